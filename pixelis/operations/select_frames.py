"""SELECT_FRAMES: show frames of a clip by number, by time or at a steady rate."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations.container import require_decord
from pixelis.operations.operation import Operation, OperationArguments, Result, Scene, Target
from pixelis.operations.video import Clip

Seconds = Annotated[float, Field(allow_inf_nan=False)]


class SelectFramesArguments(OperationArguments):
    """``frames``: numbers. ``times``: seconds. ``rate``: frames per second from ``start`` to ``end``."""

    frames: list[int] | None = None
    times: list[Seconds] | None = None
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    start: Seconds | None = None
    end: Seconds | None = None

    @model_validator(mode="after")
    def _one_way(self) -> SelectFramesArguments:
        if sum(argument is not None for argument in (self.frames, self.times, self.rate)) != 1:
            raise ValueError("give exactly one of frames, times and rate")
        if self.rate is None and (self.start is not None or self.end is not None):
            raise ValueError("start and end go with rate")
        if self.frames == [] or self.times == []:
            raise ValueError("the list is empty")
        return self


class SelectFrames(Operation):
    """Shows exact frames of any container in the requested order, each once."""

    name = "select_frames"
    description = (
        "Show frames of a video. Name them by frame number from 0 (frames), by seconds (times), or take "
        "`rate` frames a second between start and end seconds. Returns each frame with its number and time."
    )
    Arguments = SelectFramesArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        if settings.video_backend == "decord":
            require_decord()

    @classmethod
    def run(cls, arguments: SelectFramesArguments, target: Target, scene: Scene) -> Result:
        clip = target.clip
        requested = _requested_frames(arguments, clip, scene.settings.max_frames)
        numbers = list(dict.fromkeys(requested))
        images = scene.show_frames(clip, numbers)
        listed = ", ".join(f"{image.frame} at {image.time:.2f} s" for image in images)
        count = "1 frame" if len(clip.times) == 1 else f"{len(clip.times)} frames"
        text = f"{target.root} has {count}, {clip.duration:.2f} s. Shown: {listed}."
        if duplicates := len(requested) - len(numbers):
            text += f" {duplicates} duplicate frame{'s' if duplicates > 1 else ''} omitted."
        return Result(
            text, images, {"frames": [{"index": image.frame, "time": image.time} for image in images]}
        )


def _requested_frames(arguments: SelectFramesArguments, clip: Clip, limit: int) -> list[int]:
    named = arguments.frames if arguments.times is None else arguments.times
    if named is not None and len(set(named)) > limit:
        raise OperationError(f"{len(set(named))} frames requested, the limit is {limit}", code="limit")
    if arguments.frames is not None:
        return arguments.frames
    if arguments.times is not None:
        for time in arguments.times:
            _check_time(time, clip)
        return [clip.at(time) for time in arguments.times]
    start = float(clip.times[0]) if arguments.start is None else arguments.start
    end = float(clip.times[-1]) if arguments.end is None else arguments.end
    if end < start:
        raise OperationError(f"start {start:g} s is after end {end:g} s", code="out_of_range")
    _check_time(start, clip)
    _check_time(end, clip)
    rate = arguments.rate or 1.0
    steps = (end - start) * rate + 1e-6
    if steps >= limit:
        message = (
            f"{min(steps, 1e9) + 1:.0f} frames requested, the limit is {limit}: use a lower rate, or times"
        )
        raise OperationError(message, code="limit")
    return [clip.at(start + step / rate) for step in range(math.floor(steps) + 1)]


def _check_time(time: float, clip: Clip) -> None:
    end, first = clip.end, float(clip.times[0])
    if not (first if clip.whole else min(0.0, first)) <= time <= end + 1e-6:
        raise OperationError(
            f"time {time:g} s is outside the clip, which runs from {clip.times[0]:.2f} to {end:.2f} s",
            code="out_of_range",
        )
