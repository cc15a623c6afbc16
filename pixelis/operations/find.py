"""FIND: the objects in a picture that words describe, by an open-vocabulary detector from a local folder."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any

import cv2
import numpy as np
from pydantic import Field, StringConstraints

from pixelis.config import ToolboxConfig
from pixelis.errors import MissingFile
from pixelis.operations import checkpoints
from pixelis.operations.geometry import WHOLE, clamp, compose
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, Result, Scene, Target
from pixelis.operations.pixel_budget import shrink

KINDS = {
    "owlvit": "OwlViTForObjectDetection",
    "owlv2": "Owlv2ForObjectDetection",
    "grounding-dino": "GroundingDinoForObjectDetection",
}
THRESHOLDS = {"owlvit": 0.1, "owlv2": 0.2, "grounding-dino": 0.3}
"""Least score of an object, as the authors of the models use them."""
OVERLAP = 0.5
"""IoU above which the lower of two boxes is dropped."""
MAX_OBJECTS = 20
SHORTEST, LONGEST = 800, 1333
"""Sides of the picture that Grounding DINO sees."""
GET = (
    "set toolbox.detector=google/owlv2-base-patch16-ensemble, or to a folder; or "
    "leave find out of toolbox.operations"
)


class FindArguments(OperationArguments):
    text: Annotated[str, StringConstraints(min_length=1, max_length=100, strip_whitespace=True)] = Field(
        description="what to find, one kind of object, such as: red cup"
    )
    box: BoxArgument | None = Field(None, description="the region to search, default all of the image")


class Find(Operation):
    name = "find"
    description = (
        "Find objects in an image by words. Returns a box, a score and an id (for get_properties and "
        "track_object) for each, best first, and shows them."
    )
    Arguments = FindArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        _detector(settings)

    @classmethod
    def run(cls, arguments: FindArguments, target: Target, scene: Scene) -> Result:
        """Up to MAX_OBJECTS objects with a drawn view; none is a result too, with the best score."""
        detector = _detector(scene.settings)
        box = clamp(arguments.box or WHOLE)
        boxes, scores = detector.detect(target.crop(box), arguments.text)
        sizes = [(x0, y0, x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes.tolist()]
        indices = np.asarray(
            cv2.dnn.NMSBoxes(sizes, scores.tolist(), detector.threshold, OVERLAP), int
        ).ravel()
        chosen = sorted((int(i) for i in indices), key=lambda i: -float(scores[i]))[:MAX_OBJECTS]
        region = target.snap(box)
        records: list[dict[str, Any]] = []
        for i in chosen:
            numbers = [round(v, 6) for v in compose(region, boxes[i].tolist())]
            key = json.dumps([target.root, target.frame, arguments.text, numbers])
            detection = {"box": numbers, "score": round(float(scores[i]), 3), "method": detector.kind}
            records.append(target.record(key, label=arguments.text, **detection))
        if not records:
            best = f"{scores.max():.2f}" if len(scores) else "none"
            text = f"no {arguments.text} found; the best score {best} is below {detector.threshold:g}"
            return Result(text, data={"objects": []})
        lines = [f"{len(records)} found: {arguments.text}"]
        for record in records:
            place = scene.place(record["box"], target)
            lines.append(f"{record['id']}: box {place} of {target.id}, score {record['score']:.2f}")
        return Result("\n".join(lines), [scene.show(target, box, {"objects": records})], {"objects": records})


def _detector(settings: ToolboxConfig) -> Detector:
    if settings.detector is None:
        raise MissingFile(
            "find needs an open-vocabulary detector, and toolbox.detector names no folder", fix=GET
        )
    return load(settings.detector)


class Detector:
    def __init__(self, folder: str):
        self.model, self.kind, self.settings = checkpoints.load("toolbox.detector", folder, KINDS, GET)
        self.tokenizer = checkpoints.load_tokenizer("toolbox.detector", folder)
        self.threshold = THRESHOLDS[self.kind]

    def detect(self, picture: np.ndarray, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Boxes float64 [n, 4] (0..1 of the picture, with an area) and scores [n] for uint8 [h, w, 3]."""
        import torch

        # Anti-aliased first: resizing a large picture to the model's side would skip pixels.
        inputs = {**self._tokens(text), **self._pixels(shrink(picture, 2 * LONGEST))}
        with torch.inference_mode():
            output = self.model(**{name: value.to(self.model.device) for name, value in inputs.items()})
        scores = output.logits[0].float().sigmoid().amax(dim=-1).cpu().numpy()
        cx, cy, w, h = output.pred_boxes[0].float().cpu().numpy().astype(np.float64).T
        boxes = np.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], 1)
        if self.kind == "owlv2":  # 0..1 of the square to which the picture was padded, right and below
            side = max(picture.shape[:2])
            boxes *= np.array([side / picture.shape[1], side / picture.shape[0]] * 2)
        boxes = boxes.clip(0, 1)
        least = np.array([1 / picture.shape[1], 1 / picture.shape[0]])
        valid = (
            np.isfinite(boxes).all(1) & np.isfinite(scores) & (boxes[:, 2:] - boxes[:, :2] >= least).all(1)
        )
        return boxes[valid], scores[valid]

    def _tokens(self, text: str) -> dict[str, Any]:
        if self.kind == "grounding-dino":  # trained on lower-case phrases that end with a point
            tokens = self.tokenizer(
                text.lower().rstrip(". ") + ".", truncation=True, max_length=256, return_tensors="pt"
            )
            tokens.setdefault("token_type_ids", tokens["input_ids"] * 0)
            return {name: tokens[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            [text], padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    def _pixels(self, picture: np.ndarray) -> dict[str, Any]:
        height, width = picture.shape[:2]
        if self.kind == "grounding-dino":
            scale = min(SHORTEST / min(height, width), LONGEST / max(height, width))
            size = max(1, round(height * scale)), max(1, round(width * scale))
            settings = {"resample": 2, **checkpoints.IMAGENET, **self.settings}
            values = checkpoints.normalised(picture, size, settings)
            return {"pixel_values": values, "pixel_mask": values.new_ones((1, *size)).long()}
        if self.kind == "owlv2":
            side = max(height, width)  # grey, as in training; transformers 5 pads with black
            picture = cv2.copyMakeBorder(
                picture, 0, side - height, 0, side - width, cv2.BORDER_CONSTANT, value=(128, 128, 128)
            )
        side = int(self.model.config.vision_config.image_size)
        settings = {**checkpoints.CLIP, **self.settings}
        return {"pixel_values": checkpoints.normalised(picture, (side, side), settings)}


@functools.lru_cache(maxsize=1)
def load(folder: str) -> Detector:
    return Detector(folder)
