"""Plays demonstrations into trajectories whose observations come from executing the operations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import numpy as np

from pixelis.config import Config
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import is_done, name_observation, show_start
from pixelis.dialogue.dialects import default_target
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadInput, DataFailure, OperationError
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.operations import Operation, Scene, execute, select
from pixelis.operations.environment import Environment, environment_of, observe, select_environments, start
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.video import Clip
from pixelis.records import (
    Action,
    Demonstration,
    ImageView,
    Observation,
    Question,
    Step,
    StopReason,
    Trajectory,
    Turn,
    Verbatim,
)


class Player:
    """Plays demonstrations as the run's dialect and operations see them."""

    def __init__(self, config: Config, model_folder: str):
        self.config, tokenizer = config, load_tokenizer(model_folder)
        self.spec = load_spec(model_folder, tokenizer, config.policy.family)
        self.crop = PixelBudget.of(config.dialogue.crop)
        environments = select_environments(config.toolbox)
        self.renderer = Renderer(
            tokenizer, self.spec, config.dialogue, select(config.toolbox.operations), environments
        )

    def play(self, question: Demonstration) -> tuple[Trajectory, list[np.ndarray]]:
        """The trajectory of a demonstration and the views of its images, uint8 [h, w, 3].

        In the row's dialect a turn keeps its text, unless a call means something else here. A refused call is
        an error observation in a turn that is not learnt. DataFailure, BadInput name the row.
        """
        try:
            return self._play(question)
        except (DataFailure, BadInput) as error:
            raise error.about(question.place) from None

    def problem(self, question: Question, source: str) -> BadRow | None:
        """Why a question cannot be shown or played; opens its media."""
        try:
            if isinstance(question, Demonstration):
                self._play(question)
            else:
                trajectory, _, environment, _ = self._begin(question)
                if environment is not None:
                    environment.close()
                self._check_length(trajectory)
        except (DataFailure, BadInput) as error:
            return BadRow.of_error(question, source, error)
        return None

    def _play(self, question: Demonstration) -> tuple[Trajectory, list[np.ndarray]]:
        trajectory, views, environment, media = self._begin(question)
        with nullcontext() if environment is None else closing(environment):
            self._play_turns(question, trajectory, views, environment, media)
        if trajectory.answer is None and not _has_ended(trajectory):
            raise DataFailure("its environment does not end: end with an answer", code="no_answer")
        self._check_length(trajectory)
        return trajectory, views

    def _play_turns(
        self,
        question: Demonstration,
        trajectory: Trajectory,
        views: list[np.ndarray],
        environment: Environment | None,
        media: dict[str, np.ndarray | Clip],
    ) -> None:
        offered = self.renderer.offered(question)
        default = "" if environment is not None else default_target(media)
        for number, step in enumerate(question.turns):
            if _has_ended(trajectory):
                raise DataFailure(f"its environment ends before turn {number}", code="after_end")
            if step.answer is not None:
                turn = self._written(step, step.answer, trajectory.images)
                trajectory.turns.append(turn.model_copy(update={"learn": step.learn}))
                trajectory.answer, trajectory.stop_reason = step.answer, StopReason.ANSWER
                continue
            turn, actions, error = self._call(step, trajectory.images, default, offered)
            trajectory.turns.append(turn)
            if error is not None:
                results = [_refused(error)]
            elif environment is not None:
                results = self._act(environment, actions)
            else:
                scene = self.scene(media, trajectory.objects, list(trajectory.images))
                results = [execute(action, scene, offered) for action in actions]
            later = question.turns[number + 1 :]
            for place, (observation, new_views) in enumerate(results):
                observation = self._named(observation, actions[place], trajectory.operations_ok, step, later)
                shown = len(trajectory.images)
                trajectory.turns.append(self.renderer.observation(observation, shown, place, len(results)))
                trajectory.images += observation.images
                views += new_views

    def _check_length(self, trajectory: Trajectory) -> None:
        if (length := len(trajectory.token_ids())) > (limit := self.config.dialogue.max_context):
            message = f"{length} tokens are longer than dialogue.max_context {limit}"
            raise DataFailure(message, code="over_context", fix="shorten it, or raise dialogue.max_context")

    def turn_lengths(self, question: Demonstration) -> list[int]:
        """Tokens of each turn that is learnt, without opening the media: as in a picture of 1000 x 1000."""
        in_environment = environment_of(question, self.renderer.environments) is not None
        default = "" if in_environment else default_target({item.id: item for item in question.media})
        lengths = list[int]()
        for step in (step for step in question.turns if step.learn):
            actions = step.calls(default)
            others = (str(action.arguments.get("other")) for action in actions)
            names = dict.fromkeys([default, *(action.target for action in actions), *others])
            images = [ImageView(id=name, view_size=(1000, 1000)) for name in names]
            try:
                turn = self._written(step, actions if step.answer is None else step.answer, images)
                lengths.append(len(turn.tokens))
            except OperationError:
                lengths.append(0)
        return lengths

    def _begin(
        self, question: Question
    ) -> tuple[Trajectory, list[np.ndarray], Environment | None, dict[str, np.ndarray | Clip]]:
        media, images, views = dict[str, np.ndarray | Clip](), list[ImageView](), list[np.ndarray]()
        for item in question.media:
            try:
                media[item.id] = open_media(item, self.config.toolbox)
                look = first_look({item.id: media[item.id]}, self.config.dialogue, self.spec.multiple)
            except BadInput as error:
                raise error.about(item.id if item.is_inline else (item.frames or [item.uri])[0]) from None
            images, views = images + look[0], views + look[1]
        environment: Environment | None = None
        shown: Question = question
        if (kind := environment_of(question, self.renderer.environments)) is not None:
            with _failures():
                environment, result = start(kind, question, media, self.config.run.seed)
                observation, new_views = observe(result, self.crop, self.spec.multiple)
            shown = show_start(shown, images, observation)
            views += new_views
        trajectory = Trajectory(
            question_id=question.id,
            dialect=self.renderer.dialect.name,
            turns=self.renderer.prompt(shown, images),
            images=images,
            stop_reason=StopReason.DONE,
        )
        return trajectory, views, environment, media

    def _named(
        self, observation: Observation, action: Action, successes: int, step: Step, later: Sequence[Step]
    ) -> Observation:
        """The observation with its id; DataFailure for an error that is learnt, or that a later turn uses."""
        if observation.status == "ok":
            data = {**observation.data, "op": action.op, "target": action.target}
            return name_observation(observation.model_copy(update={"data": data}), successes)
        shown = step.verbatim is not None and step.op is not None and not step.verbatim.failed
        used = [int(id[1]) for turn in later if (id := re.match(r"obs(\d+)", turn.target or ""))]
        if step.learn or (shown and max(used, default=0) > successes):
            raise DataFailure(f"{action.op} failed: {observation.text}", code=observation.code or "operation")
        return observation

    def _act(
        self, environment: Environment, actions: Sequence[Action]
    ) -> list[tuple[Observation, list[np.ndarray]]]:
        results = list[tuple[Observation, list[np.ndarray]]]()
        for action in actions:
            if results and is_done(results[-1][0]):
                raise DataFailure("its environment ends before the last call of a turn", code="after_end")
            try:
                with _failures():
                    results.append(observe(environment.execute(action), self.crop, self.spec.multiple))
            except OperationError as error:
                results.append(_refused(error))
        return results

    def _verbatim(self, step: Step) -> Verbatim | None:
        """The turn of the row, if that is in the dialect of the run."""
        verbatim = step.verbatim
        return verbatim if verbatim is not None and verbatim.dialect == self.renderer.dialect.name else None

    def _written(self, step: Step, content: list[Action] | str, images: list[ImageView]) -> Turn:
        if (verbatim := self._verbatim(step)) is not None:
            return self.renderer.verbatim(verbatim.text)
        return self.renderer.assistant(content, step.think, images)

    def _call(
        self, step: Step, images: list[ImageView], default: str, offered: Mapping[str, type[Operation]]
    ) -> tuple[Turn, list[Action], OperationError | None]:
        """The turn of a call, the actions to execute, and the error that replaces their results, if any."""
        actions, verbatim = step.calls(default), self._verbatim(step)
        if step.op is None:
            assert step.verbatim is not None
            turn = self.renderer.verbatim(step.verbatim.text)
        else:
            try:
                turn = self._written(step, actions, images)
            except OperationError:
                if step.learn:
                    raise
                # The dialect cannot write it: JSON as it stands
                turn = self.renderer.mistaken(actions[0], step.think)
        # Parsed from its tokens, on the dialect's grid: a policy's call must have the same result
        read, reply = self.renderer.read(turn.tokens, [0.0] * len(turn.tokens), images, offered)
        if verbatim is not None and step.op is not None:
            is_as_in_row = read.actions == [self.renderer.dialect.adapt(action) for action in actions]
            if not is_as_in_row and (step.learn or reply.action is not None):
                self.renderer.check_calls(len(actions))
                turn = self.renderer.verbatim(verbatim.text, actions, images)
                read, reply = self.renderer.read(turn.tokens, [0.0] * len(turn.tokens), images, offered)
            if read.actions and len(read.actions) != len(actions):
                message = f"the row executed {len(actions)} calls of a turn, here it is {len(read.actions)}"
                raise OperationError(f"{message}: set dialogue.max_calls={len(actions)}", code="limit")
        read_back = {"action": read.action, "further_actions": read.further_actions, "error": read.error}
        turn = turn.model_copy(update={"learn": step.learn, **read_back})
        if step.verbatim is not None and step.verbatim.failed:
            return turn, actions[:1], OperationError((step.verbatim.result or "").strip(), code="refused")
        if turn.actions:
            return turn, turn.actions, None
        if step.op is not None and verbatim is not None:
            return turn, actions, None
        return turn, actions[:1], reply.error or OperationError("no call was found", code="bad_json")

    def scene(
        self, media: dict[str, Any], objects: dict[str, dict[str, Any]], images: list[ImageView]
    ) -> Scene:
        run = self.config.dialogue, self.config.toolbox, self.spec.multiple, self.renderer.coordinates
        return Scene.of(*run, media, images, objects)


def _refused(error: OperationError) -> tuple[Observation, list[np.ndarray]]:
    return Observation(status="error", code=error.code, text=error.message), []


def _has_ended(trajectory: Trajectory) -> bool:
    return any(is_done(observation) for observation in trajectory.observations[-1:])


@contextmanager
def _failures() -> Iterator[None]:
    """Turns whatever an environment raises, but OperationError, into DataFailure ``environment_crashed``."""
    try:
        yield
    except OperationError:
        raise
    except Exception as error:
        message = f"its environment failed: {type(error).__name__}: {error}"
        raise DataFailure(message, code="environment_crashed") from error
