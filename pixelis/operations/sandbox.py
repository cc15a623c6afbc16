"""Runs a policy's Python code in a locked process (`sandbox_worker`) and checks its answer."""

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
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pixelis.errors import BadImage, MissingDependency, OperationError
from pixelis.operations import sandbox_worker as worker
from pixelis.operations.image import load_image

CODE_S = 10.0
"""Seconds that the code itself may run, on the clock and of CPU time."""
MAX_PICTURE_BYTES = 4 * worker.MAX_SHOWN_PIXELS
MAX_BYTES = 65_536 + 2 * worker.MAX_PICTURES * MAX_PICTURE_BYTES
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LANG": "C.UTF-8",
}
"""All of the process's environment: no threads, which would begin after the lock, and equal results."""


class Answer(BaseModel):
    """What the code printed, its error or None, and the pictures that it showed, as PNG."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, StringConstraints(max_length=worker.MAX_TEXT + 100)]
    error: Annotated[str, StringConstraints(max_length=500)] | None
    pictures: Annotated[list[Base64Bytes], Field(max_length=worker.MAX_PICTURES)]


def run(
    code: str, image: np.ndarray, seed: int, memory_bytes: int, start_s: float
) -> tuple[str, str | None, list[np.ndarray]]:
    """Run code on an image, uint8 [h, w, 3]. ``start_s``: seconds that the process may take to start.

    Returns what the code printed, its error or None, and the pictures that it showed (uint8 [h, w, 3]).
    Raises OperationError ``timeout``, ``limit`` (too much output) or ``crashed``; MissingDependency where the
    process cannot be locked.
    """
    request = {"code": code, "seed": seed, "memory": memory_bytes, "seconds": int(CODE_S) + 1}
    with os.fdopen(os.memfd_create("pixelis"), "wb+") as file, tempfile.TemporaryDirectory() as empty:
        file.write(json.dumps(request).encode() + b"\n")
        np.save(file, image, allow_pickle=False)
        file.seek(0)
        process = subprocess.Popen(
            # As -I, but the environment, which is ours, sets the hash seed.
            [sys.executable, "-s", "-P", str(Path(worker.__file__).resolve()), str(os.getpid())],
            stdin=file,
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
            message = (
                "the sandbox did not start in time"
                if starting
                else f"the code took more than {CODE_S:g} seconds"
            )
            raise OperationError(message, code="timeout")
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            return bytes(data)
        data += chunk
        if len(data) > MAX_BYTES:
            raise OperationError("the code wrote too much", code="limit")
        if starting:
            starting, deadline = False, time.monotonic() + CODE_S


def _answer(data: bytes) -> tuple[str, str | None, list[np.ndarray]]:
    """Check and read the bytes of the process, which the code may have written itself."""
    if data[:1] == b"X":
        raise MissingDependency(
            f"the operation python cannot lock its process: {data[1:501].decode(errors='replace')}",
            fix="use Linux with seccomp filters (in a container: a profile that allows seccomp) and "
            "libseccomp (Debian's libseccomp2), or leave python out of toolbox.operations",
        )
    if data[:1] != b"R" or len(data) == 1:
        message = "the code was stopped: it used too much memory or CPU time, or crashed"
        raise OperationError(message, code="crashed")
    try:
        answer = Answer.model_validate_json(data[1:])
        pictures = [load_image(png, MAX_PICTURE_BYTES, worker.MAX_SHOWN_PIXELS) for png in answer.pictures]
    except (ValidationError, BadImage):
        raise OperationError("the code wrote to the descriptors of the sandbox", code="crashed") from None
    return answer.text, answer.error, pictures


@functools.cache
def require() -> None:
    """Raise MissingDependency where code cannot be run in a locked process."""
    try:
        run("1 + 1", np.zeros((4, 4, 3), np.uint8), 0, 500_000_000, 120.0)
    except OSError as error:
        raise MissingDependency(
            f"the operation python cannot start a process: {error}",
            fix="use Linux, or leave python out of toolbox.operations",
        ) from None
