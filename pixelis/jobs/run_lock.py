"""Admits one job to a run folder, whichever machine it is on."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from pixelis.errors import BadConfig
from pixelis.files import disk_failures, locked, write_json

LEASE_S, BEAT_S = 15.0, 1.5
"""Seconds without a beat after which another machine takes over, and between two beats."""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold ``folder``; ``lock.json`` names its owner. Raises BadConfig if another job has it.

    The lock of a file decides on one machine. A shared file system may not pass locks on to other machines, or may
    keep that of a lost one, so the owner touches lock.json regularly: untouched for LEASE_S seconds, it is gone.
    """
    lock, record, boot = folder / ".lock", folder / "lock.json", boot_id()
    job = os.environ.get("RAY_JOB_SUBMISSION_ID", "")
    me = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": job,
        "boot": boot,
        "owner": uuid.uuid4().hex,
    }
    with ExitStack() as stack:
        with disk_failures(folder):
            if _read(record).get("boot", boot) != boot:
                _await_silence(record)
                lock.unlink(missing_ok=True)
            try:
                stack.enter_context(locked(lock, wait=False))
            except filelock.Timeout:
                raise _in_use(record) from None
            write_json(record, me)
        stop = threading.Event()
        beats = threading.Thread(target=_beat, args=(record, me["owner"], stop), name="run-lock", daemon=True)
        beats.start()
        try:
            yield
        finally:
            stop.set()
            beats.join()
            record.unlink(missing_ok=True)


def boot_id() -> str:
    """Identifies this machine since its last start: two machines may have the same name."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _await_silence(record: Path) -> None:
    """Watch the owner's record. BadConfig if it is touched.

    Looks are counted instead of seconds: a file server that stops halts the owner, too.
    """
    first = _touched(record)
    for _ in range(round(LEASE_S / BEAT_S)):
        time.sleep(BEAT_S)
        if _touched(record) not in (first, None):
            raise _in_use(record)
    print(f"{record.parent} is taken over from {_owner(record)}, which is gone", file=sys.stderr)


def _beat(record: Path, owner: object, stop: threading.Event) -> None:
    """Touch the record until ``stop``. Ends the process if it was suspended or cut off and has lost the folder."""
    while not stop.wait(BEAT_S):
        with suppress(OSError):  # the next beat may succeed
            if _read(record).get("owner", owner) != owner:
                print(
                    f"{record.parent} was taken over by {_owner(record)}: this job ends",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)  # anything else would write to the folder
            os.utime(record)


def _touched(record: Path) -> int | None:
    """Time of the last beat by the file server's clock. A network file system asks the server on opening only."""
    try:
        with open(record, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _read(record: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(record.read_bytes()))
    except FileNotFoundError:
        return {}


def _owner(record: Path) -> str:
    owner = _read(record)
    return ", ".join(f"{key} {owner[key]}" for key in ("host", "pid", "job") if owner.get(key))


def _in_use(record: Path) -> BadConfig:
    return BadConfig(f"{record.parent} is in use ({_owner(record)})", fix="wait, or choose another run.dir")
