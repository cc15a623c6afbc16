"""Renders chat turns as exact tokens, and parses policy tokens to turns.

Only this module and the dialect produce special tokens: text of others never becomes one, whatever it spells.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2

from pixelis.config import DialogueConfig
from pixelis.dialogue.dialects import DIALECTS, Piece, Reply, Tag
from pixelis.dialogue.dialects.base import by_exchange
from pixelis.dialogue.session import TokenCallback
from pixelis.errors import BadConfig, BadInput, OperationError
from pixelis.families.family import ModelSpec
from pixelis.operations.environment import Environment, environment_of
from pixelis.operations.function import function_operation
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView, Observation, Question, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTES = {chr(byte): byte for byte in _SHOWN}
_BYTES |= {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _SHOWN)
}
"""Byte of each character in which byte-level vocabularies, as GPT-2's, write their tokens."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A byte without a token in vocabularies like SentencePiece's, which write a space as `▁`."""
_SURROGATES = re.compile("[\ud800-\udfff]")


class Renderer:
    """Renders and parses the turns of one model with its tokenizer, dialect and operations.

    Raises BadInput if the tokenizer lacks a token of the chat format, BadConfig if the dialect has no form for
    the operations, or for one of the ``environments`` that questions may name.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        spec: ModelSpec,
        config: DialogueConfig,
        operations: Sequence[type[Operation]],
        environments: Mapping[str, type[Environment]] | None = None,
    ):
        self.tokenizer, self.spec = tokenizer, spec
        self.dialect = DIALECTS[config.dialect]
        self.operations = {
            operation.name: operation for operation in operations if self.dialect.offers(operation)
        }
        if operations and self.dialect.call and not self.operations:
            names = ", ".join(operation.name for operation in operations)
            raise BadConfig(
                f"dialogue.dialect {config.dialect} does not support {names}",
                fix="add zoom_in to toolbox.operations",
            )
        self.environments = environments or {}
        for name, environment in self.environments.items():
            if unsupported := [a.name for a in environment.actions if not self.dialect.offers(a)]:
                raise BadConfig(
                    f"dialogue.dialect {config.dialect} has no form for {unsupported[0]} of {name}",
                    fix="set dialogue.dialect=qwen",
                )
        configured = spec.coordinates if config.coordinates == "auto" else config.coordinates
        self.coordinates = self.dialect.scale or configured
        self.clamp, self.max_calls = config.clamp, config.max_calls
        self.system, self.row_system = config.instructs and not spec.embedded, config.system == "row"
        self.only_template = config.system == "template"
        self._token_cache: dict[tuple[str, bool], list[int]] = {}
        self._banned = frozenset(spec.banned)
        # Tokens that structure a conversation: marked special, `<|...|>` or `<tag>`
        controls = {
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self._control = re.compile(
            "|".join(re.escape(text) for text in sorted(controls, key=len, reverse=True))
        )
        chat = spec.chat
        self._prefix = self._marked(chat.prefix)
        self._openers, self._closers = (
            {role: self._marked(text) for role, text in texts.items()}
            for texts in (chat.openers, chat.closers)
        )
        self._stop, *self._after_stop = self._closers["assistant"]
        # What the chat template writes into the policy's turn, as `<think>` and a line break
        policy_opener = chat.openers.get("policy", chat.openers["assistant"])
        begun = self._from_template(config.thinking).rpartition(policy_opener)[2]
        self._begun = begun if begun.lstrip().startswith("<think>") else ""
        if self._thinks and not config.thinking:
            raise BadConfig(
                "dialogue.thinking=false: the model's chat template always begins a thought",
                fix="use the Instruct model, or set dialogue.thinking=true",
            )

    def offered(self, question: Question, operations: bool = True) -> dict[str, type[Operation]]:
        """The operations that the policy may use for this question, by name.

        Without ``operations`` only the client's functions. Raises BadInput if these cannot be offered.
        """
        own: Mapping[str, type[Operation]] = {}
        if operations and (environment := environment_of(question, self.environments)) is not None:
            own = {action.name: action for action in environment.actions}
        elif operations:
            names = self.operations if question.tools is None else question.tools
            own = {name: operation for name, operation in self.operations.items() if name in names}
        for function in question.functions:
            if not self.dialect.functions:
                raise BadInput(
                    f"dialogue.dialect {self.dialect.name} has no form for the function {function.name}",
                    code="no_functions",
                    fix="set dialogue.dialect=qwen",
                )
            if question.environment is not None:
                message = "a question with an environment has no functions of a client"
                raise BadInput(message, code="no_functions")
            if function.name in self.operations:
                raise BadInput(
                    f"the function {function.name} is called as an operation of the service",
                    code="name_taken",
                    fix="rename it, or take the operation out of toolbox.operations",
                )
        return {**own, **{function.name: function_operation(function) for function in question.functions}}

    def prompt(self, question: Question, views: Sequence[ImageView], operations: bool = True) -> list[Turn]:
        """The turns before the first policy token, which end with the assistant's opener.

        An earlier exchange is one user turn, whose tokens include the answer. With ``dialogue.system: row``
        the row's system message replaces the dialect's instructions. A dialect without a system turn gets
        that of the model's chat template. A client's own comes before the instructions.
        """
        turns = []
        offered = self.offered(question, operations)
        own = question.meta.get("system") if self.row_system else None
        system: Sequence[Piece] = self.dialect.pieces(own) if isinstance(own, str) else []
        instruct = self.system and not system
        if instruct:
            system = self.dialect.system(views, offered, self.coordinates, self.max_calls)
        if not system and not question.system and (instruct or self.only_template):
            system = self._template_system
        if question.system:
            system = [question.system, *(["\n\n", *system] if system else [])]
        if system:
            text = _clean("".join(piece for piece in system if isinstance(piece, str)))
            tokens = self._encode([*self._openers["system"], *system, *self._closers["system"]])
            turns.append(Turn(role="system", text=text, tokens=tokens))
        for text, shown, answer in by_exchange(question, views):
            said = [] if answer is None else self.dialect.render(answer, self._scale(shown))
            turns.append(self._exchange(text, shown, bool(offered), instruct, said))
        turns[0].tokens = [*self._encode(self._prefix), *turns[0].tokens]
        return turns

    @functools.cached_property
    def _template_system(self) -> list[Piece]:
        """The system turn that the model's chat template writes by itself, as that of Qwen2.5-VL."""
        chat = self.spec.chat
        before = self._from_template(True).partition(chat.openers["user"])[0]
        opening, closing = chat.prefix + chat.openers["system"], chat.closers["system"]
        if not (before.startswith(opening) and before.endswith(closing)):
            return []
        return [Tag(before.removeprefix(opening).removesuffix(closing))]

    def _from_template(self, thinking: bool) -> str:
        """A question of `?` to the opener of the answer, by the model's chat template; empty without one."""
        if not self.tokenizer.chat_template:
            return ""
        content = [{"type": "text", "text": "?"}] if self.spec.reads_images else "?"
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
        except (jinja2.TemplateError, TypeError) as error:
            fix = "correct chat_template.jinja in the model's folder, or remove it"
            raise BadInput(f"the tokenizer's chat template fails: {error}", fix=fix) from None
        return str(text)

    @property
    def _thinks(self) -> bool:
        """Whether the policy's turn begins inside a thought."""
        return bool(self._begun) and "</think>" not in self._begun

    @property
    def _policy_opener(self) -> list[Piece]:
        opener = self._openers.get("policy", self._openers["assistant"])
        return [*opener, *self.dialect.pieces(self._begun)]

    def _exchange(
        self,
        question: str,
        views: Sequence[ImageView],
        tools: bool,
        instruct: bool,
        answer: Sequence[str] = (),
        before: Sequence[Piece] = (),
    ) -> Turn:
        pieces = self.dialect.question(question, views, tools, instruct)
        texts = ("".join(p for p in part if isinstance(p, str)) for part in (pieces, answer))
        text = _clean("\n".join(filter(None, texts)))
        said = [*self._openers["assistant"], *answer, *self._closers["assistant"]]
        reply = said if answer else self._policy_opener
        opener = self._openers["user"]
        if pieces and isinstance(pieces[0], ImageView):
            opener = self._openers.get("image", opener)
        tokens = self._encode([*before, *opener, *pieces, *self._closers["user"], *reply])
        return Turn(role="user", text=text, tokens=tokens, images=[view.id for view in views])

    def message(self, text: str, views: Sequence[ImageView], tools: bool, first: bool = True) -> Turn:
        """A user's further message after the policy's turn, or after observations if it is not the ``first``."""
        return self._exchange(text, views, tools, self.system, before=self._after_stop if first else ())

    def continued(self, prompt: Turn, text: str, views: Sequence[ImageView]) -> Turn | None:
        """The last turn of a prompt with further text and views where the user ends; None if it ends otherwise."""
        end = self._encode([*self._closers["user"], *self._policy_opener])
        start = len(prompt.tokens) - len(end)
        if prompt.tokens[start:] != end:
            return None
        tokens = [*prompt.tokens[:start], *self._encode([text, *views]), *end]
        images = [*prompt.images, *(view.id for view in views)]
        return prompt.model_copy(
            update={"text": prompt.text + _clean(text), "tokens": tokens, "images": images}
        )

    def call_text(self, action: Action, images: Sequence[ImageView]) -> str:
        """How the policy writes a call, without tags. OperationError if the dialect cannot express it."""
        pieces = self.dialect.render(action, self._scale(images))
        return "".join(piece for piece in pieces if not isinstance(piece, Tag))

    def reply(self, text: str, calls: Sequence[Action], images: Sequence[ImageView]) -> Turn:
        """What a client puts in the place of a policy turn after the views ``images``: an answer, or calls."""
        if not calls:
            return self._said(self.dialect.render(text, self._scale(images)))
        return self._said([*([text, "\n"] if text else []), *self.dialect.render(calls, self._scale(images))])

    def observation(
        self,
        observation: Observation,
        images_so_far: int = 0,
        place: int = 0,
        count: int = 1,
        opens: bool = True,
    ) -> Turn:
        """From the end of the policy's turn to the assistant's next opener, with an observation in between.

        Of the ``count`` observations of a turn with several calls, which are one turn of the chat, this is
        the part ``place``. Without ``opens`` a message follows before that opener.
        """
        last = place == count - 1
        pieces = self.dialect.observation(observation, images_so_far, self.system and last)
        text = _clean(
            "".join(piece for piece in pieces if isinstance(piece, str) and not isinstance(piece, Tag))
        )
        opener = ["\n"] if place else [*self._after_stop, *self._openers["user"]]
        closer = [*self._closers["user"], *(self._policy_opener if opens else [])] if last else []
        tokens = self._encode([*opener, *pieces, *closer])
        images = [view.id for view in observation.images]
        return Turn(role="tool", text=text, tokens=tokens, images=images, observation=observation)

    def read(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        images: Sequence[ImageView] = (),
        operations: Mapping[str, type[Operation]] | None = None,
    ) -> tuple[Turn, Reply]:
        """Parse a policy turn after the views ``images``; the tokens are stored exactly.

        A thought that the chat template began is part of the turn's text.

        ``operations``: those that may be called, by default all. A turn with a banned id, or an early stop
        token, has ``error`` ``bad_token`` and no tokens: it never enters a batch.
        """
        tokens, log_probs = [int(t) for t in tokens], [float(p) for p in log_probs]
        if len(tokens) != len(log_probs):
            raise BadInput(f"{len(log_probs)} log-probs for {len(tokens)} tokens", code="bad_completion")
        stopped = bool(tokens) and tokens[-1] == self.spec.stop
        content = tokens[:-1] if stopped else tokens
        valid = [t for t in content if 0 <= t < self.spec.vocab]
        text = (self._begun if self._thinks else "") + str(
            self.tokenizer.decode(valid, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        if len(valid) < len(content) or self.spec.stop in content or not self._banned.isdisjoint(content):
            return Turn(role="assistant", text=text, error="bad_token"), Reply()
        scale = self._scale(images)
        callable_operations = self.operations if operations is None else operations
        reply = self.dialect.parse(text, callable_operations, scale, self.max_calls)
        return reply.turn(text, tokens=tokens, log_probs=log_probs), reply

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The UTF-8 bytes of each token, of which a character may need several."""
        added = self.tokenizer.added_tokens_decoder
        is_byte_level = "Ġ" in self.tokenizer.get_vocab()
        pieces = []
        for token in tokens:
            text = str(self.tokenizer.convert_ids_to_tokens(token))
            if token in added or (is_byte_level and not _BYTES.keys() >= set(text)):
                pieces.append(text.encode())
            elif is_byte_level:
                pieces.append(bytes(_BYTES[character] for character in text))
            elif byte := _BYTE_TOKEN.fullmatch(text):
                pieces.append(bytes.fromhex(byte[1]))
            else:
                pieces.append(text.replace("▁", " ").encode())
        return pieces

    def listener(self, on_text: Callable[[str], None]) -> TokenCallback:
        """Pass the tokens of a policy turn on as text, a character as soon as all its bytes are there."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def on_tokens(tokens: Sequence[int]) -> None:
            pieces = self.pieces([token for token in tokens if token != self.spec.stop])
            if text := decoder.decode(b"".join(pieces)):
                on_text(text)

        return on_tokens

    def assistant(
        self,
        content: Action | Sequence[Action] | str,
        think: str | None = None,
        images: Sequence[ImageView] = (),
    ) -> Turn:
        """A demonstration's turn after the views ``images``: calls, in the dialect's version, or an answer.

        OperationError if the dialect cannot express them, or for more than ``dialogue.max_calls``.
        """
        calls: Sequence[Action] = () if isinstance(content, str) else content  # type: ignore[assignment]
        if isinstance(content, Action):
            calls = [content]
        self.check_calls(len(calls))
        turn = self._said(self.dialect.render(calls or content, self._scale(images), think))
        actions = [self.dialect.adapt(action) for action in calls]
        turn.action, turn.further_actions = (actions[0] if actions else None), actions[1:]
        return turn

    def check_calls(self, count: int) -> None:
        """Raise OperationError ``limit`` for more calls in a turn than ``dialogue.max_calls``."""
        if count > self.max_calls:
            raise OperationError(
                f"{count} calls in a turn, dialogue.max_calls is {self.max_calls}", code="limit"
            )

    def mistaken(self, action: Action, think: str | None = None) -> Turn:
        """The turn of a wrong call that the dialect has no form for, as it stands; it is never learnt."""
        call = {"name": action.op, "arguments": {**action.arguments, "target": action.target}}
        text = json.dumps(call, ensure_ascii=False, default=str)
        tag = self.dialect.call or "tool_call"
        thought = [Tag("<think>"), think, Tag("</think>")] if think else []
        return self._said([*thought, Tag(f"<{tag}>"), text, Tag(f"</{tag}>")])

    def verbatim(self, text: str, actions: Sequence[Action] = (), images: Sequence[ImageView] = ()) -> Turn:
        """A demonstration's turn as its row has it, with ``actions`` in place of its calls."""
        if actions:
            text = self.dialect.rewrite(text, actions, self._scale(images))
        return self._said(self.dialect.pieces(text))

    def _said(self, pieces: Sequence[str]) -> Turn:
        text = _clean("".join(pieces))
        if self._thinks:
            # The opener has begun the thought
            pieces = self._after_begun(pieces)
        return Turn(role="assistant", text=text, tokens=self._encode([*pieces, self._stop]))

    def _after_begun(self, pieces: Sequence[str]) -> list[str]:
        """A policy turn after the thought's beginning in its opener; without a thought, an empty one ends."""
        if pieces[:1] != ["<think>"]:
            return ["\n", Tag("</think>"), "\n\n", *pieces]
        _, thought, *rest = pieces
        return [thought.removeprefix(self._begun.partition("<think>")[2]), *rest]

    def _scale(self, images: Sequence[ImageView]) -> Scale:
        return Scale.of(self.coordinates, images, slack=self.spec.multiple, clamp=self.clamp)

    def _marked(self, text: str) -> list[Piece]:
        """A text of the chat format as pieces, its control tokens by themselves."""
        parts = re.split(f"({self._control.pattern})", text)
        return [Tag(part) if i % 2 else part for i, part in enumerate(parts) if part]

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Images become pads, Tags their control tokens, other text plain text."""
        out: list[int] = []
        pending = ""
        # Text between control tokens is one, as in the chat template: "System: " and "Think" share tokens
        split = (self._marked(piece) if isinstance(piece, Tag) else [piece] for piece in pieces)
        for piece in itertools.chain.from_iterable(split):
            if isinstance(piece, str) and not isinstance(piece, Tag):
                pending += piece
                continue
            out += self._encode_text(pending)
            pending = ""
            if isinstance(piece, str):
                out += self._encode_text(piece)
                continue
            if not self.spec.reads_images:
                raise BadInput(
                    f"a model of type {self.spec.family_name} reads text alone",
                    code="no_vision",
                    fix="name a vision-language model in policy.model, or questions without media",
                )
            width, height = piece.view_size
            out += self.spec.family.image_ids(self.spec, height, width)
            pending = self.spec.chat.after_image
        return out + self._encode_text(pending)

    def _encode_text(self, text: str) -> list[int]:
        """Cached for short texts, which every episode of a group repeats."""
        key = (text, isinstance(text, Tag))
        tokens = self._token_cache.get(key)
        if tokens is None:
            parts = [str(text)] if key[1] else self._harmless(_clean(text))
            tokens = [t for part in parts for t in self.tokenizer.encode(part, add_special_tokens=False)]
            if len(text) <= 4096 and len(self._token_cache) < 1024:
                self._token_cache[key] = tokens
        return tokens

    def _harmless(self, text: str) -> list[str]:
        """The text in parts that spell no control token: it is split after the first character of each."""
        parts, start = list[str](), 0
        while (match := self._control.search(text, start)) is not None:
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
        return [part for part in (*parts, text[start:]) if part]


def _clean(text: str) -> str:
    """Replace lone surrogates by U+FFFD, so that any tokenizer and JSON accept the text."""
    return _SURROGATES.sub("\ufffd", text)
