"""A question with the exchanges before it, and how the messages of OpenAI's two question routes spell it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pixelis.protocol.errors import ApiError
from pixelis.protocol.messages import Message
from pixelis.records import Exchange

MAX_EXCHANGES = 32
"""Longest history of a question."""

_BLAND = re.compile(r"you are (an? )?([\w-]+,? (and )?){0,5}(assistant|chatbot|ai|model)[.!]?", re.IGNORECASE)
"""System messages that only name the model's role, which many clients send by default."""


@dataclass(slots=True)
class Conversation:
    """A question as sent, with the URLs of all media of the conversation and the exchanges before it.

    The n-th picture has the id ``img{n}``, the n-th clip ``vid{n}``; those that no exchange names came with
    the question. ``places`` in the request are by these ids. The first ``stored`` exchanges come from the
    memory.
    """

    question: str
    images: list[str] = field(default_factory=list)
    clips: list[str] = field(default_factory=list)
    history: list[Exchange] = field(default_factory=list)
    stored: int = 0
    places: dict[str, str] = field(default_factory=dict, compare=False)

    def attach(self, media: Sequence[str], places: Sequence[str]) -> list[str]:
        """Add data URLs with their places in the request, pictures before clips; returns their ids."""

        def is_clip(medium: tuple[str, str]) -> bool:
            return medium[0].startswith("data:video/")

        ids = list[str]()
        for medium in sorted(zip(media, places, strict=True), key=is_clip):
            kind, urls = ("vid", self.clips) if is_clip(medium) else ("img", self.images)
            ids.append(f"{kind}{len(urls)}")
            urls.append(medium[0])
            self.places[ids[-1]] = medium[1]
        return ids

    @property
    def unnamed(self) -> list[str]:
        """Ids of the pictures and clips that no exchange names."""
        ids = [f"img{n}" for n in range(len(self.images))] + [f"vid{n}" for n in range(len(self.clips))]
        named = {id for exchange in self.history for id in exchange.media}
        return [id for id in ids if id not in named]


def read_messages(
    messages: Iterable[Message], param: str, earlier: Conversation | None = None
) -> Conversation:
    """The conversation of the messages of ``param``, which continue ``earlier``. Raises ApiError 400.

    User messages in a row are one question, also with a reply without an answer in between.
    """
    conversation = copy.deepcopy(earlier) if earlier is not None else Conversation("")
    texts = [conversation.question] if conversation.question else []
    media = conversation.unnamed
    roles = list[str]()

    def refuse(problem: str) -> ApiError:
        return ApiError(400, problem, "unsupported_conversation", param)

    for message in messages:
        role, text, place = message.role, message.text, message.place
        if role == "tool" or message.calls:
            raise refuse(f"`{place}` is of a tool: the agent executes its operations itself")
        if role == "system":
            if {"user", "assistant"}.intersection(roles):
                raise refuse(f"`{place}`: system messages precede the first question")
            text = "" if _BLAND.fullmatch(text) else text
        elif role == "assistant":
            if not roles or roles[-1] != "user":
                raise refuse(f"`{place}` answers no question: user and assistant messages alternate")
            if text:
                conversation.history.append(Exchange(question="\n".join(texts), answer=text, media=media))
                texts, media = [], []
        roles.append(role)
        if role != "assistant":
            texts += [text] if text else []
            media += conversation.attach(message.media, message.places)
    if roles[-1:] != ["user"]:
        raise refuse(f"the last of `{param}` must be a user message: the question")
    conversation.question = "\n".join(texts)
    return conversation
