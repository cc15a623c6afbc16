"""`zoom_in` with faults for `benchmarks.robustness`: `Failing30`, `Slow30`, `Late30` and `Lying30` have one
in 30 % of calls.

Which calls are hit depends on their arguments and the picture alone, as operations must be pure.
"""

from __future__ import annotations

import hashlib
import time
from typing import ClassVar

import numpy as np

from pixelis.errors import OperationError
from pixelis.operations.operation import Result, Scene, Target
from pixelis.operations.zoom_in import ZoomIn, ZoomInArguments

SHARES = (10, 30, 100)
"""Percentages of calls with a fault."""
SLOW_S = 0.5
"""Seconds that a slow call takes longer."""


class _Faulty(ZoomIn):
    share: ClassVar[float] = 1.0

    @classmethod
    def run(cls, arguments: ZoomInArguments, target: Target, scene: Scene) -> Result:
        seed = hashlib.sha256(
            arguments.model_dump_json().encode() + np.ascontiguousarray(target.picture[::32, ::32]).tobytes()
        )
        rng = np.random.default_rng(list(seed.digest()))
        return (
            cls.fault(arguments, target, scene, rng)
            if rng.random() < cls.share
            else super().run(arguments, target, scene)
        )

    @classmethod
    def fault(
        cls, arguments: ZoomInArguments, target: Target, scene: Scene, rng: np.random.Generator
    ) -> Result:
        """What a call that is hit does instead."""
        raise NotImplementedError


class Failing(_Faulty):
    """Gives an error."""

    @classmethod
    def fault(
        cls, arguments: ZoomInArguments, target: Target, scene: Scene, rng: np.random.Generator
    ) -> Result:
        raise OperationError("the service is unavailable, try again", code="unavailable")


class Slow(_Faulty):
    """Takes `SLOW_S` longer."""

    @classmethod
    def fault(
        cls, arguments: ZoomInArguments, target: Target, scene: Scene, rng: np.random.Generator
    ) -> Result:
        time.sleep(SLOW_S)
        return ZoomIn.run(arguments, target, scene)


class Late(_Faulty):
    """Does not return within `toolbox.timeout_s`: its process is ended."""

    @classmethod
    def fault(
        cls, arguments: ZoomInArguments, target: Target, scene: Scene, rng: np.random.Generator
    ) -> Result:
        time.sleep(10 * scene.settings.timeout_s)
        raise AssertionError("the toolbox did not end this process")


class Lying(_Faulty):
    """Shows another region of the same size, and says nothing."""

    @classmethod
    def fault(
        cls, arguments: ZoomInArguments, target: Target, scene: Scene, rng: np.random.Generator
    ) -> Result:
        shown = ZoomIn.run(arguments, target, scene).images[0].box
        assert shown is not None
        width, height = shown[2] - shown[0], shown[3] - shown[1]
        left, top = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
        other = ZoomInArguments(box=(left, top, left + width, top + height))
        return ZoomIn.run(other, target, scene)


for _kind in (Failing, Slow, Late, Lying):
    for _percent in SHARES:
        _name = f"{_kind.__name__}{_percent}"
        globals()[_name] = type(_name, (_kind,), {"share": _percent / 100, "__doc__": _kind.__doc__})
