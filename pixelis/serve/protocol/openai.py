"""OpenAI's bodies: chat completions with their streamed chunks, and the list of models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from pixelis.config import Config
from pixelis.dialogue.session import MAX_TOP_LOG_PROBS
from pixelis.protocol.answer_format import AnswerFormat, answer_format
from pixelis.protocol.errors import ApiError, text_or
from pixelis.protocol.fields import refuse_unsupported
from pixelis.protocol.log_probs import LogProbs
from pixelis.protocol.parts import Content, LenientModel, file_ids, read_message
from pixelis.protocol.stream import ThoughtStream, sse_event
from pixelis.records import Trajectory, Verdict, new_id
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Answer, TextEvent, TurnEvent
from pixelis.serve.protocol.conversation import read_messages
from pixelis.serve.protocol.log_probs import answer_log_probs
from pixelis.serve.protocol.question import (
    MAX_EXCHANGES,
    Conversation,
    QuestionRequest,
    ReplyFormat,
    agent_query,
    reply_cache_key,
)

MAX_STOPS = 4


class Message(LenientModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None


class StreamOptions(LenientModel):
    """Whether a stream ends with the number of tokens."""

    include_usage: bool = False


class ChatRequest(QuestionRequest):
    """Body of ``POST /v1/chat/completions``: a question, after optional system messages and exchanges.

    ``n`` choices are the elected answer and the answers of other samples; ``stop`` cuts each. Unknown fields
    and those that would change the reply but are not supported (``tools``, ``top_k``, ...) are errors.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    question_param: ClassVar[str] = "messages"
    image_param: ClassVar[str] = "messages"
    model: str
    messages: list[Message] = Field(min_length=1, max_length=2 * MAX_EXCHANGES, fail_fast=True)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: text_or(Annotated[list[str], Field(max_length=MAX_STOPS)]) | None = None  # type: ignore[valid-type]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOG_PROBS)
    web_search_options: Any = None
    response_format: dict[str, Any] | None = None

    def conversation(self) -> Conversation:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "`top_logprobs` needs `logprobs` to be true", "invalid_value", "top_logprobs")
        answers = self.answer_format
        unsupported = {
            "web_search_options": self.web_search_options is not None,
            "stop": bool(self.stop) and answers is not None,  # would cut JSON
        }
        refuse_unsupported(unsupported, self.model_extra)
        messages = (
            read_message(message.role, message.content, f"messages[{i}]", self._files)
            for i, message in enumerate(self.messages)
        )
        return read_messages(messages, "messages")

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        f = self.response_format or {}
        return answer_format(f.get("type", "text"), f.get("json_schema"), "response_format")

    def file_ids(self) -> list[str]:
        return file_ids(message.content for message in self.messages)


class Usage(BaseModel):
    """Tokens of a request: the prompt once, because samples share it, and the replies of all samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, trajectories: list[Trajectory]) -> Usage:
        turns = trajectories[0].turns if trajectories else []
        first_reply = next((i for i, turn in enumerate(turns) if turn.is_policy), len(turns))
        prompt = sum(len(turn.tokens) for turn in turns[:first_reply])
        completion = sum(len(turn.tokens) for t in trajectories for turn in t.turns if turn.is_policy)
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class ChatMessage(BaseModel):
    """``content`` is null without an answer; ``refusal`` then gives the reason."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None


class Choice(BaseModel):
    """The answer of one sample."""

    index: int = 0
    message: ChatMessage
    logprobs: LogProbs | None = None
    finish_reason: Literal["stop", "length"]

    @classmethod
    def of(cls, index: int, content: str | None, trajectory: Trajectory, stops: Sequence[str]) -> Choice:
        """The choice of a sample with the answer ``content``, which ends before the first of ``stops``."""
        reason, refusal = trajectory.stop_reason.value, None
        if content is None:
            who = "this sample reached no" if index else "no sample reached an"
            refusal = f"{who} answer ({reason})"
        else:
            ends = [place for stop in stops if (place := content.find(stop)) >= 0]
            content = content[: min(ends, default=None)]
        truncated = content is None and reason in ("length", "over_turn", "over_context", "over_images")
        message = ChatMessage(content=content, refusal=refusal)
        return cls(index=index, message=message, finish_reason="length" if truncated else "stop")


class PixelisFields(BaseModel):
    """What OpenAI's format has no field for; see AgentReply. ``operations`` counts the successful ones."""

    confidence: float
    verdict: Verdict
    policy_version: int
    operations: int
    experience_id: str | None
    remembered: str
    cached: bool = False
    seconds: float

    @classmethod
    def of(cls, answer: Answer, seconds: float) -> PixelisFields:
        return cls(
            confidence=answer.verdict.confidence,
            verdict=answer.verdict,
            policy_version=answer.group.policy_version,
            operations=answer.winner.operations_ok,
            experience_id=answer.experience_id,
            remembered=answer.remembered,
            seconds=seconds,
        )


class ChatCompletion(BaseModel):
    """Reply of ``POST /v1/chat/completions``."""

    id: str = Field(default_factory=lambda: new_id("chatcmpl"))
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    pixelis: PixelisFields

    @classmethod
    def of(
        cls, model: str, answer: Answer, seconds: float, n: int = 1, stops: Sequence[str] = ()
    ) -> ChatCompletion:
        """The completion of an answer after ``seconds``, with ``n`` choices cut at the first of ``stops``."""
        return cls(
            model=model,
            system_fingerprint=f"policy-{answer.group.policy_version}",
            choices=[Choice.of(i, content, t, stops) for i, (content, t) in enumerate(choices(answer, n))],
            usage=Usage.of(answer.group.trajectories),
            pixelis=PixelisFields.of(answer, seconds),
        )


def choices(answer: Answer, n: int) -> list[tuple[str | None, Trajectory]]:
    others = [(t.answer, t) for t in answer.accepted if t is not answer.winner]
    chosen = [(answer.verdict.answer, answer.winner), *others][:n]
    return chosen + [chosen[0]] * (n - len(chosen))


class ChatFormat(ReplyFormat):
    """The ReplyFormat of chat completions.

    A stream has the thoughts of the first sample (``reasoning``, as vLLM names it), a chunk for every turn of
    every sample (``pixelis.event``), and the answer in one piece, after the vote.
    """

    def __init__(self, config: Config, request: ChatRequest, started: float):
        super().__init__(config, request.stream, started, request.model)
        self.include_usage = request.stream_options is not None and request.stream_options.include_usage
        self.n, stop = request.n or 1, request.stop or []
        self.log_probs = bool(request.logprobs)
        if self.n > config.serve.samples:
            raise ApiError(400, f"`n` is at most {config.serve.samples}", "invalid_value", "n")
        self.stops = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        self.query = agent_query(
            config,
            request,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            top_p=request.top_p,
            top_log_probs=request.top_logprobs or 0,
            answers=request.answer_format,
        )
        self.cache_key = reply_cache_key(
            f"/v1/chat/completions {self.n} {self.stops} {self.log_probs}", self.query, request.seed
        )
        self.thoughts = ThoughtStream(config.dialogue.dialect)
        self.chunk: dict[str, Any] = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": None,
        }

    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]:
        completion = ChatCompletion.of(self.model, answer, self.seconds, self.n, self.stops)
        if self.log_probs:
            trajectories = [trajectory for _, trajectory in choices(answer, self.n)]
            contents = [choice.message.content for choice in completion.choices]
            log_probs = await answer_log_probs(agent, answer, [*zip(contents, trajectories, strict=True)])
            for choice, of_answer in zip(completion.choices, log_probs, strict=True):
                choice.logprobs = of_answer
        return completion.model_dump(mode="json")

    def cached_reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        fields = {**reply["pixelis"], "cached": True, "seconds": self.seconds}
        return {**reply, "id": new_id("chatcmpl"), "created": int(time.time()), "pixelis": fields}

    def stream_start(self) -> str:
        return sse_event(self._chunk({"role": "assistant", "content": ""}))

    def stream_text(self, event: TextEvent) -> str:
        thought = self.thoughts.add(event.text, event.attempt)
        return sse_event(self._chunk({"reasoning": thought})) if thought else ""

    def stream_turn(self, event: TurnEvent) -> str:
        rest = (
            self.thoughts.end(event.turn.text, event.attempt)
            if event.sample == 0 and event.turn.is_policy
            else ""
        )
        chunk = self._chunk({"reasoning": rest} if rest else {})
        return sse_event(chunk | {"pixelis": {"event": event.model_dump(mode="json")}})

    def stream_end(self, reply: dict[str, Any]) -> list[str]:
        self.chunk["system_fingerprint"] = reply["system_fingerprint"]
        chunks = []
        for choice in reply["choices"]:
            # The first choice has begun with the stream
            role = {"role": "assistant"} if choice["index"] else {}
            delta = {k: v for k, v in choice["message"].items() if k != "role" and v is not None}
            chunks += [
                self._chunk(role | delta, index=choice["index"], logprobs=choice["logprobs"]),
                self._chunk({}, choice["finish_reason"], choice["index"]),
            ]
        chunks[-1] |= {"pixelis": reply["pixelis"]}
        if self.include_usage:
            chunks.append({**self.chunk, "choices": [], "usage": reply["usage"]})
        return [*map(sse_event, chunks), "data: [DONE]\n\n"]

    def stream_error(self, error: ApiError) -> str:
        return sse_event(error.body())  # which the official client raises

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, index: int = 0, logprobs: Any = None
    ) -> Any:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self.chunk, "choices": [choice]}


class ModelCard(BaseModel):
    """A model that the service serves."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pixelis"


class ModelList(BaseModel):
    """Reply of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
