"""Uploaded pictures and clips by key, on disk, for all gateways that share ``run.dir``.

A file is one line of JSON, then its content.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from pixelis.config.serve import FilesConfig
from pixelis.errors import BadInput
from pixelis.files import disk_failures, locked, replacing, sync
from pixelis.operations.encoded import media_type
from pixelis.records import new_id

FOLDER = "files"
FILE_ID = r"^file_[0-9a-f]{16}$"
NAMELESS = "_"
"""Folder of the key of the environment, and of a service without keys: no key has this name."""
PARTIAL_S = 3600.0
"""Age at which the remains of an incomplete upload are removed."""
Purpose = Literal["vision", "user_data"]


class StoredFile(BaseModel):
    """A file without its content; times in seconds since the epoch."""

    id: str
    filename: str
    purpose: Purpose
    media_type: str
    bytes: int
    created_at: int
    expires_at: int


Files = list[StoredFile]


class FileStore:
    """The files of all keys below ``run_dir``. ``key`` is empty for the key of the environment."""

    def __init__(self, run_dir: str | Path, config: FilesConfig, clock: Callable[[], float] = time.time):
        self.root, self.config, self.clock = Path(run_dir) / FOLDER, config, clock

    def add(
        self, key: str, content: bytes, filename: str, purpose: Purpose, ttl_s: float | None = None
    ) -> StoredFile:
        """Store a file durably; ``ttl_s`` shortens the configured lifetime.

        Raises BadInput ``file_quota_exceeded``, and InfraFailure with the code of the disk's failure.
        """
        now = self.clock()
        file = StoredFile(
            id=new_id("file"),
            filename=filename,
            purpose=purpose,
            media_type=media_type(content),
            bytes=len(content),
            created_at=int(now),
            expires_at=int(now + min(ttl_s or self.config.ttl_s, self.config.ttl_s)),
        )
        folder = self._folder(key)
        with disk_failures(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(folder / ".lock"):
                files, c = self._list(folder), self.config
                used = sum(stored.bytes for stored in files)
                if len(files) >= c.max_files or used + len(content) > c.max_bytes:
                    allowed = f"{c.max_files} of {c.max_bytes} are allowed"
                    raise BadInput(
                        f"this key has {len(files)} files of {used} bytes; {allowed}",
                        code="file_quota_exceeded",
                        fix="delete files that are no longer needed",
                    )
                with replacing(folder / file.id, permissions=0o600) as out:
                    out.write(file.model_dump_json().encode() + b"\n" + content)
        return file

    def list(self, key: str) -> Files:
        """The files of a key, oldest first. Removes expired ones."""
        return self._list(self._folder(key))

    def sweep(self) -> None:
        for folder in self.root.glob("*/"):
            self._list(folder)

    def get(self, key: str, id: str) -> StoredFile:
        """Raises BadInput ``file_not_found``, also for other keys' and expired files."""
        return self._open(key, id, False)[0]

    def read(self, key: str, id: str) -> tuple[StoredFile, bytes]:
        """Raises BadInput ``file_not_found``."""
        return self._open(key, id, True)

    def delete(self, key: str, id: str) -> None:
        self.get(key, id)
        folder = self._folder(key)
        with disk_failures(folder):
            (folder / id).unlink(missing_ok=True)
            sync(folder)

    def _folder(self, key: str) -> Path:
        return self.root / (key or NAMELESS)

    def _list(self, folder: Path) -> Files:
        files, now = Files(), self.clock()
        with contextlib.suppress(FileNotFoundError):
            for path in [*folder.iterdir()]:
                with contextlib.suppress(FileNotFoundError):  # another gateway removes the same
                    if path.name.startswith(".file_") and path.stat().st_mtime < time.time() - PARTIAL_S:
                        path.unlink()
                    elif (file := _read(path, content=False)[0]) is not None:
                        if file.expires_at > now:
                            files.append(file)
                        else:
                            path.unlink()
        return sorted(files, key=lambda file: (file.created_at, file.id))

    def _open(self, key: str, id: str, content: bool) -> tuple[StoredFile, bytes]:
        file = None
        if re.match(FILE_ID, id):
            with contextlib.suppress(FileNotFoundError):
                file, data = _read(self._folder(key) / id, content)
        if file is None or file.expires_at <= self.clock():
            raise BadInput(
                f"no file {id[:80]!r} is stored",
                code="file_not_found",
                fix="upload it again with POST /v1/files",
            )
        return file, data


def _read(path: Path, content: bool) -> tuple[StoredFile | None, bytes]:
    """A file and, if requested, its content; None if it is damaged or none of the store."""
    if re.match(FILE_ID, path.name) is None:
        return None, b""
    with open(path, "rb") as stored:
        try:
            file = StoredFile.model_validate_json(stored.readline(8192))
        except ValidationError:
            return None, b""
        data = stored.read() if content else b""
    return (file, data) if not content or len(data) == file.bytes else (None, b"")
