"""Hidden states of episodes: before the first policy turn and after each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_policy import Maker, spec, stock

from pixelis.policy.embed import turn_ends, turn_states
from pixelis.records import ImageView, Trajectory, Turn


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    model = stock()
    spec().family.attend_packed(model)
    return model


def episode(seed: int, turns: int) -> tuple[Trajectory, list[np.ndarray]]:
    maker = Maker(seed=seed)
    view = maker.view()
    dialogue = [Turn(role="user", tokens=maker.text(3) + maker.image(view) + maker.text(4), images=["img0"])]
    for number in range(turns):
        dialogue.append(Turn(role="assistant", tokens=maker.text(5), log_probs=[-1.0] * 5))
        if number < turns - 1:
            dialogue.append(Turn(role="tool", tokens=maker.text(6)))
    image = ImageView(id="img0", view_size=(32, 32))
    return Trajectory(question_id="q", turns=dialogue, images=[image]), [view]


def test_a_state_is_taken_before_each_policy_turn_and_at_the_end() -> None:
    assert turn_ends(episode(0, 2)[0]) == [12, 23, 28]


def test_the_last_state_follows_an_observation_that_ends_the_episode(model: torch.nn.Module) -> None:
    trajectory, views = episode(0, 2)
    crop, maker = views[0][::-1].copy(), Maker()
    observed = Turn(role="tool", tokens=maker.text(2) + maker.image(crop), images=["obs1"])
    images = [*trajectory.images, ImageView(id="obs1", view_size=(32, 32))]
    done = trajectory.model_copy(update={"turns": [*trajectory.turns, observed], "images": images})
    other, other_views = episode(1, 1)
    (before,) = turn_states(model, spec(), [trajectory], [views], 512)
    (alone,) = turn_states(model, spec(), [done], [[*views, crop]], 512)
    together, beside = turn_states(model, spec(), [done, other], [[*views, crop], other_views], 512)
    assert alone.shape == before.shape == (3, model.config.text_config.hidden_size)
    np.testing.assert_allclose(alone[:2], before[:2], atol=2e-5)
    assert np.abs(alone[2] - before[2]).max() > 1e-2
    np.testing.assert_allclose(together, alone, atol=2e-5)
    np.testing.assert_allclose(beside, turn_states(model, spec(), [other], [other_views], 512)[0], atol=2e-5)


def test_an_unusable_trajectory_has_no_states(model: torch.nn.Module) -> None:
    good, views = episode(0, 2)
    silent = good.model_copy(update={"turns": good.turns[:1]})
    states = turn_states(model, spec(), [good, silent, good], [views, views, []], 512)
    assert states[1] is states[2] is None
    assert states[0].dtype == np.float32
