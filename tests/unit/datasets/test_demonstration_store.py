"""Which demonstrations are in which batch: by seed, step and mixture alone; each row its share."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pixelis.config import SftConfig, SftCurriculumConfig
from pixelis.datasets.curriculum import LEVELS
from pixelis.datasets.demonstration_store import BatchSampler, DemonstrationStore
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Demonstration

ROWS = 60


def demonstration(number: int, **values: object) -> Demonstration:
    fields = {"id": f"q{number}", "question": "Which?", "level": LEVELS[number % 3]}
    return Demonstration.model_validate({**fields, "turns": [{"answer": str(number)}], **values})


def filled(folder: Path, *rows: Demonstration) -> DemonstrationStore:
    return DemonstrationStore.fill(folder / "rows", rows, ["golden"])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DemonstrationStore:
    return filled(tmp_path_factory.mktemp("shelf"), *map(demonstration, range(ROWS)))


def test_rows_are_read_by_number_and_other_kinds_are_counted(tmp_path: Path) -> None:
    kinds = ["golden", "trap_logical", "self_correction", "outcome_negative", "golden"]
    rows = [demonstration(n, kind=kind, question="Größe? \U0001f600") for n, kind in enumerate(kinds)]
    store = DemonstrationStore.fill(tmp_path / "rows", iter(rows), ["golden", "self_correction"])
    assert [store[n].id for n in (2, 0, 1)] == ["q4", "q0", "q2"]
    assert store[1] == rows[2]
    assert store.refused == {"trap_logical": 1, "outcome_negative": 1}
    repeated = DemonstrationStore(tmp_path / "rows")
    assert repeated[2] == rows[4]
    traps = [demonstration(n, kind="trap_perceptual") for n in range(5)]
    with pytest.raises(DataFailure, match="none of 5"):
        DemonstrationStore.fill(tmp_path / "none", traps, ["golden"])
    assert not (tmp_path / "none").exists()


PARTS = st.tuples(*[st.integers(0, 9)] * 3).filter(any)
SEEDS = st.integers(0, 2**31)


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 500), st.integers(1, 40), PARTS)
def test_a_batch_has_its_mixture_and_depends_on_seed_step_and_mixture_alone(
    store: DemonstrationStore, seed: int, step: int, batch: int, parts: tuple[int, int, int]
) -> None:
    mixture = tuple(part / sum(parts) for part in parts)
    one, other = (BatchSampler(store, SftConfig(batch=batch), seed) for _ in range(2))
    other.rows(step + 3, mixture)  # what was drawn before makes no difference
    rows = one.rows(step, mixture)
    assert rows.tolist() == other.rows(step, mixture).tolist()
    result = Counter(store.levels[rows].tolist())
    for level, share in enumerate(mixture):
        assert abs(result[level] - share * batch) < 1 + 1e-6
        assert share > 0 or not result[level]


def test_without_a_mixture_every_row_is_drawn_once_in_a_pass_and_each_pass_is_shuffled_anew(
    store: DemonstrationStore,
) -> None:
    draw = BatchSampler(store, SftConfig(batch=12), seed=3)
    assert draw.steps(2) == 10
    passes = [np.concatenate([draw.rows(first + i) for i in range(5)]).tolist() for first in (0, 5)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(ROWS))
    assert passes[0] != passes[1]
    in_order = BatchSampler(store, SftConfig(batch=12), seed=3, shuffle=False)
    assert in_order.rows(1).tolist() == list(range(12, 24))


@settings(max_examples=12)
@given(SEEDS, st.integers(1, 40), PARTS)
@example(3, 10, (2, 3, 5))
@example(0, 16, (5, 3, 2))
def test_every_level_uses_up_its_rows_before_they_come_again(
    store: DemonstrationStore, seed: int, batch: int, parts: tuple[int, int, int]
) -> None:
    mixture = tuple(part / sum(parts) for part in parts)
    draw = BatchSampler(store, SftConfig(batch=batch), seed)
    drawn = np.concatenate([draw.rows(step, mixture) for step in range(60)])
    for level in range(3):
        rows, pool = drawn[store.levels[drawn] == level], ROWS // 3
        whole = rows[: len(rows) // pool * pool].reshape(-1, pool)
        assert (np.sort(whole) == np.arange(level, ROWS, 3)).all(), "a pass draws each row once"


def test_a_smaller_share_is_a_subset_of_a_larger_one(store: DemonstrationStore) -> None:
    samplers = [BatchSampler(store, SftConfig(share=share), seed=8) for share in (0.1, 0.25, 0.5, 1.0)]
    shares = [set(sampler.pools[0].tolist()) for sampler in samplers]
    assert [len(share) for share in shares] == [6, 15, 30, 60]
    assert all(small < large for small, large in itertools.pairwise(shares))


def test_a_row_of_twice_the_weight_is_drawn_twice_as_often(tmp_path: Path) -> None:
    rows = [demonstration(n, weight=3.0 if n < 10 else 0.75) for n in range(50)]
    draw = BatchSampler(filled(tmp_path, *rows), SftConfig(batch=10), seed=0)
    drawn = Counter(int(row) for step in range(500) for row in draw.rows(step))
    mean = (10 * 3 + 40 * 0.75) / 50
    for row, times in drawn.items():
        assert times == pytest.approx(100 * (3.0 if row < 10 else 0.75) / mean, abs=30)
    assert sum(drawn[row] for row in range(10)) == pytest.approx(2500, abs=100)


def test_a_stage_without_demonstrations_is_an_error_before_training(tmp_path: Path) -> None:
    rows = [demonstration(n, level="simple") for n in range(6)]
    draw = BatchSampler(filled(tmp_path, *rows), SftConfig(batch=4), seed=0)
    with pytest.raises(BadInput, match="stage simple_medium draws medium"):
        draw.check(SftCurriculumConfig().stages)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 30), st.randoms(use_true_random=False))
@example(5, 5, 2, Random(0))
@settings(max_examples=25)
def test_learners_get_equally_many_rows_of_about_equally_much_text(
    store: DemonstrationStore, shares: int, each: int, step: int, random: Any
) -> None:
    draw = BatchSampler(store, SftConfig(batch=shares * each), seed=3)
    lengths = [random.choice([1, 5, 40, 600, 7000]) + random.randrange(9) for _ in range(len(store))]
    draw.sizes = np.asarray(lengths)
    rows, parts = draw.rows(step), [draw.share(step, None, share, shares) for share in range(shares)]
    assert {len(part) for part in parts} == {each}
    assert sorted(itertools.chain(*(part.tolist() for part in parts))) == sorted(rows.tolist())
    sums = [int(draw.sizes[part].sum()) for part in parts]
    assert max(sums) - min(sums) <= draw.sizes[rows].max()
    # Each keeps the order of the batch, which names a row twice where it crosses the end of a shuffle
    for part in parts:
        left = iter(rows.tolist())
        assert all(row in left for row in part.tolist())
