"""Backgrounds of the pictures that pretrain the base of pixelis-nano: photographs and recoloured, cropped
variants.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image

from pixelis.datasets import cards

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def photo_backgrounds(folder: Path, seed: int, per_folder: int = 16) -> list[cards.Background]:
    """Return the photographs under a folder, each unchanged and as one variant.

    Small pictures, pictures with transparency, duplicates and drawings on a uniform background are skipped.
    At most `per_folder` photographs of one directory are used, because a background takes 4 MB.
    """
    backgrounds, thumbnails = [], set()
    by_folder: dict[Path, list[Path]] = {}
    for path in sorted(
        p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.stat().st_size > 40_000
    ):
        by_folder.setdefault(path.parent, []).append(path)
    selected = [
        path
        for paths in by_folder.values()
        for path in paths[:: max(1, len(paths) // per_folder)][:per_folder]
    ]
    for path in selected:
        try:
            with Image.open(path) as image:
                if (
                    image.mode not in ("RGB", "L")
                    or min(image.size) < 240
                    or max(image.size) > 4 * min(image.size)
                ):
                    continue
                image.draft("RGB", (1440, 1440))
                photograph = image.convert("RGB")
        except OSError:
            continue
        levels = np.bincount(np.asarray(photograph.convert("L").resize((64, 64))).ravel() // 16, minlength=16)
        thumbnail = (np.asarray(photograph.resize((4, 4), Image.Resampling.BOX)) // 16).tobytes()
        if levels.max() < 0.5 * levels.sum() and thumbnail not in thumbnails:
            thumbnails.add(thumbnail)
            backgrounds += [
                cards.Background(photograph),
                _variant(photograph, np.random.default_rng([len(thumbnails), seed])),
            ]
    return backgrounds


def own_backgrounds(seed: int) -> list[cards.Background]:
    """Return the training photographs of the cards data and two variants of each."""
    backgrounds = list(cards.world("train").backgrounds)
    for number, background in enumerate(list(backgrounds)):
        photograph = Image.fromarray(background.pixels)
        backgrounds += [
            _variant(photograph, np.random.default_rng([number, copy, seed])) for copy in range(2)
        ]
    return backgrounds


def _variant(photograph: Image.Image, rng: np.random.Generator) -> cards.Background:
    """Crop a photograph, permute its colour channels and recolour it."""
    share = rng.uniform(0.35, 0.9)
    width, height = (int(side * share) for side in photograph.size)
    left = int(rng.integers(photograph.width - width + 1))
    top = int(rng.integers(photograph.height - height + 1))
    pixels = np.asarray(photograph.crop((left, top, left + width, top + height)))[..., rng.permutation(3)]
    return cards.Background(Image.fromarray(recolored(pixels, rng, 0.5)))


def recolored(pixels: np.ndarray, rng: np.random.Generator, strength: float) -> np.ndarray:
    """Change brightness, contrast and white balance at random. pixels: uint8 [H, W, 3]."""
    gamma, gain = math.exp(rng.uniform(-strength, strength)), math.exp(rng.uniform(-strength, strength) / 1.5)
    balance = np.exp(rng.uniform(-strength / 2, strength / 2, 3))
    level = (np.linspace(0, 1, 256)[:, None] ** gamma - 0.5) * gain + 0.5
    table = np.clip(level * balance * 255, 0, 255).astype(np.uint8)
    return np.stack([table[pixels[..., c], c] for c in range(3)], axis=-1)
