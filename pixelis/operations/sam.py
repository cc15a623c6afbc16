"""Segmentation with a SAM or SAM 2 checkpoint of transformers from a local folder.

Inputs are made here, as the SAM 2 processor of transformers needs torchvision; for SAM they equal those of
``SamImageProcessorPil``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from PIL import Image

from pixelis.errors import OperationError
from pixelis.operations import checkpoints
from pixelis.operations.masks import Edges, Mask, Segment

if TYPE_CHECKING:
    import torch

KINDS = {"sam": "SamModel", "sam2": "Sam2Model", "sam2_video": "Sam2Model"}
"""``model_type`` -> class in transformers; published SAM 2 is ``sam2_video``, which contains ``sam2``."""


@dataclass(frozen=True)
class Sam:
    """A loaded checkpoint, its input size and pixel normalisation."""

    model: Any
    padded: bool
    side: int
    settings: dict[str, Any]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Input height and width: SAM keeps the aspect ratio and pads, SAM 2 stretches to a square."""
        if not self.padded:
            return self.side, self.side
        scale = self.side / max(height, width)
        return int(height * scale + 0.5), int(width * scale + 0.5)

    def pixel_values(self, picture: np.ndarray) -> torch.Tensor:
        """uint8 [H, W, 3] -> float32 [1, 3, side, side], normalised, zero where padded."""
        import torch

        height, width = self.size(*picture.shape[:2])
        values = checkpoints.normalised(picture, (height, width), self.settings)
        return torch.nn.functional.pad(values, (0, self.side - width, 0, self.side - height))

    def predict(self, picture: np.ndarray, corners: np.ndarray, box: bool) -> tuple[np.ndarray, float]:
        """The mask of a point [1, 2] or box [2, 2] (x, y in pixels): bool [H, W] and its predicted IoU."""
        import torch

        rows, columns = picture.shape[:2]
        height, width = self.size(rows, columns)
        points = torch.from_numpy((corners * [width / columns, height / rows]).astype(np.float32))
        prompt = (
            {"input_boxes": points.reshape(1, 1, 4)} if box else {"input_points": points.reshape(1, 1, 1, 2)}
        )
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            inputs = {"pixel_values": self.pixel_values(picture), **prompt}
            # A point is ambiguous between a part and the whole: take the best of three masks.
            output = self.model(**{k: v.to(device) for k, v in inputs.items()}, multimask_output=not box)
            scores = output.iou_scores[0, 0].float()
            best = int(scores.argmax())
            logits = output.pred_masks[0, 0, best].float()[None, None]
            if self.padded:
                logits = torch.nn.functional.interpolate(
                    logits, (self.side, self.side), mode="bilinear", align_corners=False
                )
                logits = logits[..., :height, :width]
        large = cv2.resize(logits[0, 0].cpu().numpy(), (columns, rows), interpolation=cv2.INTER_LINEAR)
        return large > 0, float(scores[best].clamp(0, 1))


def segment(
    picture: np.ndarray, region: Edges, point: tuple[float, float] | None, box: Edges | None, folder: str
) -> Segment:
    """Segment the object at a point or in a box (pixels of the picture); the model sees ``region`` only."""
    left, top, right, bottom = region
    if box is not None:  # rounding may move the edges of a box beyond the region
        left, top, right, bottom = (
            min(left, box[0]),
            min(top, box[1]),
            max(right, box[2]),
            max(bottom, box[3]),
        )
    corners = np.reshape(np.asarray(point if box is None else box, np.float64), (-1, 2)) - (left, top)
    inside, score = load(folder).predict(picture[top:bottom, left:right], corners, box is not None)
    if not inside.any():
        raise OperationError(
            "the segmenter found no object there: move the point or give a box", code="nothing_found"
        )
    return Segment(Mask.of(inside, left, top, *picture.shape[:2]), round(score, 3), "sam")


@functools.lru_cache(maxsize=1)
def load(folder: str) -> Sam:
    """Load the checkpoint of a folder once per process. Raises MissingFile or BadConfig."""
    fix = "set it to mobilenet, or to the folder of a SAM or SAM 2 checkpoint saved with save_pretrained"
    model, kind, settings = checkpoints.load("toolbox.segmenter", folder, KINDS, fix)
    padded = kind == "sam"
    side = model.config.vision_config.image_size if padded else model.config.prompt_encoder_config.image_size
    settings = {**checkpoints.IMAGENET, **settings, "resample": Image.Resampling.BILINEAR}
    return Sam(model, padded, side if isinstance(side, int) else int(side[0]), settings)
