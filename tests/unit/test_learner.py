"""What a learner tells of a batch that it learnt from in several steps."""

from __future__ import annotations

import pytest

from pixelis.actors.learner import combined


def test_counts_of_minibatches_are_summed_and_largest_values_stay() -> None:
    one = {"learner/sequences": 8.0, "learner/dropped_bad_view": 2.0, "learner/skipped": 3.0, "policy/ratio_max": 1.5}
    other = {"learner/sequences": 7.0, "learner/dropped_bad_view": 1.0, "learner/skipped": 4.0, "policy/ratio_max": 1.1}
    found = combined([{**one, "policy/loss": 1.0, "policy/kl": 0.5}, {**other, "policy/loss": 2.0}])
    assert found == {
        "learner/sequences": 15.0,
        "learner/dropped_bad_view": 3.0,
        "learner/skipped": 4.0,
        "policy/ratio_max": 1.5,
        "policy/loss": pytest.approx(1.5),
        "policy/kl": 0.5,
    }
