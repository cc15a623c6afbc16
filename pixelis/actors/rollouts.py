"""Turns questions into batches: rolls out and scores groups, selects them, assigns advantages.

A group is rolled out, scored and kept or dropped as a whole, whatever the batch, group size and number of
workers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np
from ray.actor import ActorHandle

from pixelis.actors.agent_rollouts import AgentRollouts
from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.generator_router import GeneratorRouter, Reservation
from pixelis.actors.rollout_buffer import ScoredGroup, Selection
from pixelis.actors.rollout_messages import RolloutRequest
from pixelis.config import Config
from pixelis.datasets.bad_rows import BAD_ROW, BadRow
from pixelis.datasets.labels import Labels
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, DataFailure
from pixelis.evaluation.batches import NO_MAJORITY, batch_metrics, learnt_votes
from pixelis.policy.advantages import assign_advantages, group_rewards, usable
from pixelis.policy.distributed import balanced_shares
from pixelis.policy.replay import SampleReplay, least_kept, subset
from pixelis.records import Group, Question
from pixelis.rewards.grader import Advance
from pixelis.telemetry.events import EventLog


@dataclass
class RolloutBatch:
    """A learner batch: groups with advantages, and references to the views of each.

    ``numbers`` of the questions; ``state`` to resume after it; ``options`` of the optimizer step, which
    starts from the weights of version ``restore``, or from the checkpoint ``resume``, if that is set. ``publish``:
    whether its weights are published; None: if they are due.
    """

    step: int
    groups: list[Group] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    greedy: list[float | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    state: dict = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    options: dict[str, float] = field(default_factory=dict)
    restore: int | None = None
    resume: str | None = None
    publish: bool | None = None

    def share(self, rank: int, world: int) -> RolloutBatch:
        """Whole groups for worker ``rank`` of ``world``, so that all have about equally many tokens."""
        sizes = [sum(t.tokens for t in group.trajectories) for group in self.groups]
        part = balanced_shares(sizes, world)[rank]

        def own(items: list) -> list:
            return [items[i] for i in part] if items else []

        return replace(self, groups=own(self.groups), views=own(self.views), greedy=own(self.greedy))


@dataclass
class StepResult:
    """What the source of a learner's batches returns at the end of a step."""

    metrics: dict[str, float] = field(default_factory=dict)
    boundary: str | None = None
    """Name of the checkpoint to keep at the end of a reward phase."""
    state: dict[str, Any] = field(default_factory=dict)
    """The source's, for checkpoints."""

    @classmethod
    def merged(cls, results: Sequence[StepResult | Advance]) -> StepResult:
        metrics = {name: value for result in results for name, value in result.metrics.items()}
        return cls(metrics, next((result.boundary for result in results if result.boundary), None))


class Prompts:
    """Numbered questions, read by a thread so that the event loop never waits. Reading starts immediately."""

    def __init__(self, questions: Iterator[tuple[int, Question]], source: str):
        self.questions, self.source = questions, source
        self.thread = ThreadPoolExecutor(1, "questions")
        self.first = self.thread.submit(next, questions, None)
        self.is_first = True

    async def take(self, count: int) -> list[tuple[int, Question]]:
        result = await asyncio.get_running_loop().run_in_executor(self.thread, self._read, count)
        if len(result) < count:
            raise DataFailure(f"{self.source} has no more questions", fix="check data.train and data.limit")
        return result

    def _read(self, count: int) -> list[tuple[int, Question]]:
        head = [self.first.result()] if self.is_first else []
        self.is_first = False
        return [
            row for row in [*head, *itertools.islice(self.questions, count - len(head))] if row is not None
        ]

    def close(self) -> None:
        self.thread.submit(getattr(self.questions, "close", lambda: None))
        self.thread.shutdown(wait=False)


class Rollouts:
    def __init__(
        self,
        config: Config,
        router: GeneratorRouter,
        scorers: Sequence[ActorHandle],
        embedder: ActorHandle | None = None,
    ):
        self.config, self.embedder = config, embedder
        self.player = AgentRollouts(config, router) if config.rft.agent else router
        self.scorer, self.log = itertools.cycle(scorers), EventLog(config.run.dir)
        self.labels: dict[str, Labels] = {}
        """True answers by question id that the reader has cut off: for metrics alone."""
        replay = config.rft.replay
        self.replay = SampleReplay(replay.capacity, replay.alpha)

    async def group(self, question: Question, step: int) -> ScoredGroup | str:
        """Scored group of one question for batch ``step``, or the reason why the question is unusable."""
        r, d = self.config.rft, self.config.dialogue
        seed = (self.config.run.seed * 1_000_003 + step) & 0x7FFFFFFF
        sampling = SamplingParams(r.sampling.temperature, r.sampling.top_p, d.max_turn_tokens, seed)
        operations, name = self.config.toolbox.has_tools, f"s{step:06d}-{question.id}"
        try:
            causal_use = self._is_measured(name)
            requests = [
                RolloutRequest(question, name, r.group_size, sampling, operations, causal_use=causal_use)
            ]
            if r.advantage.baseline == "greedy":
                deterministic = replace(sampling, temperature=0.0, top_p=1.0)
                requests.append(RolloutRequest(question, f"{name}-greedy", 1, deterministic, operations))
            scored, *greedy = await asyncio.gather(*(self.episodes(request, step) for request in requests))
            if (labels := self.labels.pop(question.id, None)) is not None:
                scored.accuracy = await next(self.scorer).accuracy.remote(scored.group, *labels)
        except (DataFailure, BadInput) as error:
            self.log.write(BAD_ROW, **BadRow.of_error(question, self.config.data.train, error)._asdict())
            return error.code
        if greedy:
            scored.greedy = greedy[0].group.trajectories[0].reward
        if abstains(scored.group) or not r.teacher.rewards:
            return scored
        # Excluded episodes are the policy's doing: a group that has too few others is uninformative, not a
        # failure.
        rewards = [
            0.0 if t.stop_reason.value in r.advantage.exclude else t.reward for t in scored.group.trajectories
        ]
        if not usable(rewards, r.advantage) or (greedy and scored.greedy is None):
            return next((t.unscored for t in scored.group.trajectories if t.unscored), "group_too_small")
        return scored

    def _is_measured(self, name: str) -> bool:
        """Whether the calls of a group are measured: a share of all, by their names."""
        share = 1.0 if "causal_use" in self.config.rewards.computed else self.config.rft.causal_use
        return crc32(name.encode()) < share * 2**32

    async def episodes(
        self, request: RolloutRequest, step: int | None = None, reserved: Reservation | None = None
    ) -> ScoredGroup:
        """Scored episodes of one question. Raises InfraFailure; DataFailure or BadInput that name its row."""
        try:
            rollout = await self.player.rollout(request, reserved)
            states = []
            if self.embedder is not None:
                states.append(self.embedder.states.remote(rollout.group, rollout.views))
            scored = await next(self.scorer).score.remote(rollout.group, step, *states)
            return ScoredGroup(scored, rollout.views)
        except (DataFailure, BadInput) as error:
            raise (unwrap_ray_error(error) or error).about(request.question.place) from None

    def assemble(self, step: int, selection: Selection) -> RolloutBatch:
        """Assign advantages to the groups of a selection, and add replayed rollouts, which keep theirs.

        Raises DataFailure if no group has a majority, or if the episodes of all groups are excluded.
        """
        chosen, uninformative, abstained = selection.chosen, selection.uninformative, selection.abstained
        if abstained and not chosen and not uninformative:
            message = f"none of the {len(abstained)} questions tried for step {step} has a majority"
            raise DataFailure(
                message, code="no_majority", fix="lower rewards.vote.min_share, or set rewards.vote.tie=first"
            )
        r = self.config.rft
        tried = [*chosen, *uninformative, *abstained]
        attempted = [measured(scored.group, scored.accuracy) for scored in tried]
        metrics = {
            **batch_metrics(attempted),
            "rollout/unusable_groups": float(selection.failures.total()),
            "rollout/stale_groups": float(len(selection.stale)),
            **{f"unusable/{cause}": float(count) for cause, count in selection.failures.items()},
        }
        missing = r.prompts_per_step - len(chosen)
        rng = np.random.default_rng([self.config.run.seed, step])
        size = r.train_samples or r.group_size
        beside = int(len(chosen) * size * r.replay.share / (1 - r.replay.share))
        replayed = self.replay.draw(missing * size + beside, step, rng)
        if not chosen and not replayed:
            # A step without a signal still counts.
            chosen = [s for s in uninformative if usable(group_rewards(s.group, r.advantage), r.advantage)][
                : r.prompts_per_step
            ]
            if not chosen:
                reasons = ", ".join(r.advantage.exclude)
                message = (
                    f"all groups of step {step} have too few episodes that end otherwise than by {reasons}"
                )
                fix = "raise dialogue.max_turns or max_context, or set rft.advantage.count_excluded=true"
                raise DataFailure(message, code="all_excluded", fix=fix)
        groups = [subset(scored.group, r.train_samples, r.choose, rng) for scored in chosen]
        greedy = [scored.greedy for scored in chosen]
        if groups and r.teacher.rewards:
            metrics |= assign_advantages(groups, r.advantage, greedy=greedy)
        elif groups:
            for trajectory in itertools.chain.from_iterable(group.trajectories for group in groups):
                is_excluded = trajectory.stop_reason.value in r.advantage.exclude
                trajectory.advantage = None if is_excluded else 0.0
        least = least_kept(groups, r.replay)
        for group, scored in zip(groups, chosen, strict=True):
            self.replay.add(group, scored.views, step, least)
        metrics |= {
            "group/kept": len(chosen) / max(len(attempted), 1),
            "group/replayed": float(len(replayed)),
        }
        if r.train_samples:
            metrics |= learnt_votes([measured(g, s.accuracy) for g, s in zip(groups, chosen, strict=True)])
        return RolloutBatch(
            step,
            groups + [sample.group for sample in replayed],
            [scored.views for scored in chosen] + [sample.views for sample in replayed],
            greedy + [None] * len(replayed),
            selection.numbers,
            metrics=metrics,
        )


def measured(group: Group, accuracy: Mapping[str, float]) -> Group:
    """The group with the accuracy by trajectory that no reward, filter or advantage sees."""
    if not accuracy:
        return group
    known = [
        t.model_copy(update={"rewards": {**t.rewards, "accuracy": accuracy[t.id]}}) if t.id in accuracy else t
        for t in group.trajectories
    ]
    return group.model_copy(update={"trajectories": known})


def abstains(group: Group) -> bool:
    """Whether the rollouts voted without a majority."""
    return any(t.unscored in NO_MAJORITY for t in group.trajectories)
