"""PYTHON: run a short program on the pixels of a picture, without files, network or other programs.

After PyVision (arXiv 2507.07998), which runs the policy's code in a plain process.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations import sandbox
from pixelis.operations.geometry import WHOLE
from pixelis.operations.operation import (
    MADE,
    BoxArgument,
    Operation,
    OperationArguments,
    Result,
    Scene,
    Target,
    View,
)
from pixelis.operations.sandbox_worker import MAX_CODE

MAX_PIXELS = 16_000_000

Code = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CODE)]


class PythonArguments(OperationArguments):
    code: Code = Field(
        description="the program; print what you want to read, show(picture) what you want to see"
    )
    box: BoxArgument | None = Field(
        None, description="the region that `image` holds, default all of the image"
    )


class Python(Operation):
    """Off by default. Its pictures show no region of the target, so no further call can be about them."""

    name = "python"
    description = (
        "Run Python on an image. `image` holds its pixels in full resolution (uint8 array [height, width, "
        "3], RGB). Available: numpy as np, cv2, PIL, math, statistics and more of the standard library; no "
        "files, no network. print(...) to read values, show(array or PIL image) to see up to 3 pictures."
    )
    Arguments = PythonArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        sandbox.require()

    @classmethod
    def run(cls, arguments: PythonArguments, target: Target, scene: Scene) -> Result:
        """What the code printed and up to 3 views; an error of the code is text."""
        image = target.crop(arguments.box or WHOLE)
        if (count := image.shape[0] * image.shape[1]) > MAX_PIXELS:
            raise OperationError(
                f"the region has {count} pixels, at most {MAX_PIXELS}: give a box", code="limit"
            )
        settings = scene.settings
        # The toolbox ends its own process at timeout_s.
        start_s = max(1.0, 0.9 * settings.timeout_s - sandbox.CODE_S)
        printed, error, pictures = sandbox.run(
            arguments.code, image, scene.seed, settings.memory_bytes, start_s
        )
        views = [View(scene.fit_crop(picture), None, source=MADE) for picture in pictures]
        text = printed.rstrip()
        if error is not None:
            text = f"{text}\n{error}".lstrip("\n")
        return Result(text or ("nothing printed" if not views else ""), views, {"error": error})
