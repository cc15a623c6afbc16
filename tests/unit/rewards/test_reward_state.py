"""State of scoring: running statistics, curriculum, dynamics model, and the grader that holds them."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_episodes import group
from test_rewards import chain

from pixelis import config
from pixelis.config import RewardsConfig
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Action, Trajectory
from pixelis.rewards import dynamics as dynamics_module
from pixelis.rewards.curriculum import Curriculum
from pixelis.rewards.dynamics import Dynamics
from pixelis.rewards.grader import Grader
from pixelis.rewards.normalise import Normaliser

SIZE = 8  # numbers of a state


# -- running statistics


@given(st.lists(st.floats(-100, 100), min_size=10, max_size=60), st.floats(-100, 100))
def test_z_scores_are_those_of_all_values_so_far(seen, value):
    normaliser = Normaliser(["accuracy"])
    for number, one in enumerate(seen):
        normaliser.observe(f"g{number:03d}", {"accuracy": [one]})
        normaliser.commit()
    deviation = max(statistics.pstdev(seen), 0.1)
    score = max(-3.0, min(3.0, (value - statistics.fmean(seen)) / deviation))
    assert normaliser("accuracy", value) == pytest.approx(score, abs=1e-6)


def test_nothing_is_normalised_before_ten_values_nor_in_the_middle_of_a_step():
    normaliser = Normaliser(["accuracy"])
    normaliser.observe("a", {"accuracy": [0.0, 1.0] * 4 + [0.0]})
    normaliser.commit()
    assert normaliser("accuracy", 1.0) == 1.0
    normaliser.observe("b", {"accuracy": [1.0]})
    assert normaliser("accuracy", 1.0) == 1.0
    normaliser.commit()
    assert normaliser("accuracy", 1.0) == pytest.approx(1.0)  # mean 0.5, deviation 0.5
    assert normaliser("accuracy", 100.0) == 3.0
    assert normaliser("coherence", 0.7) == 0.7


def test_the_same_groups_give_the_same_statistics_in_any_order_and_once():
    rng = random.Random(0)
    groups = {f"g{i}": {"accuracy": [rng.random() for _ in range(8)]} for i in range(20)}
    first, second = Normaliser(["accuracy"]), Normaliser(["accuracy"])
    for normaliser, order in ((first, sorted(groups)), (second, sorted(groups, reverse=True))):
        for name in [*order, *order[:5]]:
            normaliser.observe(name, groups[name])
        normaliser.commit()
    assert first.state_dict() == second.state_dict()
    assert first.state_dict()["accuracy"][0] == 160


# -- curriculum

QUICK = {"kind": "trigger", "window": 10, "check_every": 10, "min_samples": 100}


def run(
    curriculum: Curriculum, steps: range, success: float, coherence: float = 0.0, samples: int = 16
) -> list[tuple[int, str]]:
    boundaries = [(step, curriculum.advance(step, success, coherence, samples)) for step in steps]
    return [(step, name) for step, name in boundaries if name]


def test_phases_follow_success_and_then_a_flat_coherence():
    curriculum = Curriculum(config.CurriculumConfig(**QUICK))
    assert curriculum.mixture == {"accuracy": 1, "curiosity_dynamics": 0, "coherence": 0}
    assert run(curriculum, range(50), 0.7) == []
    assert run(curriculum, range(50, 70), 0.9) == [(59, "base")]
    assert curriculum.mixture == {"accuracy": 1, "curiosity_dynamics": 0, "coherence": 0.1}
    # The check after 70 steps saw no coherence yet, so the slope over five checks is flat from 120 on: for
    # the fifth time at 160.
    assert run(curriculum, range(70, 200), 0.9, 0.5) == [(159, "coherence")]
    assert curriculum.mixture == {"accuracy": 1, "curiosity_dynamics": 0.05, "coherence": 0.1}
    assert run(curriculum, range(200, 400), 1.0, 1.0) == []
    assert curriculum.history == [(60, "base"), (160, "coherence")]
    assert curriculum.metrics()["curriculum/phase"] == 3.0


def test_a_rising_coherence_keeps_its_phase_until_both_are_good():
    curriculum = Curriculum(config.CurriculumConfig(**QUICK))
    run(curriculum, range(10), 0.9)
    assert curriculum.phase == 1
    for check in range(12):
        assert run(curriculum, range(10 + 10 * check, 20 + 10 * check), 0.9, 0.05 * check) == []
    assert run(curriculum, range(130, 140), 0.9, 0.9) == [(139, "coherence")]


def test_a_phase_ends_by_step_and_never_before_enough_samples():
    curriculum = Curriculum(config.CurriculumConfig(**{**QUICK, "first_steps": 30, "second_steps": 60}))
    assert run(curriculum, range(100), 0.0, -1.0)[0] == (39, "base")
    assert curriculum.history == [(40, "base"), (70, "coherence")]
    starved = Curriculum(config.CurriculumConfig(**{**QUICK, "min_samples": 10_000}))
    assert run(starved, range(100), 1.0) == []


def test_the_schedule_by_step_has_its_weights_at_its_steps():
    curriculum = Curriculum(config.CurriculumConfig(kind="steps"))
    weights = {}
    for step in range(10_001):
        weights[step] = tuple(curriculum.mixture.values())
        curriculum.advance(step, None, None, 0)
    assert (weights[0], weights[4999]) == ((1, 0, 0), (1, 0, 0))
    assert (weights[5000], weights[9999]) == ((0.7, 0.2, 0.1), (0.7, 0.2, 0.1))
    assert weights[10_000] == (0.5, 0.3, 0.2)
    assert curriculum.history == [(5000, "base"), (10_000, "coherence")]


# -- dynamics


def walk(seed: int, ops=("zoom_in", "read_text")) -> tuple[Trajectory, list[list[float]]]:
    """An episode whose states follow a rule: each operation turns the state in its own way."""
    rng = random.Random(seed)
    state, states = [rng.gauss(0, 1) for _ in range(8)], []
    trajectory = chain(*[Action(op=rng.choice(ops)) for _ in range(3)])
    for turn in [t for t in trajectory.turns if t.is_policy]:
        states.append(state)
        shift = 1 if turn.action is None or turn.action.op == "zoom_in" else 3
        state = [state[(i + shift) % 8] * (-1 if i < shift else 1) for i in range(8)]
    return trajectory, [*states, state]


def test_curiosity_falls_for_learned_transitions_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dynamics_module, "HIDDEN", 64)
    monkeypatch.setattr(dynamics_module, "LR", 3e-3)
    dynamics = Dynamics(SIZE)
    seen, unseen = [walk(i) for i in range(32)], [walk(1000 + i) for i in range(16)]
    rng = random.Random(0)
    noise = [(t, [[rng.gauss(0, 1) for _ in state] for state in states]) for t, states in unseen]

    def surprise(pairs):
        return statistics.fmean(dynamics.curiosity(*pair) for pair in pairs)

    before = surprise(unseen)
    first, *_, last = [dynamics.update(seen)["dynamics/forward_loss"] for _ in range(40)]
    assert last < 0.5 * first
    assert surprise(unseen) < 0.5 * before
    assert surprise(noise) > 2 * surprise(unseen)
    assert 0.0 < before <= 1.0


def test_learning_resumes_exactly_and_does_not_change_torchs_random_state():
    import torch

    batches = [[walk(10 * i + j) for j in range(4)] for i in range(6)]
    torch.manual_seed(5)
    whole, first, second = (Dynamics(SIZE, seed=1) for _ in range(3))
    for batch in batches:
        whole.update(batch)
    for batch in batches[:3]:
        first.update(batch)
    second.load_tensors(first.tensors())
    for batch in batches[3:]:
        second.update(batch)
    assert all(map(torch.equal, whole.tensors().values(), second.tensors().values()))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("states", [[], [[0.0] * 8] * 3, [[0.0] * 7] * 5, [[0.0] * 7 + [math.nan]] * 5])
def test_states_of_another_shape_are_a_data_failure(states):
    with pytest.raises(DataFailure) as caught:
        Dynamics(SIZE).curiosity(walk(0)[0], states)
    assert caught.value.code == "bad_states"


# -- the grader

PIXELIS = {"curriculum": {**QUICK, "check_every": 2, "window": 2, "min_samples": 8, "second_steps": 12}}


def staged(step: int, number: int):
    """A group of step ``step`` with states for each of its episodes."""
    name = f"s{step}-{number}"
    episodes = [walk(100 * step + 10 * number + j) for j in range(4)]
    trajectories = [
        t.model_copy(update={"id": f"{name}-{j}", "group_id": name}) for j, (t, _) in enumerate(episodes)
    ]
    row = group().model_copy(update={"id": name, "trajectories": trajectories})
    return row, {t.id: states for t, (_, states) in zip(trajectories, episodes, strict=True)}


def play(grader: Grader, steps: range, order: int = 1) -> list:
    out = []
    for step in steps:
        groups = [staged(step, number) for number in range(3)][::order]
        scored = sorted((grader.score(g, step=step, states=s) for g, s in groups), key=lambda g: g.id)
        advance = grader.advance(step)
        out.append(([t.reward for g in scored for t in g.trajectories], advance.boundary))
    return out


def test_pixelis_from_end_to_end_and_exactly_resumed():
    settings = RewardsConfig(preset="pixelis", **PIXELIS)
    uninterrupted = Grader(settings)
    expected = play(uninterrupted, range(24))
    boundaries = [(step, name) for step, (_, name) in enumerate(expected) if name]
    assert [name for _, name in boundaries] == ["base", "coherence"]
    assert all(reward is not None and abs(reward) <= 10 for rewards, _ in expected for reward in rewards)
    first = Grader(settings)
    assert play(first, range(13), order=-1) == expected[:13]
    second = Grader(settings)
    second.load(first.state())
    assert play(second, range(13, 24)) == expected[13:]
    assert second.state() == uninterrupted.state()


def test_terms_are_logged_raw_and_weighted_as_z_scores():
    grader = Grader(RewardsConfig(preset="pixelis-full"))
    play(grader, range(3))
    row, states = staged(9, 0)
    trajectory = grader.score(row, step=9, states=states).trajectories[0]
    for name, weight in (("accuracy", 1.0), ("coherence", 0.1), ("curiosity_dynamics", 0.05)):
        z = grader.normaliser(name, trajectory.rewards[name])
        assert trajectory.weighted[name] == pytest.approx(weight * z)
    assert trajectory.weighted["tool_misuse"] == trajectory.rewards["tool_misuse"]
    assert trajectory.reward == pytest.approx(sum(trajectory.weighted.values()))
    assert grader.advance(9).metrics["normalise/accuracy_mean"] == 1.0


def test_evaluation_changes_no_state_and_missing_states_are_a_cause_only_with_a_weight():
    grader = Grader(RewardsConfig(preset="pixelis", **PIXELIS))
    before = grader.state()
    unscored, _ = staged(0, 0)
    scored = grader.score(unscored)
    assert [t.unscored for t in scored.trajectories] == [None] * 4  # curiosity weighs nothing yet
    assert "curiosity_dynamics" not in scored.trajectories[0].rewards
    assert grader.state() == before
    always = Grader(RewardsConfig(preset="pixelis-full"))
    assert {t.unscored for t in always.score(unscored, step=0).trajectories} == {"no_states"}


def test_the_last_step_ends_its_phase_under_its_name():
    steps = {"steps": [[0, 1, 0, 0], [1, 1, 0, 1], [2, 1, 1, 1]]}
    settings = RewardsConfig(preset="pixelis-steps", curriculum=steps)
    grader = Grader(settings)
    boundaries = [grader.advance(step, is_last=step == 4).boundary for step in range(5)]
    assert boundaries == ["base", "coherence", None, None, "full"]
    assert Grader(settings).advance(0, is_last=True).boundary == "base"
    assert Grader(RewardsConfig()).advance(0, is_last=True).boundary is None


def test_the_dynamics_model_has_the_size_of_the_states_that_arrive():
    grader, resumed = (Grader(RewardsConfig(preset="pixelis", **PIXELIS)) for _ in range(2))
    assert grader.dynamics is None
    empty = grader.state()
    play(grader, range(3))
    assert grader.dynamics.size == SIZE
    resumed.load(grader.state())
    assert resumed.state() == grader.state()
    resumed.load(empty)
    assert resumed.dynamics is None


@pytest.mark.parametrize("state", [b"", b"12345678", b"\x02" + b"\0" * 7 + b"{}", b"\xff" * 64])
def test_bytes_that_are_not_a_state_are_refused(state):
    with pytest.raises(BadInput):
        Grader(RewardsConfig(preset="pixelis", **PIXELIS)).load(state)
