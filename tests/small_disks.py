"""Small disks that tests fill: tmpfs mounts. Where mounting is not allowed, such a test is skipped by name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: float) -> Iterator[Path]:
    """A file system of this size at ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={int(megabytes * 1024)}k"
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting a small disk is not possible here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk of ``folder`` with one file, to be removed to make room again."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def make_read_only(folder: Path) -> None:
    """Remount a small disk that nobody writes to as read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
