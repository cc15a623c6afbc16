"""The command line in this process, for tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from pixelis.jobs import cli

Command = Callable[..., tuple[int, str, str]]


def pixelis(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Run a command; returns its exit code and what it wrote to stdout and stderr."""
    monkeypatch.setattr("sys.argv", ["pixelis", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as left:
        code = int(left.code or 0)
    return code, *capsys.readouterr()


def job_of(name: str) -> Any:
    """The module of a job."""
    return importlib.import_module(f"pixelis.jobs.{name}")
