"""Episodes whose agent owns the loop: each of its requests lets the policy's episode go on where it stopped.

The record is the one of our own loop (`dialogue.agent`), which a generator interrupts and resumes: tokens,
log-probs, masks and views are what the policy saw and sampled.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from pixelis.actors.generator_router import GeneratorRouter, Reservation
from pixelis.actors.group_views import GroupViews
from pixelis.actors.rollout_messages import (
    ClientContent,
    EpisodeSoFar,
    RolloutRequest,
    RolloutResult,
    TextUpdate,
    TurnUpdate,
)
from pixelis.config import Config
from pixelis.dialogue.resumption import Said, up_to
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import PixelisError
from pixelis.protocol.branches import Branches, Extends, Forks, Repeats
from pixelis.protocol.completion import Completion
from pixelis.protocol.episodes import EpisodeStatus, RewardReply, RewardRequest, Status
from pixelis.protocol.errors import ApiError
from pixelis.protocol.messages import Message
from pixelis.protocol.tools import Toolset
from pixelis.records import Action, Media, Question, StopReason, Trajectory, new_id
from pixelis.rewards.scorers import case_of, find_scorer
from pixelis.rewards.services import shared_services

log = logging.getLogger(__name__)

MAX_OPEN = 10_000
"""Open episodes of a host."""
SECOND_SEED = 1 << 20
"""Added to the seed of a reply that is sampled once more: beyond those of a group's other episodes."""
CLIENT_ERRORS = {
    "bad_answer": "an earlier reply cannot be written in the policy's dialect",
    "no_vision": "the policy reads text alone",
    "wrong_results": "the messages do not follow from the reply before",
}
"""What a client has done wrong, by the cause of an episode that ends in an error."""
CUT_OFF = (StopReason.LENGTH, StopReason.OVER_TURN, StopReason.OVER_CONTEXT, StopReason.OVER_IMAGES)


@dataclass
class Line:
    """A branch of an episode: its record, and what the policy has said by the number of messages up to it.

    ``turns``: of the policy, by the same number.
    """

    question: Question
    trajectory: Trajectory
    views: GroupViews | None = None
    turns: dict[int, int] = field(default_factory=dict)
    completion: Completion | None = None
    answered: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class OutsideEpisode:
    """An episode of an outside agent, open until a reward, a failure or its expiry ends it.

    ``sample``: its number in its group. ``owner``: the space of the key that opened it. ``cause``: of a
    failure. ``outcome``: reward terms; None without a reward. ``own``: the question's media by the data URLs that
    its agent was given; a picture that comes back unchanged costs no more than in our own loop.
    """

    id: str
    question: Question
    group_id: str
    sampling: SamplingParams
    expires_at: float
    sample: int = 0
    reservation: Reservation | None = None
    owner: str = ""
    expired: bool = False
    own: Mapping[str, Media] = field(default_factory=dict)
    branches: Branches = field(default_factory=Branches)
    lines: dict[str, Line] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cause: str = ""
    chosen: str = ""
    outcome: dict[str, float] | None = None
    answer: str | None = None

    @property
    def status(self) -> Status:
        if not self.ended.is_set():
            return "open"
        if self.cause:
            return "failed"
        if self.outcome is not None:
            return "rewarded"
        return "expired" if self.expired else "unrewarded"

    @property
    def last(self) -> str:
        """The branch of the last reply."""
        return self.branches.last

    @property
    def reward(self) -> float | None:
        return None if self.outcome is None else math.fsum(self.outcome.values())

    def end(
        self,
        outcome: Mapping[str, float] | None = None,
        answer: str | None = None,
        branch: str | None = None,
        cause: str = "",
    ) -> bool:
        """End the episode at ``branch``, by default the last; False if it has ended before, and stays so.

        A ``cause`` of a failure is counted, and nothing is learnt. Raises ApiError 400 for an unknown branch.
        """
        if branch is not None and branch not in self.lines:
            known = ", ".join(self.lines) or "none"
            raise ApiError(400, f"no branch {branch[:40]!r}; known: {known}", "unknown_branch", "branch")
        if self.ended.is_set():
            return False
        self.outcome = dict(outcome) if outcome is not None else None
        self.answer, self.chosen, self.cause = answer, branch or self.last, cause
        self.ended.set()
        return True

    def record(self) -> tuple[Trajectory, GroupViews | None]:
        """The trajectory of the branch that counts, as one of our own loop, and its views."""
        line = self.lines.get(self.chosen)
        if line is None:
            cause = self.cause or "agent_silent"  # it has not called the policy
            line = Line(self.question, Trajectory(question_id=self.question.id, unscored=cause))
        trajectory = line.trajectory
        update: dict[str, Any] = {"question_id": self.question.id, "group_id": self.group_id}
        update["outcome"] = self.outcome
        if self.cause:
            timed_out = self.cause == "agent_timeout"
            reason = StopReason.DEADLINE if timed_out else StopReason.ERROR
            update |= {"stop_reason": reason, "unscored": self.cause, "answer": None}
        elif line.completion is not None and trajectory.stop_reason not in CUT_OFF:
            answer = self.answer if self.answer is not None else line.completion.text
            update |= {"answer": answer, "stop_reason": StopReason.ANSWER if answer else StopReason.DONE}
        return trajectory.model_copy(update=update), line.views


class Episodes:
    """Holds the open episodes of outside agents, whose completions a router's generators make.

    ``owner`` is the space of a key: methods raise ApiError 404 for the episodes of another.
    ``max_turns``: of the policy in an episode, by default those of training. ``augmentations``: under which the
    episodes of a group see all pictures in turn, the first without.
    """

    def __init__(
        self,
        config: Config,
        router: GeneratorRouter,
        max_turns: int | None = None,
        augmentations: Sequence[str] = (),
    ):
        self.config, self.router, self.max_turns = config, router, max_turns
        self.augmentations = augmentations
        self.by_id: dict[str, OutsideEpisode] = {}
        self.ended: dict[str, OutsideEpisode] = {}
        """The last that were closed, in order."""

    def begin(
        self, question: Question, group_id: str, sampling: SamplingParams, expires_s: float, **details: Any
    ) -> OutsideEpisode:
        """A new episode. Raises ApiError 429 with too many open ones."""
        if len(self.by_id) >= MAX_OPEN:
            raise ApiError(429, "too many episodes are open", "too_many_episodes", retry_after_s=10.0)
        id, expires_at = new_id("ep"), time.time() + expires_s
        episode = OutsideEpisode(id, question, group_id, sampling, expires_at, **details)
        self.by_id[id] = episode
        return episode

    def close(self, episode: OutsideEpisode) -> None:
        """Forget an ended episode, but how it ended, for its agent may ask again."""
        if self.by_id.pop(episode.id, None) is not None:
            episode.lines.clear()
            episode.own, episode.branches = {}, Branches()  # they hold pictures
            self.ended[episode.id] = episode
            if len(self.ended) > MAX_OPEN:
                del self.ended[next(iter(self.ended))]

    def get(self, owner: str, id: str) -> OutsideEpisode:
        """An episode that is open or has ended lately. Raises ApiError 404."""
        episode = self.by_id.get(id) or self.ended.get(id)
        if episode is None or episode.owner != owner:
            raise ApiError(404, f"there is no episode {id[:40]!r}", "episode_not_found", "id")
        return episode

    async def settle(self, episode: OutsideEpisode) -> None:
        """What follows the end of an episode, and is waited for before its agent is told."""

    async def reward(self, owner: str, id: str, body: RewardRequest) -> RewardReply:
        """End an episode with a reward; one that has ended stays as it is. Raises ApiError 400."""
        episode = self.get(owner, id)
        if not episode.ended.is_set():
            outcome = body.terms or {"reward": body.reward or 0.0}
            if body.verifier is not None:
                outcome = {body.verifier: await asyncio.to_thread(self._verify, episode, body)}
            episode.end(outcome, body.answer, body.branch)
        await self.settle(episode)
        return RewardReply(id=episode.id, status=episode.status, branch=episode.chosen, reward=episode.reward)

    async def fail(self, owner: str, id: str, cause: str) -> EpisodeStatus:
        """End an episode whose agent failed."""
        episode = self.get(owner, id)
        if self.agent_failed(episode, cause):
            await self.settle(episode)
        return self.shown(episode)

    def agent_failed(self, episode: OutsideEpisode, error: str) -> bool:
        """End an episode for an error of its agent; False if it has ended before."""
        if ended := episode.end(cause="agent_failed"):
            log.info("the agent of episode %s failed: %.200s", episode.id, error)
        return ended

    async def status(self, owner: str, id: str) -> EpisodeStatus:
        return self.shown(self.get(owner, id))

    def _verify(self, episode: OutsideEpisode, body: RewardRequest) -> float:
        """The score of the answer by a scorer. Raises ApiError 400 if it cannot be computed."""
        answer, truths, name = body.answer, episode.question.answers, body.verifier or ""
        if answer is None and (line := episode.lines.get(body.branch or episode.last)) is not None:
            answer = line.completion.text if line.completion is not None else None
        if not truths:
            raise ApiError(400, "the episode's question has no answers", "no_answers", "verifier")
        try:
            case = case_of(episode.question, answer, truths)
            return find_scorer(name)(case, shared_services(self.config.rewards))
        except PixelisError as error:
            raise ApiError(400, error.message, error.code, "verifier") from None

    def shown(self, episode: OutsideEpisode) -> EpisodeStatus:
        return EpisodeStatus(
            id=episode.id,
            base_url="",
            group=episode.group_id,
            expires_at=episode.expires_at,
            status=episode.status,
            branches={name: line.trajectory.policy_turns for name, line in episode.lines.items()},
            reward=episode.reward,
            cause=episode.cause or None,
        )

    async def reply(
        self,
        episode: OutsideEpisode,
        messages: Sequence[Message],
        tools: Toolset,
        sampling: SamplingParams | None = None,
        stream: bool = False,
    ) -> AsyncGenerator[TextUpdate | TurnUpdate | Completion, None]:
        """The policy's next reply to a conversation, with ``stream`` after its text and turns.

        ``sampling``: in place of the episode's. Raises ApiError 409 for an ended episode, 422 for a reply that
        is twice not what ``tool_choice`` asks for, BadInput and InfraFailure; the same request may follow.
        """
        _require_open(episode)
        sampling = sampling or episode.sampling
        key = hashlib.sha256(repr((tools, sampling)).encode(errors="surrogatepass")).hexdigest()
        place = episode.branches.place(messages, key)
        if isinstance(place, Repeats):
            line = episode.lines[place.branch]
            async with line.answered:
                if line.completion is not None:
                    yield line.completion
                    return
            raise ApiError(409, "the request before has failed: send it again", "not_completed")
        name = place.branch
        if isinstance(place, Extends):
            line, begin = episode.lines[name], len(messages) - len(place.new)
        else:
            line, begin = self._fork(episode, place, messages)
            episode.lines[name] = line
        async with line.answered:
            line.completion = None
            try:
                said = client_turns(messages, begin, episode.own)
                items = self._reply(episode, line, name, said, tools, sampling, stream)
                async with aclosing(items):
                    async for item in items:
                        yield item
            except BaseException:
                if not episode.ended.is_set():  # else it may be closed
                    episode.branches.abandon(name)
                    if name not in episode.branches.branches:
                        del episode.lines[name]
                raise

    def _fork(self, episode: OutsideEpisode, place: Forks, messages: Sequence[Message]) -> tuple[Line, int]:
        """A new branch from a reply of another, or from the beginning, and the number of its messages."""
        if place.source is not None:
            earlier = episode.lines[place.source]
            trajectory = up_to(earlier.trajectory, earlier.turns[place.keep])
            turns = {end: count for end, count in earlier.turns.items() if end <= place.keep}
            line = replace(earlier, trajectory=trajectory, turns=turns, answered=asyncio.Lock())
            return line, place.keep
        first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        opening = [m for m in messages[:first] if m.role == "user"]
        media = [url for message in opening for url in message.media]
        question = episode.question.model_copy(
            update={
                "question": "\n".join(m.text for m in opening if m.text),
                "system": "\n\n".join(m.text for m in messages[:first] if m.role == "system"),
                "history": [],
                "media": [as_media(url, number, episode.own) for number, url in enumerate(media)],
                "meta": {},
            }
        )
        trajectory = Trajectory(question_id=question.id, group_id=episode.group_id)
        return Line(question, trajectory), first

    async def _reply(
        self,
        episode: OutsideEpisode,
        line: Line,
        name: str,
        said: Sequence[Said[ClientContent]],
        tools: Toolset,
        sampling: SamplingParams,
        stream: bool,
    ) -> AsyncGenerator[TextUpdate | TurnUpdate | Completion, None]:
        before, views = line.trajectory, line.views
        so_far = EpisodeSoFar(before, said, views.added if views is not None else None)
        functions = {function.name for function in tools.offered}
        request = RolloutRequest(
            line.question.model_copy(update={"functions": list(tools.offered)}),
            episode.group_id,
            1,
            sampling,
            self.config.toolbox.has_tools,
            self.max_turns,
            augmentations=self.augmentations,
            text=stream,
            resume=[so_far],
            sample=episode.sample,
        )
        again = replace(sampling, seed=sampling.seed + SECOND_SEED)
        # A greedy reply would be the same again
        trials = [request, replace(request, sampling=again)] if sampling.temperature else [request]
        attempts = 0
        for trial in trials:
            first, result = attempts, list[RolloutResult]()
            items = self.router.episodes(trial, stream=stream, reservation=episode.reservation)
            async with aclosing(items):
                async for item in items:
                    if isinstance(item, RolloutResult):
                        result.append(item)
                    else:
                        attempts = first + item.attempt + 1
                        yield replace(item, attempt=attempts - 1)
            completion, trajectory = _read(result[0], before, functions, name)
            try:
                tools.check(completion.calls)
                break
            except ApiError:
                if trial is trials[-1]:
                    raise
        _require_open(episode)
        if trajectory.policy_turns > before.policy_turns:
            line.trajectory, line.views = trajectory, result[0].views
        else:  # a limit left the policy no turn
            line.trajectory = before.model_copy(update={"stop_reason": trajectory.stop_reason})
        line.completion = completion
        episode.branches.reply(name, completion.message)
        line.turns[len(episode.branches.branches[name].messages)] = trajectory.policy_turns
        yield completion


def _require_open(episode: OutsideEpisode) -> None:
    if episode.ended.is_set():
        raise ApiError(409, "the episode has ended", "episode_ended", "id")


def _read(
    result: RolloutResult, before: Trajectory, functions: Collection[str], branch: str
) -> tuple[Completion, Trajectory]:
    """The reply in a result. Raises ApiError 400 for what cannot be shown to the policy, 503 for a failure."""
    (trajectory,) = result.group.trajectories
    if trajectory.stop_reason in (StopReason.ERROR, StopReason.DEADLINE):
        cause = trajectory.unscored or trajectory.stop_reason.value
        if message := CLIENT_ERRORS.get(cause):
            raise ApiError(400, message, cause, "messages")
        raise ApiError(503, f"the policy could not reply ({cause})", "not_completed", retry_after_s=1.0)
    return Completion.of(trajectory, len(before.turns), functions, branch), trajectory


def client_turns(
    messages: Sequence[Message], begin: int, known: Mapping[str, Media]
) -> list[Said[ClientContent]]:
    """What a client says from message ``begin``, after a policy turn or the prompt.

    An assistant message there was not sampled: it begins the next turn.
    """
    turns = list[Said[ClientContent]]()
    media = sum(len(message.media) for message in messages[:begin])
    for message in messages[begin:]:
        if message.role == "assistant":
            calls = [Action(op=call.name, target="", arguments=call.arguments) for call in message.calls]
            turns.append(Said(reply=message.text, calls=calls))
            continue
        said = turns.pop() if turns else Said[ClientContent]()
        shown = [as_media(url, media + place, known) for place, url in enumerate(message.media)]
        media += len(shown)
        if message.role == "tool":
            turns.append(replace(said, results=[*said.results, ClientContent(message.text, shown)]))
            continue
        before = said.message or ClientContent()  # messages in a row are one
        text = "\n".join(filter(None, (before.text, message.text)))
        turns.append(replace(said, message=ClientContent(text, [*before.media, *shown])))
    return turns


def as_media(url: str, number: int, own: Mapping[str, Media]) -> Media:
    """A picture or clip of a conversation, whose ids count them all: img0, vid1, img2."""
    is_clip = url.startswith("data:video/")
    id, kind = (f"vid{number}", "video") if is_clip else (f"img{number}", "image")
    return own[url].model_copy(update={"id": id}) if url in own else Media(id=id, uri=url, kind=kind)
