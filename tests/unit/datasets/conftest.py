"""Fixtures that several tests of data share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

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


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """Closes servers of this machine and their clients after the test: ``server = opened(ChatServer())``."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ExitStack() as stack:
        yield lambda one: stack.enter_context(closing(one))
