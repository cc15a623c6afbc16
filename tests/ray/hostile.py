"""Operations that hang, crash or use too much memory. Workers import them as ``hostile:Class``."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

import numpy as np

from pixelis.errors import OperationError
from pixelis.operations import Operation, OperationArguments, Result, Scene, Target, View


class TagArguments(OperationArguments):
    """``tag`` makes calls different from each other."""

    tag: int = 0


class Hostile(Operation):
    """Base class: ``run`` calls ``misbehave``."""

    description = "Misbehave."
    Arguments = TagArguments

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        cls.misbehave()
        return Result(text="survived")

    @staticmethod
    def misbehave() -> None:
        raise NotImplementedError


class Sleep(Hostile):
    name = "sleep"

    @staticmethod
    def misbehave() -> None:
        time.sleep(3600)


class Hold(Hostile):
    """Sleeps without releasing the GIL."""

    name = "hold"

    @staticmethod
    def misbehave() -> None:
        ctypes.PyDLL(None).sleep(3600)


class Leave(Hostile):
    name = "leave"

    @staticmethod
    def misbehave() -> None:
        os._exit(0)


class Exit(Hostile):
    name = "exit"

    @staticmethod
    def misbehave() -> None:
        sys.exit(0)


class Segfault(Hostile):
    name = "segfault"

    @staticmethod
    def misbehave() -> None:
        ctypes.string_at(0)


class EatNumpy(Hostile):
    name = "eat_numpy"

    @staticmethod
    def misbehave() -> None:
        arrays = []
        while True:
            # Not written: faulting in the pages would exceed the test's timeout
            arrays.append(np.empty(10_000_000, np.uint8))


class Raise(Hostile):
    name = "raise"

    @staticmethod
    def misbehave() -> None:
        raise KeyError("a bug")


class Refuse(Hostile):
    name = "refuse"

    @staticmethod
    def misbehave() -> None:
        raise OperationError("not like this", code="bad_arguments")


class Huge(Hostile):
    name = "huge"

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        return Result(images=[View(np.zeros((8000, 8000, 3), np.uint8))])


class Fork(Hostile):
    """Leaves child processes behind, which inherit the worker's sockets, and hangs."""

    name = "fork"

    @staticmethod
    def misbehave() -> None:
        for _ in range(3):
            if os.fork() == 0:
                time.sleep(3600)
        subprocess.Popen(["sleep", "20"])
        time.sleep(3600)


class Threads(Hostile):
    """Leaves threads behind that occupy memory."""

    name = "threads"

    @staticmethod
    def misbehave() -> None:
        for _ in range(15):
            memory = np.ones(4_000_000, np.uint8)
            threading.Thread(target=lambda _: time.sleep(3600), args=(memory,), daemon=True).start()


class Leak(Hostile):
    name = "leak"
    leaked: ClassVar[list[Any]] = []

    @classmethod
    def misbehave(cls) -> None:
        cls.leaked.append(np.ones(30_000_000, np.uint8))


class ProcessInfo(Operation):
    """Returns the id of its process and whether the picture is writable, i.e. a copy."""

    name = "process_info"
    description = "Return the process id."
    Arguments = TagArguments

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        time.sleep(0.05)
        return Result(text=str(os.getpid()), data={"writable": bool(target.picture.flags.writeable)})


class QuickSleep(Sleep):
    name = "quick_sleep"
    quick = True


class QuickLeave(Leave):
    name = "quick_leave"
    quick = True


ALL = [
    f"hostile:{name}"
    for name, kind in list(vars().items())
    if isinstance(kind, type) and hasattr(kind, "name")
]

if os.environ.get("HOSTILE_OPEN"):  # set for the workers of one test: decoding hangs or crashes by file name
    from pixelis.datasets import media

    original = media.load_image

    def load_image(source: Any, *limits: Any) -> Any:
        for word, kind in (("hang", Hold), ("crash", Segfault), ("eat", EatNumpy)):
            if source == f"{word}.png":
                kind.misbehave()
        return original(source, *limits)

    media.load_image = load_image
