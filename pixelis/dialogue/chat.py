"""Episodes with a chat model: calls and answers are text in a dialect, pictures are parts of the messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.dialogue.agent import Outcome
from pixelis.dialogue.dialects import Dialect, Piece, Reply
from pixelis.dialogue.dialects.base import by_exchange
from pixelis.operations.image import png_url
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Coordinates, ImageView, Question, StopReason, Turn

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatReply:
    """What a chat model said; ``truncated`` at the limit of its length."""

    text: str
    reasoning: str = ""
    truncated: bool = False

    @property
    def transcript(self) -> str:
        return f"<think>{self.reasoning}</think>\n{self.text}" if self.reasoning else self.text


class ChatConversation:
    """A conversation in the messages of an OpenAI-compatible API.

    ``slack`` and ``clamp`` are those of `Scale`. ``parts`` show a picture by its id; others are sent as PNG.
    With ``examples``, demonstrations to imitate, earlier answers have the dialect's form, and ids precede
    pictures.
    """

    def __init__(
        self,
        ask: Callable[[list[Message]], Awaitable[ChatReply]],
        dialect: Dialect,
        operations: Mapping[str, type[Operation]],
        coordinates: Coordinates,
        *,
        instruct: bool = True,
        max_calls: int = 1,
        slack: int = 0,
        clamp: bool | None = None,
        parts: Mapping[str, list[Message]] | None = None,
        examples: str = "",
    ):
        self.ask, self.dialect, self.operations, self.coordinates = ask, dialect, operations, coordinates
        self.instruct, self.max_calls, self.slack, self.clamp = instruct, max_calls, slack, clamp
        self.parts, self.examples = dict(parts or {}), examples
        self.messages: list[Message] = []

    def begin(
        self, question: Question, images: Sequence[ImageView], views: Sequence[np.ndarray]
    ) -> list[Turn]:
        """The system message, the earlier exchanges and the question."""
        self._add_pictures(images, views)
        turns = list[Turn]()
        if self.instruct:
            system = text_of(self.dialect.system(images, self.operations, self.coordinates, self.max_calls))
            if system := "\n\n".join(filter(None, (system, self.examples))):
                self.messages.append({"role": "system", "content": system})
                turns.append(Turn(role="system", text=system))
        for text, shown, answer in by_exchange(question, images):
            turns.append(self._ask_about(text, shown))
            if answer is not None:
                if self.examples:
                    answer = "".join(self.dialect.render(answer, self._scale(images)))
                self.messages.append({"role": "assistant", "content": answer})
                turns[-1].text += f"\n{answer}"
        return turns

    async def policy_turn(self, images: Sequence[ImageView]) -> tuple[Turn, Reply, StopReason | None]:
        message = await self.ask(list(self.messages))
        self.messages.append({"role": "assistant", "content": message.text})
        reply = self.dialect.parse(message.text, self.operations, self._scale(images), self.max_calls)
        return reply.turn(message.transcript), reply, StopReason.LENGTH if message.truncated else None

    def observe(self, results: Sequence[Outcome], images_so_far: int) -> list[Turn]:
        """One message with the observations of a turn."""
        turns, content = list[Turn](), list[Message]()
        for place, (observation, views) in enumerate(results):
            self._add_pictures(observation.images, views)
            instruct = self.instruct and place == len(results) - 1
            pieces = self.dialect.observation(observation, images_so_far, instruct)
            content += self._content(pieces)
            shown = [image.id for image in observation.images]
            turns.append(Turn(role="tool", text=text_of(pieces), images=shown, observation=observation))
            images_so_far += len(shown)
        self.messages.append({"role": "user", "content": content})
        return turns

    def _add_pictures(self, images: Sequence[ImageView], views: Sequence[np.ndarray]) -> None:
        self.parts |= {
            image.id: [picture_part(png_url(view))] for image, view in zip(images, views, strict=False)
        }

    def _ask_about(self, text: str, images: Sequence[ImageView]) -> Turn:
        pieces = self.dialect.question(text, images, bool(self.operations), self.instruct)
        self.messages.append({"role": "user", "content": self._content(pieces)})
        return Turn(role="user", text=text_of(pieces), images=[image.id for image in images])

    def _content(self, pieces: Sequence[Piece]) -> list[Message]:
        parts = list[Message]()
        for piece in pieces:
            if isinstance(piece, ImageView):
                name = [{"type": "text", "text": f"[{piece.id}]"}] if self.examples else []
                parts += [*name, *self.parts[piece.id]]
            elif self.examples and parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += str(piece)
            else:
                parts.append({"type": "text", "text": str(piece)})
        return parts

    def _scale(self, images: Sequence[ImageView]) -> Scale:
        return Scale.of(self.coordinates, images, slack=self.slack, clamp=self.clamp)


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(str(piece) for piece in pieces if isinstance(piece, str))


def picture_part(url: str) -> Message:
    return {"type": "image_url", "image_url": {"url": url}}
