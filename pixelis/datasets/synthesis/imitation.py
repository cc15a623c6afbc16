"""Cold-start demonstrations by in-context imitation: a model sees demonstrations and plays episodes.

An episode is kept if its answer is right and every call succeeds when it is executed again. Source: cold start
of Mini-o3 (arXiv 2509.07969).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import DialogueConfig, RewardsConfig
from pixelis.config.synthesis import TeacherConfig
from pixelis.datasets.agent_request import agent_request
from pixelis.datasets.synthesis.checking import is_right
from pixelis.datasets.synthesis.executor import Executor, Session
from pixelis.dialogue.agent import Episode, Limits, Outcome
from pixelis.dialogue.agent import play as play_episode
from pixelis.dialogue.chat import ChatConversation, ChatReply, Message
from pixelis.dialogue.dialects import DIALECTS, Dialect
from pixelis.errors import BadConfig, DataFailure
from pixelis.operations.scale import Scale
from pixelis.records import (
    Action,
    Demonstration,
    ImageView,
    Provenance,
    Question,
    StopReason,
    Trajectory,
    Turn,
)
from pixelis.rewards.llm_client import LlmClient

MAX_IMAGES = 64
"""Images of an episode, beyond what a model can be sent."""
INSTRUCTION = (
    "Work as the assistant does in the following examples, of which only the text is given. Make "
    "one call in a turn."
)


class Imitator:
    """Plays episodes with a model behind an OpenAI-compatible API, shown ``examples``, or a gateway's.

    BadConfig without url, model, key or examples.
    """

    def __init__(
        self,
        settings: TeacherConfig,
        executor: Executor,
        examples: Sequence[Demonstration],
        dialogue: DialogueConfig | None = None,
        rewards: RewardsConfig | None = None,
        cache: str | Path | None = None,
    ):
        if not examples and settings.plays == "turns":
            raise BadConfig(
                "imitation needs demonstrations to imitate",
                fix="set synthesis.teacher.demonstrations to a file",
            )
        self.settings, self.executor, self.rewards = settings, executor, rewards
        self.dialect: Dialect = DIALECTS[(dialogue or executor.dialogue).dialect]
        self.coordinates = self.dialect.scale or executor.coordinates
        self.operations = {name: op for name, op in executor.operations.items() if self.dialect.offers(op)}
        self.client = LlmClient(
            settings, "synthesis.teacher", cache, calls_per_minute=settings.calls_per_minute
        )
        self.examples = [(_question_key(d), self._example(d)) for d in examples[: settings.shots]]

    def play(self, question: Question, draw: int = 0) -> Demonstration:
        """A successful episode, or DataFailure; ``draw`` numbers repeated episodes of a question."""
        play = self._by_gateway if self.settings.plays == "gateway" else self._by_turns
        trajectory = play(question, draw)
        if trajectory.answer is None or not is_right(question, trajectory.answer, self.rewards):
            raise DataFailure(
                f"{question.id}: the answer {trajectory.answer!r:.60} is wrong", code="wrong_answer"
            )
        session, think = self.executor.open(question), None
        for turn in trajectory.turns:
            if not turn.is_policy:
                continue
            if turn.error is not None:
                raise DataFailure(
                    f"{question.id}: the call cannot be parsed ({turn.error})", code="call_refused"
                )
            scale = Scale.of(self.coordinates, [])
            think = DIALECTS[trajectory.dialect].parse(turn.text, self.operations, scale).think
            for action in turn.actions:
                session.call(think, action.op, action.target, **action.arguments)
        session.answer(think, trajectory.answer)
        provenance = Provenance(
            source="", original_id=question.id, method="imitation", writer=self.settings.model
        )
        return session.demonstration(id=f"{question.id}-imitation-{draw}", provenance=provenance)

    def _by_turns(self, question: Question, draw: int) -> Trajectory:
        """The episode that the model plays turn by turn, up to a refused call."""
        settings, session = self.settings, self.executor.open(question)

        def read(text: str) -> ChatReply:
            reply = self.dialect.parse(text, self.operations, Scale.of(self.coordinates, []))
            if reply.answer is None and reply.action is None and reply.error is None:
                raise ValueError("the reply neither calls nor answers")  # so that the request is repeated
            return ChatReply(text)

        async def ask(messages: list[Message]) -> ChatReply:
            s = settings
            return self.client.ask(messages, read, draw, temperature=s.temperature, max_tokens=s.max_tokens)

        def on_turn(turn: Turn, views: list[np.ndarray]) -> None:
            if turn.observation is not None and turn.observation.status != "ok":
                raise DataFailure(
                    f"{question.id}: a call failed: {turn.observation.text}", code="call_refused"
                )

        key = _question_key(question)  # its own demonstration would reveal the answer
        others = [text for example, text in self.examples if example != key]
        examples = "\n\n".join([INSTRUCTION, *(f"Example {i}\n{text}" for i, text in enumerate(others, 1))])
        conversation = ChatConversation(
            ask, self.dialect, self.operations, self.coordinates, examples=examples
        )
        trajectory = Trajectory(
            question_id=question.id, dialect=self.dialect.name, images=list(session.images)
        )
        limits = Limits(settings.max_turns, settings.max_tokens, max_context=0, max_images=MAX_IMAGES)
        episode = Episode(trajectory, list(session.views))
        stop = asyncio.run(
            play_episode(conversation, question, episode, _SessionTools(session), limits, on_turn)
        )
        if stop is StopReason.OVER_TURN:
            raise DataFailure(f"{question.id}: no answer within {settings.max_turns} turns", code="over_turn")
        return trajectory

    def _by_gateway(self, question: Question, draw: int) -> Trajectory:
        def extract(body: bytes) -> str:
            trajectory = Trajectory.model_validate(json.loads(body)["trajectory"])
            images = [image.model_copy(update={"uri": ""}) for image in trajectory.images]
            return trajectory.model_copy(update={"images": images}).model_dump_json()

        body = {**agent_request(question, self.executor.toolbox), "samples": 1, "learn": False, "seed": draw}
        temperature = self.settings.temperature
        return self.client.post("agent", body, extract, Trajectory.model_validate_json, draw, temperature)

    def close(self) -> None:
        self.client.close()

    def _example(self, demonstration: Demonstration) -> str:
        session = self.executor.open(demonstration)
        lines = [f"User: {e.question}\nAssistant: {e.answer}" for e in demonstration.history]
        lines.append(f"User: {demonstration.question}")
        for step in demonstration.turns:
            content: Action | str = str(step.answer)
            if step.op is not None:
                content = step.calls(session.target)[0]
            scale, count = Scale.of(self.coordinates, session.images), len(session.images)
            lines.append("Assistant: " + "".join(self.dialect.render(content, scale, step.think)))
            session.replay([step])
            if (observation := session.steps[-1].observation) is not None:
                pieces = self.dialect.observation(observation, count, instruct=False)
                shown = [f"[{p.id}]" if isinstance(p, ImageView) else str(p) for p in pieces]
                lines.append("User: " + "".join(shown))
        return "\n".join(lines)


class _SessionTools:
    def __init__(self, session: Session):
        self.session = session

    async def execute(self, action: Action, images: list[ImageView], objects: dict[str, Any]) -> Outcome:
        observation = self.session.execute(action.op, action.target, allow_error=True, **action.arguments)
        return observation, [self.session.view(image.id) for image in observation.images]


def _question_key(question: Question) -> tuple[str, ...]:
    """Equal for records of one question: its text and its files' names, without folders."""
    files = [uri for item in question.media for uri in (item.frames or [item.uri])]
    return question.conversation, *(Path(uri).name for uri in files)
