"""Lets a chat model use the operations: its calls are text in a dialect, and run on toolboxes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from pixelis.actors import cluster
from pixelis.actors.episode_tools import BoundTools
from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.config import Config
from pixelis.dialogue.chat import ChatConversation
from pixelis.dialogue.dialects import DIALECTS, offered
from pixelis.errors import BadConfig
from pixelis.jobs.chat_model import ChatModel
from pixelis.records import Group, Question, Trajectory

MULTIPLE = 28
"""Divisor of the sides of views, Qwen2.5-VL's; other models resize what they get."""


class ChatAgent:
    """Episodes of ``model`` with the operations of ``dialogue.dialect``, on a cluster. BadConfig without any."""

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

        async def play_all() -> list[Group]:
            pool = ToolboxPool(self.config, MULTIPLE, self.coordinates)
            episode = functools.partial(self._episode, pool, operations)
            try:
                await pool.ready()
                return await self.model.play_groups(episode, questions, samples, seeds, on_done)
            finally:
                pool.close()

        return asyncio.run(play_all())

    async def _episode(
        self, pool: ToolboxPool, with_operations: bool, question: Question, seed: int | None, sample: int
    ) -> Trajectory:
        opened, (images, views) = await pool.open(question.media)
        d, names = self.config.dialogue, question.tools
        operations = {
            n: o for n, o in self.operations.items() if with_operations and (names is None or n in names)
        }
        conversation = ChatConversation(
            self.model.asker(seed, sample),
            self.dialect,
            operations,
            self.coordinates,
            instruct=d.instructs,
            max_calls=d.max_calls,
            slack=MULTIPLE,
            clamp=d.clamp,
        )
        tools = BoundTools(pool, opened) if operations else None
        return await self.model.play(conversation, question, seed, sample, images, views, tools)
