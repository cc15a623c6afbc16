"""Bodies of ``POST /v1/agent``: a question, and the answer with its verdict and trajectory."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from pixelis.config import Config
from pixelis.protocol.errors import ApiError, StrictModel, text_or
from pixelis.protocol.parts import MAX_PARTS, Kind, file_url, kind_url
from pixelis.protocol.request import Request
from pixelis.protocol.stream import sse_event
from pixelis.records import Exchange, ImageView, Trajectory, Verdict, new_id
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Answer, TextEvent, TurnEvent
from pixelis.serve.files import FILE_ID
from pixelis.serve.protocol.conversation import MAX_EXCHANGES, Conversation
from pixelis.serve.protocol.question import ReplyFormat, agent_query, reply_cache_key, require_at_most

Urls = text_or(Annotated[list[str], Field(max_length=MAX_PARTS, fail_fast=True)])


class EarlierQuestion(StrictModel):
    """An exchange of the conversation: the question with its pictures, and the answer."""

    question: str
    answer: str
    image: Urls = Field(default_factory=list)  # type: ignore[valid-type]
    video: Urls = Field(default_factory=list)  # type: ignore[valid-type]


class AgentRequest(StrictModel, Request):
    """Body of ``POST /v1/agent``: a question about pictures and clips, data URLs or ids of uploaded files.

    - ``history``: the exchanges before it, each with the pictures that came with its question.
    - ``samples``: number of votes, at most ``serve.samples``.
    - ``operations``: false answers without pixel operations.
    - ``learn``: false makes no update from this request; ``remember``: false does not store it either,
      "later" stores it after the reply, which then has no ``experience_id``.
    - ``priority``: lower goes first; below ``serve.priority`` it needs the scope ``steer``.
    - ``stream``: true sends the turns as they happen.
    - ``cache``: true allows a cached reply for a sampled request too; false never uses the cache.
    - ``user``: stored as a pseudonym.
    """

    question: str
    image: Urls = Field(default_factory=list)  # type: ignore[valid-type]
    video: Urls = Field(default_factory=list)  # type: ignore[valid-type]
    history: list[EarlierQuestion] = Field(default_factory=list, max_length=MAX_EXCHANGES, fail_fast=True)
    samples: int | None = Field(None, ge=1)
    operations: bool = True
    max_turns: int | None = Field(None, ge=1)
    learn: bool = True
    remember: bool | Literal["later"] = True
    stream: bool = False
    cache: bool | None = None

    def file_ids(self) -> list[str]:
        bodies: list[AgentRequest | EarlierQuestion] = [self, *self.history]
        fields = [urls for body in bodies for urls in (body.image, body.video)]
        return [url for urls in fields for url in _listed(urls) if re.match(FILE_ID, url)]

    def conversation(self) -> Conversation:
        """Raises ApiError 400."""
        conversation = Conversation(self.question.strip())
        for i, earlier in enumerate(self.history):
            media = self._attach(conversation, earlier, f"history[{i}].")
            conversation.history.append(
                Exchange(question=earlier.question.strip(), answer=earlier.answer.strip(), media=media)
            )
        self._attach(conversation, self, "")
        return conversation

    def _attach(
        self, conversation: Conversation, body: EarlierQuestion | AgentRequest, param: str
    ) -> list[str]:
        media = dict[str, str]()
        fields: list[tuple[Kind, Any]] = [("image", body.image), ("video", body.video)]
        for kind, urls in fields:
            for n, url in enumerate(_listed(urls)):
                place = f"{param}{kind}" if isinstance(urls, str) else f"{param}{kind}[{n}]"
                is_file = re.match(FILE_ID, url) is not None
                media[place] = kind_url(
                    file_url(self._files, url, kind, place) if is_file else url, kind, place
                )
        return conversation.attach(list(media.values()), list(media))


def _listed(urls: str | list[str]) -> list[str]:
    return [urls] if isinstance(urls, str) else urls


class AgentReply(BaseModel):
    """Reply of ``POST /v1/agent``.

    - ``answer``: null if no sample reached one; ``confidence`` is the verdict's.
    - ``trajectory``: the winning sample without token ids and log-probs; ``images[].uri`` are PNG data URLs.
    - ``experience_id``: the experience, which is on disk; null if there is none.
    - ``remembered``: "yes" with an ``experience_id``; "no" if the request or the service stores nothing,
      "later" as requested, or why it is not stored: "no space", "read-only", "I/O error", "damaged",
      "unavailable", "queue full", "error".
    - ``cached``: true for an earlier reply; the request made no experience.
    - ``seconds``: since the request arrived.
    """

    id: str = Field(default_factory=lambda: new_id("agent"))
    object: Literal["agent.answer"] = "agent.answer"
    model: str
    answer: str | None
    confidence: float
    verdict: Verdict
    trajectory: Trajectory
    policy_version: int
    experience_id: str | None = None
    remembered: str
    cached: bool = False
    seconds: float


class AgentFormat(ReplyFormat):
    """The ReplyFormat of ``/v1/agent``, whose streams have the events text, turn, answer and error."""

    def __init__(self, config: Config, request: AgentRequest, started: float):
        super().__init__(config, request.stream, started)
        require_at_most("samples", request.samples, config.serve.samples)
        require_at_most("max_turns", request.max_turns, config.dialogue.max_turns_test)
        self.query = agent_query(
            config,
            request,
            request.conversation(),
            learn=request.learn,
            remember=request.remember,
            samples=request.samples,
            operations=request.operations,
            max_turns=request.max_turns,
        )
        self.cache_key = reply_cache_key("/v1/agent", self.query, request.seed, request.cache)

    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]:
        reply = AgentReply(
            model=self.model,
            answer=answer.verdict.answer,
            confidence=answer.verdict.confidence,
            verdict=answer.verdict,
            trajectory=without_tokens(answer.winner, await agent.pictures(answer)),
            policy_version=answer.group.policy_version,
            experience_id=answer.experience_id,
            remembered=answer.remembered,
            seconds=self.seconds,
        )
        return reply.model_dump(mode="json")

    def cached_reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        return {**reply, "id": new_id("agent"), "cached": True, "seconds": self.seconds}

    def stream_start(self) -> str:
        return ": accepted\n\n"

    def stream_text(self, event: TextEvent) -> str:
        return sse_event(event.model_dump(mode="json"), "text")

    def stream_turn(self, event: TurnEvent) -> str:
        return sse_event(event.model_dump(mode="json"), "turn")

    def stream_end(self, reply: dict[str, Any]) -> str:
        return sse_event(reply, "answer")

    def stream_error(self, error: ApiError) -> str:
        return sse_event(error.body(), "error")


def without_tokens(trajectory: Trajectory, uris: dict[str, str]) -> Trajectory:
    """A copy without token ids and log-probs. ``uris``: data URLs by image id."""

    def with_uris(images: list[ImageView], uris: dict[str, str]) -> list[ImageView]:
        return [image.model_copy(update={"uri": uris.get(image.id, "")}) for image in images]

    turns = []
    for turn in trajectory.turns:
        observation = turn.observation
        # Each picture travels once, under `trajectory.images`
        if observation is not None and observation.images:
            observation = observation.model_copy(update={"images": with_uris(observation.images, {})})
        turns.append(turn.model_copy(update={"tokens": [], "log_probs": [], "observation": observation}))
    return trajectory.model_copy(update={"turns": turns, "images": with_uris(trajectory.images, uris)})
