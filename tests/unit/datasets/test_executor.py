"""A studio executes operations for real and keeps what they showed for later calls."""

from __future__ import annotations

import pytest

from pixelis.datasets.questions import read_demonstrations
from pixelis.datasets.synthesis.executor import Executor
from pixelis.errors import DataFailure
from pixelis.records import Demonstration


@pytest.fixture(scope="module")
def golden() -> Demonstration:
    return read_demonstrations("cards:?split=train", 1, 5, 0.0)[0]


def test_calls_are_named_in_order_and_crops_of_crops_refer_to_them(golden: Demonstration) -> None:
    session = Executor().open(golden)
    first = session.call("closer", "zoom_in", box=(0.2, 0.2, 0.8, 0.8))
    second = session.call(None, "zoom_in", "obs1", box=(0.25, 0.25, 0.75, 0.75))
    assert (first.id, second.id) == ("obs1", "obs2")
    assert second.images[0].parent == "obs1"
    assert second.data["pixels"] == pytest.approx([269, 269, 499, 499], abs=2)
    assert session.view("obs2").shape[2] == 3
    session.answer("so", "7")
    demonstration = session.demonstration(id="x1", kind="golden")
    assert [turn.op for turn in demonstration.turns] == ["zoom_in", "zoom_in", None]
    assert demonstration.question == golden.question


def test_a_refused_call_raises_unless_errors_are_allowed(golden: Demonstration) -> None:
    session = Executor().open(golden)
    with pytest.raises(DataFailure) as error:
        session.execute("zoom_in", "obs9", box=(0.1, 0.1, 0.5, 0.5))
    assert error.value.code == "bad_target"
    refused = session.call(None, "zoom_in", "obs9", box=(0.1, 0.1, 0.5, 0.5), learn=False, allow_error=True)
    assert (refused.status, refused.code, refused.id) == ("error", "bad_target", None)
    assert session.call(None, "zoom_in", box=(0.1, 0.1, 0.5, 0.5)).id == "obs1"


def test_replayed_turns_refer_to_the_observations_of_the_new_session(golden: Demonstration) -> None:
    session = Executor().open(golden)
    session.call("a", "zoom_in", box=(0.2, 0.2, 0.8, 0.8))
    session.call("in obs1", "zoom_in", "obs1", box=(0.25, 0.25, 0.75, 0.75))
    session.answer("obs2 shows it", "7")
    other = session.restarted()
    other.call("elsewhere", "zoom_in", box=(0.0, 0.0, 0.3, 0.3), learn=False)
    other.replay(session.steps)
    assert [turn.target for turn in other.steps] == ["img0", "img0", "obs2", None]
    assert [turn.think for turn in other.steps] == ["elsewhere", "a", "in obs2", "obs3 shows it"]
