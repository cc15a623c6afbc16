"""Base class of dialects: the syntax of thoughts, calls and answers, and the wording of prompts.

Calls are strict JSON. An invalid call becomes an error with a code that the model reads. Coordinates use one
scale per episode; a box in another scale is refused, never guessed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pixelis.dialogue.dialects.strict import named_call, strict_json
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.operations.zoom_in import ZoomInArguments
from pixelis.records import Action, Coordinates, ImageView, Observation, Question, Turn, place_media

DEFAULT_TARGET = "img0"
ANSWER_RULE = "Think inside <think>...</think>, then write the final answer as <answer>...</answer>."
SYSTEM = "You are a helpful assistant.\n\n# Tools\n\n{calls}\n\n"
SIGNATURES = """You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

BOXED = re.compile(r"\\boxed\s*\{")


class Tag(str):
    """Text of the dialect itself, which may become special tokens; other text never does."""

    __slots__ = ()


RESPONSE, RESPONSE_END = Tag("<tool_response>"), Tag("</tool_response>")

Piece = str | ImageView
"""A piece of a turn: the dialect's own text (Tag), other text (str), or an image."""


@dataclass(frozen=True)
class Reply:
    """A parsed policy turn: at most one of ``action``, ``answer`` and ``error`` is set."""

    think: str | None = None
    action: Action | None = None
    further_actions: tuple[Action, ...] = ()
    answer: str | None = None
    error: OperationError | None = None

    def turn(self, text: str, **fields: Any) -> Turn:
        return Turn(
            role="assistant",
            text=text,
            action=self.action,
            further_actions=list(self.further_actions),
            error=self.error.code if self.error else None,
            **fields,
        )


class Dialect:
    """Thoughts and answers in tags, calls as JSON; where systems differ, each dialect does as its system."""

    name: ClassVar[str]
    tools: ClassVar[Mapping[str, str]] = {}
    """The operations that calls can express, and their names in calls."""
    schemas: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """The JSON schemas of their calls, for the system turn."""
    call: ClassVar[str | None] = "tool_call"
    """The tag of calls; None for a dialect without operations."""
    functions: ClassVar[bool] = False
    """It has a form for the functions of clients."""
    thinks: ClassVar[bool] = True
    """A well-formed turn needs a thought."""
    scale: ClassVar[Coordinates | None] = None
    """None for the model's own."""
    boxes: ClassVar[bool] = False
    """``\\boxed{}`` counts as an answer when there is none in tags."""
    parallel_calls: ClassVar[bool] = False
    several: ClassVar[Literal["refuse", "first", "last"]] = "refuse"
    """Which of several calls in a turn counts."""
    both: ClassVar[Literal["refuse", "answer", "call", "end"]] = "refuse"
    """What a turn with a call and an answer is; ``end``: a call if the call ends the turn."""
    clamps: ClassVar[bool] = False
    """Boxes partly outside the image are cut at its border, unless ``dialogue.clamp`` says otherwise."""
    rows_clamp: ClassVar[bool] = False
    """They were cut in the system's rows."""
    separators: ClassVar[tuple[str, str]] = (",", ":")
    stop: ClassVar[str] = ""
    """A text with which a turn ends, and its generation."""

    def __init__(self) -> None:
        kinds = [kind for kind in ("think", self.call, "answer") if kind]
        self.tags = tuple(f"<{slash}{kind}>" for kind in kinds for slash in ("", "/"))
        self._call = re.compile(rf"<{self.call}>(.*?)</{self.call}>" if self.call else r"(?!)", re.DOTALL)
        self._answer = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

    # Between text and the canonical action

    def offers(self, operation: type[Operation]) -> bool:
        return operation.name in self.tools

    def adapt(self, action: Action) -> Action:
        """Convert an action to what the dialect can express, or raise OperationError."""
        if self.tools and action.op not in self.tools:
            raise OperationError(f"{self.name} has no form for {action.op[:30]}", code="unknown_op")
        return action

    def render(
        self, content: Action | Sequence[Action] | str, scale: Scale, think: str | None = None
    ) -> list[str]:
        """Render a policy turn with calls (Action) or an answer (str), in pieces.

        OperationError when the dialect, or the resolution of the scale, cannot express an action.
        """
        if isinstance(content, str):
            return [*self._render_thought(think), *self._render_answer(content)]
        out = self._render_thought(think)
        for number, action in enumerate([content] if isinstance(content, Action) else content):
            call = self._dump(self._write_call(self.adapt(action), self._scaled(scale)))
            out += ["\n"] * (number > 0) + [Tag(f"<{self.call}>"), call, Tag(f"</{self.call}>")]
        return out

    def pieces(self, text: str) -> list[str]:
        """A policy turn that is given as text, in pieces as `render` returns them."""
        tags = re.compile("(" + "|".join(re.escape(tag) for tag in self.tags) + ")")
        return [Tag(piece) if piece in self.tags else piece for piece in tags.split(text) if piece]

    def rewrite(self, text: str, actions: Sequence[Action], scale: Scale) -> str:
        """The text with ``actions`` as its first calls (one: the call that counts); all else stays."""
        _, body = self._split(text)
        calls = self._counted_calls(body, len(actions))
        if len(calls) != len(actions):
            raise OperationError(f"the turn has only {len(calls)} calls", code="bad_json")
        start = len(self._cut(text)) - len(body)
        for call, action in reversed(list(zip(calls, actions, strict=True))):
            old, new = self._load(call[1]), self._write_call(self.adapt(action), self._scaled(scale))
            if isinstance(old, dict):
                inner = {
                    key: {**old[key], **new[key]}
                    for key in old
                    if isinstance(old[key], dict) and isinstance(new.get(key), dict)
                }
                new = {**old, **new, **inner}
            written = call[1].replace(call[1].strip(), self._dump(new).strip())
            text = text[: start + call.start(1)] + written + text[start + call.end(1) :]
        return text

    def parse(
        self, text: str, operations: Mapping[str, type[Operation]], scale: Scale, max_calls: int = 1
    ) -> Reply:
        """Parse a policy turn; an invalid call makes it a Reply with ``error``, never an exception.

        Beyond ``max_calls`` calls are refused or ignored, as the dialect does. Tags inside the thought are
        ignored; the last of several answers counts.
        """
        think, body = self._split(text)
        answers = self._answers(self._call.sub("", body))
        opened, closed = (body.count(f"<{slash}{self.call}>") if self.call else 0 for slash in ("", "/"))
        answer = answers[-1].strip() if answers else None
        if not opened and not closed:
            return Reply(think=think, answer=answer)
        calls = self._counted_calls(body)
        if self.both == "answer" and self._answer.search(self._call.sub("", body)):
            return Reply(think=think, answer=answer)
        if self.both == "end" and (body[calls[0].end() :].strip() if calls else answers):
            return Reply(think=think, answer=answer)
        try:
            calls = self._counted_calls(body, max_calls)
            if max(opened, closed) > max_calls and self.several == "refuse":
                allowed = "one" if max_calls == 1 else f"at most {max_calls}"
                raise OperationError(f"{max(opened, closed)} calls in a turn, make {allowed}", code="limit")
            if not calls or (self.several == "refuse" and len(calls) < max(opened, closed)):
                raise OperationError(
                    "the call is not closed" if opened else "the call is not opened", code="bad_json"
                )
            if answers and self.both == "refuse":
                raise OperationError("call or answer, not both", code="limit")
            first, *rest = (
                self._read_call(self._load(match[1]), operations, self._scaled(scale)) for match in calls
            )
            return Reply(think=think, action=first, further_actions=tuple(rest))
        except OperationError as error:
            return Reply(think=think, error=error)

    def well_formed(self, text: str, calls: int = 1) -> bool:
        """True for a thought, optional in some dialects, then only ``calls`` calls or one answer."""
        think, body = self._split(text)
        act = self._call if calls > 1 or self._call.search(body) else self._answer
        acts, rest = act.findall(body), act.sub("", body)
        if len(acts) != calls or rest.strip() or (self.thinks and think is None):
            return False
        if any(tag in content for tag in self.tags for content in (think or "", *acts)):
            return False
        return "</think>" not in text or text.lstrip().startswith("<think>")

    def thought(self, text: str) -> str:
        """What a policy turn, or the beginning of one, says before its call or answer, without tags."""
        think, body = self._split(text)
        if think is None:
            ends = [place for tag in self.tags if "think" not in tag and (place := body.find(tag)) >= 0]
            think = body[: min(ends, default=None)].replace("<think>", "", 1)
        return think.strip()

    def _counted_calls(self, body: str, max_calls: int = 1) -> list[re.Match[str]]:
        calls = list(self._call.finditer(body))
        if max_calls > 1:
            return calls[:max_calls]
        return calls[-1:] if self.several == "last" else calls[:1]

    def _dump(self, call: Any) -> str:
        return json.dumps(call, separators=self.separators, ensure_ascii=False, allow_nan=False)

    def _load(self, text: str) -> Any:
        return strict_json(text)

    def _write_call(self, action: Action, scale: Scale) -> dict[str, Any]:
        raise OperationError("answer without operations", code="unknown_op")

    def _read_call(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        """The inverse of ``_write_call``, for any JSON."""
        raise OperationError("answer without operations", code="unknown_op")

    def _named_call(self, call: Any, operations: Mapping[str, type[Operation]]) -> tuple[str, dict[str, Any]]:
        """The operation and the arguments of ``{"name":..,"arguments":{..}}``."""
        forms = {self.tools[name]: name for name in operations if name in self.tools}
        name, arguments = named_call(call, list(forms))
        return forms[name], arguments

    def _render_thought(self, think: str | None) -> list[str]:
        return [Tag("<think>"), think, Tag("</think>")] if think else []

    def _render_answer(self, answer: str) -> list[str]:
        return [Tag("<answer>"), answer, Tag("</answer>")]

    def _answers(self, body: str) -> list[str]:
        matches = self._answer.findall(body)
        return matches or [body[start:end] for start, end in boxed(body)] if self.boxes else matches

    def _split(self, text: str) -> tuple[str | None, str]:
        """The thought and what follows it; text before it, as Reason-RFT's captions, belongs to neither."""
        text = self._cut(text)
        thought, closing, body = text.partition("</think>")
        return (thought.split("<think>", 1)[-1], body) if closing else (None, text)

    def _cut(self, text: str) -> str:
        before, stop, _ = text.partition(self.stop) if self.stop else (text, "", "")
        return before + stop

    def _scaled(self, scale: Scale) -> Scale:
        clamp = self.clamps if scale.clamp is None else scale.clamp
        return dataclasses.replace(scale, kind=self.scale or scale.kind, clamp=clamp)

    # Wording

    def system(
        self,
        views: Sequence[ImageView],
        operations: Mapping[str, type[Operation]],
        coordinates: Coordinates,
        max_calls: int = 1,
    ) -> list[Piece]:
        """The system turn for these views and operations; empty if the dialect has none."""
        if not operations or not self.schemas:
            return []
        rules = SYSTEM.format(calls=calls_allowed(max_calls if self.parallel_calls else 1))
        return [Tag(rules), *signatures([self.schemas[name] for name in operations])]

    def question(self, text: str, views: Sequence[ImageView], tools: bool, instruct: bool) -> list[Piece]:
        """The user turn; ``instruct`` adds the dialect's reply instructions."""
        return interleaved(text, views)

    def observation(self, observation: Observation, images_so_far: int, instruct: bool) -> list[Piece]:
        """The turn that shows an observation after ``images_so_far`` earlier images.

        A success is ``obs1 = zoom_in(img0)`` and its text, an error ``error bad_box: message``, the result of a
        client's function what the client says.
        """
        if is_of_client(observation):
            return [RESPONSE, "\n", *interleaved(observation.text, observation.images), "\n", RESPONSE_END]
        if observation.status == "error":
            text = error_text(observation)
        else:
            op, target = observation.data.get("op"), observation.data.get("target", "")
            text = f"{observation.id} = {op}({target})" if op else f"{observation.id}"
            text += f"\n{observation.text}" if observation.text else ""
        return [RESPONSE, text, *observation.images, RESPONSE_END]


def by_exchange(
    question: Question, views: Sequence[ImageView]
) -> list[tuple[str, list[ImageView], str | None]]:
    """Each text of a conversation with its views and its answer; the question is last, with None."""
    exchanges, left = list[tuple[str, list[ImageView], str | None]](), list(views)
    for exchange in question.history:
        shown = [view for view in left if (view.parent or view.id) in exchange.media]
        left = [view for view in left if view not in shown]
        exchanges.append((exchange.question, shown, exchange.answer))
    return [*exchanges, (question.question, left, None)]


def calls_allowed(max_calls: int) -> str:
    """The rule of a system prompt that says how many calls a turn may have."""
    allowed = "one function" if max_calls == 1 else f"up to {max_calls} functions"
    return f"You may call {allowed} per turn to look closer before you answer."


def interleaved(text: str, views: Sequence[ImageView]) -> list[Piece]:
    """The text with its pictures and clips at their marks, or all before it if the views are in another order."""
    groups: dict[tuple[str, str | None], list[ImageView]] = {}
    for view in views:
        media = ("image", view.id) if view.frame is None else ("video", view.parent)
        groups.setdefault(media, []).append(view)
    shown, pieces = list(groups.values()), place_media(text, [kind for kind, _ in groups])
    if (numbers := [piece for piece in pieces if isinstance(piece, int)]) != sorted(numbers):
        return [*views, text]
    return [item for piece in pieces for item in ([piece] if isinstance(piece, str) else shown[piece])]


def is_of_client(observation: Observation) -> bool:
    """Whether it is the result of a client's function."""
    return observation.data.get("client") is True


def error_text(observation: Observation) -> str:
    """Code and message of an error observation: ``error bad_box: message``."""
    return f"error {observation.code}" + (f": {observation.text}" if observation.text else "")


def default_target(sizes: Mapping[str, Any] | None) -> str:
    """The target of a call without one: the first picture, or else the first clip."""
    return DEFAULT_TARGET if not sizes or DEFAULT_TARGET in sizes else next(iter(sizes))


def first_image(scale: Scale) -> str:
    """The first image shown: a picture, or a frame when the question has only clips."""
    return next(iter(scale.images), DEFAULT_TARGET)


def rounded(value: Any) -> Any:
    """A list of numbers as whole numbers; anything else as it is, for the scale to refuse."""
    numbers = isinstance(value, list) and all(type(v) in (int, float) for v in value)
    return [round(v) for v in value] if numbers else value


def region(action: Action) -> list[float]:
    """The region of a zoom as a plain box, padding included, for dialects that know only boxes."""
    if set(action.arguments) == {"box"} and isinstance(action.arguments["box"], list | tuple):
        return list(action.arguments["box"])
    try:
        arguments = ZoomInArguments.model_validate(action.arguments)
    except ValueError as error:
        raise OperationError(str(error)[:80], code="bad_arguments") from None
    return list(arguments.pad(arguments.moved_inside()))


def boxed(text: str) -> list[tuple[int, int]]:
    r"""Start and end of the content of every ``\boxed{}`` whose braces match."""
    out, position = [], 0
    while (opened := BOXED.search(text, position)) is not None:
        depth, position = 1, opened.end()
        for place in range(opened.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                out.append((opened.end(), place))
                position = place + 1
                break
        else:
            return out
    return out


def describe_view(view: ImageView) -> str:
    """A view's id; for a frame also its number, clip and time."""
    if view.frame is None:
        return view.id
    time = f" at {view.time:.2f} s" if view.time is not None else ""
    return f"{view.id} (frame {view.frame} of the video {view.parent}{time})"


def checked_action(
    operations: Mapping[str, type[Operation]], op: str, target: str, arguments: dict[str, Any]
) -> Action:
    """The action of a call, with its arguments checked and completed by the operation."""
    checked = operations[op].check(arguments)
    return Action(op=op, target=target, arguments=checked.model_dump(mode="json", exclude_none=True))


def numbers_schema(kind: str, count: int) -> dict[str, Any]:
    return {"type": "array", "items": {"type": kind}, "minItems": count, "maxItems": count}


def function(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str]
) -> dict[str, Any]:
    """The JSON schema of a call, as OpenAI's tools have it."""
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def signatures(schemas: Sequence[dict[str, Any]], form: str = SIGNATURES) -> list[Piece]:
    """The part of a system prompt that lists functions and explains how to call them.

    The schemas are plain text: those of a client may spell control tokens.
    """
    before, after = form.split("{schemas}")
    return [Tag(before), "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas), Tag(after)]
