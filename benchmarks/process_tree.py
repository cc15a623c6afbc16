"""Processes of a job under test: found by a mark in their environment, named by role, with their memory and
open files.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

MARK = "PIXELIS_SOAK_MARK"
"""Environment variable that all processes of a tree inherit."""
_TITLE = re.compile(r"ray::([\w:]+)")


@dataclass(frozen=True)
class Usage:
    """Processes of one role at one time: number, private bytes (USS) and open files."""

    processes: int
    bytes: int
    files: int


def marked(value: str) -> list[psutil.Process]:
    """Running processes whose environment has ``PIXELIS_SOAK_MARK=value``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def role(process: psutil.Process) -> str:
    """The actor class of a Ray process, otherwise the name of the program.

    Raises psutil.Error if the process is gone.
    """
    command = process.cmdline()
    title = " ".join(command)
    if match := _TITLE.match(title):
        return match[1].removeprefix("ServeReplica:pixelis:")
    for program in (
        "raylet",
        "gcs_server",
        "pixelis.jobs",
        "dashboard",
        "log_monitor",
        "monitor.py",
        "benchmarks",
    ):
        if program in title:
            return program
    return process.name()


def usage(processes: Iterable[psutil.Process]) -> dict[str, Usage]:
    """Usage by role.

    Processes that end meanwhile, or that wait for work as spare Ray workers, are left out.
    """
    rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            rows[role(process)].append((process.memory_full_info().uss, process.num_fds()))
    rows.pop("IDLE", None)
    return {
        name: Usage(len(r), sum(b for b, _ in r), sum(f for _, f in r)) for name, r in sorted(rows.items())
    }


def kill_role(processes: Iterable[psutil.Process], roles: Sequence[str]) -> str | None:
    """Send SIGKILL to the first process whose role is one of ``roles``; returns its role, None if there is
    none.
    """
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if (name := role(process)) in roles:
                process.kill()
                return name
    return None


def kill_all(value: str, timeout_s: float = 60.0) -> int:
    """Send SIGKILL to every marked process until none is left; returns how many there were."""
    deadline, pids = time.monotonic() + timeout_s, set[int]()
    while processes := marked(value):
        for process in processes:
            pids.add(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(processes)} processes survive SIGKILL")
        time.sleep(0.05)
    return len(pids)


def growth(
    samples: Sequence[dict[str, Usage]], value: Callable[[Usage], float], role: str | None = None
) -> float:
    """Median of the last third of the samples / median of their second third, of one role or summed over
    all.
    """
    totals = [sum(value(u) for name, u in sample.items() if role in (None, name)) for sample in samples]
    third = max(1, len(totals) // 3)
    before, after = totals[-2 * third : -third] or totals, totals[-third:]
    return statistics.median(after) / max(1e-9, statistics.median(before))


def table(samples: Sequence[dict[str, Usage]]) -> list[dict[str, Any]]:
    """For each role that is there in most samples: processes, MB and open files at the end of the run, and
    their growth.
    """
    roles = sorted({name for sample in samples for name in sample})
    rows = []
    for name in roles:
        having = [sample for sample in samples if name in sample]
        if 2 * len(having) < len(samples):
            continue
        last = having[-max(1, len(having) // 3) :]
        rows.append(
            {
                "role": name,
                "processes": statistics.median(sample[name].processes for sample in last),
                "MB": round(statistics.median(sample[name].bytes for sample in last) / 1e6, 1),
                "MB, last third / second": round(growth(having, lambda u: u.bytes, name), 4),
                "open files": statistics.median(sample[name].files for sample in last),
                "files, last third / second": round(growth(having, lambda u: u.files, name), 4),
            }
        )
    return rows
