"""Runs a policy's Python code in a locked process (`sandbox_worker`) and reads what it answers as untrusted bytes."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.errors import MissingDependency, OperationError
from pixelis.operations import sandbox_worker as worker

CODE_S = 10.0
"""Seconds that the code itself may run, on the clock and of CPU time."""
MAX_REPLY = 65_536
MAX_BYTES = 1 + worker.HEADER.size + MAX_REPLY + 3 * worker.MAX_PICTURES * worker.MAX_SHOWN_PIXELS
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LANG": "C.UTF-8",
}
"""All of the process's environment: no threads, which would begin after the lock, and equal results of equal calls."""


@dataclass(frozen=True)
class Answer:
    """What the code printed, its error or None, and the pictures that it showed (uint8 [h, w, 3])."""

    text: str
    error: str | None
    pictures: list[np.ndarray]


def run(code: str, image: np.ndarray, seed: int, memory_bytes: int, start_s: float) -> Answer:
    """Run code on an image, uint8 [h, w, 3]. ``start_s``: seconds that the process may take to start.

    Raises OperationError ``timeout``, ``out_of_memory``, ``crashed`` (ended without an answer, or with a wrong one);
    MissingDependency where the process cannot be locked.
    """
    request = {"code": code, "shape": image.shape, "seed": seed, "memory": memory_bytes, "seconds": int(CODE_S) + 1}
    body = json.dumps(request).encode()
    memory = os.memfd_create("pixelis", os.MFD_CLOEXEC)
    with os.fdopen(memory, "wb", closefd=True) as file, tempfile.TemporaryDirectory() as empty:
        file.write(worker.HEADER.pack(len(body)) + body + image.tobytes())
        file.flush()
        os.lseek(memory, 0, os.SEEK_SET)
        process = subprocess.Popen(
            # As -I, but the environment, which is ours, sets the hash seed.
            [sys.executable, "-s", "-P", str(Path(worker.__file__).resolve()), str(os.getpid())],
            stdin=memory,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd=empty,
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdout is not None
        try:
            return _answer(_read(process.stdout.fileno(), start_s))
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            process.wait()
            process.stdout.close()


def _read(descriptor: int, start_s: float) -> bytes:
    """All that the process writes, at most MAX_BYTES. Its first byte starts the clock of the code."""
    data, deadline, starting = bytearray(), time.monotonic() + start_s, True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            message = "the sandbox did not start in time" if starting else f"the code took more than {CODE_S:g} seconds"
            raise OperationError(message, code="timeout")
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            return bytes(data)
        data += chunk
        if len(data) > MAX_BYTES:
            raise OperationError("the code wrote too much", code="limit")
        if starting:
            starting, deadline = False, time.monotonic() + CODE_S


def _answer(data: bytes) -> Answer:
    """Check and read the bytes of the process, which the code may have written itself."""
    if data[:1] == b"X":
        raise MissingDependency(
            f"the operation python cannot lock its process: {data[1:501].decode(errors='replace')}",
            fix="use Linux with seccomp filters (in a container: a profile that allows seccomp), or leave python out of "
            "toolbox.operations",
        )
    if data[:1] != b"R" or len(data) == 1:
        raise OperationError("the code was stopped: it used too much memory or CPU time, or crashed", code="crashed")
    wrong = OperationError("the code wrote to the descriptors of the sandbox", code="crashed")
    start = 1 + worker.HEADER.size
    if len(data) < start:
        raise wrong
    (length,) = worker.HEADER.unpack(data[1:start])
    if length > MAX_REPLY:
        raise wrong
    try:
        reply = json.loads(data[start : start + length])
    except (ValueError, RecursionError):
        raise wrong from None
    if not (isinstance(reply, dict) and isinstance(reply.get("text"), str)):
        raise wrong
    error = reply.get("error")
    if not (error is None or isinstance(error, str)):
        raise wrong
    pictures = _pictures(reply.get("shapes"), data[start + length :])
    if pictures is None:
        raise wrong
    return Answer(reply["text"][: worker.MAX_TEXT + 100], error if error is None else error[:500], pictures)


def _pictures(shapes: Any, data: bytes) -> list[np.ndarray] | None:
    """The pictures of these shapes; None unless shapes and bytes are as the worker writes them."""
    if not isinstance(shapes, list) or len(shapes) > worker.MAX_PICTURES:
        return None
    pictures, at = [], 0
    for shape in shapes:
        if not (isinstance(shape, list) and len(shape) == 3 and all(type(n) is int for n in shape) and shape[2] == 3):
            return None
        height, width, _ = shape
        if not (4 <= height <= worker.MAX_SIDE and 4 <= width <= worker.MAX_SIDE and height * width <= worker.MAX_SHOWN_PIXELS):
            return None
        size = height * width * 3
        if len(data) < at + size:
            return None
        pictures.append(np.frombuffer(data, np.uint8, size, at).reshape(height, width, 3))
        at += size
    return pictures if at == len(data) else None


@functools.cache
def require() -> None:
    """Raise MissingDependency where code cannot be run in a locked process."""
    try:
        run("1 + 1", np.zeros((4, 4, 3), np.uint8), 0, 500_000_000, 120.0)
    except OSError as error:
        raise MissingDependency(
            f"the operation python cannot start a process: {error}", fix="use Linux, or leave python out of toolbox.operations"
        ) from None
