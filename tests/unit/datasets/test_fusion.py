"""Recipes take what they say, never more than there is, and traps never reach SFT."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from refined import demonstration

from pixelis.config.refinement import RecipeConfig, RftRecipeConfig, SftRecipeConfig
from pixelis.datasets.refinement import fusion
from pixelis.datasets.refinement.actions import WRONG_KINDS, category, kind_group
from pixelis.records import Demonstration, Question

TASK_OF = {"geometric": "geometric_comparison", "ocr": "text_extraction", "zoom": "detail_perception"}
TASK_OF |= {"spatio_temporal": "temporal_tracking", "select": "frame_selection", "vqa": "object_counting"}
KINDS = ("golden", "outcome_negative", "trap_perceptual", "trap_logical", "self_correction")


def pile(group: str, kind: str, count: int) -> list[Demonstration]:
    asked = [f"Which digit is in frame {group} {i}?" for i in range(count)]
    fields = {"task": TASK_OF[group], "kind": kind}
    return [demonstration(f"{group}-{kind}-{i}", question=text, **fields) for i, text in enumerate(asked)]


@functools.cache
def plenty(count: int = 60):
    return [d for group in TASK_OF for kind in KINDS for d in pile(group, kind, count)]


@pytest.mark.slow
def test_sft_keeps_its_shares_and_never_takes_a_trap():
    fused = fusion.sft(plenty(), SftRecipeConfig(size=300), seed=1)
    assert len(fused.demonstrations) == 300
    tasks = [category(d.task) for d in fused.demonstrations]
    shares = {group: tasks.count(group) / 300 for group in TASK_OF}
    assert shares == pytest.approx(SftRecipeConfig().tasks, abs=0.01)
    kinds = [d.kind for d in fused.demonstrations]
    assert set(kinds) == {"golden", "self_correction"}
    assert kinds.count("golden") == pytest.approx(225, abs=2)  # .6 of .6 + .2
    assert fused.excluded["wrong_on_purpose"] == 6 * 3 * 60


def test_rft_has_its_mix_and_weighs_hard_negatives_and_traps_more():
    questions, fused = fusion.rft(plenty(), RftRecipeConfig(size=360), seed=1)
    kinds = [kind_group(d.kind) for d in fused.demonstrations]
    shares = [kinds.count(kind) / 360 for kind in ("golden", "trap", "self_correction")]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
    weights = {d.kind: d.weight for d in fused.demonstrations}
    different = 1 + 0.1 * 1 / 2  # one operation in two calls
    assert weights["golden"] == pytest.approx(different)
    assert weights["outcome_negative"] == pytest.approx(2 * different)
    assert weights["trap_logical"] == pytest.approx(3 * different)
    assert len({q.id for q in questions}) == len(questions)
    assert all(type(q) is Question for q in questions)


def test_a_question_occurs_once_with_the_signals_of_its_demonstrations():
    family = [
        demonstration("g", quality=0.81, level="hard", difficulty=0.7, meta={"own": 1}),
        demonstration("t", kind="trap_logical", quality=1.0),
        demonstration("c", kind="self_correction", quality=0.5),
    ]
    questions, _ = fusion.rft(family, RftRecipeConfig(tasks={}, kinds={}), seed=0)
    (question,) = questions
    assert question.id == "g"
    assert question.answers == ["7"]
    assert question.meta["own"] == 1
    assert question.meta["weight"] == pytest.approx(3 * (1 + 0.1 / 2))
    assert question.meta["signals"]["wrong_answers"] == ["3"]
    assert question.meta["signals"]["kinds"] == {"golden": 1, "trap_logical": 1, "self_correction": 1}
    assert question.meta["signals"]["level"] == "hard"
    assert question.meta["reference_operations"] == ["zoom_in", "zoom_in"]


def test_missing_demonstrations_are_reported_and_not_invented():
    rows = pile("geometric", "golden", 50) + pile("ocr", "golden", 2) + pile("ocr", "self_correction", 1)
    recipe = SftRecipeConfig(size=100, tasks={"geometric": 0.4, "ocr": 0.4, "zoom": 0.2})
    fused = fusion.sft(rows, recipe, seed=0)
    assert fused.absent == ["zoom"]  # no demonstration of it: its share goes to the others
    assert fused.counts["ocr/golden"] == 2
    assert fused.targets["ocr/golden"] > 2
    # No more than its share of what there is
    assert fused.counts["geometric/golden"] == fused.targets["geometric/golden"] < 50
    assert fused.summary()["short"] == 100 - len(fused.demonstrations)
    summary = fused.summary()
    assert summary["count"] + summary["short"] == summary["size"] == 100
    assert summary["left_out"]["beyond_share"] == len(rows) - len(fused.demonstrations)


def test_higher_weights_are_drawn_first_and_the_seed_decides_the_draw():
    rows = pile("vqa", "golden", 400)
    good = [d.model_copy(update={"quality": 1.0 if i % 2 else 0.04}) for i, d in enumerate(rows)]
    recipe = RecipeConfig(size=100)
    ids = [d.id for d in fusion.select(good, recipe, 3).demonstrations]
    assert ids == [d.id for d in fusion.select(good[::-1], recipe, 3).demonstrations]
    assert ids != [d.id for d in fusion.select(good, recipe, 4).demonstrations]
    better = sum(d.quality == 1.0 for d in fusion.select(good, recipe, 3).demonstrations)
    assert 70 <= better <= 97  # weights 1 and .2


CELLS = st.tuples(st.sampled_from(sorted(TASK_OF)), st.sampled_from(KINDS))


@settings(max_examples=40)
@given(st.dictionaries(CELLS, st.integers(0, 9)), st.integers(1, 80))
def test_no_cell_gets_more_than_its_share(counts: dict, size: int):
    rows = [d for (group, kind), n in counts.items() for d in pile(group, kind, n)]
    sft = fusion.sft(rows, SftRecipeConfig(size=size), 0)
    for fused in (sft, fusion.rft(rows, RftRecipeConfig(size=size), 0)[1]):
        assert len({d.id for d in fused.demonstrations}) == len(fused.demonstrations) <= min(size, len(rows))
        assert all(fused.counts[cell] <= fused.targets[cell] for cell in fused.counts)
        assert sum(fused.counts.values()) == len(fused.demonstrations)
        assert sum(fused.targets.values()) <= size
    assert not any(d.kind in WRONG_KINDS for d in sft.demonstrations)


def test_recipes_that_contradict_themselves():
    with pytest.raises(ValidationError, match=r"add up to 0\.5"):
        RecipeConfig(tasks={"geometric": 0.5})
    with pytest.raises(ValidationError, match="unknown share `geometry`"):
        RecipeConfig(tasks={"geometry": 1.0})
