"""OpenAI's chat completions of a vote: the request and its reply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from pixelis.config import Config
from pixelis.protocol.chat import ChatBody, ChatReply, ChatStream, Choice, Usage
from pixelis.protocol.errors import ApiError, invalid
from pixelis.protocol.stream import sse_event
from pixelis.records import Trajectory, Verdict, new_id
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Answer, TurnEvent
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


class ChatRequest(ChatBody, QuestionRequest):
    """Body of ``POST /v1/chat/completions``: a question, after optional system messages and exchanges.

    ``n`` choices are the elected answer and the answers of other samples; ``stop`` cuts each.
    """

    question_param: ClassVar[str] = "messages"
    image_param: ClassVar[str] = "messages"

    def conversation(self) -> Conversation:
        if len(self.messages) > 2 * MAX_EXCHANGES:
            raise invalid("messages", f"at most {2 * MAX_EXCHANGES} of a question without tools")
        return read_messages(self.raw_messages(), "messages")


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


class ChatCompletion(ChatReply):
    """Reply of ``POST /v1/chat/completions``."""

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
    """The elected answer and those of ``n`` - 1 other samples, each with its sample."""
    others = [(t.answer, t) for t in answer.accepted if t is not answer.winner]
    chosen = [(answer.verdict.answer, answer.winner), *others][:n]
    return chosen + [chosen[0]] * (n - len(chosen))


class ChatFormat(ReplyFormat):
    """The ReplyFormat of chat completions.

    A stream has the thoughts of the first sample (``reasoning``, as vLLM names it), a chunk for every turn of
    every sample (``pixelis.event``), and the answer in one piece, after the vote.
    """

    events: ChatStream

    def __init__(self, config: Config, request: ChatRequest, started: float):
        super().__init__(config, request.stream, started, request.model)
        self.n, stop = request.n or 1, request.stop or []
        self.log_probs = bool(request.logprobs)
        if self.n > config.serve.samples:
            raise ApiError(400, f"`n` is at most {config.serve.samples}", "invalid_value", "n")
        self.stops = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        self.query = agent_query(
            config,
            request,
            max_tokens=request.token_limit,
            top_p=request.top_p,
            top_log_probs=request.top_logprobs or 0,
            answers=request.answer_format,
        )
        self.cache_key = reply_cache_key(
            f"/v1/chat/completions {self.n} {self.stops} {self.log_probs}", self.query, request.seed
        )
        include_usage = request.stream_options is not None and request.stream_options.include_usage
        self.events = ChatStream(self.model, config.dialogue.dialect, include_usage)

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

    def stream_turn(self, event: TurnEvent) -> str:
        thought = self.events.turn(event.turn, event.attempt) if event.sample == 0 else ""
        shown = self.events.chunk({}) | {"pixelis": {"event": event.model_dump(mode="json")}}
        return thought + sse_event(shown)
