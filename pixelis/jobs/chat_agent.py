"""Lets a chat model use the operations: its calls are text in a dialect, and run on toolboxes as those of a policy do."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from pixelis.actors import cluster
from pixelis.actors.episode_tools import BoundTools
from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.config import Config
from pixelis.datasets.synthesis.chat import data_url
from pixelis.dialogue.agent import operate_all
from pixelis.dialogue.dialects import DIALECTS, offered
from pixelis.errors import BadConfig, DataFailure
from pixelis.jobs.chat_model import ChatModel, chat, content_of, picture_part, text_of
from pixelis.operations.scale import Scale
from pixelis.records import Group, Observation, Question, StopReason, Trajectory, Turn

MULTIPLE = 28
"""Divisor of the sides of views, Qwen2.5-VL's; other models resize what they get."""


class ChatAgent:
    """Episodes of ``model`` with the operations of ``dialogue.dialect``. Starts or joins a cluster. BadConfig without any."""

    def __init__(self, config: Config, model: ChatModel):
        self.config, self.model, self.dialect = config, model, DIALECTS[config.dialogue.dialect]
        self.operations = {operation.name: operation for operation in offered(config)}
        if not self.operations:
            raise BadConfig(
                f"dialogue.dialect {self.dialect.name} offers none of toolbox.operations",
                fix="set dialogue.dialect=qwen, or evaluate.api.operations=false",
            )
        configured = config.dialogue.coordinates
        self.coordinates = self.dialect.scale or ("thousand" if configured == "auto" else configured)
        cluster.connect(config)

    def groups(
        self,
        questions: Sequence[Question],
        samples: int,
        seeds: Sequence[int],
        on_done: Callable[[int], None],
        operations: bool = True,
    ) -> list[Group]:
        """As ``ChatModel.groups``; without ``operations`` the same pictures are shown and none is offered."""
        draws = list(itertools.product(seeds or (None,), range(samples)))
        return asyncio.run(self._groups(questions, draws, on_done, operations))

    async def _groups(
        self,
        questions: Sequence[Question],
        draws: Sequence[tuple[int | None, int]],
        on_done: Callable[[int], None],
        operations: bool,
    ) -> list[Group]:
        pool = ToolboxPool(self.config, MULTIPLE, self.coordinates)
        places, count = asyncio.Semaphore(self.config.evaluate.api.concurrency), itertools.count(1)

        async def play(question: Question, seed: int | None, sample: int) -> Trajectory:
            async with places:
                trajectory = await self._episode(pool, question, seed, sample, operations)
            on_done(next(count))
            return trajectory

        try:
            await pool.ready()
            episodes = [play(question, *draw) for question in questions for draw in draws]
            trajectories = iter(await asyncio.gather(*episodes))
        except BaseException:
            self.model.client.stopping.set()
            raise
        finally:
            pool.close()
        return [Group(id=q.id, question=q, trajectories=list(itertools.islice(trajectories, len(draws)))) for q in questions]

    async def _episode(
        self, pool: ToolboxPool, question: Question, seed: int | None, sample: int, with_operations: bool
    ) -> Trajectory:
        started, d = time.perf_counter(), self.config.dialogue
        opened, (images, views) = await pool.open(question.media)
        trajectory = Trajectory(
            id=f"{question.id}-{sample}" if seed is None else f"{question.id}-s{seed}-{sample}",
            question_id=question.id,
            group_id=question.id,
            dialect=self.dialect.name,
            images=[image.model_copy() for image in images],
        )
        contents = {image.id: [picture_part(data_url(view))] for image, view in zip(images, views, strict=True)}
        names = question.tools
        operations = {n: o for n, o in self.operations.items() if with_operations and (names is None or n in names)}
        instruct = d.system != "none"
        messages, trajectory.turns = chat(question, images, contents, self.dialect, bool(operations), instruct)
        if instruct and (system := text_of(self.dialect.system(images, operations, self.coordinates, d.max_calls))):
            messages.insert(0, {"role": "system", "content": system})
            trajectory.turns.insert(0, Turn(role="system", text=system))
        tools = BoundTools(pool, opened) if operations else None
        for number in range(d.max_turns_test):
            try:
                reply = await asyncio.wrap_future(self.model.submit(self.model.ask, list(messages), seed, sample))
            except DataFailure as failure:
                trajectory.stop_reason, trajectory.unscored = StopReason.ERROR, failure.code
                break
            scale = Scale.of(self.coordinates, trajectory.images, slack=MULTIPLE, clamp=d.clamp)
            parsed = self.dialect.parse(reply.text, operations, scale, d.max_calls)
            turn = Turn(
                role="assistant",
                text=reply.transcript,
                action=parsed.action,
                further_actions=list(parsed.further_actions),
                error=parsed.error.code if parsed.error else None,
            )
            trajectory.turns.append(turn)
            messages.append({"role": "assistant", "content": reply.text})
            if reply.truncated:
                trajectory.stop_reason = StopReason.LENGTH
                break
            if parsed.answer is not None or (parsed.action is None and parsed.error is None):
                trajectory.answer = parsed.answer
                trajectory.stop_reason = StopReason.NO_ACTION if parsed.answer is None else StopReason.ANSWER
                break
            if number == d.max_turns_test - 1:
                trajectory.stop_reason = StopReason.OVER_TURN
                break
            results = await operate_all(tools, turn.actions, trajectory)
            if not results:
                code, text = (parsed.error.code, parsed.error.message) if parsed.error else ("unknown_op", "answer directly")
                results = [(Observation(status="error", code=code, text=text), [])]
            if len(trajectory.images) + sum(len(new) for _, new in results) > d.max_images:
                trajectory.stop_reason = StopReason.OVER_IMAGES
                break
            content = list[dict[str, Any]]()
            for place, (observation, new) in enumerate(results):
                contents |= {i.id: [picture_part(data_url(view))] for i, view in zip(observation.images, new, strict=True)}
                last = place == len(results) - 1
                pieces = self.dialect.observation(observation, len(trajectory.images), instruct and last)
                content += content_of(pieces, contents)
                shown = [image.id for image in observation.images]
                trajectory.turns.append(Turn(role="tool", text=text_of(pieces), images=shown, observation=observation))
                trajectory.images += observation.images
            messages.append({"role": "user", "content": content})
        trajectory.seconds = time.perf_counter() - started
        return trajectory
