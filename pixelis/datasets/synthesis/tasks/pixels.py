"""Tasks about pixel values, which a short program computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from pixelis.datasets.synthesis import geometry
from pixelis.datasets.synthesis.sample import Sample, forms
from pixelis.records import Demonstration

CHANNELS = ("red", "green", "blue")
MIN_PIXELS = 200
"""Number of pixels of one colour from which on they are counted."""


def _run(sample: Sample, code: str, media: str, **place: Any) -> str:
    think = sample.think("compute", sample.topic)
    observation = sample.session.call(think, "python", target=media, code=code, **place)
    sample.check(observation.data["error"] is None, "measure_differs")
    sample.narrator.remark("printed", value=observation.text)
    return observation.text


def colour_pixels(sample: Sample) -> Demonstration:
    region = sample.pick([r for r in sample.named if r.mask is not None])
    picture, mask = sample.picture(region), sample.mask(region)
    assert mask is not None
    colours, counts = np.unique(picture[mask], axis=0, return_counts=True)
    rgb = [int(v) for v in colours[int(counts.argmax())]]
    truth = int((picture == rgb).all(-1).sum())
    sample.require(truth >= MIN_PIXELS)
    sample.ask(red=rgb[0], green=rgb[1], blue=rgb[2])
    printed = _run(sample, f"print(int((image == {rgb}).all(axis=-1).sum()))", region.media)
    sample.check(printed == str(truth), "measure_differs")
    return sample.done(printed, value=printed)


def channel_mean(sample: Sample) -> Demonstration:
    region = sample.pick(sample.named)
    channel = int(sample.rng.integers(3))
    sample.ask(what=sample.names[region.id], channel=CHANNELS[channel])
    picture = sample.picture(region)
    size = np.array([*picture.shape[1::-1]] * 2)
    x0, y0, x1, y1 = np.round(np.array(region.box) * size).astype(int).tolist()
    sample.require(x1 > x0 and y1 > y0)
    truth = float(picture[y0:y1, x0:x1, channel].mean())  # over the annotated box, 0..255
    sample.require(truth >= 20)
    box = geometry.outward(region.box, sample.grid)
    printed = _run(sample, f"print(round(float(image[..., {channel}].mean()), 1))", region.media, box=box)
    return sample.done_measured(printed, f"{truth:.2f}")


PIXELS = forms(colour_pixels, channel_mean)
