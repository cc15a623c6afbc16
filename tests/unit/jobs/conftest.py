"""The command line in this process."""

from __future__ import annotations

from functools import partial

import command_line
import pytest


@pytest.fixture
def pixelis(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> command_line.Command:
    """A function that runs a command; returns its exit code and what it wrote to stdout and stderr."""
    return partial(command_line.pixelis, capsys, monkeypatch)
