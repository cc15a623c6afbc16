"""What a learner tells of a batch that it learnt from in several steps."""

from __future__ import annotations

import pytest

from pixelis.policy.minibatches import combine_metrics, minibatch_indices


def test_counts_of_minibatches_are_summed_and_largest_values_stay() -> None:
    one = {"learner/sequences": 8.0, "learner/dropped_bad_view": 2.0, "learner/skipped": 3.0, "policy/ratio_max": 1.5}
    other = {"learner/sequences": 7.0, "learner/dropped_bad_view": 1.0, "learner/skipped": 4.0, "policy/ratio_max": 1.1}
    found = combine_metrics([{**one, "policy/loss": 1.0, "policy/kl": 0.5}, {**other, "policy/loss": 2.0}])
    assert found == {
        "learner/sequences": 15.0,
        "learner/dropped_bad_view": 3.0,
        "learner/skipped": 4.0,
        "policy/ratio_max": 1.5,
        "policy/loss": pytest.approx(1.5),
        "policy/kl": 0.5,
    }


def test_every_pass_takes_every_sample_once_and_the_first_in_turn() -> None:
    steps = list(minibatch_indices(7, 3, 2, seed=(42, 5)))
    assert steps[:3] == [[0, 3, 6], [1, 4], [2, 5]]
    assert sorted(i for step in steps[3:] for i in step) == list(range(7))
    assert steps[3:] != steps[:3]
    assert steps == list(minibatch_indices(7, 3, 2, seed=(42, 5))), "a resumed run takes the same"
    assert steps != list(minibatch_indices(7, 3, 2, seed=(42, 6)))
