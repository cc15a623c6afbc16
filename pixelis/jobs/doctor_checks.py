"""Findings of `pixelis doctor`, and what its checks share. Uses the standard library only."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

GIB = 2**30

State = Literal["ok", "missing", "wrong", "note"]


@dataclass(frozen=True)
class Check:
    """One finding. `needed`: required by the quickstart."""

    area: str
    name: str
    state: State
    detail: str
    fix: str = ""
    needed: bool = False


def version(name: str) -> str | None:
    """Installed version of a distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_text(path: str | Path) -> str:
    """Content of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def output(command: list[str], timeout_s: float) -> str:
    """Standard output of a command; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
