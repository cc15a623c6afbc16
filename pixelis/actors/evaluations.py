"""Evaluations on held-out questions, on a reserved share of the Coordinator's generators."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pixelis.actors import report
from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.generator_router import GeneratorRouter
from pixelis.actors.group_views import GroupViews
from pixelis.actors.rollout_buffer import ScoredGroup
from pixelis.actors.rollout_messages import RolloutRequest
from pixelis.actors.rollouts import Rollouts
from pixelis.config import Config
from pixelis.datasets.labels import Labels
from pixelis.datasets.questions import read_questions, require_text
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import DataFailure
from pixelis.evaluation.looking import looking, spread
from pixelis.evaluation.metrics import evaluation_metrics, summarise
from pixelis.records import Group, Question
from pixelis.telemetry import diagnosis, events
from pixelis.telemetry.events import EventLog

TRAINING_SHARE = 0.25
"""Share of the generators, at least one, that an evaluation reserves during training."""
SEED_STRIDE = 1_000_003
"""Distance of the seeds of an evaluation's runs, so that their samples never share one."""


class Evaluations:
    """Evaluates versions on held-out questions: during training one at a time, beside the rollouts."""

    def __init__(self, config: Config, router: GeneratorRouter, rollouts: Rollouts, log: EventLog):
        self.config, self.router, self.rollouts, self.log = config, router, rollouts, log
        self.finished: Counter[str] = Counter()
        self.metrics: dict[str, float] = {}
        self.running: set[asyncio.Future] = set()
        self.turn = asyncio.Lock()

    def start(self, step: int, version: int) -> None:
        """Evaluate ``version`` during training, after evaluations that run."""
        self._track(asyncio.create_task(self._during_training(step, version)))

    def _track(self, task: asyncio.Future) -> None:
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def wait(self) -> None:
        """Return when the evaluations during training have ended and their pages are written."""
        while self.running:
            await asyncio.gather(*self.running, return_exceptions=True)

    def take_metrics(self) -> dict[str, float]:
        metrics, self.metrics = self.metrics, {}
        return metrics

    async def _during_training(self, step: int, version: int) -> None:
        """A failure is logged and does not end the run."""
        async with self.turn:
            try:
                count = self.config.evaluate.questions
                summaries, metrics = await self.held_out(step, version, count, TRAINING_SHARE)
            except Exception as error:
                cause = unwrap_ray_error(error) or error
                self.log.write(events.ALARM, step=step, text=f"the evaluation failed: {cause}")
                return
        for name, summary in summaries.items():
            if (problem := diagnosis.of_evaluation(summary)) is not None:
                self.log.write(
                    events.ALARM, step=step, text=f"the evaluation{name and f' of {name}'}: {problem}"
                )
        self.log.write("evaluation", step=step, version=version, **metrics)
        self.metrics |= {**metrics, "evaluate/step": float(step)}

    async def held_out(
        self, step: int, version: int, count: int, share: float = 1.0, levels: Sequence[str] = ()
    ) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """Summaries by held-out set after ``step``, and their metrics, also by ``levels`` of the questions.

        A page with episodes of the first set is written in the background.
        """
        e, results = self.config.evaluate, {}
        for name, source in self.config.held_out.items():
            options: dict[str, Any] = {"samples": e.samples, "seeds": e.seeds, "share": share}
            results[name] = await self.evaluate(
                source, count, version, self.config.toolbox.has_tools, **options
            )
        summaries = {name: summarise(groups) for name, (groups, _) in results.items()}
        metrics = evaluation_metrics(summaries)
        every = [group for groups, _ in results.values() for group in groups]
        if uses := looking(every):
            metrics["evaluate/causal_use"] = uses["mean"]
        for level in levels:
            of_level = [group for group in every if group.question.meta.get("level") == level]
            if (accuracy := summarise(of_level)["accuracy"]) is not None:
                metrics[f"evaluate/accuracy_{level}"] = accuracy
        name, (groups, views) = next(iter(results.items()))
        if (page := report.sample(self.config, step, summaries[name], groups, views)) is not None:
            self._track(asyncio.ensure_future(page))
        return summaries, metrics

    async def evaluate(
        self,
        source: str,
        count: int,
        version: int,
        operations: bool,
        name: str = "evaluate",
        seed: int | None = None,
        samples: int = 1,
        share: float = 1.0,
        seeds: Sequence[int] = (),
    ) -> tuple[list[Group], list[GroupViews]]:
        questions = await asyncio.to_thread(self._questions, source, seed, count)
        if not questions:
            raise DataFailure(f"{source} has no questions", fix="check data.evaluate")
        self.finished[name] = 0
        e, d = self.config.evaluate, self.config.dialogue
        measured = spread(e.causal_use, len(questions))
        streams = {f"{name}-seed{seed}": seed * SEED_STRIDE & 0x7FFFFFFF for seed in seeds} or {
            name: self.config.run.seed
        }
        async with self.router.reserve(version, share) as reserved:
            gate = asyncio.Semaphore(self.config.engine.max_num_seqs * len(self.router.members))

            async def answer(number: int, question: Question, label: str, seed: int) -> ScoredGroup:
                sampling = SamplingParams(e.sampling.temperature, e.sampling.top_p, d.max_turn_tokens, seed)
                id = f"{label}-{question.id}"
                request = RolloutRequest(
                    question,
                    id,
                    samples,
                    sampling,
                    operations,
                    d.max_turns_test,
                    causal_use=number in measured,
                )
                async with gate:
                    scored = await self.rollouts.episodes(request, reserved=reserved)
                self.finished[name] += 1
                return scored

            answers = [
                asyncio.ensure_future(answer(number, question, *stream))
                for number, question in enumerate(questions)
                for stream in streams.items()
            ]
            try:
                results = await asyncio.gather(*answers)
            finally:
                # After a failure the others would wait for a reservation that is released
                for task in answers:
                    task.cancel()
        if (n := len(streams)) > 1:
            results = [_merged(name, results[i : i + n]) for i in range(0, len(results), n)]
        return [scored.group for scored in results], [scored.views for scored in results]

    def _questions(self, source: str, seed: int | None, count: int) -> list[Question]:
        cut: dict[str, Labels] = {}
        on_labels = None if self.config.rewards.labelled else cut.__setitem__
        rows = read_questions(source, seed=seed, epochs=1, on_labels=on_labels)
        questions = [require_text(question, source) for question in itertools.islice(rows, count or None)]
        return [q.model_copy(update=cut[q.id]._asdict()) if q.id in cut else q for q in questions]


def _merged(name: str, same: Sequence[ScoredGroup]) -> ScoredGroup:
    id = f"{name}-{same[0].group.question.id}"
    trajectories = [
        t.model_copy(update={"group_id": id}) for scored in same for t in scored.group.trajectories
    ]
    group = same[0].group.model_copy(update={"id": id, "trajectories": trajectories})
    return replace(same[0], group=group, views=report.merge_views([scored.views for scored in same]))
