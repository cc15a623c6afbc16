"""Masks: COCO's run lengths both ways against pycocotools, and codes that lie."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pycocotools import mask as coco

from pixelis.errors import OperationError
from pixelis.operations import masks
from pixelis.operations.masks import Mask, decode, encode

SMALL = hnp.arrays(bool, st.tuples(st.integers(1, 12), st.integers(1, 12)))


def theirs(mask: np.ndarray) -> dict:
    code = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [int(n) for n in code["size"]], "counts": code["counts"].decode()}


@given(SMALL)
def test_the_code_is_pycocotools_and_comes_back(mask: np.ndarray):
    if not mask.any():
        with pytest.raises(OperationError, match="empty") as caught:
            encode(mask)
        assert caught.value.code == "nothing_found"
        return
    code = encode(mask)
    assert code == theirs(mask)
    back = decode(code, *mask.shape)
    np.testing.assert_array_equal(back.full(), mask)
    x, y, w, h = coco.toBbox({**code, "counts": code["counts"].encode()})
    assert back.edges == (x, y, x + w, y + h)
    assert back.area == mask.sum()


@given(SMALL, st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_a_window_codes_as_its_whole_picture(
    inside: np.ndarray, left: int, top: int, right: int, bottom: int
):
    if inside.any():
        whole = np.pad(inside, ((top, bottom), (left, right)))
        mask = Mask.of(inside, left, top, *whole.shape)
        assert mask.encode() == theirs(whole)
        np.testing.assert_array_equal(mask.full(), whole)
        box = np.argwhere(whole)
        assert mask.edges == (*box.min(0)[::-1], *(box.max(0)[::-1] + 1))


def of(counts, size=(3, 4)):
    return {"size": list(size), "counts": counts}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (None, "bad_arguments"),
        ("52203", "bad_arguments"),
        ({}, "bad_arguments"),
        ({"size": [3, 4]}, "bad_arguments"),
        (of("52203", ("3", 4)), "bad_arguments"),
        (of("52203", (0, 4)), "bad_arguments"),
        (of("52203", (3, 4, 1)), "bad_arguments"),
        (of("52203", (10**9, 10**9)), "limit"),
        (of([10**18], (10**9, 10**9)), "bad_arguments"),
        (of("0" * 4_000_001), "limit"),
        (of([3, -1, 10]), "bad_arguments"),
        (of([3, 10]), "bad_arguments"),
        (of([2**62, 2**62, 2**62, 2**62]), "bad_arguments"),
        (of("3:"), "bad_arguments"),
        (of("P"), "bad_arguments"),  # says that more follows, and nothing does
        (of("oooooooooooooooooooooooooo0"), "bad_arguments"),
        (of("\ud800"), "bad_arguments"),
        (of("<"), "nothing_found"),
        (of([12]), "nothing_found"),
        (of(""), "bad_arguments"),
    ],
)
def test_codes_that_lie(code, kind: str):
    with pytest.raises(OperationError) as caught:
        decode(code)
    assert caught.value.code == kind, caught.value
    assert len(caught.value.message) < 100


@given(st.text(alphabet=st.characters(min_codepoint=40, max_codepoint=120), max_size=40))
def test_any_string_is_a_mask_or_an_error(text: str):
    try:
        mask = decode(of(text, (6, 7)))
    except OperationError:
        return
    assert 0 < mask.area <= 42
    repeated = coco.decode({"size": [6, 7], "counts": text.encode()})
    np.testing.assert_array_equal(mask.full(), repeated)


def test_uncompressed_counts_are_read_too():
    back = decode({"size": [2, 3], "counts": [1, 2, 3]})
    np.testing.assert_array_equal(back.full(), [[0, 1, 0], [1, 0, 0]])
    assert decode({"size": [2, 3], "counts": [0, 2, 0, 1, 3]}).area == 3


def test_a_bomb_takes_no_memory():
    """A few characters may claim MAX_PIXELS: only columns that hold something are made."""
    height, width = 14_000, 14_000
    assert height * width < masks.MAX_PIXELS
    tracemalloc.start()
    try:
        mask = decode({"size": [height, width], "counts": [height * (width - 1), 5, height - 5]})
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert mask.area == 5
