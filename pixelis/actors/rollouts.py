"""From questions to a batch: groups are rolled out, scored, selected, and given their advantages.

Every group is rolled out, scored and kept or dropped as a whole, so its rollouts share one question, one baseline and one fate
whatever the sizes of batches, groups and worker counts.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.generator_router import Fleet
from pixelis.config import Config
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, DataFailure
from pixelis.evaluation.batches import NO_MAJORITY, batch_metrics, learnt_votes
from pixelis.policy.advantages import assign_advantages, group_rewards, usable
from pixelis.policy.replay import SampleReplay, informative, subset
from pixelis.records import Group, Question

MAX_GROUP_FAILURES = 0.5
"""Share of a batch's groups that may fail for data reasons before the run stops with an error."""


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
    """What is known after a step: metrics, and the name to keep a checkpoint under when a phase of the rewards has ended."""

    metrics: dict[str, float] = field(default_factory=dict)
    boundary: str | None = None


@dataclass
class ScoredGroup:
    """A scored group, the reference to its views, and the reward of a greedy rollout where the baseline needs one."""

    group: Group
    views: ray.ObjectRef
    greedy: float | None = None


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
    """Makes batches from numbered questions on a fleet of generators."""

    def __init__(self, config: Config, fleet: Fleet, scorers: Sequence[ActorHandle], embedder: ActorHandle | None = None):
        self.config, self.fleet, self.embedder = config, fleet, embedder
        self.scorer = itertools.cycle(scorers)
        # Without labels nothing but the vote may decide what is learnt from.
        weights = config.rewards.weights
        self.term = "majority_vote" if weights.majority_vote and not weights.accuracy else "accuracy"
        replay = config.rft.replay
        self.replay = SampleReplay(replay.capacity, replay.alpha, replay.max_age, replay.max_bytes)

    async def batch(self, step: int, prompts: Prompts) -> RolloutBatch:
        """Batch ``step``: as many groups as asked for, less when too few can be used; what is missing is filled by replay.

        A group that fails, is too small or teaches nothing is replaced at once by a new question; so is one that abstains, its
        rollouts having no majority, as long as ``rft.filter.max_oversampling`` allows. Raises DataFailure when too many fail,
        when all abstain, or when the questions run out.
        """
        r = self.config.rft
        started, failures = time.monotonic(), Counter[str]()
        dull: list[ScoredGroup] = []
        undecided: list[ScoredGroup] = []
        kept: dict[int, ScoredGroup] = {}
        running: dict[asyncio.Task[ScoredGroup | str], int] = {}
        numbers: list[int] = []

        async def draw(count: int = 1) -> None:
            for number, question in await prompts.take(count):
                running[asyncio.get_running_loop().create_task(self.group(question, step))] = len(numbers)
                numbers.append(number)

        try:
            await draw(r.prompts_per_step)
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place, rolled = running.pop(task), task.result()
                    if isinstance(rolled, str):
                        failures[rolled] += 1
                        if sum(failures.values()) > max(r.prompts_per_step * MAX_GROUP_FAILURES, 4):
                            raise DataFailure(
                                f"too many unusable groups in step {step}: {dict(failures)}", fix="look at events.jsonl"
                            )
                        await draw()
                    elif (abstains := _abstains(rolled.group)) or (
                        r.filter.key == "accuracy" and not informative(rolled.group, self.term)
                    ):
                        (undecided if abstains else dull).append(rolled)
                        if len(numbers) < r.filter.max_oversampling * r.prompts_per_step:
                            await draw()
                    else:
                        kept[place] = rolled
        finally:
            for task in running:
                task.cancel()
        # The order in which questions were drawn, not the one in which they happened to end.
        chosen = [kept[place] for place in sorted(kept)]
        if undecided and not chosen and not dull:
            told = f"none of the {len(undecided)} questions tried for step {step} has a majority"
            raise DataFailure(told, code="no_majority", fix="lower rewards.vote.min_share, or set rewards.vote.tie=first")
        batch = self._assemble(step, chosen, dull, numbers)
        seconds = time.monotonic() - started
        everything = [rolled.group for rolled in [*chosen, *dull, *undecided]]
        batch.metrics |= {
            **batch_metrics(everything),
            "rollout/seconds": seconds,
            "rollout/tokens_per_s": sum(len(t.token_ids()) for g in everything for t in g.trajectories) / seconds,
            "rollout/unusable_groups": float(sum(failures.values())),
            "group/kept": len(chosen) / max(len(everything), 1),
        }
        batch.metrics |= {f"unusable/{cause}": float(count) for cause, count in failures.items()}
        return batch

    def _assemble(self, step: int, chosen: list[ScoredGroup], dull: list[ScoredGroup], numbers: list[int]) -> RolloutBatch:
        """Advantages over the whole batch, then replayed rollouts, which keep theirs."""
        r, metrics = self.config.rft, {}
        missing = r.prompts_per_step - len(chosen)
        rng = np.random.default_rng([self.config.run.seed, step])
        replayed = self.replay.draw(missing * (r.train_samples or r.group_size), step, rng)
        if not chosen and not replayed:
            chosen = dull[: r.prompts_per_step]  # nothing to learn from, but the step is made and counted
        groups = [subset(rolled.group, r.train_samples, r.choose, rng) for rolled in chosen]
        greedy = [rolled.greedy for rolled in chosen]
        if groups:
            metrics = assign_advantages(groups, r.advantage, greedy=greedy)
        for group, rolled in zip(groups, chosen, strict=True):
            self.replay.add(group, rolled.views, step)
        metrics["group/replayed"] = float(len(replayed))
        if r.train_samples:
            metrics |= learnt_votes(groups)
        return RolloutBatch(
            step,
            groups + [kept.group for kept in replayed],
            [rolled.views for rolled in chosen] + [kept.views for kept in replayed],
            greedy + [None] * len(replayed),
            numbers,
            metrics=metrics,
        )

    async def group(self, question: Question, step: int) -> ScoredGroup | str:
        """A scored group of one question, or the name of why it cannot be used."""
        r, d = self.config.rft, self.config.dialogue
        seed = (self.config.run.seed * 1_000_003 + step) & 0x7FFFFFFF
        sampling = SamplingParams(r.sampling.temperature, r.sampling.top_p, d.max_turn_tokens, seed)
        group_id = f"s{step:06d}-{question.id}"
        try:
            wanted = [self.episodes(question, group_id, r.group_size, sampling, step=step)]
            if r.advantage.baseline == "greedy":
                at_zero = SamplingParams(0.0, 1.0, d.max_turn_tokens, seed)
                wanted.append(self.episodes(question, f"{group_id}-greedy", 1, at_zero, step=step))
            rolled, *greedy = await asyncio.gather(*wanted)
        except (DataFailure, BadInput) as error:
            return (unwrap_ray_error(error) or error).code
        if greedy:
            rolled.greedy = greedy[0].group.trajectories[0].reward
        rewards = group_rewards(rolled.group, r.advantage)
        if _abstains(rolled.group):
            return rolled
        if not usable(rewards, r.advantage) or (greedy and rolled.greedy is None):
            return next((t.unscored for t in rolled.group.trajectories if t.unscored), "group_too_small")
        return rolled

    async def episodes(
        self,
        question: Question,
        group_id: str,
        n: int,
        sampling: SamplingParams,
        step: int | None = None,
        operations: bool | None = None,
        max_turns: int | None = None,
    ) -> ScoredGroup:
        """``n`` scored episodes of one question; raises InfraFailure, and DataFailure or BadInput of the question."""
        offered = bool(self.config.toolbox.operations) if operations is None else operations
        turns = max_turns or self.config.dialogue.max_turns
        group, views = await self.fleet.rollout(question, group_id, n, sampling, offered, turns)
        more = [self.embedder.states.remote(group, views)] if self.embedder is not None else []
        return ScoredGroup(await next(self.scorer).score.remote(group, step, *more), views)


def _abstains(group: Group) -> bool:
    """True when the rollouts were to vote and have no majority."""
    return any(t.unscored in NO_MAJORITY for t in group.trajectories)
