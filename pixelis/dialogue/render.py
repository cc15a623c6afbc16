"""Renders chat turns as exact tokens, and parses policy tokens to turns.

Only this module and the dialect produce tags and special tokens: text of users, demonstrations and
observations never becomes one, whatever it spells.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2

from pixelis.config import DialogueConfig
from pixelis.dialogue.dialects import DIALECTS, Piece, Reply, Tag
from pixelis.dialogue.session import TokenCallback
from pixelis.dialogue.spec import ModelSpec, is_control, token_id
from pixelis.errors import BadConfig, BadInput, OperationError
from pixelis.operations.environment import Environment, environment_of
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView, Observation, Question, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START, END = Tag("<|im_start|>"), Tag("<|im_end|>")
VISION_START, VISION_END = Tag("<|vision_start|>"), Tag("<|vision_end|>")
_SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTES = {chr(byte): byte for byte in _SHOWN}
_BYTES |= {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _SHOWN)
}
"""Byte of each character in which byte-level vocabularies, as GPT-2's, write their tokens."""
_SURROGATES = re.compile("[\ud800-\udfff]")


class Renderer:
    """Renders and parses the turns of one model with its tokenizer, dialect and operations.

    ``operations`` are those that the dialect supports, ``environments`` those that questions may name. Raises
    BadInput if the tokenizer lacks a token of the chat format, BadConfig if the dialect has no form for the
    operations or an environment.
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
            if unsupported := [
                action.name for action in environment.actions if not self.dialect.offers(action)
            ]:
                message = (
                    f"dialogue.dialect {config.dialect} has no form for {', '.join(unsupported)} of "
                    f"the environment {name}"
                )
                raise BadConfig(message, fix="set dialogue.dialect=qwen")
        configured = spec.coordinates if config.coordinates == "auto" else config.coordinates
        self.coordinates = self.dialect.scale or configured
        self.clamp, self.max_calls = config.clamp, config.max_calls
        self.system, self.row_system = config.system != "none" and not spec.embedded, config.system == "row"
        self._token_cache: dict[tuple[str, bool], list[int]] = {}
        # A turn with one of these ids was not sampled by a working engine.
        self._banned = frozenset(spec.banned)
        added = tokenizer.added_tokens_decoder.values()
        controls = {token.content for token in added if is_control(token.content, bool(token.special))}
        for tag in (START, END, VISION_START, VISION_END):
            token_id(tokenizer, tag)
        self._control = re.compile(
            "|".join(re.escape(text) for text in sorted(controls, key=len, reverse=True))
        )

    def offered(self, question: Question, operations: bool = True) -> dict[str, type[Operation]]:
        """The operations that the policy may use for this question, by name; none without ``operations``.

        Raises BadInput ``unknown_environment``.
        """
        if operations and (environment := environment_of(question, self.environments)) is not None:
            return {action.name: action for action in environment.actions}
        names = question.tools
        return {
            name: o for name, o in self.operations.items() if operations and (names is None or name in names)
        }

    def prompt(self, question: Question, views: Sequence[ImageView], operations: bool = True) -> list[Turn]:
        """The turns before the first policy token: [system,] user, ...

        The tokens end with the assistant's opener.

        An earlier exchange is one user turn, whose tokens include the answer. ``views`` are the question's
        pictures in order; ``operations`` False offers no tools. With ``dialogue.system: row`` the system
        message of the question's row replaces the dialect's instructions. A dialect without a system turn
        gets that of the model's chat template.
        """
        turns = []
        offered = self.offered(question, operations)
        own = question.meta.get("system") if self.row_system else None
        system: Sequence[Piece] = self.dialect.pieces(own) if isinstance(own, str) else []
        instruct = self.system and not system
        if instruct:
            system = (
                self.dialect.system(views, offered, self.coordinates, self.max_calls) or self._template_system
            )
        if system:
            text = _clean("".join(piece for piece in system if isinstance(piece, str)))
            turns.append(
                Turn(role="system", text=text, tokens=self._encode([START, "system\n", *system, END, "\n"]))
            )
        for exchange in question.history:
            shown = [view for view in views if (view.parent or view.id) in exchange.media]
            views = [view for view in views if view not in shown]
            answer = self.dialect.render(exchange.answer, self._scale(shown))
            turns.append(
                self._exchange(exchange.question, shown, bool(offered), instruct, [*answer, END, "\n"])
            )
        return [*turns, self._exchange(question.question, views, bool(offered), instruct, [])]

    @functools.cached_property
    def _template_system(self) -> list[Piece]:
        """The system turn that the model's chat template writes by itself, as that of Qwen2.5-VL.

        Raises BadInput.
        """
        if not self.tokenizer.chat_template:
            return []
        content = [{"type": "text", "text": "?"}] if self.spec.reads_images else "?"
        try:
            text = str(
                self.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise BadInput(
                f"the tokenizer's chat template fails: {error}", fix="set dialogue.system=none"
            ) from None
        before, opening, closing = text.partition(f"{START}user\n")[0], f"{START}system\n", f"{END}\n"
        if not (before.startswith(opening) and before.endswith(closing)):
            return []
        return [Tag(before.removeprefix(opening).removesuffix(closing))]

    def _exchange(
        self, question: str, views: Sequence[ImageView], tools: bool, instruct: bool, answer: Sequence[str]
    ) -> Turn:
        pieces = self.dialect.question(question, views, tools, instruct)
        text = "\n".join(
            filter(
                None,
                ("".join(p for p in part if isinstance(p, str) and p != END) for part in (pieces, answer)),
            )
        )
        tokens = self._encode([START, "user\n", *pieces, END, "\n", START, "assistant\n", *answer])
        return Turn(
            role="user",
            text=_clean(text).rstrip("\n") if answer else _clean(text),
            tokens=tokens,
            images=[view.id for view in views],
        )

    def observation(
        self, observation: Observation, images_so_far: int = 0, place: int = 0, count: int = 1
    ) -> Turn:
        """The turn that shows an observation, from the line break after the policy's turn to the assistant's
        next opener.

        ``images_so_far``: number of earlier images, for dialects that number them. The ``count`` observations
        of a turn with several calls are one turn of the chat, of which this is the part ``place``.
        """
        last = place == count - 1
        pieces = self.dialect.observation(observation, images_so_far, self.system and last)
        text = _clean(
            "".join(piece for piece in pieces if isinstance(piece, str) and not isinstance(piece, Tag))
        )
        opener = [] if place else [START, "user\n"]
        closer = [END, "\n", START, "assistant\n"] if last else []
        tokens = self._encode(["\n", *opener, *pieces, *closer])
        images = [view.id for view in observation.images]
        return Turn(role="tool", text=text, tokens=tokens, images=images, observation=observation)

    def read(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        images: Sequence[ImageView] = (),
        operations: Mapping[str, type[Operation]] | None = None,
    ) -> tuple[Turn, Reply]:
        """Parse a policy turn; the tokens are stored exactly.

        ``images`` are the views so far (targets and sizes).

        ``operations`` are those that may be called (`offered`), by default all. A turn with a banned id, an
        id outside the vocabulary, or the stop token before its end has ``error`` ``bad_token`` and no tokens:
        it never enters a batch.
        """
        tokens, log_probs = [int(t) for t in tokens], [float(p) for p in log_probs]
        if len(tokens) != len(log_probs):
            raise BadInput(f"{len(log_probs)} log-probs for {len(tokens)} tokens", code="bad_completion")
        stopped = bool(tokens) and tokens[-1] == self.spec.stop
        content = tokens[:-1] if stopped else tokens
        valid = [t for t in content if 0 <= t < self.spec.vocab]
        text = str(
            self.tokenizer.decode(valid, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        if len(valid) < len(content) or self.spec.stop in content or not self._banned.isdisjoint(content):
            return Turn(role="assistant", text=text, error="bad_token"), Reply()
        scale = self._scale(images)
        reply = self.dialect.parse(
            text, self.operations if operations is None else operations, scale, self.max_calls
        )
        turn = Turn(
            role="assistant",
            text=text,
            tokens=tokens,
            log_probs=log_probs,
            action=reply.action,
            further_actions=list(reply.further_actions),
            error=reply.error.code if reply.error else None,
        )
        return turn, reply

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The UTF-8 bytes of each token, of which a character may need several: together, the text of the
        tokens.
        """
        added = self.tokenizer.added_tokens_decoder
        pieces = []
        for token in tokens:
            text = (
                str(self.tokenizer.convert_ids_to_tokens(token))
                if token not in added
                else added[token].content
            )
            is_plain = token not in added and all(character in _BYTES for character in text)
            pieces.append(bytes(_BYTES[character] for character in text) if is_plain else text.encode())
        return pieces

    def listener(self, on_text: Callable[[str], None]) -> TokenCallback:
        """Pass the tokens of a policy turn on as text, a character as soon as all its bytes are there,
        without the stop token.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def on_tokens(tokens: Sequence[int]) -> None:
            text = decoder.decode(
                b"".join(self.pieces([token for token in tokens if token != self.spec.stop]))
            )
            if text:
                on_text(text)

        return on_tokens

    def assistant(
        self,
        content: Action | Sequence[Action] | str,
        think: str | None = None,
        images: Sequence[ImageView] = (),
    ) -> Turn:
        """A demonstration's turn: calls, or the text of an answer.

        Ends with the stop token; has no log-probs.

        ``images`` are the views so far, which models with pixel coordinates need. The turn's actions are the
        dialect's versions of the given ones. Raises OperationError if the dialect cannot express them, or for
        more than ``dialogue.max_calls``.
        """
        calls = (
            [content] if isinstance(content, Action) else [] if isinstance(content, str) else list(content)
        )
        self.check_calls(len(calls))
        parts = self.dialect.render(calls or content, self._scale(images), think)
        actions = [self.dialect.adapt(action) for action in calls]
        return Turn(
            role="assistant",
            text=_clean("".join(parts)),
            tokens=self._encode([*parts, END]),
            action=actions[0] if actions else None,
            further_actions=actions[1:],
        )

    def check_calls(self, count: int) -> None:
        """Raise OperationError ``limit`` for more calls in a turn than ``dialogue.max_calls``."""
        if count > self.max_calls:
            raise OperationError(
                f"{count} calls in a turn, dialogue.max_calls is {self.max_calls}", code="limit"
            )

    def mistaken(self, action: Action, think: str | None = None) -> Turn:
        """The turn of a wrong call that the dialect has no form for, arguments as they stand: it is context,
        never learnt.
        """
        call = {"name": action.op, "arguments": {**action.arguments, "target": action.target}}
        text = json.dumps(call, ensure_ascii=False, default=str)
        tag = self.dialect.call or "tool_call"
        pieces = [
            *([Tag("<think>"), think, Tag("</think>")] if think else []),
            Tag(f"<{tag}>"),
            text,
            Tag(f"</{tag}>"),
        ]
        return Turn(role="assistant", text=_clean("".join(pieces)), tokens=self._encode([*pieces, END]))

    def verbatim(self, text: str, actions: Sequence[Action] = (), images: Sequence[ImageView] = ()) -> Turn:
        """A demonstration's turn as its row has it.

        ``actions``: its calls are written anew, as these; the rest is kept.

        Raises OperationError as `assistant`.
        """
        if actions:
            text = self.dialect.rewrite(text, actions, self._scale(images))
        return Turn(
            role="assistant", text=_clean(text), tokens=self._encode([*self.dialect.pieces(text), END])
        )

    def _scale(self, images: Sequence[ImageView]) -> Scale:
        return Scale.of(self.coordinates, images, slack=self.spec.multiple, clamp=self.clamp)

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Encode pieces: images as pads, Tags with their control tokens, other text as plain text."""
        out: list[int] = []
        pending = ""
        for piece in pieces:
            if isinstance(piece, str) and not (isinstance(piece, Tag) and self._control.search(piece)):
                pending += piece
                continue
            out += self._encode_text(pending)
            pending = ""
            if isinstance(piece, str):
                out += self._encode_text(piece)
                continue
            if not self.spec.reads_images:
                fix = "name a vision-language model in policy.model, or questions without media"
                raise BadInput(
                    f"a model of type {self.spec.family} reads text alone", code="no_vision", fix=fix
                )
            width, height = piece.view_size
            pads = [self.spec.image_token] * self.spec.image_tokens(height, width)
            out += [self.spec.vision_start, *pads, self.spec.vision_end]
        return out + self._encode_text(pending)

    def _encode_text(self, text: str) -> list[int]:
        """Encode a piece of text; short ones are cached, because every episode of a group repeats them."""
        key = (text, isinstance(text, Tag))
        tokens = self._token_cache.get(key)
        if tokens is None:
            tokens = (
                self.tokenizer.encode(str(text), add_special_tokens=False) if key[1] else self._plain(text)
            )
            if len(text) <= 4096 and len(self._token_cache) < 1024:
                self._token_cache[key] = tokens
        return tokens

    def _plain(self, text: str) -> list[int]:
        """Encode text so that it gives no control tokens: their spellings are split after the first
        character.
        """
        text = _clean(text)
        pieces, start, position = [], 0, 0
        while (match := self._control.search(text, position)) is not None:
            pieces.append(text[start : match.start() + 1])
            start = position = match.start() + 1
        pieces.append(text[start:])
        return [
            t for piece in pieces if piece for t in self.tokenizer.encode(piece, add_special_tokens=False)
        ]


def _clean(text: str) -> str:
    """Replace lone surrogates by U+FFFD, so that any tokenizer and JSON accept the text."""
    return _SURROGATES.sub("\ufffd", text)
