"""Cold-start demonstrations by in-context imitation: a vision-language model sees demonstrations and plays real episodes.

Every call is executed on the question's own pixels; an episode is kept if its answer is right and every call succeeds. A policy
behind a Pixelis gateway needs no demonstrations: it plays the episode, and its calls are executed again here.
Source: Mini-o3 (arXiv 2509.07969), section on cold-start data: six demonstrations in context, turn by turn, filtered by answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pixelis.config import DialogueConfig, RewardsConfig
from pixelis.config.synthesis import ImitationConfig
from pixelis.datasets.agent_request import agent_request
from pixelis.datasets.synthesis.chat import ask, chat_client, picture_part
from pixelis.datasets.synthesis.checking import is_right
from pixelis.datasets.synthesis.executor import Executor, Session
from pixelis.dialogue.dialects import DIALECTS, Dialect, Piece
from pixelis.errors import BadConfig, DataFailure
from pixelis.operations.scale import Scale
from pixelis.records import Action, Demonstration, ImageView, Provenance, Question, Trajectory

INSTRUCTION = "Work as the assistant does in the following examples, of which only the text is given. Make one call in a turn."


class Imitator:
    """Plays episodes with a model behind an OpenAI-compatible API. BadConfig without url, model, key or demonstrations.

    ``examples`` are the demonstrations to imitate; they are executed once for the text of their observations.
    """

    def __init__(
        self,
        settings: ImitationConfig,
        executor: Executor,
        examples: Sequence[Demonstration],
        dialogue: DialogueConfig | None = None,
        rewards: RewardsConfig | None = None,
        cache: str | Path | None = None,
    ):
        if not examples and settings.plays == "turns":
            raise BadConfig("synthesis.imitation needs demonstrations to imitate", fix="set imitation.demonstrations to a file")
        self.settings, self.executor, self.rewards = settings, executor, rewards
        self.dialect: Dialect = DIALECTS[(dialogue or executor.dialogue).dialect]
        self.coordinates = self.dialect.scale or executor.coordinates
        self.operations = {name: op for name, op in executor.operations.items() if self.dialect.offers(op)}
        self.client = chat_client(settings, "synthesis.imitation", cache)
        self.examples = [(_question_key(d), self._example(d)) for d in examples[: settings.shots]]

    def play(self, question: Question, draw: int = 0) -> Demonstration:
        """A successful episode; ``draw`` numbers repeated episodes of a question.

        DataFailure ``wrong_answer``, ``call_refused`` (or broken), ``over_turn``, ``no_truth``, or a ``chat_...`` code.
        """
        session = self.executor.open(question)
        if self.settings.plays == "gateway":
            return self._play_by_gateway(session, draw)
        system = self.dialect.system(session.images, self.operations, self.coordinates)  # type: ignore[arg-type]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "".join([*(str(piece) for piece in system), "\n\n", self._examples_for(question)])},
            *self._conversation(session),
        ]
        for _ in range(self.settings.max_turns):
            text = ask(self.client, self.settings, messages, lambda text: self._check_reply(text, session), draw)
            reply = self.dialect.parse(text, self.operations, self._scale(session))
            if reply.answer is not None:
                if not is_right(question, reply.answer, self.rewards):
                    raise DataFailure(f"{question.id}: the answer {reply.answer[:60]!r} is wrong", code="wrong_answer")
                session.answer(reply.think, reply.answer)
                return self._finished(session, draw)
            if reply.action is None:
                message = reply.error.message if reply.error else "no call"
                raise DataFailure(f"{question.id}: the call cannot be parsed ({message})", code="call_refused")
            action, image_count = reply.action, len(session.images)
            observation = session.call(reply.think, action.op, action.target, allow_error=True, **action.arguments)
            if observation.status != "ok":
                raise DataFailure(f"{question.id}: {action.op} failed: {observation.text}", code="call_refused")
            pieces = self.dialect.observation(observation, image_count, instruct=True)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": self._parts(pieces, session)}]
        raise DataFailure(f"{question.id}: no answer within {self.settings.max_turns} turns", code="over_turn")

    def _play_by_gateway(self, session: Session, draw: int) -> Demonstration:
        """The episode that a Pixelis gateway returns, executed again turn by turn."""
        question = session.question
        body = {**agent_request(question, self.executor.toolbox), "samples": 1, "learn": False, "seed": draw}
        trajectory = Trajectory.model_validate_json(
            self.client.post("agent", body, _episode, str, draw, self.settings.temperature)
        )
        if trajectory.answer is None or not is_right(question, trajectory.answer, self.rewards):
            raise DataFailure(f"{question.id}: the answer {trajectory.answer!r:.60} is wrong", code="wrong_answer")
        think = None
        for turn in trajectory.turns:
            if not turn.is_policy:
                continue
            think = DIALECTS[trajectory.dialect].parse(turn.text, self.operations, Scale.of(self.coordinates, [])).think  # type: ignore[arg-type]
            for action in turn.actions:
                session.call(think, action.op, action.target, **action.arguments)
            if turn.error is not None:
                raise DataFailure(f"{question.id}: the call cannot be parsed ({turn.error})", code="call_refused")
        session.answer(think, trajectory.answer)
        return self._finished(session, draw)

    def close(self) -> None:
        """Close the client."""
        self.client.close()

    def _conversation(self, session: Session) -> list[dict[str, Any]]:
        """The earlier exchanges and the question, each with its own pictures and frames."""
        question, views, messages = session.question, list(session.images), list[dict[str, Any]]()

        def ask(text: str, shown: list[ImageView]) -> None:
            pieces = self.dialect.question(text, shown, tools=True, instruct=True)
            messages.append({"role": "user", "content": self._parts(pieces, session)})

        for exchange in question.history:
            shown = [view for view in views if (view.parent or view.id) in exchange.media]
            views = [view for view in views if view not in shown]
            ask(exchange.question, shown)
            answer = self.dialect.render(exchange.answer, self._scale(session))
            messages.append({"role": "assistant", "content": "".join(answer)})
        ask(question.question, views)
        return messages

    def _check_reply(self, text: str, session: Session) -> str:
        """The reply if it calls or answers; ValueError otherwise, so that the request is repeated."""
        reply = self.dialect.parse(text, self.operations, self._scale(session))
        if reply.answer is None and reply.action is None and reply.error is None:
            raise ValueError("the reply neither calls nor answers")
        return text

    def _finished(self, session: Session, draw: int) -> Demonstration:
        question = session.question
        provenance = Provenance(source="", original_id=question.id, method="imitation", writer=self.settings.model)
        return session.demonstration(id=f"{question.id}-imitation-{draw}", provenance=provenance)

    def _examples_for(self, question: Question) -> str:
        """The demonstrations to imitate, except those of the same question, which would reveal its answer."""
        others = [text for key, text in self.examples if key != _question_key(question)]
        return "\n\n".join([INSTRUCTION, *(f"Example {i}\n{text}" for i, text in enumerate(others, 1))])

    def _example(self, demonstration: Demonstration) -> str:
        session = self.executor.open(demonstration)
        earlier = [line for e in demonstration.history for line in (f"User: {e.question}", f"Assistant: {e.answer}")]
        lines = [*earlier, f"User: {demonstration.question}"]
        for step in demonstration.turns:
            content: Action | str
            if step.op is None:
                content = str(step.answer)
            else:
                content = Action(op=step.op, target=step.target or session.target, arguments=step.arguments)
            lines.append("Assistant: " + "".join(self.dialect.render(content, self._scale(session), step.think)))
            if step.op is not None:
                image_count = len(session.images)
                session.replay([step])
                observation = session.steps[-1].observation
                assert observation is not None
                pieces = self.dialect.observation(observation, image_count, instruct=False)
                lines.append("User: " + "".join(f"[{p.id}]" if isinstance(p, ImageView) else str(p) for p in pieces))
        return "\n".join(lines)

    def _scale(self, session: Session) -> Scale:
        return Scale.of(self.coordinates, session.images)  # type: ignore[arg-type]

    def _parts(self, pieces: Sequence[Piece], session: Session) -> list[dict[str, Any]]:
        """Pieces of a turn as parts of a message; consecutive texts are joined."""
        parts: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, ImageView):
                parts += [{"type": "text", "text": f"[{piece.id}]"}, picture_part(session.view(piece.id))]
            elif parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += str(piece)
            else:
                parts.append({"type": "text", "text": str(piece)})
        return parts


def _question_key(question: Question) -> tuple[str, ...]:
    """Equal for records of one question: its text and the names, without folders, of its files."""
    return (question.conversation, *(Path(uri).name for item in question.media for uri in (item.frames or [item.uri])))


def _episode(body: bytes) -> str:
    """The trajectory in a reply of ``/v1/agent``, without its pictures; ValueError for anything else."""
    trajectory = Trajectory.model_validate(json.loads(body)["trajectory"])
    images = [image.model_copy(update={"uri": ""}) for image in trajectory.images]
    return trajectory.model_copy(update={"images": images}).model_dump_json()
