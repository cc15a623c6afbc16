"""Environments of gymnasium, or of its API, which render pictures: an entry `gym:ID`.

`gym:my_package:ID` imports my_package first, which registers ID.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from pixelis.errors import BadConfig, OperationError
from pixelis.operations.environment import Entry, Environment, EnvironmentResult
from pixelis.operations.function import function_operation
from pixelis.operations.video import Clip
from pixelis.records import Action, Function, Question


class GymEnvironment(Environment):
    """An environment with the action ``step``; what it renders, uint8 [H, W, 3], is shown.

    An observation that is text is shown too.
    """

    make: ClassVar[Callable[[], gymnasium.Env]]
    _env: gymnasium.Env | None = None

    def reset(
        self, question: Question, media: Mapping[str, np.ndarray | Clip], seed: int
    ) -> EnvironmentResult:
        self._env = type(self).make()
        observation, _ = self._env.reset(seed=seed)
        return EnvironmentResult(*self._shown(observation))

    def execute(self, action: Action) -> EnvironmentResult:
        assert self._env is not None
        space = self._env.action_space
        try:
            (value,) = space.from_jsonable([action.arguments["action"]])
        except OverflowError:
            value = None
        if not space.contains(value):
            raise OperationError(f"action is not in {space}", code="bad_arguments")
        observation, reward, terminated, truncated, _ = self._env.step(value)
        return EnvironmentResult(*self._shown(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _shown(self, observation: Any) -> tuple[str, list[np.ndarray]]:
        assert self._env is not None
        picture = np.asarray(self._env.render(), dtype=np.uint8)
        return observation if isinstance(observation, str) else "", [picture]


def gym_class(name: str, make: Callable[[], gymnasium.Env]) -> type[GymEnvironment]:
    """The environments that ``make`` makes, with ``render_mode="rgb_array"``, as a class for the toolbox.

    Raises BadConfig for one that cannot render so, or an action space without a JSON schema.
    """
    try:
        env = make()
        env.close()
    except Exception as error:  # an environment can raise anything
        message = f"{name} cannot start: {type(error).__name__}: {error}"
        raise BadConfig(message, fix="correct its id, or install what it needs") from error
    if env.render_mode != "rgb_array":
        raise BadConfig(f"{name} renders no rgb_array", fix="wrap it so that it does")
    parameters = {
        "type": "object",
        "properties": {"action": _schema(env.action_space, name)},
        "required": ["action"],
        "additionalProperties": False,
    }
    # Environments explain their actions in this section of their documentation alone.
    section = re.search(r"## Action Space\n(.*?)(\n\s*## |\Z)", env.unwrapped.__doc__ or "", re.DOTALL)
    meaning = " ".join(section[1].split()) if section else ""
    function = Function(name="step", description=f"One step. {meaning}".strip(), parameters=parameters)
    body = {"name": name, "actions": (function_operation(function),), "make": staticmethod(make)}
    return type("GymEnvironmentOfName", (GymEnvironment,), body)


def adapt(entry: Entry) -> type[GymEnvironment]:
    """The class of an entry."""
    id = entry.rest.removeprefix(":")
    return gym_class(id.rpartition(":")[2], lambda: gymnasium.make(id, render_mode="rgb_array"))


def _schema(space: spaces.Space, name: str) -> dict[str, Any]:
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return {"type": "integer", "minimum": first, "maximum": first + int(space.n) - 1}
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        schema: dict[str, Any] = {"type": "integer" if space.dtype.kind in "iu" else "number"}
        for length in reversed(space.shape):
            schema = {"type": "array", "items": schema, "minItems": length, "maxItems": length}
        return {**schema, "description": str(space)}
    raise BadConfig(
        f"the actions of {name} are {type(space).__name__}, which has no form for a policy",
        fix="wrap it so that its actions are Discrete, Box, MultiDiscrete or MultiBinary",
    )
