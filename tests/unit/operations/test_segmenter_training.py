"""The views on which the packaged segmenter is trained, and that its network can be trained further."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import segmenter_data as data
import skimage.data
from PIL import Image

from pixelis.operations import mobilenet


def photograph() -> data.View:
    """A disc and a small square on a photograph."""
    picture = np.ascontiguousarray(skimage.data.coffee()[:400, :600])
    masks = np.zeros((2, 400, 600), np.uint8)
    cv2.circle(masks[0], (150, 250), 60, 1, -1)
    masks[1, 60:100, 480:520] = 1
    return data.View(picture, masks > 0)


def test_pictures_of_excluded_folders_are_not_trained_on(tmp_path: Path):
    coffee, cat, rocket = skimage.data.coffee(), skimage.data.chelsea(), skimage.data.rocket()
    Image.fromarray(coffee).resize((300, 200)).save(tmp_path / "smaller.jpg", quality=60)
    Image.fromarray(rocket[:, ::-1]).save(tmp_path / "mirrored.jpg")
    views = [data.View(picture, np.ones((1, *picture.shape[:2]), bool)) for picture in (coffee, cat, rocket)]
    (kept,) = data.unseen(views, [tmp_path])
    assert kept is views[1]


@pytest.mark.parametrize("framing", ["whole", "point", "box"])
def test_a_crop_contains_the_framed_object_whole(framing: str):
    rng, whole = np.random.default_rng(3), photograph()
    shares = []
    for _ in range(30):
        view = data.crop(whole, 96, framing, rng)
        if view is None:
            continue
        assert view.picture.shape == (96, 96, 3)
        inside = view.masks[0]
        shares.append(inside.mean())
        w, h = cv2.boundingRect(inside.astype(np.uint8))[2:]
        filled = inside.sum() / (w * h)
        # Square, disc
        assert filled == pytest.approx(1.0, abs=0.1) or filled == pytest.approx(np.pi / 4, abs=0.1)
    assert len(shares) > 10
    if framing == "box":
        # The surroundings are about .35 of the box on each side, which inference takes too.
        assert min(shares) > 0.5 * np.pi / 4 / (1 + 2 * mobilenet.BOX_MARGIN) ** 2
    if framing == "whole":
        assert min(shares) < 0.1


def test_the_packaged_network_is_loaded_for_further_training():
    pytest.importorskip("onnx")
    import torch
    from segmenter_model import load

    picture = np.ascontiguousarray(skimage.data.coffee()[:256, :256])
    masks, scores = mobilenet.candidates(picture, (0, 0, 256, 256), (120.0, 130.0), None)
    with torch.no_grad():
        same, equal = load(mobilenet.WEIGHTS).eval()(
            torch.from_numpy(picture[None]).float(),
            torch.from_numpy(mobilenet.prompt(256, (120.0, 130.0), None)[None]),
        )
    np.testing.assert_allclose(masks, same[0].numpy(), atol=1e-3)
    np.testing.assert_allclose(scores, equal[0].numpy(), atol=1e-3)
