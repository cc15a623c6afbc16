"""Colour names: the eleven basic terms of English (Berlin and Kay), beige and cyan, by regions of CIELAB."""

from __future__ import annotations

import cv2
import numpy as np

NAMES = (
    "black", "white", "grey", "red", "orange", "brown", "yellow", "green", "cyan", "blue", "purple", "pink", "beige",
)  # fmt: skip
BETWEEN = 7.0
"""Degrees of hue (CIELAB) that people disagree by when they name colours."""
_CODE = {name: code for code, name in enumerate(NAMES)}


def to_lab(colours: np.ndarray) -> np.ndarray:
    """sRGB uint8 [n, 3] -> CIELAB float32 [n, 3] (D65): L 0..100, a and b about -128..127."""
    return cv2.cvtColor(np.ascontiguousarray(colours[None]).astype(np.float32) / 255, cv2.COLOR_RGB2LAB)[0]


def codes(lab: np.ndarray) -> np.ndarray:
    """CIELAB [n, 3] -> index of each colour's name in NAMES, [n]."""
    light = lab[:, 0]
    chroma = np.hypot(lab[:, 1], lab[:, 2])
    hue = np.degrees(np.arctan2(lab[:, 2], lab[:, 1])) % 360
    red, orange, yellow = (hue >= 12) & (hue < 48), (hue >= 48) & (hue < 82), (hue >= 82) & (hue < 112)
    faint = 9.0 + 5.0 * np.clip((60 - light) / 60, 0, 1)  # least chroma of a colour; higher in the dark
    faint = faint + 3 * ((hue >= 200) & (hue < 300))  # a bluish grey is grey
    rules = [
        ((light < 9) & (chroma < 28) | (light < 18) & (chroma < faint + 4), "black"),
        ((chroma < faint) & (light > 87), "white"),
        (chroma < faint, "grey"),
        (red & (light >= 62) & (chroma < 70), "pink"),
        (red & (light < 45) & (chroma < 36) & (hue >= 26), "brown"),
        (red, "red"),
        (orange & (light >= 65) & (chroma < 45), "beige"),
        (orange & (light < 60) & (chroma < np.where(light < 48, 78, 64)), "brown"),
        (orange, "orange"),
        (yellow & (light >= 70) & (chroma < 26), "beige"),
        (yellow & (light < 50) & (hue < 96), "brown"),
        (yellow & (light < 66) & (hue >= 96), "green"),
        (yellow, "yellow"),
        (hue < 12, "pink"),
        (hue < 177, "green"),
        (hue < 222, "cyan"),
        (hue < np.where(light < 45, 308, 304), "blue"),
        ((hue >= 335) & ((light >= 48) | (hue >= 352)), "pink"),
        ((light >= 70) & (hue >= 325), "pink"),
        ((hue >= 352) & (light < 48), "red"),
    ]
    return np.select(
        [np.broadcast_to(condition, light.shape) for condition, _ in rules],
        [_CODE[n] for _, n in rules],
        _CODE["purple"],
    )


def name(colour: np.ndarray) -> str:
    return NAMES[int(codes(to_lab(np.asarray(colour, np.uint8).reshape(1, 3)))[0])]


def between(colour: np.ndarray) -> str | None:
    """The name of another hue within BETWEEN degrees of an sRGB colour, else None."""
    lab = to_lab(np.asarray(colour, np.uint8).reshape(1, 3))
    chroma, hue = np.hypot(lab[0, 1], lab[0, 2]), np.arctan2(lab[0, 2], lab[0, 1])
    turned = np.concatenate([lab, lab, lab])
    turns = hue + np.radians([0, -BETWEEN, BETWEEN])
    turned[:, 1], turned[:, 2] = chroma * np.cos(turns), chroma * np.sin(turns)
    own, *others = (NAMES[code] for code in codes(turned))
    return next((name for name in others if name != own), None)


def dominant(colours: np.ndarray) -> tuple[list[int], str, float]:
    """The most common colour of sRGB uint8 [n, 3]: its RGB, its name, and the share of pixels with this name.

    It is the densest point of CIELAB, by mean shift, among the pixels of the most common name.
    """
    lab = to_lab(colours)
    named = codes(lab)
    counts = np.bincount(named, minlength=len(NAMES))
    winner = int(np.argmax(counts))
    of_name = named == winner
    lab, colours = lab[of_name], colours[of_name]
    cells = np.floor(lab / 8).astype(np.int64) @ np.array([10_000, 100, 1])
    _, cell, counts_by_cell = np.unique(cells, return_inverse=True, return_counts=True)
    close = cell == int(np.argmax(counts_by_cell))
    for _ in range(4):
        close = np.linalg.norm(lab - lab[close].mean(0), axis=1) < 12
        if not close.any():
            close = np.ones(len(lab), bool)
    return (
        [round(v) for v in colours[close].mean(0).tolist()],
        NAMES[winner],
        float(counts[winner] / len(named)),
    )
