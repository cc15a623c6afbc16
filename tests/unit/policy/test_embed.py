"""Hidden states of episodes: before the first policy turn and after each."""

from __future__ import annotations

import numpy as np
import torch
from tiny_policy import policy

from pixelis.policy.embed import turn_ends, turn_states
from pixelis.policy.forward import use_packed_attention
from pixelis.policy.model import load_model
from pixelis.records import ImageView, Trajectory, Turn


def tiny_model(family: str):
    model, _, spec = load_model(policy(family), "cpu")
    use_packed_attention(model)
    return model, spec


def episode(seed: int, turns: int, spec) -> tuple[Trajectory, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    side = spec.multiple * 2
    view = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)

    def words(count: int) -> list[int]:
        return [int(t) for t in rng.integers(7, 40, count)]

    pads = [spec.vision_start, *[spec.image_token] * spec.image_tokens(side, side), spec.vision_end]
    dialogue = [Turn(role="user", tokens=[*words(3), *pads, *words(4)], images=["img0"])]
    for number in range(turns):
        dialogue.append(Turn(role="assistant", tokens=words(5), log_probs=[-1.0] * 5))
        if number < turns - 1:
            dialogue.append(Turn(role="tool", tokens=words(6)))
    image = ImageView(id="img0", view_size=(side, side))
    return Trajectory(question_id="q", turns=dialogue, images=[image]), [view]


def test_a_state_is_taken_before_each_policy_turn_and_at_the_end() -> None:
    trajectory = Trajectory(
        question_id="q",
        turns=[
            Turn(role="user", tokens=[1] * 10),
            Turn(role="assistant", tokens=[2] * 4),
            Turn(role="tool", tokens=[3] * 7),
            Turn(role="assistant", tokens=[4] * 5),
        ],
    )
    assert turn_ends(trajectory) == [9, 20, 25]


def test_the_last_state_follows_an_observation_that_ends_the_episode() -> None:
    model, spec = tiny_model("qwen3_vl")
    trajectory, views = episode(0, 2, spec)
    pads = [spec.vision_start, *[spec.image_token] * 4, spec.vision_end]
    crop = ImageView(id="obs1", view_size=(spec.multiple * 2, spec.multiple * 2))
    done = trajectory.model_copy(
        update={
            "turns": [*trajectory.turns, Turn(role="tool", tokens=[8, 9, *pads, 10], images=["obs1"])],
            "images": [*trajectory.images, crop],
        }
    )
    other, other_views = episode(1, 1, spec)
    shown = [*views, views[0][::-1].copy()]
    (before,), (alone,) = (
        turn_states(model, spec, [t], [v], 512) for t, v in ((trajectory, views), (done, shown))
    )
    together, beside = turn_states(model, spec, [done, other], [shown, other_views], 512)
    assert alone.shape == before.shape == (3, model.config.text_config.hidden_size)
    np.testing.assert_allclose(alone[:2], before[:2], atol=2e-5)
    assert np.abs(alone[2] - before[2]).max() > 1e-2
    np.testing.assert_allclose(together, alone, atol=2e-5)
    np.testing.assert_allclose(beside, turn_states(model, spec, [other], [other_views], 512)[0], atol=2e-5)


def test_an_unusable_trajectory_has_no_states() -> None:
    model, spec = tiny_model("qwen3_vl")
    good, views = episode(0, 2, spec)
    silent = good.model_copy(update={"turns": good.turns[:1]})
    states = turn_states(model, spec, [good, silent, good], [views, views, []], 512)
    assert states[1] is states[2] is None
    assert not torch.is_grad_enabled() or states[0].dtype == np.float32
