"""Every gate rejects a set made to violate it, names the figure and the ids."""

from __future__ import annotations

import pytest
from refined import SCORE, TASKS, demonstration, seen, zoom

from pixelis.config import DialogueConfig, ToolboxConfig
from pixelis.config.refinement import GatesConfig
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.refinement import gates
from pixelis.datasets.refinement.row_checks import with_observations
from pixelis.datasets.synthesis.checking import is_wrong
from pixelis.datasets.synthesis.executor import Executor
from pixelis.errors import DataFailure
from pixelis.operations import OPERATIONS
from pixelis.records import Demonstration, Observation, Step

SMALL = GatesConfig(per_task=10)
KINDS = ("golden", "golden", "trap_perceptual", "trap_logical", "self_correction")
LEVELS = ("simple", "medium", "hard")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "TOTAL", 40)
    monkeypatch.setattr(gates, "CRITICAL", 4)


def good_set() -> list[Demonstration]:
    """48 demonstrations: four tasks of 12, every kind, three levels."""
    kinds, levels = [KINDS[(i // 4) % 5] for i in range(48)], [LEVELS[(i // 4) % 3] for i in range(48)]
    return [demonstration(f"d{i}", task=TASKS[i % 4], kind=kinds[i], level=levels[i]) for i in range(48)]


def check_gates(
    demonstrations: list[Demonstration], settings: GatesConfig = SMALL, **more
) -> dict[str, gates.Gate]:
    return {g.name: g for g in gates.check(demonstrations, settings, OPERATIONS, SCORE, **more)}


def broken(demonstrations: list[Demonstration], settings: GatesConfig = SMALL, **more) -> list[str]:
    return [name for name, gate in check_gates(demonstrations, settings, **more).items() if not gate.passed]


def test_an_honest_set_passes_every_gate():
    checked = check_gates(good_set())
    assert [name for name, gate in checked.items() if not gate.passed] == []
    assert set(checked) == {
        *("actions", "observations", "answers", "cycles", "total", "per_task", "imbalance"),
        *("critical", "level_share", "level_tasks", "corrupted"),
    }
    gates.enforce(checked.values())


UNKNOWN = Step(op="teleport", target="img0", observation=seen(1))
ANSWER = Step(think="The digit in the red frame is 7", answer="7")
FAILED = Observation(status="error", code="out_of_range", text="outside")


@pytest.mark.parametrize(
    ("gate", "reason", "fields"),
    [
        ("actions", "unknown operation teleport", {"turns": [UNKNOWN, ANSWER]}),
        ("actions", "speed", {"turns": [zoom(arguments={"box": [0, 0, 0.5, 0.5], "speed": 2}), ANSWER]}),
        ("actions", "x0 < x1", {"turns": [zoom(arguments={"box": [0.5, 0.1, 0.2, 0.4]}), ANSWER]}),
        ("actions", "outside the picture", {"turns": [zoom(arguments={"box": [1.1, 0.1, 1.2, 0.4]}), ANSWER]}),
        ("actions", "unknown image obs2", {"turns": [zoom(1), zoom(2, target="obs2"), ANSWER]}),
        ("observations", "has no observation", {"turns": [zoom(observation=None), ANSWER]}),
        ("observations", "has learn set", {"turns": [zoom(observation=FAILED), ANSWER]}),
        ("answers", "is wrong", {"turns": [zoom(), Step(answer="3")]}),
        ("answers", "is right", {"kind": "trap_logical", "turns": [zoom(), ANSWER]}),
        ("answers", "is right", {"kind": "outcome_negative", "turns": [zoom(), ANSWER]}),
        ("answers", "cannot be checked", {"answers": None}),
        ("answers", "ends without", {"turns": [zoom()]}),
        ("answers", "without a mistake", {"kind": "self_correction", "turns": [zoom(), ANSWER]}),
        ("answers", "not corrected", {"kind": "self_correction", "turns": [zoom(1, learn=False), zoom(2), zoom(1), ANSWER]}),
        ("cycles", "is repeated", {"turns": [zoom(1), zoom(1), ANSWER]}),
        ("cycles", "zoom_in zoom_in is repeated", {"turns": [zoom(3), zoom(1), zoom(2), zoom(1), zoom(2), ANSWER]}),
    ],
)  # fmt: skip
def test_one_bad_demonstration_is_named(gate: str, reason: str, fields: dict):
    rejected = [*good_set(), demonstration("culprit", **fields)]
    checked = check_gates(rejected)
    assert [name for name, g in checked.items() if not g.passed] == [gate]
    assert checked[gate].figure == 1
    assert reason in checked[gate].ids["culprit"]
    message = rf"(?s)gate {gate}: .* is 1, limit 0 \(culprit: .*{reason}"
    with pytest.raises(DataFailure, match=message) as caught:
        gates.enforce(checked.values())
    assert caught.value.code == "gate"


def test_gates_and_synthesis_agree_on_right_and_wrong():
    """Ten per cent off earns three quarters and is not right; half of the letters right is wrong."""
    turns = [zoom(), Step(think="It is 11", answer="11")]
    off = demonstration("off", scorer="numeric_band", answers=["10"], turns=turns)
    assert 0.5 < SCORE(off, "11") < 1
    assert broken([*good_set(), off]) == ["answers"]
    turns = [zoom(), Step(think="It is ax", answer="ax")]
    trap = demonstration("trap", kind="trap_logical", scorer="cer", answers=["ab"], turns=turns)
    assert is_wrong(trap, "ax")
    assert broken([*good_set(), trap]) == []


def test_a_mistake_out_of_the_loss_may_be_an_invalid_call():
    outside = zoom(arguments={"box": [1.1, 0.1, 1.2, 0.4]}, learn=False, observation=FAILED)
    pretended = outside.model_copy(update={"observation": seen(1)})
    for mistake, failed in ((outside, []), (pretended, ["actions"])):
        correction = demonstration("m", kind="self_correction", turns=[mistake, zoom(2), ANSWER])
        assert broken([*good_set(), correction]) == failed


def test_frames_of_a_clip_are_targets():
    media = [{"id": "vid0", "uri": "a.mp4", "kind": "video"}]
    clip = demonstration("v", media=media, turns=[zoom(target="vid0.3"), ANSWER])
    assert gates.invalid_action(clip, OPERATIONS) is None
    assert gates.invalid_action(demonstration(turns=[zoom(target="img0.3"), ANSWER]), OPERATIONS) is not None


def test_the_set_as_a_whole():
    assert broken(good_set()[:39]) == ["per_task", "total"]
    few = [d for d in good_set() if d.task != TASKS[0]]
    few += [demonstration(f"x{i}", task="rare") for i in range(4)]
    assert broken(few) == ["per_task"]  # 12 to 4 is just three times
    assert check_gates(few)["per_task"].ids == {"rare": "4 demonstrations"}
    more = good_set() + [demonstration(f"y{i}", task=TASKS[0]) for i in range(25)]
    assert broken(more) == ["imbalance"]
    assert check_gates(more)["imbalance"].figure == pytest.approx(37 / 12)
    assert set(check_gates(more)["imbalance"].ids) == set(TASKS)
    golden = [d for d in good_set() if d.kind != "trap_logical"]
    assert "critical" in broken(golden, GatesConfig(per_task=5))
    assert broken(golden, GatesConfig(per_task=5, sizes=False)) == []
    levels = ["hard" if i > 20 else LEVELS[i % 3] for i in range(48)]
    uneven = [d.model_copy(update={"level": level}) for d, level in zip(good_set(), levels, strict=True)]
    assert broken(uneven) == ["level_share"]
    assert set(check_gates(uneven)["level_share"].ids) == {"simple", "medium"}
    by_task = [d.model_copy(update={"level": "hard" if d.task in TASKS[:2] else d.level}) for d in good_set()]
    assert "level_tasks" in broken(by_task, GatesConfig(per_task=1))


def test_corrupted_rows_are_at_most_one_in_a_hundred():
    bad = [BadRow("a.jsonl", "7", "turns", "bad_value", "Input should be a list")]
    assert broken(good_set(), rows=100, bad=bad) == []
    assert broken(good_set(), rows=99, bad=bad) == ["corrupted"]
    ids = check_gates(good_set(), rows=99, bad=bad)["corrupted"].ids
    assert ids == {"a.jsonl, row 7": "turns: Input should be a list"}


def test_every_failed_gate_is_in_the_error():
    with pytest.raises(DataFailure, match=r"(?s)gate per_task.*gate total.*gate critical"):
        gates.enforce(gates.check([demonstration()], GatesConfig(), OPERATIONS, SCORE))


def test_replay_executes_calls_again_and_finds_changed_observations():
    executor = Executor(ToolboxConfig(), DialogueConfig())
    calls = zoom(1, observation=None), zoom(2, target="obs1", observation=None)
    bare = demonstration("r", turns=[*calls, ANSWER])
    complete = with_observations(bare, executor)
    assert isinstance(complete, Demonstration)
    assert [step.observation.id for step in complete.steps if step.observation] == ["obs1", "obs2"]
    assert gates.replay([complete], executor, 1.0, 0).passed
    forged = complete.model_copy(deep=True)
    forged.turns[1].observation.data["zoom_level"] = 9.0
    gate = gates.replay([complete, forged.model_copy(update={"id": "forged"})], executor, 1.0, 0)
    assert not gate.passed
    assert gate.ids == {"forged": "turn 2: zoom_in returns another data"}
    media = [complete.media[0].model_copy(update={"uri": "/no/such.png"})]
    lost = complete.model_copy(update={"id": "lost", "media": media})
    assert "lost" in gates.replay([lost], executor, 1.0, 0).ids
    trap = forged.model_copy(update={"id": "trap", "kind": "trap_perceptual"})
    assert gates.replay([trap], executor, 1.0, 0).passed  # its observation is wrong on purpose
