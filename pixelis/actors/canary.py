"""Answers the labelled canary questions greedily, on a generator that serves nobody."""

from __future__ import annotations

import asyncio
import itertools

from ray.actor import ActorHandle

from pixelis.actors.generator_router import GeneratorRouter, RolloutRequest, RouterTimeouts
from pixelis.config import Config, RewardWeightsConfig
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, DataFailure
from pixelis.evaluation.metrics import correctness
from pixelis.records import Group, Question
from pixelis.rewards.terms import score_group


class Canary:
    """Asks ``evolution.canary.count`` questions; their own scorers say what is right. No truth leaves this class.

    ``generator`` is a Generator actor that is not among those that serve: it may hold what nobody has judged yet.
    """

    def __init__(self, config: Config, generator: ActorHandle):
        self.config = config
        limit, e = config.evolution.canary.timeout_s, config.engine
        self.router = GeneratorRouter([generator], RouterTimeouts(limit, limit, e.retry_pause_s))
        self.questions: list[Question] = []
        self.one = asyncio.Lock()
        # The raw term `accuracy` is all that is wanted; other terms may cost a call to a judge.
        self.rewards = config.rewards.model_copy(update={"weights": RewardWeightsConfig(accuracy=1.0), "tasks": {}, "own": {}})

    async def ready(self) -> None:
        """Read the questions. Raises BadInput or MissingFile for what cannot be read or has no answers."""
        if not self.questions:
            self.questions = await asyncio.to_thread(self._read)

    async def judge(self, version: int) -> dict[str, float | None]:
        """Score of ``version`` by question id; None where the question could not be asked or scored. One version at a time.

        Raises InfraFailure when the generator stays away, MissingFile for a version without weights, BadInput for weights that no
        engine takes.
        """
        await self.ready()
        async with self.one:
            await self.router.load(version)
            asked = [asyncio.ensure_future(self._ask(question, version)) for question in self.questions]
            try:
                groups = await asyncio.gather(*asked)
            finally:  # after the first failure: the next version must not be loaded under the rest
                for one in asked:
                    one.cancel()
            scored = await asyncio.to_thread(self._score, [group for group in groups if group is not None])
        known = correctness(scored)
        return {question.id: known.get(question.id) for question in self.questions}

    def _read(self) -> list[Question]:
        c = self.config.evolution.canary
        questions = list(itertools.islice(read_questions(c.questions, limit=c.count, epochs=1), c.count))
        unlabelled = next((q for q in questions if not q.answers), None)
        if unlabelled is not None:
            raise BadInput(
                f"{c.questions}: {unlabelled.id} has no answer", code="unlabelled_canary", fix="name questions that have answers"
            )
        return questions

    async def _ask(self, question: Question, version: int) -> Group | None:
        d = self.config.dialogue
        greedy = SamplingParams(0.0, 1.0, d.max_turn_tokens, self.config.run.seed)
        name = f"canary-{version}-{question.id}"
        blind = question.model_copy(update={"answers": None, "annotations": None})
        try:
            request = RolloutRequest(blind, name, 1, greedy, bool(self.config.toolbox.operations), d.max_turns)
            group = (await self.router.rollout(request)).group
        except (DataFailure, BadInput):
            return None
        return group.model_copy(update={"question": question})

    def _score(self, groups: list[Group]) -> list[Group]:
        return [score_group(group, self.rewards) for group in groups]
