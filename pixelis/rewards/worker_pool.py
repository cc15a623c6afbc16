"""A pool of killable worker processes: a worker that hangs or crashes is replaced, and only its task fails."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from pixelis.errors import DataFailure, InfraFailure

START_TIMEOUT_S = 120.0
MAX_REPLY_BYTES = 64_000_000


class _WorkerEnded(Exception):
    """The worker ended, or sent something else than a reply."""


class _Worker:
    """One process and its pipes. Only the first request waits for its start."""

    def __init__(self, memory_bytes: int, environment: Mapping[str, str], warm: str | None):
        command = [sys.executable, "-m", "pixelis.rewards.worker", str(memory_bytes)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, env=dict(environment), start_new_session=True)
        self.warm, self.is_started, self.is_late = warm, False, False

    def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply. Raises TimeoutError after ``timeout_s``, which excludes the start, and _WorkerEnded."""
        if not self.is_started:
            try:
                self._exchange({"task": self.warm or "start"}, START_TIMEOUT_S)
            except (TimeoutError, _WorkerEnded) as error:
                raise InfraFailure(
                    f"a scoring process did not start: {error!r}",
                    code="scorer_start",
                    fix="see its output in the log above",
                ) from None
            self.is_started = True
        return self._exchange(message, timeout_s)

    def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a line and read one. A timer kills a late process, which ends the wait."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None

        def give_up() -> None:
            self.is_late = True
            self.kill()

        timer = threading.Timer(timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            self.process.stdin.write(json.dumps({**message, "timeout_s": timeout_s}).encode() + b"\n")
            self.process.stdin.flush()
            reply = json.loads(self.process.stdout.readline(MAX_REPLY_BYTES))
        except (OSError, ValueError):
            reply = None
        finally:
            timer.cancel()
            timer.join()
        if self.is_late:
            raise TimeoutError
        if not isinstance(reply, dict):
            raise _WorkerEnded(f"exit status {self.process.poll()}")
        return reply

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what a dead process did not read
                    pipe.close()


class WorkerPool:
    """``size`` workers with one request each at a time; calls from many threads wait for a free one.

    ``memory_bytes`` caps a worker's address space; ``environment`` replaces this process's variables; the
    task ``warm`` is run before the first request.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float,
        memory_bytes: int = 0,
        environment: Mapping[str, str] | None = None,
        warm: str | None = None,
    ):
        self.size, self.timeout_s = size, timeout_s
        environment = os.environ if environment is None else environment
        # Workers must find the modules that this process finds: a job's folder need not be on PYTHONPATH.
        path = os.pathsep.join(p for p in sys.path if p)
        self._spawn = lambda: _Worker(memory_bytes, {**environment, "PYTHONPATH": path}, warm)
        self._idle: queue.Queue[_Worker | None] = queue.Queue()
        self._lock = threading.Lock()
        self._closed = False
        self.replaced = 0
        for _ in range(size):
            self._idle.put(self._spawn())

    def call(self, message: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        """The value of a task of ``pixelis.rewards.worker``.

        DataFailure with the worker's code, ``timeout`` or ``crashed``; InfraFailure when workers do not
        start.
        """
        timeout_s = timeout_s or self.timeout_s
        worker = self._idle.get()
        if worker is None:
            self._idle.put(None)
            raise InfraFailure("the pool of scoring processes is closed", code="closed")
        usable = False
        try:
            reply = worker.request(message, timeout_s)
            usable = True
        except TimeoutError:
            raise DataFailure(f"no result in {timeout_s:g} s", code="timeout") from None
        except _WorkerEnded as error:
            raise DataFailure(f"the scoring process ended: {error}", code="crashed") from None
        finally:
            with self._lock:
                if self._closed or not usable:
                    worker.close()
                if not self._closed:
                    self.replaced += not usable
                    self._idle.put(worker if usable else self._spawn())
        if "error" in reply:
            raise DataFailure(str(reply.get("message", "")), code=str(reply["error"]))
        return reply.get("value")

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (worker := self._idle.get_nowait()) is not None:
                    worker.close()
        self._idle.put(None)
