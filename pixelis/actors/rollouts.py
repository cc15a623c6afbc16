"""Turns questions into batches: rolls out groups, scores and selects them, assigns advantages.

Every group is rolled out, scored and kept or dropped as a whole, so its rollouts share one question, one baseline and one fate
whatever the sizes of batches, groups and worker counts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.generator_router import GeneratorRouter, Reservation, RolloutRequest
from pixelis.actors.rollout_buffer import ScoredGroup, Selection
from pixelis.config import Config
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, DataFailure
from pixelis.evaluation.batches import NO_MAJORITY, batch_metrics, learnt_votes
from pixelis.policy.advantages import assign_advantages, group_rewards, usable
from pixelis.policy.replay import SampleReplay, informative, subset
from pixelis.records import Group, Question


@dataclass
class RolloutBatch:
    """What the learner gets: groups with advantages, and beside them a reference to the views of each.

    ``numbers`` are those of the questions drawn for it; ``state`` says where a run that goes on after it begins. ``options`` are
    what the optimizer step is told beside the samples; with ``restore`` it starts from the weights of that version.
    """

    step: int
    groups: list[Group] = field(default_factory=list)
    views: list[ray.ObjectRef] = field(default_factory=list)
    greedy: list[float | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    state: dict = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    options: dict[str, float] = field(default_factory=dict)
    restore: int | None = None

    def share(self, rank: int, world: int) -> RolloutBatch:
        """Rank ``rank``'s part of ``world``: whole groups, round robin."""
        part = slice(rank, None, world)
        return replace(self, groups=self.groups[part], views=self.views[part], greedy=self.greedy[part])


@dataclass
class StepResult:
    """What is known after a step.

    ``boundary`` names the checkpoint to keep when a phase of the rewards has ended; ``state`` is what a checkpoint keeps of the
    source, where the source says so at each step.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    boundary: str | None = None
    state: dict[str, Any] = field(default_factory=dict)


class Prompts:
    """Numbered questions drawn by batches that are made beside each other: a thread waits for them, the event loop never does.

    The first one is asked for at once, so that whoever reads them can start.
    """

    def __init__(self, questions: Iterator[tuple[int, Question]], source: str):
        self.questions, self.source = questions, source
        self.thread = ThreadPoolExecutor(1, "questions")
        self.first = self.thread.submit(next, questions, None)
        self.waiting = True

    async def take(self, count: int) -> list[tuple[int, Question]]:
        """The next ``count``, in one piece; raises what reading them raises, and DataFailure when there are no more."""
        taken = await asyncio.get_running_loop().run_in_executor(self.thread, self._draw, count)
        if len(taken) < count:
            raise DataFailure(f"{self.source} gave no question", fix="check data.train and data.limit")
        return taken

    def _draw(self, count: int) -> list[tuple[int, Question]]:
        head = [self.first.result()] if self.waiting else []
        self.waiting = False
        return [drawn for drawn in [*head, *itertools.islice(self.questions, count - len(head))] if drawn is not None]

    def close(self) -> None:
        """End the reading, once what was asked for has come."""
        self.thread.submit(getattr(self.questions, "close", lambda: None))
        self.thread.shutdown(wait=False)


class Rollouts:
    """Rolls out and scores groups on a router's generators, and makes batches of them."""

    def __init__(
        self, config: Config, router: GeneratorRouter, scorers: Sequence[ActorHandle], embedder: ActorHandle | None = None
    ):
        self.config, self.router, self.embedder = config, router, embedder
        self.scorer = itertools.cycle(scorers)
        # Without labels nothing but the vote may decide what is learnt from.
        weights = config.rewards.weights
        self.term = "majority_vote" if weights.majority_vote and not weights.accuracy else "accuracy"
        replay = config.rft.replay
        self.replay = SampleReplay(replay.capacity, replay.alpha, replay.max_age, replay.max_bytes)

    async def group(self, question: Question, step: int) -> ScoredGroup | str:
        """A scored group of one question for batch ``step``, or the name of why it cannot be used."""
        r, d = self.config.rft, self.config.dialogue
        seed = (self.config.run.seed * 1_000_003 + step) & 0x7FFFFFFF
        sampling = SamplingParams(r.sampling.temperature, r.sampling.top_p, d.max_turn_tokens, seed)
        offered, name = bool(self.config.toolbox.operations), f"s{step:06d}-{question.id}"
        try:
            requests = [RolloutRequest(question, name, r.group_size, sampling, offered, d.max_turns)]
            if r.advantage.baseline == "greedy":
                at_zero = SamplingParams(0.0, 1.0, d.max_turn_tokens, seed)
                requests.append(RolloutRequest(question, f"{name}-greedy", 1, at_zero, offered, d.max_turns))
            scored, *greedy = await asyncio.gather(*(self.episodes(request, step) for request in requests))
        except (DataFailure, BadInput) as error:
            return (unwrap_ray_error(error) or error).code
        if greedy:
            scored.greedy = greedy[0].group.trajectories[0].reward
        rewards = group_rewards(scored.group, r.advantage)
        if abstains(scored.group):
            return scored
        if not usable(rewards, r.advantage) or (greedy and scored.greedy is None):
            return next((t.unscored for t in scored.group.trajectories if t.unscored), "group_too_small")
        return scored

    async def episodes(
        self, request: RolloutRequest, step: int | None = None, reserved: Reservation | None = None
    ) -> ScoredGroup:
        """Scored episodes of one question; raises InfraFailure, and DataFailure or BadInput of the question."""
        rolled = await self.router.rollout(request, reserved)
        more = [self.embedder.states.remote(rolled.group, rolled.views)] if self.embedder is not None else []
        return ScoredGroup(await next(self.scorer).score.remote(rolled.group, step, *more), rolled.views)

    def informative(self, scored: ScoredGroup) -> bool:
        """False for a group that ``rft.filter`` replaces."""
        return self.config.rft.filter.key == "none" or informative(scored.group, self.term)

    def assemble(self, step: int, selection: Selection) -> RolloutBatch:
        """The batch of a selection: advantages over the whole of it, then replayed rollouts, which keep theirs.

        Raises DataFailure when no group has a majority to learn from.
        """
        chosen, uninformative, abstained = selection.chosen, selection.uninformative, selection.abstained
        if abstained and not chosen and not uninformative:
            message = f"none of the {len(abstained)} questions tried for step {step} has a majority"
            raise DataFailure(message, code="no_majority", fix="lower rewards.vote.min_share, or set rewards.vote.tie=first")
        r = self.config.rft
        everything = [scored.group for scored in [*chosen, *uninformative, *abstained]]
        metrics = {
            **batch_metrics(everything),
            "rollout/unusable_groups": float(selection.failures.total()),
            "rollout/stale_groups": float(len(selection.stale)),
            "group/kept": len(chosen) / max(len(everything), 1),
            **{f"unusable/{cause}": float(count) for cause, count in selection.failures.items()},
        }
        missing = r.prompts_per_step - len(chosen)
        rng = np.random.default_rng([self.config.run.seed, step])
        replayed = self.replay.draw(missing * (r.train_samples or r.group_size), step, rng)
        if not chosen and not replayed:
            chosen = uninformative[: r.prompts_per_step]  # nothing to learn from, but the step is made and counted
        groups = [subset(scored.group, r.train_samples, r.choose, rng) for scored in chosen]
        greedy = [scored.greedy for scored in chosen]
        if groups:
            metrics |= assign_advantages(groups, r.advantage, greedy=greedy)
        for group, scored in zip(groups, chosen, strict=True):
            self.replay.add(group, scored.views, step)
        metrics["group/replayed"] = float(len(replayed))
        if r.train_samples:
            metrics |= learnt_votes(groups)
        return RolloutBatch(
            step,
            groups + [kept.group for kept in replayed],
            [scored.views for scored in chosen] + [kept.views for kept in replayed],
            greedy + [None] * len(replayed),
            selection.numbers,
            metrics=metrics,
        )


def abstains(group: Group) -> bool:
    """True when the rollouts were to vote and have no majority."""
    return any(t.unscored in NO_MAJORITY for t in group.trajectories)
