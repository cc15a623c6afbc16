"""Shared by the question routes: checks of questions, the agent's query, cache keys, reply formats."""

from __future__ import annotations

import re
import secrets
import time
import unicodedata
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal

from pixelis.config import Config
from pixelis.config.references import EMBEDDED
from pixelis.dialogue.session import MIN_TEMPERATURE, SamplingParams
from pixelis.protocol.chat import ChatBody, ChatWriter
from pixelis.protocol.errors import ApiError, is_plain
from pixelis.protocol.parts import kind_url
from pixelis.protocol.request import CompletionBody, Request
from pixelis.protocol.responses import ResponsesBody, ResponseWriter
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import AgentQuery, Answer, TextEvent, TurnEvent
from pixelis.serve.cache import key_of
from pixelis.serve.keys import Caller
from pixelis.serve.protocol.conversation import Conversation

MAX_SEED = 0x7FFFFFFF
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"
"""Characters that Unicode counts as letters or symbols, and that are invisible."""
_MARKER = re.compile(r"<\|[A-Za-z0-9_]+\|>")


class ReplyFormat(ABC):
    """A validated request and the format of its reply, a server-sent stream if ``stream``.

    ``cached_reply`` gives an earlier reply this request's id and times. Stream methods may return "" for no
    event; by default a ``writer`` of OpenAI's formats tells the thoughts of the first sample.
    """

    query: AgentQuery
    cache_key: str | None
    writer: ChatWriter | ResponseWriter

    def __init__(self, config: Config, stream: bool | None, started: float, model: str | None = None):
        """Raises ApiError 404 unless ``model`` is served."""
        self.caller, self.stream, self.started = Caller(), bool(stream), started
        self.model = model_name(config)
        if model is not None:
            require_model(config, model)

    @property
    def seconds(self) -> float:
        """Since the request arrived."""
        return round(time.monotonic() - self.started, 4)

    @abstractmethod
    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def cached_reply(self, reply: dict[str, Any]) -> dict[str, Any]: ...

    def stream_start(self) -> str:
        return self.writer.start()

    def stream_text(self, event: TextEvent) -> str:
        return self.writer.text(event.text, event.attempt)

    def stream_turn(self, event: TurnEvent) -> str:
        return self.writer.turn(event.turn, event.attempt) if event.sample == 0 else ""

    def stream_end(self, reply: dict[str, Any]) -> str:
        return self.writer.end(reply)

    def stream_error(self, error: ApiError) -> str:
        return self.writer.error(error)


def model_name(config: Config) -> str:
    """The id under ``/v1/models``: ``pixelis-nano``, ``pixelis-mini``, or the name of the model's folder."""
    model = config.policy.model
    return f"pixelis-{model}" if model in EMBEDDED else Path(model).name


def require_model(config: Config, name: str) -> None:
    """Raises ApiError 404 unless it is the name of the served model."""
    served = model_name(config)
    if name not in (served, config.policy.model):
        message = f"model `{name[:100]}` is not available here; use `{served}`"
        raise ApiError(404, message, "model_not_found", "model")


def require_at_most(param: str, value: int | None, most: int) -> None:
    """Raises ApiError 400."""
    if value is not None and value > most:
        raise ApiError(400, f"`{param}` is at most {most}", "invalid_value", param)


def agent_query(
    config: Config,
    body: Request,
    conversation: Conversation,
    learn: bool = True,
    remember: bool | Literal["later"] = True,
    samples: int | None = None,
    operations: bool = True,
    max_turns: int | None = None,
) -> AgentQuery:
    """The query for the agent. Raises ApiError 400 for an invalid question."""
    for i, exchange in enumerate(conversation.history):
        for text in (exchange.question, exchange.answer):
            # Stored ones may be longer, by the schema of the answer.
            most = len(text) if i < conversation.stored else config.serve.max_question_chars
            check_question(text, most, body.question_param)
    check_question(conversation.question, config.serve.max_question_chars, body.question_param)
    answers = body.answer_format if isinstance(body, ChatBody | ResponsesBody) else None
    instruction = answers.instruction if answers is not None else ""
    if instruction:
        check_question(instruction, len(instruction), "response_format")
    shown = len(conversation.images) + len(conversation.clips) * config.dialogue.frames
    if shown > (most := config.dialogue.max_images):
        frames = f", with {config.dialogue.frames} frames of each clip" if conversation.clips else ""
        message = f"{shown} pictures{frames}; at most {most} are allowed"
        raise ApiError(400, message, "too_many_images", body.image_param)
    sampling = sampling_params(config, body)
    # Samples without a required format did not vote, and turns of fewer tokens would not be the policy's.
    usual = is_usual(config, sampling) and sampling.max_tokens == config.dialogue.max_turn_tokens
    on_policy = answers is None and usual
    has_media = bool(conversation.images or conversation.clips)
    return AgentQuery(
        question=conversation.question + instruction,
        images=conversation.images,
        clips=conversation.clips,
        history=conversation.history,
        places=conversation.places,
        # Greedy samples would all be the same
        samples=1 if sampling.temperature == 0 else samples or config.serve.samples,
        sampling=sampling,
        operations=operations and bool(config.toolbox.operations) and has_media,
        max_turns=max_turns or config.dialogue.max_turns_test,
        learn=learn and bool(remember) and on_policy and operations and has_media,
        remember=remember,
        answers=answers,
        user=body.user or None,
    )


def sampling_params(config: Config, body: Request) -> SamplingParams:
    """The service's sampling with the changes of a request, whose seed is random without one."""
    default, most = config.serve.sampling, config.dialogue.max_turn_tokens
    temperature = default.temperature if body.temperature is None else body.temperature
    max_tokens, top_p, top_log_probs = most, default.top_p, 0
    if isinstance(body, CompletionBody):
        max_tokens = min(body.token_limit or most, most)
        top_p, top_log_probs = body.top_p or top_p, body.top_logprobs or 0
    return SamplingParams(
        temperature and max(temperature, MIN_TEMPERATURE),
        top_p,
        max_tokens,
        secrets.randbits(31) if body.seed is None else body.seed & MAX_SEED,
        config.serve.priority if body.priority is None else body.priority,
        top_log_probs,
    )


def is_usual(config: Config, sampling: SamplingParams) -> bool:
    """Whether it is the sampling distribution of the service, whose log-probs the learner expects."""
    default = config.serve.sampling
    return (sampling.temperature, sampling.top_p) == (default.temperature, default.top_p)


def search_query(config: Config, text: str, image: str | None) -> AgentQuery:
    """The query of a search in the memory. Raises ApiError 400."""
    if text.strip():
        check_question(text, config.serve.max_question_chars, "text")
    images = [kind_url(image, "image", "image")] if image is not None else []
    return AgentQuery(text.strip(), images, samples=1, sampling=SamplingParams(), operations=False)


def reply_cache_key(route: str, query: AgentQuery, seed: int | None, cache: bool | None = None) -> str | None:
    """The cache key of a greedy or seeded request, or of any if ``cache`` is true; otherwise None.

    It covers the ``user``, who may delete the reply's experience.
    """
    greedy = query.sampling.temperature == 0
    if cache is False or not (cache or greedy or seed is not None):
        return None
    sampling = query.sampling
    return key_of(
        {
            "route": route,
            "question": query.question,
            "history": [exchange.model_dump() for exchange in query.history],
            "pictures": query.images,
            "clips": query.clips,  # apart: a GIF can be either
            "sampling": (sampling.temperature, sampling.top_p, sampling.max_tokens, None if greedy else seed),
            "top_log_probs": sampling.top_log_probs,
            "choices": (query.samples, query.operations, query.max_turns, query.learn, query.remember),
            "answers": query.answers.text if query.answers is not None else None,
            "user": query.user,
        }
    )


def check_question(text: str, max_chars: int, param: str = "question") -> None:
    """Raises ApiError 400 if the text is empty, too long, or has control characters or tokens."""
    if not any(unicodedata.category(c)[0] in "LNPS" and c not in _BLANK for c in text):
        raise ApiError(400, "the question is empty: it has no visible character", "empty_question", param)
    if len(text) > max_chars:
        message = f"the question has {len(text)} characters; at most {max_chars} are allowed"
        raise ApiError(400, message, "question_too_long", param)
    check_characters(text, param, "question")
    if marker := _MARKER.search(text):
        message = f"the question spells the control token {marker.group()[:60]}: write it differently"
        raise ApiError(400, message, "control_token", param)


def check_characters(text: str, param: str, noun: str) -> None:
    """Raises ApiError 400 for text that cannot be stored."""
    if not is_plain(text):
        message = f"the {noun} contains a NUL or an unpaired surrogate"
        raise ApiError(400, message, "invalid_characters", param)
