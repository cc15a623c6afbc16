"""Operations that misbehave, as a user's own or a library's may; workers import them by ``hostile:Class``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

import numpy as np

from pixelis.errors import OperationError
from pixelis.operations import Operation, OperationArguments, Result, Scene, Target, View


class Nothing(OperationArguments):
    """``tag`` only tells calls apart."""

    tag: int = 0


class Hostile(Operation):
    """Base: does something bad; ``behave`` must not come back with a result worth having."""

    description = "Misbehave."
    Arguments = Nothing

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        cls.behave()
        return Result(text="survived")

    @staticmethod
    def behave() -> None:
        raise NotImplementedError


class Sleep(Hostile):
    name = "sleep"

    @staticmethod
    def behave() -> None:
        time.sleep(3600)


class Hold(Hostile):
    """Never gives the interpreter back."""

    name = "hold"

    @staticmethod
    def behave() -> None:
        ctypes.PyDLL(None).sleep(3600)


class Stop(Hostile):
    """Not even a thread of C runs on."""

    name = "stop"

    @staticmethod
    def behave() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Leave(Hostile):
    name = "leave"

    @staticmethod
    def behave() -> None:
        os._exit(0)


class Exit(Hostile):
    name = "exit"

    @staticmethod
    def behave() -> None:
        sys.exit(0)


class Segfault(Hostile):
    name = "segfault"

    @staticmethod
    def behave() -> None:
        ctypes.string_at(0)


class EatNumpy(Hostile):
    name = "eat_numpy"

    @staticmethod
    def behave() -> None:
        kept = []
        while True:
            kept.append(np.empty(10_000_000, np.uint8))  # not touched: the pages alone would take longer than a test's deadline


class EatPython(Hostile):
    name = "eat_python"

    @staticmethod
    def behave() -> None:
        kept: list[Any] = []
        while True:
            kept.append(str(len(kept)) * 50)


class EatCv2(Hostile):
    name = "eat_cv2"

    @staticmethod
    def behave() -> None:
        import cv2

        kept = [np.ones((2000, 2000, 3), np.uint8)]
        while True:
            kept.append(cv2.resize(kept[0], None, fx=2, fy=2))


class Raise(Hostile):
    name = "raise"

    @staticmethod
    def behave() -> None:
        raise KeyError("a bug")


class Refuse(Hostile):
    name = "refuse"

    @staticmethod
    def behave() -> None:
        raise OperationError("not like this", code="bad_arguments")


class Huge(Hostile):
    name = "huge"

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        return Result(images=[View(np.zeros((8000, 8000, 3), np.uint8))])


class Strange(Hostile):
    """Data that no log can hold."""

    name = "strange"

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        return Result(data={"function": cls.run})


class Scribble(Hostile):
    """Writes into the picture that it shares with everybody."""

    name = "scribble"

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        target.picture[:] = 0
        return Result(text="survived")


class Shout(Hostile):
    name = "shout"

    @staticmethod
    def behave() -> None:
        for _ in range(2000):
            print("x" * 1000)
            print("y" * 1000, file=sys.stderr)


class Fork(Hostile):
    """Leaves children behind and hangs: they hold the sockets of the worker."""

    name = "fork"

    @staticmethod
    def behave() -> None:
        for _ in range(3):
            if os.fork() == 0:
                time.sleep(3600)
        subprocess.Popen(["sleep", "20"])
        time.sleep(3600)


class Threads(Hostile):
    """Leaves threads behind that hold memory."""

    name = "threads"

    @staticmethod
    def behave() -> None:
        for _ in range(15):
            held = np.ones(4_000_000, np.uint8)
            threading.Thread(target=lambda kept: time.sleep(3600), args=(held,), daemon=True).start()


class Leak(Hostile):
    name = "leak"
    kept: ClassVar[list[Any]] = []

    @classmethod
    def behave(cls) -> None:
        cls.kept.append(np.ones(30_000_000, np.uint8))


class Where(Operation):
    """Says in which process it ran, and whether the picture is the shared one."""

    name = "where"
    description = "Tell the process."
    Arguments = Nothing

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


ALL = [f"hostile:{name}" for name, kind in list(vars().items()) if isinstance(kind, type) and hasattr(kind, "name")]

if os.environ.get("HOSTILE_OPEN"):  # in the workers of one test: decoders that hang and crash
    from pixelis.datasets import media

    real = media.load_image

    def load_image(source: Any, *limits: Any) -> Any:
        for word, kind in (("hang", Hold), ("crash", Segfault), ("eat", EatNumpy)):
            if source == f"{word}.png":
                kind.behave()
        return real(source, *limits)

    media.load_image = load_image
