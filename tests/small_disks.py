"""Small disks that tests fill or make read-only; where mounting is not allowed, a test is skipped by name."""

from __future__ import annotations

import os
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
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True
    )
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


@contextmanager
def failing_disk(folder: Path) -> Iterator[Path]:
    """A disk of 32 MB at ``folder`` that the kernel makes read-only when it fails, like that of a server."""
    image = folder.with_suffix(".img")
    image.write_bytes(b"")
    os.truncate(image, 32_000_000)
    folder.mkdir()
    for command in (["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], _mount(image, folder)):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"mounting a disk of one's own is not possible here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fail(folder: Path) -> None:
    """Let a `failing_disk` fail: from now on it is read-only, also for files that are open."""
    device = next(
        line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {folder} " in line
    )
    Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("1")


def mount_again(folder: Path) -> None:
    """Mount a `failing_disk` that nobody uses any more, as a server does when it starts again."""
    subprocess.run(["umount", str(folder)], check=True)
    subprocess.run(_mount(folder.with_suffix(".img"), folder), check=True)


def _mount(image: Path, folder: Path) -> list[str]:
    return ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)]


def freeze(folder: Path, frozen: bool = True) -> None:
    """Make everything in ``folder``, on a `failing_disk`, immutable, open files too; or mutable again."""
    subprocess.run(["chattr", "-R", "+i" if frozen else "-i", str(folder)], check=True)
