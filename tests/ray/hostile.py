"""Operations that hang, crash or use too much memory. Workers import them as ``hostile:name``."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pixelis.errors import OperationError
from pixelis.operations import Operation, OperationArguments, Result, Scene, Target, View

ALL: list[str] = []
LEAKED: list[Any] = []


class TagArguments(OperationArguments):
    """``tag`` makes calls different from each other."""

    tag: int = 0


def operation(
    misbehave: Callable[[], Result | None], name: str = "", is_quick: bool = False
) -> type[Operation]:
    """An operation of the name of this function that does what it does."""

    class Hostile(Operation):
        description = "Misbehave."
        Arguments = TagArguments
        quick = is_quick

        @classmethod
        def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
            return misbehave() or Result(text="survived")

    Hostile.name = name or misbehave.__name__
    ALL.append(f"hostile:{Hostile.name}")
    return Hostile


def rest() -> None:
    time.sleep(3600)


def go() -> None:
    os._exit(0)


sleep, quick_sleep = operation(rest, "sleep"), operation(rest, "quick_sleep", is_quick=True)
leave, quick_leave = operation(go, "leave"), operation(go, "quick_leave", is_quick=True)


@operation
def hold() -> None:
    """Sleeps without releasing the GIL."""
    ctypes.PyDLL(None).sleep(3600)


@operation
def exit() -> None:
    sys.exit(0)


@operation
def segfault() -> None:
    ctypes.string_at(0)


@operation
def eat_numpy() -> None:
    arrays = []
    while True:
        # Not written: faulting in the pages would exceed the test's timeout
        arrays.append(np.empty(10_000_000, np.uint8))


@operation
def fail() -> None:
    raise KeyError("a bug")


@operation
def refuse() -> None:
    raise OperationError("not like this", code="bad_arguments")


@operation
def huge() -> Result:
    return Result(images=[View(np.zeros((8000, 8000, 3), np.uint8))])


@operation
def fork() -> None:
    """Leaves child processes behind, which inherit the worker's sockets, and hangs."""
    for _ in range(3):
        if os.fork() == 0:
            time.sleep(3600)
    subprocess.Popen(["sleep", "20"])
    time.sleep(3600)


@operation
def threads() -> None:
    """Leaves threads behind that occupy memory."""
    for _ in range(15):
        memory = np.ones(4_000_000, np.uint8)
        threading.Thread(target=lambda _: time.sleep(3600), args=(memory,), daemon=True).start()


@operation
def leak() -> None:
    LEAKED.append(np.ones(30_000_000, np.uint8))


class ProcessInfo(Operation):
    """Returns the id of its process and whether the picture is writable, i.e. a copy."""

    name = "process_info"
    description = "Return the process id."
    Arguments = TagArguments

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        time.sleep(0.05)
        return Result(text=str(os.getpid()), data={"writable": bool(target.picture.flags.writeable)})


ALL.append("hostile:ProcessInfo")

if os.environ.get("HOSTILE_OPEN"):  # set for the workers of one test: decoding hangs or crashes by file name
    from pixelis.datasets import media

    original = media.load_image
    bad = {"hang.png": hold, "crash.png": segfault, "eat.png": eat_numpy}

    def load_image(source: Any, *limits: Any) -> Any:
        if source in bad:
            bad[source].run(None, None, None)  # type: ignore[arg-type]
        return original(source, *limits)

    media.load_image = load_image
