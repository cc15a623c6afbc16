"""Which groups are learnt from and which are replaced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewarded import group

from pixelis import config
from pixelis.actors import rollouts
from pixelis.actors.rollout_buffer import RolloutBuffer, ScoredGroup
from pixelis.config import RftConfig
from pixelis.errors import BadConfig, DataFailure
from pixelis.jobs import rft as rft_job
from pixelis.jobs import ttrl
from pixelis.policy.advantages import assign_advantages
from pixelis.policy.replay import informative
from pixelis.records import Group, StopReason

OVER = StopReason.OVER_TURN


def rft(key: str = "accuracy", **more: object) -> RftConfig:
    advantage = more.pop("advantage", {})
    return RftConfig.model_validate({"filter": {"key": key, **more}, "advantage": advantage})


def test_the_raw_accuracy_decides_whatever_the_shaped_reward_says() -> None:
    assert informative(group([1.0, 0.0]), rft())
    assert not informative(group([1.1, 1.0], accuracies=[1.0, 1.0]), rft())
    assert informative(group([1.1, 1.0], accuracies=[1.0, 1.0]), rft("reward"))
    assert not informative(group([1.0, 0.0, None]), rft(advantage={"min_group": 3}))


@given(
    st.lists(st.tuples(st.sampled_from([None, 0.0, 0.5, 1.0]), st.booleans()), min_size=2, max_size=8),
    st.booleans(),
    st.sampled_from(["std", "none"]),
)
def test_a_group_passes_exactly_when_it_has_an_advantage(
    episodes: list[tuple[float | None, bool]], counts: bool, scale: str
) -> None:
    settings = rft(
        "reward", min_std=0.0, advantage={"exclude": ["over_turn"], "count_excluded": counts, "scale": scale}
    )
    g = group([reward for reward, _ in episodes], {i: OVER for i, (_, cut) in enumerate(episodes) if cut})
    passes = informative(g, settings)
    assign_advantages([g], settings.advantage)
    learnt = [t.advantage for t in g.trajectories if t.advantage is not None]
    # Of a group of excluded rollouts and equal others, only those that count give the others an advantage.
    assert passes or not any(learnt)
    assert not passes or any(learnt) or not learnt


def test_both_thresholds_bound_the_mean_of_the_key() -> None:
    easy, hard, mixed = group([1.0, 1.0, 1.0, 0.0]), group([0.0, 0.0, 0.0, 1.0]), group([1.0, 0.0, 1.0, 0.0])
    for key in ("accuracy", "reward"):
        settings = rft(key, low=0.25, high=0.75)
        assert [informative(g, settings) for g in (easy, hard, mixed)] == [False, False, True]
    assert informative(easy, rft(low=0.25))
    close = group([0.5, 0.50001])
    assert not informative(close, rft("reward"))
    assert informative(close, rft("reward", min_std=0.0))
    with pytest.raises(BadConfig, match=r"low 0\.9 is not below high 0\.1"):
        config.load(None, ["rft.filter.low=0.9", "rft.filter.high=0.1"])


def test_a_failed_judge_call_drops_the_group_for_mini_o3() -> None:
    mini_o3, failed = RftConfig(algorithm="mini_o3"), group([1.0, 0.0, None])
    assert not informative(failed, mini_o3)
    assert informative(failed, rft())
    assert informative(group([1.0, 0.0, None], {2: OVER}), mini_o3), (
        "no judge is asked about an episode without an answer"
    )
    assert not informative(group([1.0, 1.0, 1.0]), mini_o3)


def test_without_truths_groups_are_filtered_by_votes_only() -> None:
    settings = ["rewards.preset=ttrl", "rft.algorithm=ttrl"]
    # In `rft` too: no reward uses truths, so they are cut off at the reader.
    unlabelled = config.load(None, [*settings, "rft.filter.key=accuracy"])
    for require in (rft_job.checked, ttrl.require_unlabelled):
        with pytest.raises(BadConfig, match=r"rft\.filter\.key=accuracy needs true answers"):
            require(unlabelled)
    assert rft_job.checked(config.load(None, ["rft.filter.key=accuracy"]))
    assert ttrl.require_unlabelled(config.load(None, [*settings, "rft.filter.key=majority_vote"]))


def assembled(
    groups: list[Group], settings: config.Config, source: rollouts.Rollouts | None = None, step: int = 0
) -> rollouts.RolloutBatch:
    source = source or rollouts.Rollouts(settings, None, [None])  # type: ignore[arg-type, list-item]
    buffer, numbers = RolloutBuffer(settings.rft, 0), iter(range(len(groups)))
    while (selection := buffer.take(lambda _: 0)) is None:
        for _ in range(buffer.room(0)):
            buffer.admit()
            scored = ScoredGroup(groups[number := next(numbers)], None, number=number)  # type: ignore[arg-type]
            if informative(scored.group, settings.rft):
                buffer.add(scored)
            else:
                buffer.add_unusable(scored, abstained=False)
    return source.assemble(step, selection)


def test_a_slot_without_a_signal_is_refilled() -> None:
    keys = ["rft.algorithm=mini_o3", "rft.prompts_per_step=2", "rft.advantage.count_excluded=false"]
    settings = config.load(None, keys)
    silent, useful = group([1.0, 1.0, 1.0, 0.0], {3: OVER}), group([1.0, 0.0, 1.0, 0.0])
    batch = assembled([silent, useful, silent, useful], settings)
    assert batch.numbers == [0, 1, 2, 3]
    assert [[t.advantage is not None for t in g.trajectories] for g in batch.groups] == [[True] * 4] * 2
    assert batch.metrics["advantage/silent_groups"] == 0


def test_each_batch_ahead_keeps_its_own_groups_without_a_signal() -> None:
    keys = ["rft.prompts_per_step=2", "rft.max_off_policy_steps=1", "rft.filter.max_oversampling=1"]
    settings = config.load(None, keys)
    source, buffer = rollouts.Rollouts(settings, None, [None]), RolloutBuffer(settings.rft, 0)  # type: ignore[arg-type, list-item]
    for number in range(buffer.room(0)):
        buffer.admit()
        buffer.add_unusable(ScoredGroup(group([1.0, 1.0]), None, number=number), abstained=False)  # type: ignore[arg-type]
    for step in range(2):
        selection = buffer.take(lambda _: 0)
        assert selection.numbers == [2 * step, 2 * step + 1]
        batch = source.assemble(step, selection)
        assert len(batch.groups) == 2
        assert batch.metrics["group/kept"] == 1


def test_a_step_of_excluded_episodes_alone_says_what_to_do() -> None:
    settings = config.load(None, ["rft.prompts_per_step=1", "rft.advantage.exclude=[over_turn]"])
    with pytest.raises(DataFailure, match="over_turn") as error:
        assembled([group([0.0] * 4, dict.fromkeys(range(4), OVER))] * 3, settings)
    assert "dialogue.max_turns" in str(error.value.fix)


def test_the_top_rollouts_of_earlier_batches_become_half_of_a_batch() -> None:
    settings = config.load(None, ["rft.algorithm=pixelis", "rft.prompts_per_step=4", "rft.group_size=4"])
    source, replayed = rollouts.Rollouts(settings, None, [None]), []  # type: ignore[arg-type, list-item]
    for step in range(6):
        rewards = ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 0.5, 0.0, 0.2], [0.3, 0.2, 0.1, 0.0])
        fresh = [group(of_group) for of_group in rewards]
        batch = assembled(fresh, settings, source, step)
        replayed.append(batch.metrics["group/replayed"])
        advantages = [abs(t.advantage or 0.0) for g in batch.groups[:4] for t in g.trajectories]
        old = [abs(t.advantage or 0.0) for g in batch.groups[4:] for t in g.trajectories]
        assert len(old) == replayed[-1]
        assert min(old, default=9.0) >= sorted(advantages)[11], "not among the top 30 % of its batch"
    assert replayed[0] == 0
    assert replayed[-1] == 16, "as many as the 16 fresh ones"
    assert replayed == sorted(replayed)
