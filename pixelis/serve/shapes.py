"""The two request forms behind one way of answering: OpenAI's chat completions, and ``/v1/agent`` with its trajectory."""

from __future__ import annotations

import hashlib
import secrets
import time
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pixelis.config import Config
from pixelis.dialogue.session import SamplingParams
from pixelis.records import new_id
from pixelis.serve import schemas
from pixelis.serve.agent import Agent
from pixelis.serve.cache import key_of
from pixelis.serve.events import Answer, Ask, TurnEvent
from pixelis.serve.responses import event
from pixelis.serve.schemas import AgentReply, AgentRequest, ApiError, ChatRequest

MAX_SEED = 0x7FFFFFFF


def model_name(config: Config) -> str:
    """The id under ``/v1/models``: ``pixelis-nano``, or the name of the model's folder."""
    return "pixelis-nano" if config.policy.model == "nano" else Path(config.policy.model).name


class Shape(Protocol):
    """A parsed request and the form of its reply. Making one raises ApiError for whatever is wrong with the body.

    ``key`` is what the reply may be kept under, None when it is not one that repeats.
    """

    route: ClassVar[str]
    ask: Ask
    key: str | None
    stream: bool

    def __init__(self, config: Config, body: bytes, started: float): ...
    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]: ...
    def again(self, reply: dict[str, Any]) -> dict[str, Any]: ...
    def first(self) -> str: ...
    def turn(self, happened: TurnEvent) -> str: ...
    def last(self, reply: dict[str, Any]) -> list[str]: ...
    def error(self, error: ApiError) -> str: ...


class Chat:
    """``POST /v1/chat/completions``.

    Streamed: the role at once, a chunk for every turn of every sample (``pixelis.event``, with an empty delta, so that clients
    that do not know turns see nothing of them), then the answer in one piece: it exists only once all samples have voted.
    """

    route: ClassVar[str] = "/v1/chat/completions"

    def __init__(self, config: Config, body: bytes, started: float):
        self.started, self.model = started, model_name(config)
        wanted = schemas.parse(ChatRequest, body)
        if wanted.model not in (self.model, config.policy.model):
            message = f"the model `{wanted.model[:100]}` is not served here, `{self.model}` is"
            raise ApiError(404, message, "model_not_found", "model")
        self.stream = bool(wanted.stream)
        self.with_usage = wanted.stream_options is not None and wanted.stream_options.include_usage
        max_tokens = wanted.max_completion_tokens or wanted.max_tokens
        self.ask = _ask(config, wanted, max_tokens=max_tokens, top_p=wanted.top_p)
        self.key = _key(self.route, self.ask, wanted.seed, None)
        self.shared: dict[str, Any] = {"id": new_id("chatcmpl"), "object": "chat.completion.chunk", "created": int(time.time())}
        self.shared |= {"model": self.model, "system_fingerprint": None}

    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]:
        """A ``chat.completion``."""
        usage, version = schemas.usage_of(answer.group.trajectories), answer.group.policy_version
        seconds = time.monotonic() - self.started
        return schemas.chat_reply(self.model, answer.verdict, answer.winner, version, usage, seconds, answer.experience_id)

    def again(self, reply: dict[str, Any]) -> dict[str, Any]:
        """A kept reply for this request."""
        own = {"cached": True, "seconds": round(time.monotonic() - self.started, 4)}
        return {**reply, "id": new_id("chatcmpl"), "created": int(time.time()), "pixelis": {**reply["pixelis"], **own}}

    def first(self) -> str:
        """The role."""
        return event(self._chunk({"role": "assistant", "content": ""}))

    def turn(self, happened: TurnEvent) -> str:
        """A turn as it happens."""
        return event(self._chunk({}) | {"pixelis": {"event": happened.model_dump(mode="json")}})

    def last(self, reply: dict[str, Any]) -> list[str]:
        """The answer, why it ended, and usage when asked for."""
        self.shared["system_fingerprint"] = reply["system_fingerprint"]
        choice = reply["choices"][0]
        said = {k: v for k, v in choice["message"].items() if k != "role" and v is not None}
        chunks = [self._chunk(said), self._chunk({}, choice["finish_reason"]) | {"pixelis": reply["pixelis"]}]
        if self.with_usage:
            chunks.append({**self.shared, "choices": [], "usage": reply["usage"]})
        return [*map(event, chunks), "data: [DONE]\n\n"]

    def error(self, error: ApiError) -> str:
        """As OpenAI does: a chunk that is an error body; the official client raises it."""
        return event(error.body())

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**self.shared, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}


class AgentShape:
    """``POST /v1/agent``. Streamed: ``event: turn`` for each TurnEvent, then ``event: answer`` or ``event: error``."""

    route: ClassVar[str] = "/v1/agent"

    def __init__(self, config: Config, body: bytes, started: float):
        self.started, self.model = started, model_name(config)
        wanted = schemas.parse(AgentRequest, body)
        if wanted.samples is not None and wanted.samples > config.serve.samples:
            raise ApiError(400, f"`samples` is at most {config.serve.samples}", "invalid_value", "samples")
        if wanted.max_turns is not None and wanted.max_turns > config.dialogue.max_turns_test:
            raise ApiError(400, f"`max_turns` is at most {config.dialogue.max_turns_test}", "invalid_value", "max_turns")
        self.stream = wanted.stream
        self.ask = _ask(config, wanted, wanted.samples, wanted.operations, wanted.max_turns, wanted.learn, wanted.remember)
        self.key = _key(self.route, self.ask, wanted.seed, wanted.cache)

    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]:
        """An AgentReply."""
        trajectory = schemas.without_tokens(answer.winner, await agent.pictures(answer))
        reply = AgentReply(
            model=self.model,
            answer=answer.verdict.answer,
            confidence=answer.verdict.confidence,
            verdict=answer.verdict,
            trajectory=trajectory,
            policy_version=answer.group.policy_version,
            experience_id=answer.experience_id,
            seconds=time.monotonic() - self.started,
        )
        return reply.model_dump(mode="json")

    def again(self, reply: dict[str, Any]) -> dict[str, Any]:
        """A kept reply for this request."""
        return {**reply, "id": new_id("agent"), "cached": True, "seconds": time.monotonic() - self.started}

    def first(self) -> str:
        """A comment: the request is taken."""
        return ": taken\n\n"

    def turn(self, happened: TurnEvent) -> str:
        """A turn as it happens."""
        return event(happened.model_dump(mode="json"), "turn")

    def last(self, reply: dict[str, Any]) -> list[str]:
        """The answer."""
        return [event(reply, "answer")]

    def error(self, error: ApiError) -> str:
        """What kept it from being answered."""
        return event(error.body(), "error")


def _ask(
    config: Config,
    wanted: ChatRequest | AgentRequest,
    samples: int | None = None,
    operations: bool = True,
    max_turns: int | None = None,
    learn: bool = True,
    remember: bool = True,
    max_tokens: int | None = None,
    top_p: float | None = None,
) -> Ask:
    """A checked Ask. Raises ApiError 400 for what is wrong with the question or its pictures' addresses."""
    question, images = wanted.ask()
    schemas.check_question(question, config.serve.max_question_chars, wanted.question_param)
    schemas.check_images(images, config.dialogue.max_images, wanted.image_param)
    schemas.check_text(wanted.user, "user")
    default, most = config.serve.sampling, config.dialogue.max_turn_tokens
    temperature = default.temperature if wanted.temperature is None else wanted.temperature
    top_p = default.top_p if top_p is None else top_p
    tokens = min(max_tokens or most, most)
    seed = secrets.randbits(31) if wanted.seed is None else wanted.seed & MAX_SEED
    # Recorded log-probs are those of the sampling distribution: only the configured one is what the learner expects.
    usual = (temperature, top_p, tokens) == (default.temperature, default.top_p, most)
    return Ask(
        question=question,
        images=images,
        samples=1 if temperature == 0 else samples or config.serve.samples,  # greedy samples would all be the same one
        sampling=SamplingParams(temperature, top_p, tokens, seed),
        operations=operations and bool(config.toolbox.operations),
        max_turns=max_turns or config.dialogue.max_turns_test,
        learn=learn and remember and usual and operations,
        remember=remember,
        user=wanted.user or None,
    )


def _key(route: str, ask: Ask, seed: int | None, wish: bool | None) -> str | None:
    """The cache key of a request that repeats: greedy, seeded, or by the caller's wish; None for all others.

    A reply is given again only to the ``user`` who got it: what one may delete, no other still sees.
    """
    greedy = ask.sampling.temperature == 0
    if wish is False or not (wish or greedy or seed is not None):
        return None
    sampling = (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.max_tokens, None if greedy else seed)
    pictures = [hashlib.sha256(url.encode()).hexdigest() for url in ask.images]
    choices = (ask.samples, ask.operations, ask.max_turns, ask.learn, ask.remember)
    return key_of(
        {
            "route": route,
            "question": ask.question,
            "pictures": pictures,
            "sampling": sampling,
            "choices": choices,
            "user": ask.user,
        }
    )
