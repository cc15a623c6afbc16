"""A small pool of worker processes: one that hangs is killed and replaced, and only its task fails."""

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

START_S = 120.0
"""Seconds a child may take to start, on a machine that is busy."""
LARGEST = 64_000_000
"""Bytes of a reply beyond which a child is taken for mad."""


class _Dead(Exception):
    """The child ended or talks nonsense."""


class _Child:
    """One process and its pipes. It is waited for at its first request only, so that replacing one takes no time."""

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

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply; TimeoutError after ``limit_s`` seconds, which do not count the start. _Dead when the child ended."""
        if not self.ready:
            try:
                self._read(time.monotonic() + START_S)
                if self.warm:
                    self._exchange({"do": self.warm, "limit_s": START_S}, START_S)
            except (TimeoutError, _Dead) as error:
                raise InfraFailure(
                    f"a scoring process did not start: {error!r}", code="scorer_start", fix="see the lines above in its log"
                ) from None
            self.ready = True
        return self._exchange({**message, "limit_s": limit_s}, limit_s)

    def _exchange(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        body, deadline = json.dumps(message).encode(), time.monotonic() + limit_s
        self._write(HEADER.pack(len(body)) + body, deadline)
        return self._read(deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self.input, select.POLLOUT, deadline)
            try:
                view = view[os.write(self.input, view[:65536]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _Dead(str(error)) from None

    def _read(self, deadline: float) -> dict[str, Any]:
        (length,) = HEADER.unpack(self._take(HEADER.size, deadline))
        if length > LARGEST:
            raise _Dead(f"a reply of {length} bytes")
        try:
            reply = json.loads(self._take(length, deadline))
        except ValueError as error:
            raise _Dead(str(error)) from None
        if not isinstance(reply, dict):
            raise _Dead("a reply that is no object")
        return reply

    def _take(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            self._wait(self.output, select.POLLIN, deadline)
            try:
                part = os.read(self.output, min(size, 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise _Dead(f"exit status {self.process.poll()}")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _wait(self, file: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(file, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError

    def kill(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Children:
    """``size`` child processes that answer one request at a time each. Calls from many threads wait for a free one.

    ``memory_bytes`` caps the address space of a child, 0 does not. ``environment`` is all that they get to know of ours; the
    duty ``warm`` is done once before the first request.
    """

    def __init__(
        self,
        size: int,
        limit_s: float,
        memory_bytes: int = 0,
        environment: Mapping[str, str] | None = None,
        warm: str | None = None,
    ):
        self.size, self.limit_s = size, limit_s
        environment = os.environ if environment is None else environment
        # A child finds the modules that its parent finds: a job's own folder need not be on PYTHONPATH.
        path = os.pathsep.join(p for p in sys.path if p)
        self._spawn = lambda: _Child(memory_bytes, {**environment, "PYTHONPATH": path}, warm)
        self._idle: queue.Queue[_Child | None] = queue.Queue()
        self._lock = threading.Lock()
        self._closed = False
        self.replaced = 0
        for _ in range(size):
            self._idle.put(self._spawn())

    @property
    def idle(self) -> int:
        """Children that wait for work; all of them when nothing is asked."""
        return self._idle.qsize()

    def call(self, message: Mapping[str, Any], limit_s: float | None = None) -> Any:
        """The value of a duty of ``pixelis.rewards.worker``.

        DataFailure with the child's own code, ``timeout`` (the child is killed and replaced), or ``crashed``. InfraFailure when
        children do not start or the pool is closed.
        """
        child = self._idle.get()
        if child is None:
            self._idle.put(None)
            raise InfraFailure("the pool of scoring processes is closed", code="closed")
        whole = False
        try:
            reply = child.ask(message, limit_s or self.limit_s)
            whole = True
        except TimeoutError:
            raise DataFailure(f"no result in {limit_s or self.limit_s:g} s", code="timeout") from None
        except _Dead as error:
            raise DataFailure(f"the scoring process ended: {error}", code="crashed") from None
        finally:
            self._give_back(child, whole)
        if "error" in reply:
            raise DataFailure(str(reply.get("message", "")), code=str(reply["error"]))
        return reply.get("value")

    def _give_back(self, child: _Child, whole: bool) -> None:
        if not whole:
            child.kill()
        with self._lock:
            if self._closed:
                child.kill()
                return
            if not whole:
                child = self._spawn()
                self.replaced += 1
            self._idle.put(child)

    def close(self) -> None:
        """End all children; calls that wait raise InfraFailure."""
        with self._lock:
            self._closed = True
        while True:
            try:
                child = self._idle.get_nowait()
            except queue.Empty:
                break
            if child is not None:
                child.kill()
        self._idle.put(None)
