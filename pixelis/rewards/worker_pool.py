"""A pool of killable worker processes: a worker that hangs or crashes is replaced, and only its task fails."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from pixelis.errors import DataFailure, InfraFailure
from pixelis.rewards.worker import HEADER

START_TIMEOUT_S = 120.0
"""Seconds that a worker may take to start on a busy machine."""
MAX_REPLY_BYTES = 64_000_000


class _WorkerEnded(Exception):
    """The worker ended or sent an invalid reply."""


class _Worker:
    """One process and its pipes. Only the first request waits for its start, so that replacing a worker takes no time."""

    def __init__(self, memory_bytes: int, environment: Mapping[str, str], warm: str | None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pixelis.rewards.worker", str(os.getpid()), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            bufsize=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.warm, self.ready = warm, False

    def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply. Raises TimeoutError after ``timeout_s``, which excludes the start, and _WorkerEnded."""
        if not self.ready:
            try:
                self._read(time.monotonic() + START_TIMEOUT_S)
                if self.warm:
                    self._exchange({"task": self.warm}, START_TIMEOUT_S)
            except (TimeoutError, _WorkerEnded) as error:
                raise InfraFailure(
                    f"a scoring process did not start: {error!r}", code="scorer_start", fix="see its output in the log above"
                ) from None
            self.ready = True
        return self._exchange(message, timeout_s)

    def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        body, deadline = json.dumps({**message, "timeout_s": timeout_s}).encode(), time.monotonic() + timeout_s
        view = memoryview(HEADER.pack(len(body)) + body)
        while view:
            self._wait(self.input, select.POLLOUT, deadline)
            try:
                view = view[os.write(self.input, view[:65536]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _WorkerEnded(str(error)) from None
        return self._read(deadline)

    def _read(self, deadline: float) -> dict[str, Any]:
        (length,) = HEADER.unpack(self._read_bytes(HEADER.size, deadline))
        if length > MAX_REPLY_BYTES:
            raise _WorkerEnded(f"a reply of {length} bytes")
        try:
            reply = json.loads(self._read_bytes(length, deadline))
        except ValueError as error:
            raise _WorkerEnded(str(error)) from None
        if not isinstance(reply, dict):
            raise _WorkerEnded("a reply that is no object")
        return reply

    def _read_bytes(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self.output, select.POLLIN, deadline)
            try:
                part = os.read(self.output, min(size - len(data), 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise _WorkerEnded(f"exit status {self.process.poll()}")
            data += part
        return bytes(data)

    def _wait(self, file: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(file, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError

    def kill(self) -> None:
        """End the process and the processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class WorkerPool:
    """``size`` worker processes with one request each at a time; calls from many threads wait for a free worker.

    ``memory_bytes`` caps the address space of a worker, 0 is no cap. ``environment`` replaces this process's variables; the task
    ``warm`` is run once before the first request.
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

    @property
    def idle(self) -> int:
        """Number of idle workers."""
        return self._idle.qsize()

    def call(self, message: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        """The value of a task of ``pixelis.rewards.worker``.

        Raises DataFailure with the worker's code, ``timeout`` (the worker is killed and replaced) or ``crashed``; InfraFailure
        when workers do not start or the pool is closed.
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
            if not usable:
                worker.kill()
            with self._lock:
                if self._closed:
                    worker.kill()
                else:
                    self.replaced += not usable
                    self._idle.put(worker if usable else self._spawn())
        if "error" in reply:
            raise DataFailure(str(reply.get("message", "")), code=str(reply["error"]))
        return reply.get("value")

    def close(self) -> None:
        """End all workers; waiting calls raise InfraFailure."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (worker := self._idle.get_nowait()) is not None:
                    worker.kill()
        self._idle.put(None)
