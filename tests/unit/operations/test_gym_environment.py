"""Environments of gymnasium in the toolbox: what a policy sees, may do and earns."""

from __future__ import annotations

import sys
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, OperationError
from pixelis.operations.environment import Environment, select_environments, start
from pixelis.operations.gym_environment import gym_class
from pixelis.records import Action, Question

QUESTION = Question(id="q", question="?", environment="x")


def kind(entry: str) -> type[Environment]:
    (selected,) = select_environments(ToolboxConfig(environments=[entry])).values()
    return selected


def step(environment: Environment, action: object):
    return environment.execute(Action(op="step", target="", arguments={"action": action}))


class Lights(gymnasium.Env):
    """A bar of light that is as bright as it was set to.

    ## Action Space
    The brightness of two lamps.

    ## Rewards
    None.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"
    observation_space = spaces.Text(20)
    action_space = spaces.Box(0, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.light = self.np_random.random(2)
        return "begin", {}

    def step(self, action):
        self.light = action
        return "set", float(self.light.sum()), bool(self.light.sum() < 0.5), False, {}

    def render(self):
        return np.full((4, 6, 3), 255 * self.light.mean(), np.uint8)


def test_an_own_environment_of_the_api() -> None:
    lights = gym_class("lights", Lights)
    (action,) = lights.actions
    assert action.description == "One step. The brightness of two lamps."
    valid = {"action": [0.5, 0.5]}
    action.check(valid)
    for wrong in ([0.5, "dark"], [0.5], 0.5):
        with pytest.raises(OperationError):
            action.check({"action": wrong})
    one, first = start(lights, QUESTION, {}, 0)
    two, same = start(lights, QUESTION, {}, 0)
    assert first.text == "begin"
    assert (first.images[0] == same.images[0]).all()  # episodes of a question start alike
    with closing(one), closing(two):
        result = step(one, valid["action"])
        assert (result.text, result.reward, result.done) == ("set", 1.0, False)
        assert (result.images[0] == 127).all()
        with pytest.raises(OperationError, match=r"Box\(0.0, 1.0, \(2,\), float32\)"):
            step(one, [0.5, 2])
        assert step(two, [0, 0.25]).done


def test_environments_that_no_policy_can_play_are_named() -> None:
    blind = type("Blind", (Lights,), {"render_mode": None})
    with pytest.raises(BadConfig, match="renders no rgb_array"):
        gym_class("blind", blind)
    told = type("Told", (Lights,), {"action_space": spaces.Text(4)})
    with pytest.raises(BadConfig, match="the actions of told are Text"):
        gym_class("told", told)
    with pytest.raises(BadConfig, match="Nope-v0 cannot start"):
        kind("gym:Nope-v0")


def test_a_walk_over_gymnasiums_frozen_lake() -> None:
    pytest.importorskip("pygame", reason="the extra gym draws with it")
    if "decord" in sys.modules:
        pytest.skip("the libraries in decord's wheel break pygame's reading of PNG files")
    lake = kind("lake=gym:FrozenLake-v1")
    assert lake.name == "lake"
    lake = gym_class(
        "lake", lambda: gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="rgb_array")
    )
    assert "0: Move left" in lake.actions[0].description
    environment, first = start(lake, QUESTION, {}, 0)
    with closing(environment):
        assert first.images[0].shape == (256, 256, 3)
        results = [step(environment, direction) for direction in (1, 1, 2, 2, 1, 2)]
        assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
        assert [result.done for result in results] == [False] * 5 + [True]
        assert not np.array_equal(results[0].images[0], first.images[0])
