"""Environments of gymnasium, or of its API, which render pictures: an entry `gym:ID`.

Options of `gymnasium.make` may follow: `gym:FrozenLake-v1 is_slippery=false`; `gym:my_package:ID` imports
my_package first, which registers ID.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import yaml

from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, MissingDependency, OperationError, install_extra
from pixelis.operations.environment import Environment, EnvironmentResult
from pixelis.operations.function import function_operation
from pixelis.operations.video import Clip
from pixelis.records import Action, Function, Question

try:
    import gymnasium
    from gymnasium import spaces
except ImportError:
    raise MissingDependency(
        "toolbox.environments: gym: needs the package gymnasium", fix=install_extra("gym")
    ) from None

KEY = "toolbox.environments"


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
        value = _from_json(space, action.arguments["action"])
        if not space.contains(value):
            raise OperationError(f"action is not in {space}", code="bad_arguments")
        observation, reward, terminated, truncated, _ = self._env.step(value)
        text, images = self._shown(observation)
        data = {"terminated": bool(terminated), "truncated": bool(truncated)}
        return EnvironmentResult(text, images, float(reward), bool(terminated or truncated), data)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _shown(self, observation: Any) -> tuple[str, list[np.ndarray]]:
        assert self._env is not None
        picture = np.asarray(self._env.render(), dtype=np.uint8)
        return observation if isinstance(observation, str) else "", [picture]


def gym_class(name: str, make: Callable[[], gymnasium.Env]) -> type[GymEnvironment]:
    """The environments that ``make`` makes, with ``render_mode="rgb_array"``, as a class for the toolbox.

    Raises BadConfig for one that cannot render so, or an action space without a JSON schema; MissingDependency.
    """
    try:
        env = make()
        env.reset(seed=0)
        picture: Any = env.render()
        env.close()
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingDependency(f"{KEY}: {name}: {error}", fix=install_extra("gym")) from None
    except Exception as error:  # an environment can raise anything
        message = f"{KEY}: {name} cannot start: {type(error).__name__}: {error}"
        raise BadConfig(message, fix="correct its id or its options") from error
    if env.render_mode != "rgb_array" or np.ndim(picture) != 3:
        raise BadConfig(f"{KEY}: {name} renders no rgb_array", fix="wrap it so that it does")
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


def gym_environment(rest: str, settings: ToolboxConfig) -> type[Environment]:
    """The class of an entry without `gym`."""
    id, *words = rest.removeprefix(":").split()
    if wrong := [word for word in words if "=" not in word]:
        raise BadConfig(f"{KEY}: gym:{id}: {wrong[0]!r} is no option", fix="write gym:ID KEY=VALUE ...")
    pairs = (word.partition("=") for word in words)
    options = {key: yaml.safe_load(value) for key, _, value in pairs}
    return gym_class(
        id.rpartition(":")[2], lambda: gymnasium.make(id, **{"render_mode": "rgb_array", **options})
    )


def _schema(space: spaces.Space, name: str) -> dict[str, Any]:
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return {"type": "integer", "minimum": first, "maximum": first + int(space.n) - 1}
    if isinstance(space, spaces.Box):
        kind = "integer" if np.issubdtype(space.dtype, np.integer) else "number"
        schema: dict[str, Any] = {"type": kind}
        low, high = float(space.low.min()), float(space.high.max())
        schema |= {"minimum": low} if np.isfinite(low) else {}
        schema |= {"maximum": high} if np.isfinite(high) else {}
        for length in reversed(space.shape):
            schema = {"type": "array", "items": schema, "minItems": length, "maxItems": length}
        return schema
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        ends = zip(space.start.tolist(), space.nvec.tolist(), strict=True)
        items = [{"type": "integer", "minimum": first, "maximum": first + n - 1} for first, n in ends]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(space, spaces.Dict):
        properties = {key: _schema(inner, name) for key, inner in space.spaces.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    raise BadConfig(
        f"{KEY}: the actions of {name} are {type(space).__name__}, which has no form for a policy",
        fix="wrap it so that its actions are Discrete, Box, MultiDiscrete or a Dict of them",
    )


def _from_json(space: spaces.Space, value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _from_json(inner, value.get(key)) for key, inner in space.spaces.items()}
    return int(value) if isinstance(space, spaces.Discrete) else np.asarray(value, dtype=space.dtype)
