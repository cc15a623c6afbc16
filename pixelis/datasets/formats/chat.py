"""Chats between a user and an assistant that calls operations, into demonstrations and back.

Observations are made anew when a demonstration is played: only number and size of a chat's images matter.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

from pixelis.datasets import fields
from pixelis.datasets.annotation_geometry import header_size
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Row, other_columns, question_text
from pixelis.datasets.formats.messages import RESPONSE, ChatTurn
from pixelis.dialogue.dialects import DIALECTS, Dialect
from pixelis.operations import OPERATIONS
from pixelis.operations.scale import Scale
from pixelis.records import Demonstration, Exchange, Media, Question, Step, Verbatim, place_media

ERROR_RESULT = re.compile(r"\s*(<tool_response>)?\s*(execution error|error\b)", re.IGNORECASE)
"""Beginning of a user turn that reports an error of the call before it."""


def read_chat(
    row: Row,
    name: str,
    chat: list[ChatTurn],
    *used: str,
    truths: list[str] | None = None,
    asks: bool = False,
    own_words: bool = True,
    learnt_turns: int | None = None,
) -> list[Question]:
    """The demonstration of each question of a chat, with the earlier ones as its history.

    If it ``asks``, the last question. ``used``: the columns of the chat and its media, the chat first.
    ``truths``: answers to the last question. With several questions, or without ``own_words``, the run's
    dialect writes answers that have no tags; other turns keep their text. All but the last ``learnt_turns``
    are context. RowError.
    """
    column = used[0]
    system = "\n".join(turn.text for turn in chat if turn.role == "system")
    chat = [turn for turn in chat if turn.role != "system"]
    exchanges, media = _exchanges(chat, column)
    if asks and exchanges[-1].steps:
        raise RowError(column, "no_question", "the chat of a question ends with its user turn")
    own_id = fields.identifier(row, "id", "qid", "doc_id") or name
    meta = other_columns(row, *used, "id", "qid", "doc_id") | ({"system": system} if system else {})
    untagged = {turn.text.strip() for turn in chat if turn.role == "assistant"}
    records = list[Question]()
    for i, (exchange, steps, media_end) in enumerate(exchanges):
        accepted = truths if i == len(exchanges) - 1 else None
        values = {
            "id": own_id if asks or len(exchanges) == 1 else f"{own_id}.{i + 1}",
            "question": exchange.question,
            "history": [earlier.record for earlier in exchanges[:i]],
            "media": media[:media_end],
            "task": fields.identifier(row, "data_source") or "qa",
            "meta": meta,
        }
        if not steps and asks:
            return [Question(**values, answers=accepted)]
        if not steps or steps[-1].answer is None:
            raise RowError(column, "no_answer", "the chat does not end with an answer")
        for number, step in enumerate(steps):
            if (len(exchanges) > 1 or not own_words) and step.answer in untagged:
                step.verbatim = None
            if learnt_turns is not None and number < len(steps) - learnt_turns:
                step.learn = False
        records.append(Demonstration(**values, answers=accepted or [str(steps[-1].answer)], turns=steps))
    return records


class _Exchanged(NamedTuple):
    record: Exchange
    steps: list[Step]
    media_end: int


def _exchanges(chat: list[ChatTurn], column: str) -> tuple[list[_Exchanged], list[Media]]:
    if not chat or chat[0].role != "user":
        raise RowError(column, "no_question", "the chat does not begin with a user turn")
    dialect = _dialect("\n".join(turn.text for turn in chat if turn.role == "assistant"))
    exchanges, media, steps = list[_Exchanged](), list[Media](), list[Step]()
    reader = _Reader(dialect, media)
    for i, turn in enumerate(chat):
        place = f"{column}.{i}"
        # A call has one observation; none or two would shift the numbers of later ones
        if i and turn.role == chat[i - 1].role:
            raise RowError(column, "out_of_turn", f"turns {i - 1} and {i} are both of the {turn.role}")
        if turn.role == "assistant":
            steps.append(reader.step(turn.text, chat[i + 1] if i + 1 < len(chat) else None, place))
            exchanges[-1].record.answer = steps[-1].answer or ""
        elif steps and steps[-1].answer is None:
            steps[-1] = reader.with_result(steps[-1], turn, place)
        else:
            own = list[Media]()
            for item in turn.media:
                number = sum(other.kind == item.kind for other in [*media, *own])
                prefix = "img" if item.kind == "image" else "vid"
                own.append(item.model_copy(update={"id": f"{prefix}{number}"}))
            text = question_text(turn.text, column, own)
            media += [own[n] for n in place_media(text, [item.kind for item in own]) if isinstance(n, int)]
            steps, reader = list[Step](), _Reader(dialect, media)
            record = Exchange(question=text, answer="", media=[item.id for item in own])
            exchanges.append(_Exchanged(record, steps, len(media)))
    return exchanges, media


class _Reader:
    """Reads the turns of one chat in order, and keeps the names and sizes of the images so far.

    An unreadable call shows no image here, even if it did in its own system: ``names`` maps the row's image
    ids to ours, None for such an image.
    """

    def __init__(self, dialect: Dialect, media: list[Media]):
        self.dialect = dialect
        self.sizes, self.clips = _ImageSizes(), tuple(item.id for item in media if item.kind == "video")
        self.names: dict[str, str | None] = {}
        self.shown = self.executed = 0
        for item in media:
            frames = item.frames or []
            self.sizes.add(item.id, frames[0] if frames else item.uri)
            for i, path in enumerate(frames):
                self.sizes.add(f"{item.id}.{i}", path)

    def step(self, text: str, follower: ChatTurn | None, place: str) -> Step:
        """The turn of an assistant, with as many of its calls as the following user turn has results."""
        parallel = follower is not None and self.dialect.parallel_calls
        calls = max(1, follower.text.count(RESPONSE)) if follower is not None and parallel else 1
        # Dialects with a scale of their own replace the kind
        scale = Scale("thousand", self.sizes, clips=self.clips)
        reply, learn = self.dialect.parse(text, OPERATIONS, scale, calls), True
        if reply.error is not None and reply.error.code == "out_of_range" and self.dialect.rows_clamp:
            # The systems themselves clamp such a box: the call is kept as they executed it, and not learnt
            reply = self.dialect.parse(text, OPERATIONS, dataclasses.replace(scale, clamp=True), calls)
            learn = False
        verbatim, think = Verbatim(dialect=self.dialect.name, text=text), (reply.think or "").strip() or None
        actions = [reply.action, *reply.further_actions] if reply.action is not None else []
        targets = [self.names.get(action.target, action.target) for action in actions]
        if actions and None not in targets:
            pairs = zip(actions, targets, strict=True)
            first, *further = (action.model_copy(update={"target": target}) for action, target in pairs)
            call = {"op": first.op, "target": first.target, "arguments": first.arguments, "further": further}
            return Step(think=think, learn=learn, verbatim=verbatim, **call)
        if reply.answer is not None:
            return Step(think=think, answer=reply.answer, verbatim=verbatim)
        if (error := reply.error) is not None:
            refused = follower is not None and ERROR_RESULT.match(follower.text)
            if follower is None or (error.code == "unknown_op" and not refused):
                raise RowError(place, error.code, f"{error.message}: {text[-200:]}")
        elif actions and follower is None:
            raise RowError(place, "no_answer", "the chat ends with a call")
        if error is not None or actions:
            return Step(think=think, learn=False, verbatim=verbatim)
        if follower is not None and follower.is_result:
            raise RowError(place, "no_action", "the turn neither calls an operation nor answers")
        _, closed, rest = text.partition("</think>")
        answer = (rest if closed else text).strip()
        if not answer:
            raise RowError(place, "no_answer", "the turn is empty")
        return Step(think=think if closed else None, answer=answer, verbatim=verbatim)

    def with_result(self, step: Step, turn: ChatTurn, place: str) -> Step:
        """The call with the user turn that followed; an error of a single call takes it out of the loss.

        RowError ``result_count`` for several calls without a result each, or of which one failed.
        """
        assert step.verbatim is not None
        paths = [path for item in turn.media for path in (item.frames or [item.uri])]
        failed, counts = not paths and ERROR_RESULT.match(turn.text) is not None, [len(paths)]
        if step.further:
            parts = turn.text.split(RESPONSE)[1:]
            counts = [part.count("<image>") for part in parts]
            if len(parts) != 1 + len(step.further) or sum(counts) != len(paths):
                message = f"{1 + len(step.further)} calls, {len(parts)} results of {len(paths)} images"
                raise RowError(place, "result_count", message)
            if any(ERROR_RESULT.match(part) for part in parts if "<image>" not in part):
                raise RowError(
                    place, "result_count", "one of several calls failed: later numbers would shift"
                )
        verbatim = step.verbatim.model_copy(update={"result": turn.text, "images": paths, "failed": failed})
        if failed:
            return step.model_copy(update={"verbatim": verbatim, "learn": False})
        readable = step.op is not None
        for count in counts if readable or paths else ():
            self.shown, self.executed = self.shown + 1, self.executed + readable
            own, paths = paths[:count], paths[count:]
            names = _observation_ids(self.executed, count)
            for key, name, path in zip(_observation_ids(self.shown, count), names, own, strict=True):
                self.names[key] = name if readable else None
                self.sizes.add(key, path)
        return step.model_copy(update={"verbatim": verbatim})


def _dialect(replies: str) -> Dialect:
    if "<grounding>" in replies:
        return DIALECTS["mini_o3"]
    if "<function=image_zoom_in_tool>" in replies:
        return DIALECTS["qwen_zoom_xml"]
    if "image_zoom_in_tool" in replies and '"img_idx"' in replies:
        return DIALECTS["qwen_zoom"]
    if "image_zoom_in_tool" in replies or "image_rotate_tool" in replies:
        return DIALECTS["deepeyes"]
    if "crop_image_normalized" in replies or "target_frames" in replies:
        return DIALECTS["pixel_reasoner"]
    if "<tool_call>" in replies:
        return DIALECTS["qwen_xml" if "<function=" in replies else "qwen"]
    return DIALECTS["pixel_reasoner" if "\\boxed" in replies and "<answer>" not in replies else "plain"]


class _ImageSizes(dict[str, tuple[int, int]]):
    """Width and height of images by id; a file's header is read when a call first needs its size."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, str] = {}

    def add(self, key: str, path: str) -> None:
        self.paths[key], self[key] = path, (0, 0)

    def get(self, key: str, default: Any = None) -> Any:
        if key in self.paths and not self.paths[key].startswith(("cards:", "packaged:")):
            self[key] = header_size(Path(self.paths.pop(key)), key)
        return super().get(key, default)


def _observation_ids(number: int, count: int) -> list[str]:
    return [f"obs{number}"] if count == 1 else [f"obs{number}.{i}" for i in range(count)]
