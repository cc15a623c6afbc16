"""The conversation that the messages of OpenAI's two question routes spell."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable

from pixelis.protocol.errors import ApiError
from pixelis.protocol.messages import Message
from pixelis.records import Exchange
from pixelis.serve.protocol.question import Conversation

_BLAND = re.compile(r"you are (an? )?([\w-]+,? (and )?){0,5}(assistant|chatbot|ai|model)[.!]?", re.IGNORECASE)
"""System messages that only name the model's role, which many clients send by default."""


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
            placed = list(zip(message.media, message.places, strict=True))
            clips = [medium for medium in placed if medium[0].startswith("data:video/")]
            media += conversation.attach([medium for medium in placed if medium not in clips], clips)
    if roles[-1:] != ["user"]:
        raise refuse(f"the last of `{param}` must be a user message: the question")
    conversation.question = "\n".join(texts)
    return conversation
