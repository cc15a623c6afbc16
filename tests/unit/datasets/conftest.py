"""Fixtures that several tests of data share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with pictures of 80 x 40 pixels, ``images/0.png`` to ``images/3.png``."""
    (tmp_path / "images").mkdir()
    for i in range(4):
        Image.fromarray(np.full((40, 80, 3), 60 * i, np.uint8)).save(tmp_path / "images" / f"{i}.png")
    return tmp_path
