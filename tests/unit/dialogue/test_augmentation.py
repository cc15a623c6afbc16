"""Test-time augmentation: corrections of light, and the session that shows them to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from dialogue_models import ScriptedSession, renderer
from hypothesis import given
from hypothesis import strategies as st

from pixelis.dialogue.augmentation import FITS, AugmentedSession, Correction
from pixelis.dialogue.session import Completion, SamplingParams

PICTURE = np.random.default_rng(7).integers(20, 236, (32, 24, 3)).astype(np.uint8)


def lit(picture: np.ndarray, light: Sequence[float]) -> np.ndarray:
    """The picture under a light of this colour."""
    return np.round(picture * np.asarray(light)).astype(np.uint8)


@given(st.tuples(*[st.floats(0.5, 1.0)] * 3), st.sampled_from(sorted(FITS)))
def test_a_picture_looks_alike_under_every_light(light: tuple[float, float, float], name: str) -> None:
    plain, other = PICTURE, lit(PICTURE, light)
    expected, result = (Correction(name, [view])(view).astype(float) for view in (plain, other))
    if name == "grey_world":  # which keeps the brightness
        expected *= other.mean() / plain.mean()
    unsaturated = (expected < 250) & (result < 250)
    assert np.abs(expected - result)[unsaturated].max() <= 4


def test_autocontrast_uses_the_whole_range() -> None:
    dull = (PICTURE // 4 + 90).astype(np.uint8)
    result = Correction("autocontrast", [dull])(dull).reshape(-1, 3)
    assert result.min(0).tolist() == [0, 0, 0]
    assert result.max(0).tolist() == [255, 255, 255]


@pytest.mark.parametrize("name", sorted(FITS))
@pytest.mark.parametrize("value", [0, 128, 255])
def test_a_plain_picture_is_no_error(name: str, value: int) -> None:
    view = np.full((4, 4, 3), value, np.uint8)
    result = Correction(name, [view])(view)
    assert (result.shape, result.dtype) == (view.shape, np.uint8)
    assert np.ptp(result) == 0


def test_crops_are_corrected_as_their_picture() -> None:
    """A crop of a red card is red: its own mean colour says nothing about the light."""
    picture = lit(PICTURE, (1.0, 0.8, 0.6))
    picture[:8, :8] = (200, 20, 20)
    shown: list[list[np.ndarray]] = []

    class Recorder(ScriptedSession):
        async def generate(self, tokens, views, sampling, on_tokens=None):
            shown.append(list(views))
            return Completion([1], [0.0], "stop")

    inner = Recorder(renderer("nano"), [])
    session = AugmentedSession(inner, "grey_world")
    for views in ([picture], [picture[:8, :8]], []):
        asyncio.run(session.generate([1], views, SamplingParams()))
    (whole,), (crop,), nothing = shown
    np.testing.assert_array_equal(whole[:8, :8], crop)
    assert not np.array_equal(whole, picture)
    assert nothing == []
    session.close()
    assert inner.closed == 1
