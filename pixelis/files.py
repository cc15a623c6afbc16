"""Durable files: written aside and renamed, locked between processes; failures of the disk by their reason."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import filelock

from pixelis.errors import BadInput, InfraFailure

NO_SPACE, READ_ONLY, IO_ERROR, DAMAGED = "no_space", "read_only", "io_error", "damaged"
"""Codes of the InfraFailure that ``disk_failure`` returns."""
REASONS = {NO_SPACE: "no space", READ_ONLY: "read-only", IO_ERROR: "I/O error", DAMAGED: "damaged"}
FIXES = {
    NO_SPACE: "free some space on this disk",
    READ_ONLY: "mount it writable, or correct its permissions",
    IO_ERROR: "check the disk and its limits (dmesg, quota, ulimit -f)",
    DAMAGED: (
        "restart the service, which saves every intact record, and load the last Parquet export "
        "(docs/memory.md)"
    ),
}
MIN_FREE_BYTES = 1 << 20
"""Less free space counts as none: SQLite names some failures to grow a file an I/O error."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_ERRORS = _FULL | _FORBIDDEN | {errno.EIO, errno.EFBIG}


def disk_failure(path: Path, error: OSError | sqlite3.Error) -> InfraFailure:
    """The failure to write ``path``, or to read it if damaged, as an InfraFailure by its reason."""
    code = _code(path, error)
    return InfraFailure(f"the disk refuses {path}: {REASONS[code]} ({error})", code=code, fix=FIXES[code])


@contextmanager
def disk_failures(path: Path) -> Iterator[None]:
    """Raise an OSError of the disk of ``path`` as InfraFailure; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _ERRORS:
            raise
        raise disk_failure(Path(error.filename or path), error) from error


def has_space(path: Path) -> bool:
    """Whether the disk of ``path`` has at least MIN_FREE_BYTES for this process."""
    return shutil.disk_usage(path if path.exists() else path.parent).free >= MIN_FREE_BYTES


@contextmanager
def replacing(path: str | Path, mode: str = "wb", permissions: int | None = None) -> Iterator[IO[Any]]:
    """Open a file beside ``path``; at the end it is flushed to disk and takes the place of ``path``.

    Readers see the old content or the new, also after a power failure. An error leaves the old content.
    ``permissions``: mode bits; None: those that the umask leaves.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.aside")
    try:
        with open(aside, mode, encoding=None if "b" in mode else "utf-8") as file:
            if permissions is not None:
                os.chmod(aside, permissions)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: str | Path, value: Any) -> None:
    with replacing(path, "w") as file:
        json.dump(value, file, indent=1)


@contextmanager
def damaged_file(path: Path, fix: str) -> Iterator[None]:
    """Raise whatever shows that the content of ``path`` is damaged as BadInput ``damaged``."""
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        message = f"{path} is damaged: {type(error).__name__} {error}"
        raise BadInput(message, code=DAMAGED, fix=fix) from error


@contextmanager
def locked(path: str | Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock file ``path``; the kernel frees it when its holder dies.

    Raises filelock.Timeout if it is held and ``wait`` is false.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path, mode=0o600, blocking=wait):
        yield


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk: a rename is durable only then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _code(path: Path, error: OSError | sqlite3.Error) -> str:
    if isinstance(error, OSError):
        return NO_SPACE if error.errno in _FULL else READ_ONLY if error.errno in _FORBIDDEN else IO_ERROR
    number = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_IOERR) & 0xFF
    if number in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DAMAGED
    if number == sqlite3.SQLITE_FULL:
        return NO_SPACE
    folder = path.parent if path.parent.exists() else Path("/")
    if number == sqlite3.SQLITE_READONLY or _is_read_only(folder):
        return READ_ONLY
    return IO_ERROR if has_space(folder) else NO_SPACE


def _is_read_only(folder: Path) -> bool:
    """Whether no file can be created in ``folder``: some read-only disks say so only then."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.errno in _FORBIDDEN
    return False
