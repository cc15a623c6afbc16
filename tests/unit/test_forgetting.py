"""The backward transfer of the benchmark of forgetting, by world, over pictures and over seeds."""

from __future__ import annotations

import pytest

from benchmarks.forgetting import WORLDS, Scores, summarise

PICTURES = 20


def question(world: str, number: int) -> str:
    return f"cards-test-7-{number}" + ("" if world == "plain" else f"-{world}")


def scores(right: dict[str, int]) -> Scores:
    """In each world the first ``right`` pictures are answered correctly."""
    return {world: {question(world, n): float(n < right[world]) for n in range(PICTURES)} for world in WORLDS}


def run(final: dict[str, int]) -> list[Scores]:
    """A run that answers all questions of all worlds until its last stage."""
    return [*[scores(dict.fromkeys(WORLDS, PICTURES))] * (len(WORLDS) - 1), scores(final)]


def test_transfer_is_the_final_accuracy_minus_that_after_the_own_stage():
    final = {"plain": 15, "invert": 20, "lowcontrast": 10, "digits": 20}
    transfer = summarise([run(final)])["backward_transfer"]
    expected = {"plain": -0.25, "invert": 0.0, "lowcontrast": -0.5}
    assert {world: transfer[world]["mean"] for world in WORLDS[:-1]} == expected
    assert transfer["mean"]["mean"] == pytest.approx(-0.25)
    assert transfer["plain"]["ci95_seeds"] is None


def test_the_mean_over_worlds_resamples_pictures():
    """The same 10 of 20 pictures fail in all three worlds: that is as certain as 20 questions, not as 60."""
    transfer = summarise([run(dict.fromkeys(WORLDS, 10))])["backward_transfer"]
    assert transfer["mean"]["n"] == PICTURES
    assert transfer["mean"]["ci95"] == pytest.approx(transfer["plain"]["ci95"])
