"""Rates of API keys that outlast restarts and hold for all gateways that share ``run.dir``.

Each accepted request is a record in a file of its key and day (UTC), to which all gateways append and which each of them follows.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pixelis.serve.limits import Allowance, RateLimits

log = logging.getLogger(__name__)

FOLDER = "quotas"
DAY = 86_400
RECORD = struct.Struct("<d8s")
"""Seconds since the epoch, and a random name of the gateway's process."""
MAX_AHEAD_S = 60.0
"""Records of a later time were written under a wrong clock, and are ignored."""


class KeyQuota:
    """The rate of the key ``name``, 0 for no limit. ``clock`` returns seconds since the epoch.

    While the disk refuses, a gateway counts its own requests only, until it ends.
    """

    def __init__(
        self,
        run_dir: str | Path,
        name: str,
        per_minute: int,
        per_hour: int,
        per_day: int,
        clock: Callable[[], float] = time.time,
    ):
        self.folder, self.name, self.clock = Path(run_dir) / FOLDER, name, clock
        self.limits = RateLimits(per_minute, per_hour, clock, per_day=per_day)
        self.process = secrets.token_bytes(8)
        self.offsets: dict[str, int] = {}
        self.refused = False

    def take(self) -> Allowance | None:
        """Count a request unless it is refused; see ``RateLimits.take``."""
        now = self.clock()
        try:
            self._follow(now)
        except OSError as error:
            self._refuse(error)
        times = self.limits.accepted.get(self.name, deque())
        while times and times[-1] > now + MAX_AHEAD_S:  # this gateway's clock was wrong itself
            times.pop()
        allowance = self.limits.take(self.name)
        if allowance is not None and allowance.retry_after_s is None:
            try:
                self._append(now)
            except OSError as error:
                self._refuse(error)
        return allowance

    def _file(self, day: int) -> Path:
        return self.folder / f"{self.name}.{day}"

    def _follow(self, now: float) -> None:
        """Count what other processes have accepted since the last call."""
        today, others = int(now // DAY), list[float]()
        for day in (today - 1, today):
            file = self._file(day)
            try:
                with open(file, "rb") as records:
                    records.seek(self.offsets.get(file.name, 0))
                    data = records.read()
            except FileNotFoundError:
                continue
            data = data[: len(data) - len(data) % RECORD.size]
            self.offsets[file.name] = self.offsets.get(file.name, 0) + len(data)
            others += [at for at, process in RECORD.iter_unpack(data) if process != self.process and at <= now + MAX_AHEAD_S]
        if others:
            self.limits.accepted[self.name] = deque(sorted([*self.limits.accepted.get(self.name, ()), *others]))

    def _append(self, now: float) -> None:
        file = self._file(int(now // DAY))
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file(int(now // DAY) - 2).unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as records:
            records.write(RECORD.pack(now, self.process))

    def _refuse(self, error: OSError) -> None:
        if not self.refused:
            log.warning("the rate of the key %s is counted in this gateway only: %s", self.name, error)
        self.refused = True
