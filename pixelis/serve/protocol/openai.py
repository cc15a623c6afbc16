"""OpenAI's chat completions and responses of a vote, and stored responses."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Literal

from openai.types import chat
from pydantic import BaseModel

from pixelis.config import Config
from pixelis.protocol.chat import ChatBody, ChatWriter
from pixelis.protocol.completion import TRUNCATED, Completion
from pixelis.protocol.errors import invalid
from pixelis.protocol.responses import (
    ResponseReply,
    ResponsesBody,
    ResponseWriter,
    response_outcome,
    response_usage,
)
from pixelis.protocol.stream import sse_event
from pixelis.records import Experience, Trajectory, Verdict, new_id
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Answer, TurnEvent
from pixelis.serve.protocol.conversation import MAX_EXCHANGES, Conversation, read_messages
from pixelis.serve.protocol.log_probs import answer_log_probs
from pixelis.serve.protocol.question import ReplyFormat, agent_query, reply_cache_key, require_at_most

PREFIX = "resp_"
RESPONSE_ID = r"^resp_[0-9a-f]{16}$"


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
    def of(cls, answer: Answer, seconds: float) -> dict[str, Any]:
        fields = cls(
            confidence=answer.verdict.confidence,
            verdict=answer.verdict,
            policy_version=answer.group.policy_version,
            operations=answer.winner.operations_ok,
            experience_id=answer.experience_id,
            remembered=answer.remembered,
            seconds=seconds,
        )
        return fields.model_dump(mode="json")


class ChatCompletion(chat.ChatCompletion):
    """Reply of ``POST /v1/chat/completions``."""

    pixelis: PixelisFields


class ResponseObject(ResponseReply):
    """Reply of ``POST /v1/responses`` and ``GET /v1/responses/{id}``.

    ``output`` is the winning sample, in a stream the first, and the ``message`` has the elected answer.
    ``status`` is "incomplete" if no sample reached an answer for want of tokens.
    """

    pixelis: PixelisFields


class ResponseDeleted(BaseModel):
    """Reply of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ChatFormat(ReplyFormat):
    """The ReplyFormat of chat completions.

    A stream has a chunk for every turn of every sample (``pixelis.event``) too, and the answer in one piece,
    after the vote.
    """

    writer: ChatWriter

    def __init__(self, config: Config, body: ChatBody, started: float):
        super().__init__(config, body.stream, started, body.model)
        require_at_most("n", body.n, config.serve.samples)
        if len(body.messages) > 2 * MAX_EXCHANGES:
            raise invalid("messages", f"at most {2 * MAX_EXCHANGES} of a question without tools")
        conversation = read_messages(body.raw_messages(), "messages")
        self.query = agent_query(config, body, conversation)
        stop = body.stop or []
        self.stops = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        self.n, self.log_probs = body.n or 1, bool(body.logprobs)
        self.cache_key = reply_cache_key(
            f"/v1/chat/completions {self.n} {self.stops} {self.log_probs}", self.query, body.seed
        )
        self.writer = ChatWriter(body, self.model, config.dialogue.dialect)

    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]:
        chosen = await completions(agent, answer, self.log_probs, self.n, self.stops)
        return self.writer.reply(chosen, PixelisFields.of(answer, self.seconds))

    def cached_reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        fields = {**reply["pixelis"], "cached": True, "seconds": self.seconds}
        return {**reply, **self.writer.base, "pixelis": fields}

    def stream_turn(self, event: TurnEvent) -> str:
        shown = self.writer.chunk({}) | {"pixelis": {"event": event.model_dump(mode="json")}}
        return super().stream_turn(event) + sse_event(shown)


class ResponsesFormat(ReplyFormat):
    """The ReplyFormat of ``/v1/responses``. A response has the id of its experience."""

    writer: ResponseWriter

    def __init__(
        self, config: Config, body: ResponsesBody, started: float, earlier: Conversation | None = None
    ):
        """``earlier``: the conversation of the response that this one continues."""
        stored = body.store is not False
        super().__init__(config, body.stream, started, body.model)
        self.log_probs, id = body.has_log_probs, new_id("exp")
        conversation = read_messages(body.raw_messages(), "input", earlier)
        query = agent_query(config, body, conversation, learn=stored, remember=stored)
        self.query = dataclasses.replace(query, experience_id=id, response=self._parameters)
        self.cache_key = reply_cache_key(f"/v1/responses {self.log_probs}", self.query, body.seed)
        self.writer = ResponseWriter(body, self.model, config.dialogue.dialect)
        self.writer.base |= {"id": response_id(id), "store": stored, "pixelis": None}
        self.writer.base |= {"temperature": query.sampling.temperature, "top_p": query.sampling.top_p}

    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]:
        chosen = await completions(agent, answer, self.log_probs)
        reply = self.writer.reply(chosen, PixelisFields.of(answer, self.seconds))
        return reply | {"completed_at": self._completed_at(answer)}

    def _completed_at(self, answer: Answer) -> int:
        return self.writer.base["created_at"] + int(answer.seconds)

    def _parameters(self, answer: Answer) -> dict[str, Any]:
        """The fields of a stored response that its experience lacks."""
        own = ("id", "status", "output", "pixelis")
        return {
            **{name: value for name, value in self.writer.base.items() if name not in own},
            "completed_at": self._completed_at(answer),
            "usage": response_usage(*count_tokens(answer.group.trajectories)),
            "seconds": round(answer.seconds, 4),
        }

    def cached_reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The cached response, which keeps its id, with this request's parameters and times."""
        own = ("instructions", "previous_response_id", "metadata", "max_output_tokens", "created_at")
        own_fields = {name: self.writer.base[name] for name in own}
        self.writer.base["id"] = reply["id"]
        fields = {**reply["pixelis"], "cached": True, "seconds": self.seconds}
        return {**reply, **own_fields, "completed_at": int(time.time()), "pixelis": fields}


def response_id(experience_id: str) -> str:
    return PREFIX + experience_id.removeprefix("exp_")


def stored_response(experience: Experience) -> dict[str, Any] | None:
    """The redacted response of an experience, if ``/v1/responses`` answered it."""
    if experience.response is None:
        return None
    parameters, trajectory, verdict = dict(experience.response), experience.trajectory, experience.verdict
    fields = PixelisFields(
        confidence=verdict.confidence,
        verdict=verdict,
        policy_version=experience.policy_version,
        operations=trajectory.operations_ok,
        experience_id=experience.id,
        remembered="yes",
        seconds=parameters.pop("seconds"),
    )
    return {
        **parameters,
        "id": response_id(experience.id),
        **response_outcome(_completion(0, verdict.answer, trajectory)),
        "pixelis": fields.model_dump(mode="json"),
    }


async def completions(
    agent: Agent, answer: Answer, log_probs: bool, n: int = 1, stops: Sequence[str] = ()
) -> list[Completion]:
    """The elected answer and those of ``n`` - 1 other samples, each cut at the first of ``stops``.

    Raises InfraFailure.
    """
    others = [(t.answer, t) for t in answer.accepted if t is not answer.winner]
    chosen = [(answer.verdict.answer, answer.winner), *others][:n]
    chosen += [chosen[0]] * (n - len(chosen))
    prompt, completion = count_tokens(answer.group.trajectories)
    known: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    known["version"] = answer.group.policy_version
    replies = [_completion(i, text, t, stops, **known) for i, (text, t) in enumerate(chosen)]
    if not log_probs:
        return replies
    elected = any(v.elected and v.id == answer.winner.id for v in answer.verdict.votes)
    foreign = None if elected else answer.winner  # neighbours alone elected its answer

    async def with_log_probs(reply: Completion, trajectory: Trajectory) -> Completion:
        if reply.text is None or trajectory is foreign:
            return reply
        return dataclasses.replace(reply, log_probs=await answer_log_probs(agent, reply.text, trajectory))

    return await asyncio.gather(*(with_log_probs(r, t) for r, (_, t) in zip(replies, chosen, strict=True)))


def count_tokens(trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """The tokens of a prompt, which samples share, and of the replies of all samples."""
    turns = trajectories[0].turns
    first_reply = next((i for i, turn in enumerate(turns) if turn.is_policy), len(turns))
    prompt = sum(len(turn.tokens) for turn in turns[:first_reply])
    return prompt, sum(len(turn.tokens) for t in trajectories for turn in t.turns if turn.is_policy)


def _completion(
    index: int, text: str | None, trajectory: Trajectory, stops: Sequence[str] = (), **known: Any
) -> Completion:
    """The answer ``text`` of the sample number ``index``."""
    reason, refusal = trajectory.stop_reason.value, None
    if text is None:
        who = "this sample reached no" if index else "no sample reached an"
        refusal = f"{who} answer ({reason})"
    else:
        ends = [place for stop in stops if (place := text.find(stop)) >= 0]
        text = text[: min(ends, default=None)]
    return Completion(
        text=text,
        finish="length" if text is None and reason in TRUNCATED else "stop",
        refusal=refusal,
        turns=trajectory.turns,
        dialect=trajectory.dialect,
        ids=trajectory.id.removeprefix("traj_"),
        **known,
    )
