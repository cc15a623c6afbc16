"""Evaluates candidate versions on labelled canary questions, on a generator that serves no requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.agent_rollouts import AgentRollouts
from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.generator_router import GeneratorRouter, RouterTimeouts
from pixelis.actors.group_views import Stored, UpdatePictures
from pixelis.actors.rollout_messages import RolloutRequest
from pixelis.config import CanaryConfig, Config, RewardWeightsConfig
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.session import BATCH_PRIORITY, SamplingParams
from pixelis.errors import BadInput, DataFailure
from pixelis.evaluation.looking import looking
from pixelis.evaluation.metrics import correctness
from pixelis.evolution.canary import least_questions
from pixelis.evolution.traffic_questions import TrafficQuestion
from pixelis.records import Group, Question
from pixelis.rewards.terms import score_group

Pictures = Mapping[str, ray.ObjectRef]
"""References to decoded pictures by media id; empty if they are to be opened."""


def canary_questions(config: CanaryConfig) -> list[Question]:
    """The labelled questions. Raises MissingFile; BadInput for too few, or ones without answers."""
    # Drawn: the first of a set are often of one kind
    rows = read_questions(config.questions, seed=0, epochs=1)
    questions = list(itertools.islice(rows, config.count))
    if unlabelled := [q.id for q in questions if not q.answers]:
        message = f"evolution.canary.questions: {unlabelled[0]} in {config.questions} has no answer"
        raise BadInput(message, code="unlabelled_canary", fix="use questions that have answers")
    if len(questions) < (least := least_questions(config)):
        message = f"{len(questions)} canary questions cannot rule out a drop of {config.tolerance:g}"
        fix = f"set evolution.canary.questions and count to {least} or more, or raise tolerance or risk"
        raise BadInput(message, code="small_canary", fix=fix)
    return questions


class Canary:
    """Answers `evolution.canary.count` questions greedily and scores the answers.

    Ground truth never leaves this class. With `rft.agent` that agent plays the episodes. generator: one that
    serves no requests, because it loads candidates.
    """

    def __init__(self, config: Config, generator: ActorHandle, pictures: UpdatePictures):
        self.config, self.pictures = config, pictures
        self.router = GeneratorRouter([generator], RouterTimeouts.of(config))
        self.player = AgentRollouts(config, self.router) if config.rft.agent else self.router
        self.questions: list[Question] = []
        self.traffic: dict[str, dict[str, Stored]] = {}
        """Stored pictures of traffic questions by media id, by question."""
        self.use = 0.0
        """Mean causal use of the calls of the version judged last, where `min_use` asks for it; 0 without calls."""
        self.lock = asyncio.Lock()
        # Only the raw term `accuracy` is used; other terms may call a judge.
        self.rewards = config.rewards.model_copy(
            update={"weights": RewardWeightsConfig(accuracy=1.0), "tasks": {}, "own": {}}
        )

    async def ready(self) -> None:
        if not self.questions:
            self.questions = await asyncio.to_thread(canary_questions, self.config.evolution.canary)

    async def judge(self, version: int) -> dict[str, float | None]:
        """Score of `version` by question id, None where the question could not be answered or scored.

        Raises InfraFailure if the generator is unavailable, MissingFile without weights, BadInput for weights
        that the engine rejects.
        """
        await self.ready()
        return await self._judge(version, [(question, {}) for question in self.questions])

    async def judge_traffic(self, version: int, items: Sequence[TrafficQuestion]) -> dict[str, float | None]:
        current = {item.question.id for item in items}
        for name in self.traffic.keys() - current:
            del self.traffic[name]
        stored = dict(self.traffic)  # a copy: `keep` may replace pictures meanwhile
        for item in items:
            if item.question.id not in stored:
                pictures = {
                    id: await asyncio.to_thread(self.pictures.add, array)
                    for id, array in item.pictures.items()
                }
                self.traffic[item.question.id] = stored[item.question.id] = pictures

        def shown(question: Question) -> Pictures:
            return {id: picture.ref for id, picture in stored[question.id].items()}

        return await self._judge(version, [(item.question, shown(item.question)) for item in items])

    def keep(self, question: str, pictures: Mapping[str, Stored]) -> None:
        """Keep the stored pictures of a new traffic question, by media id, until it is judged."""
        self.traffic[question] = dict(pictures)

    async def _judge(
        self, version: int, questions: Sequence[tuple[Question, Pictures]]
    ) -> dict[str, float | None]:
        async with self.lock:  # one version at a time
            rollouts = list[asyncio.Future[Group | None]]()
            try:
                await self.router.load(version)
                rollouts += [asyncio.ensure_future(self._rollout(q, version, p)) for q, p in questions]
                groups = [group for group in await asyncio.gather(*rollouts) if group is not None]
            except RayError as error:
                raise unwrap_ray_error(error) or error from error
                self.use = looking(groups).get("mean", 0.0)
            finally:  # end the others after a failure, so that the next version is not loaded while they run
                for rollout in rollouts:
                    rollout.cancel()
            scores = await asyncio.to_thread(
                lambda: correctness([score_group(group, self.rewards) for group in groups])
            )
        return {question.id: scores.get(question.id) for question, _ in questions}

    async def _rollout(self, question: Question, version: int, pictures: Pictures) -> Group | None:
        d = self.config.dialogue
        greedy = SamplingParams(0.0, 1.0, d.max_turn_tokens, self.config.run.seed, BATCH_PRIORITY)
        unlabelled = question.model_copy(update={"answers": None, "annotations": None})
        player = self.router if pictures else self.player  # an agent's traffic question had no calls
        name, tools = f"canary-{version}-{question.id}", self.config.toolbox.has_tools
        request = RolloutRequest(
            unlabelled,
            name,
            1,
            greedy,
            tools,
            pictures=pictures,
            views=False,
            causal_use=self.config.evolution.canary.min_use is not None,
        )
        try:
            group = (await player.rollout(request)).group
        except (DataFailure, BadInput):
            return None
        return group.model_copy(update={"question": question})
