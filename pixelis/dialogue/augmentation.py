"""Test-time augmentation: a session that shows the policy its pictures in a corrected light.

Samples that see another light err in other places, so their vote is right more often. A correction never moves
anything: an episode can be learnt from as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8

from pixelis.dialogue.session import Completion, SamplingParams, Session, TokenCallback
from pixelis.records import Trajectory

Pixels = UInt8[np.ndarray, "height width 3"]
Line = tuple[Float[np.ndarray, " channel"], Float[np.ndarray, " channel"]]
"""Gain and offset of each channel."""
CUTOFF = 1.0
"""Percentage of the values at either end that `autocontrast` saturates."""


def grey_world(values: UInt8[np.ndarray, "pixel channel"]) -> Line:
    """Make the mean colour grey, of the same brightness (Buchsbaum 1980)."""
    means = values.mean(0)
    return means.mean() / np.maximum(means, 1.0), np.zeros(3)


def autocontrast(values: UInt8[np.ndarray, "pixel channel"]) -> Line:
    """Stretch each channel to 0..255, without its lowest and highest percent (Limare et al. 2011)."""
    low, high = np.percentile(values, (CUTOFF, 100 - CUTOFF), axis=0)
    gain = 255 / np.maximum(high - low, 1.0)
    return gain, -low * gain


FITS: Mapping[str, Callable[[np.ndarray], Line]] = {"grey_world": grey_world, "autocontrast": autocontrast}
"""Functions by the names of `serve.augmentations`."""


def alternate(names: Sequence[str], samples: int) -> list[str | None]:
    """The augmentation of each sample of a question: in turn none and each of ``names``."""
    return list(itertools.islice(itertools.cycle([None, *names]), samples))


class Correction:
    """An augmentation fitted to the pictures of a question."""

    def __init__(self, name: str, views: Sequence[Pixels]):
        gain, offset = FITS[name](np.concatenate([view.reshape(-1, 3) for view in views]))
        levels = np.arange(256.0)[:, None] * gain + offset
        self.table = np.clip(np.round(levels), 0, 255).astype(np.uint8)

    def __call__(self, view: Pixels) -> Pixels:
        return np.stack([self.table[view[..., channel], channel] for channel in range(3)], axis=-1)


def corrected(trajectory: Trajectory, views: Sequence[Pixels], name: str) -> list[Pixels]:
    """The views of a trajectory as an `AugmentedSession` of this name shows them."""
    prompt = itertools.takewhile(lambda turn: not turn.is_policy, trajectory.turns)
    first = sum(len(turn.images) for turn in prompt)
    return [*map(Correction(name, views[:first]), views)] if first else list(views)


class AugmentedSession:
    """A session that corrects its views, by those of the question; ``first``: their number, if more come first."""

    def __init__(self, session: Session, name: str, first: int | None = None):
        self.session, self.name, self.first = session, name, first
        self.begun = False
        self.correction: Correction | None = None

    async def generate(
        self,
        tokens: Sequence[int],
        views: Sequence[np.ndarray],
        sampling: SamplingParams,
        on_tokens: TokenCallback | None = None,
    ) -> Completion:
        if not self.begun and (shown := views[: self.first]):
            self.correction = Correction(self.name, shown)
        self.begun = True
        shown = list(map(self.correction, views)) if self.correction is not None else views
        return await self.session.generate(tokens, shown, sampling, on_tokens)

    def keep(self) -> None:
        self.session.keep()

    def close(self) -> None:
        self.session.close()
