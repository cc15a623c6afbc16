"""FLIP and ENHANCE: exact pixels mirrored, and regions that a person would call better, on real photos."""

from __future__ import annotations

import numpy as np
import pytest
import skimage.data
from calling import call
from skimage.metrics import peak_signal_noise_ratio

from pixelis.operations.pixel_budget import PixelBudget

COFFEE = skimage.data.coffee()


def run(op: str, picture: np.ndarray = COFFEE, budget: PixelBudget | None = None, **arguments):
    scene = {} if budget is None else {"budget": budget, "multiple": 28}
    observation, views = call(op, picture, scene=scene, **arguments)
    return observation, views[0] if views else None


def test_flip_mirrors_exactly_and_keeps_places():
    observation, view = run("flip", direction="horizontal", box=[0.5, 0, 1, 0.5])
    np.testing.assert_array_equal(view, COFFEE[:200, :299:-1])
    assert observation.images[0].box == (0.5, 0.0, 1.0, 0.5)
    assert "left and right swapped" in observation.text
    assert "not flipped" in observation.text
    np.testing.assert_array_equal(run("flip", direction="vertical")[1], COFFEE[::-1])
    view[:] = 0
    assert COFFEE[:200, 300:].any()


def test_contrast_separates_faint_print_and_keeps_the_hue():
    page = skimage.data.page()
    faint = np.repeat((100 + page * 0.1).astype(np.uint8)[..., None], 3, 2)
    observation, view = run("enhance", faint, method="contrast")
    assert view.std() > 2 * faint.std()
    assert observation.data["spread_after"] > 2 * observation.data["spread_before"]
    assert np.abs(view.astype(int) - view.mean(axis=2, keepdims=True)).max() <= 2  # grey stays grey


def test_brighten_shows_what_is_dark_and_never_darkens():
    dark = (COFFEE * 0.15).astype(np.uint8)
    _, view = run("enhance", dark, method="brighten")
    assert peak_signal_noise_ratio(COFFEE, view) > peak_signal_noise_ratio(COFFEE, dark) + 3
    white = np.full((40, 40, 3), 220, np.uint8)
    np.testing.assert_array_equal(run("enhance", white, method="brighten")[1], white)
    black = np.zeros((40, 40, 3), np.uint8)
    np.testing.assert_array_equal(run("enhance", black, method="brighten")[1], black)


def test_denoise_comes_nearer_to_the_clean_picture_and_sharpen_raises_edges():
    clean = COFFEE[100:260, 150:350]
    noisy = np.clip(clean + np.random.default_rng(0).normal(0, 15, clean.shape), 0, 255).astype(np.uint8)
    _, view = run("enhance", noisy, method="denoise")
    assert peak_signal_noise_ratio(clean, view) > peak_signal_noise_ratio(clean, noisy) + 5
    _, sharp = run("enhance", clean, method="sharpen")
    assert (
        np.abs(np.diff(sharp.astype(int), axis=1)).mean()
        > 1.3 * np.abs(np.diff(clean.astype(int), axis=1)).mean()
    )


@pytest.mark.parametrize("method", ["contrast", "brighten", "sharpen", "denoise"])
def test_small_regions_are_enlarged_and_large_ones_shrunk_to_the_budget(method: str):
    budget = PixelBudget(112 * 112, 224 * 224)
    for box in ([0.1, 0.1, 0.15, 0.2], [0, 0, 1, 1]):
        _, view = run("enhance", method=method, box=box, budget=budget)
        assert 112 * 112 <= view.shape[0] * view.shape[1] <= 224 * 224
    assert COFFEE.flags.writeable
    np.testing.assert_array_equal(COFFEE, skimage.data.coffee())
