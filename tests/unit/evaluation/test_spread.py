"""Causal use is measured on questions of every kind, however the set is ordered."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pixelis.evaluation.looking import spread


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_measured_questions_are_spread_over_the_whole_set(count: int, total: int) -> None:
    chosen = sorted(spread(count, total))
    assert len(chosen) == min(count, total)
    gaps = {after - before for before, after in itertools.pairwise([*chosen, total])}
    assert not chosen or (chosen[0] == 0 and max(gaps) - min(gaps) <= 1)
