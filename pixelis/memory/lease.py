"""Admits one process to a folder, also where file locks do not reach other machines.

The owner locks the file ``lock`` on its machine and counts up in it every BEAT_S seconds. A process on
another machine watches the count for LEASE_S seconds: it is refused if the count changes, otherwise it takes
the folder over. Clocks are not compared.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from pixelis.errors import InfraFailure

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""Seconds without a beat after which another machine takes over."""
BEAT_S = 2.0
POLL_S = 0.05
SIZE = 512
"""Bytes of a lease: always as many, so that a beat needs no space on a full disk."""


class Lease:
    """The lease of a folder, held until ``release``.

    Raises InfraFailure ``locked`` if another process keeps it for ``wait_s`` seconds on this machine, or has
    it on another one; OSError.
    """

    def __init__(self, folder: Path, wait_s: float):
        self.path, self.owner, self.count = folder / "lock", uuid.uuid4().hex, 0
        self.lost = False
        """Whether another process has taken the folder over, after this one was suspended or cut off."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._stop = threading.Event()
        try:
            self._lock(wait_s)
            self._watch()
            self._write()
        except BaseException:
            os.close(self._file)
            raise
        self._thread = threading.Thread(target=self._beat, name="memory-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise InfraFailure ``locked`` if the folder has another owner. Reads the file if a beat is late."""
        if not self.lost and time.monotonic() - self.beat_at > LEASE_S / 2:
            self.lost = self._read().get("owner") != self.owner
        if self.lost:
            raise self._locked(self._read())

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        try:
            if self._read().get("owner") == self.owner:
                os.pwrite(self._file, b" " * SIZE, 0)
        except OSError as error:
            log.warning("the lease of %s is not given back: %s", self.path, error)
        os.close(self._file)

    def _lock(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._locked(self._read()) from None
                time.sleep(POLL_S)

    def _watch(self) -> None:
        """Wait until the owner on another machine, if there is one, has not beaten for LEASE_S seconds."""
        first, deadline = self._read(), time.monotonic() + LEASE_S
        # On this machine the lock has shown that the owner is gone
        while first and first.get("boot") != boot_id():
            if self._read() != first:
                raise self._locked(self._read())
            if time.monotonic() > deadline:
                log.warning(
                    "%s: process %s on %s is gone, taking over",
                    self.path,
                    first.get("pid"),
                    first.get("host"),
                )
                return
            time.sleep(POLL_S)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                if self._read().get("owner") != self.owner:
                    self.lost = True
                    log.critical("%s was taken over: this process stores nothing any more", self.path)
                    return
                self._write()
            except OSError as error:
                log.warning("the lease %s cannot be written: %s", self.path, error)

    def _write(self) -> None:
        self.count += 1
        lease = {
            "owner": self.owner,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot_id(),
            "count": self.count,
        }
        os.pwrite(self._file, json.dumps(lease).encode().ljust(SIZE), 0)
        os.fdatasync(self._file)  # a shared file system sends it now
        self.beat_at = time.monotonic()

    def _read(self) -> dict[str, Any]:
        """The lease in the file; empty if there is none.

        The file is opened anew, as shared file systems require.
        """
        try:
            lease = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return lease if isinstance(lease, dict) else {}

    def _locked(self, lease: dict[str, Any]) -> InfraFailure:
        process, host = lease.get("pid", "?"), lease.get("host", "this machine")
        return InfraFailure(
            f"the memory in {self.path.parent} is in use by process {process} on {host}",
            code="locked",
            fix="stop the service that uses this memory.dir, or configure another one",
        )


def boot_id() -> str:
    """Identifies this machine since its last start: two machines may have the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
