"""SEARCH_CLIP: find a moment in a clip by a picture, by an event, or by words."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import cv2
import numpy as np
from pydantic import Field, StringConstraints, model_validator

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations import checkpoints, shots
from pixelis.operations.geometry import WHOLE, clamp
from pixelis.operations.media import subsample
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, Result, Scene, Target
from pixelis.operations.pixel_budget import shrink
from pixelis.operations.select_frames import Seconds
from pixelis.operations.video import Clip

MAX_SAMPLES, MAX_WORD_SAMPLES = 240, 48
"""Frames that the first pass looks at; fewer by words, because a network sees each."""
REFINED = 24
MAX_MOMENTS = 4
WIDTH = 160
MIN_TEMPLATE = 6
ZOOMS = (1.0, 0.8, 1.25, 0.6, 1.6)
STILL = 0.8
"""Mean change of brightness (0..255) between samples below which nothing moves."""
SEARCHERS = {"clip": "CLIPModel", "siglip": "SiglipModel"}
GET = "set toolbox.searcher=openai/clip-vit-large-patch14, or to a folder"


class SearchClipArguments(OperationArguments):
    like: str | None = Field(None, description="id of an image: find the moments that show it")
    like_box: BoxArgument | None = Field(None, description="with like: the region of it to look for")
    event: Literal["cut", "motion"] | None = Field(
        None, description="cut: where scenes change; motion: when most moves"
    )
    text: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = Field(
        None, description="what the moment shows"
    )
    start: Seconds | None = Field(None, description="search from this second")
    end: Seconds | None = Field(None, description="search to this second")

    @model_validator(mode="after")
    def _one_way(self) -> SearchClipArguments:
        if sum(argument is not None for argument in (self.like, self.event, self.text)) != 1:
            raise ValueError("give one of like, event and text")
        if self.like_box is not None and self.like is None:
            raise ValueError("like_box needs like")
        return self


class SearchClip(Operation):
    """Samples frames, then looks closer at the best: a shorter moment can be missed."""

    name = "search_clip"
    description = (
        "Find a moment in a video: where an image or a region of it appears (like), where scenes change or "
        "most moves (event), or by words (text). Returns times with scores and shows the frames."
    )
    Arguments = SearchClipArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        if settings.searcher is not None:
            load(settings.searcher)

    @classmethod
    def run(cls, arguments: SearchClipArguments, target: Target, scene: Scene) -> Result:
        """Up to MAX_MOMENTS moments, the best first (cuts in order of time), each with its frame.

        data: ``moments`` [{"frame", "time", "score"}], ``frames_seen``.
        """
        clip = target.clip
        start = float(clip.times[0]) if arguments.start is None else arguments.start
        end = clip.end if arguments.end is None else arguments.end
        if start > end or start > clip.end or end < float(clip.times[0]):
            message = f"the clip runs from {clip.times[0]:.2f} to {clip.end:.2f} s"
            raise OperationError(message, code="out_of_range")
        numbers = range(clip.at(start), clip.at(end) + 1)
        limit = MAX_SAMPLES if arguments.text is None else MAX_WORD_SAMPLES
        seen = min(len(numbers), limit)
        if arguments.event == "cut":
            moments = [(cut, 1.0) for cut in _cuts(clip, numbers)]
            title = f"{len(moments)} hard cut{'' if len(moments) == 1 else 's'}" if moments else "no hard cut"
        elif arguments.event == "motion":
            moments = _motion(clip, numbers)
            title = "most motion (mean change of brightness, 0..255)" if moments else "nothing moves"
        else:
            if arguments.like is not None:
                like = scene.target(arguments.like)
                score = _by_picture(like.picture, like.pixels(clamp(arguments.like_box or WHOLE)))
            elif scene.settings.searcher is not None:
                score = load(scene.settings.searcher).by_words(arguments.text or "")
            else:
                message = "search by words needs toolbox.searcher=FOLDER: use like or event instead"
                raise OperationError(message, code="bad_arguments")
            moments = _best(clip, numbers, score, limit)
            title = "best matches (similarity, 1 is equal)"
            if arguments.like is not None and moments[0][1] < 0.5:
                title = "unsure, nothing similar; the nearest (similarity, 1 is equal)"
        shown, more = moments[:MAX_MOMENTS], moments[MAX_MOMENTS : 3 * MAX_MOMENTS]
        listed = [f"frame {number} at {clip.times[number]:.2f} s ({value:.2f})" for number, value in shown]
        text = f"{title} in {target.root}" + (": " + ", ".join(listed) if listed else "")
        if more:
            text += ", then at " + ", ".join(f"{clip.times[number]:.2f}" for number, _ in more)
        if seen < len(numbers):
            text += f"; {seen} of {len(numbers)} frames were compared first"
        views = scene.show_frames(clip, [number for number, _ in shown])
        records = [
            {"frame": n, "time": float(clip.times[n]), "score": round(value, 4)}
            for n, value in [*shown, *more]
        ]
        return Result(text, views, {"moments": records, "frames_seen": seen})


def _frames(
    clip: Clip, numbers: Sequence[int], change: Callable[[np.ndarray], Any]
) -> Iterator[tuple[int, Any]]:
    for number, frame in zip(numbers, clip.frames(numbers), strict=True):
        yield number, change(frame)


def _cuts(clip: Clip, numbers: range) -> list[int]:
    """The first frame of each new scene. Where samples differ, every frame between them is judged."""
    samples = subsample(numbers, MAX_SAMPLES)
    stretches = [(numbers[0], numbers[-1])]
    if len(samples) < len(numbers):
        pairs = itertools.pairwise(_frames(clip, samples, shots.thumbnail))
        stretches = [(a, b) for (a, before), (b, after) in pairs if shots.change(before, after) >= shots.CUT]
    cuts: list[int] = []
    for start, end in stretches:
        # With neighbours, so that a flash is no cut.
        around = range(max(numbers[0], start - shots.FLASH), min(numbers[-1], end + shots.FLASH) + 1)
        frames = clip.frames(around)
        marked = zip(around[1:], shots.mark_cuts(next(frames), frames), strict=True)
        cuts += [number for number, (_, cut) in marked if cut and start < number <= end]
    return cuts


def _motion(clip: Clip, numbers: range) -> list[tuple[int, float]]:
    """The samples at which most changes since the one before; a cut is no motion."""
    samples = subsample(numbers, MAX_SAMPLES)
    changes = [
        (number, float(np.abs(now - earlier).mean()))
        for (_, earlier), (number, now) in itertools.pairwise(_frames(clip, samples, shots.thumbnail))
        if shots.change(earlier, now) < shots.CUT
    ]
    return _apart(clip, [item for item in changes if item[1] >= STILL], numbers)


def _best(
    clip: Clip, numbers: range, score: Callable[[np.ndarray], float], limit: int
) -> list[tuple[int, float]]:
    samples = subsample(numbers, limit)
    scores = dict(_frames(clip, samples, score))
    step = len(numbers) / len(samples)
    if step > 1:
        for number, _ in _apart(clip, list(scores.items()), numbers)[:2]:
            low, high = max(numbers[0], round(number - step)), min(numbers[-1], round(number + step))
            near = [n for n in subsample(range(low, high + 1), REFINED) if n not in scores]
            scores.update(_frames(clip, near, score))
    return _apart(clip, list(scores.items()), numbers)


def _apart(clip: Clip, scores: list[tuple[int, float]], numbers: range) -> list[tuple[int, float]]:
    """Up to MAX_MOMENTS of the highest scores that are not beside each other in time."""
    gap = max(0.4, 0.08 * float(clip.times[numbers[-1]] - clip.times[numbers[0]]))
    out: list[tuple[int, float]] = []
    for number, value in sorted(scores, key=lambda item: (-item[1], item[0])):
        if all(abs(clip.times[number] - clip.times[other]) >= gap for other, _ in out):
            out.append((number, value))
        if len(out) == MAX_MOMENTS:
            break
    return out


def _by_picture(picture: np.ndarray, edges: tuple[int, int, int, int]) -> Callable[[np.ndarray], float]:
    """The best correlation (0..1) of a part of a picture with a place in a frame, at several sizes.

    Raises OperationError ``too_small`` for a part that copies of frames could only show much enlarged.
    """
    left, top, right, bottom = edges
    region, width = picture[top:bottom, left:right], picture.shape[1]
    whole = region.shape == picture.shape
    if shrink(region, WIDTH).std(axis=(0, 1)).max() < 2:
        raise OperationError(
            "the image to look for has one color, choose a region with some structure", code="bad_arguments"
        )

    @functools.cache
    def templates(height: int) -> list[np.ndarray]:
        sizes: dict[tuple[int, int], float] = {}
        for zoom in ZOOMS:
            # An object keeps about its part of the picture's width from frame to frame.
            columns, rows = (round(WIDTH / width * zoom * side) for side in (right - left, bottom - top))
            if whole and zoom == 1:
                columns, rows = WIDTH, height
            if MIN_TEMPLATE <= columns <= WIDTH and MIN_TEMPLATE <= rows <= height:
                sizes.setdefault((columns, rows), zoom)
        least = math.ceil(MIN_TEMPLATE * width / WIDTH)
        if min(right - left, bottom - top) < least and min(sizes.values(), default=math.inf) > 1.25:
            size = f"{right - left}x{bottom - top}"
            message = f"the region to look for is {size} pixels, give one of at least {least}x{least}"
            raise OperationError(message, code="too_small")
        return [
            cv2.resize(region, size, interpolation=cv2.INTER_AREA) for size in sizes or {(WIDTH, height): 1.0}
        ]

    def score(frame: np.ndarray) -> float:
        height = max(MIN_TEMPLATE, round(frame.shape[0] * WIDTH / frame.shape[1]))
        small = cv2.resize(frame, (WIDTH, height), interpolation=cv2.INTER_AREA)
        values = [
            cv2.matchTemplate(small, template, cv2.TM_CCOEFF_NORMED).max() for template in templates(height)
        ]
        finite = [float(value) for value in values if np.isfinite(value)]
        return min(1.0, max([0.0, *finite]))

    return score


class Searcher:
    """A CLIP or SigLIP checkpoint, its tokenizer and the size and normalisation of its pictures."""

    def __init__(self, folder: str):
        self.model, kind, self.settings = checkpoints.load("toolbox.searcher", folder, SEARCHERS, GET)
        self.tokenizer = checkpoints.load_tokenizer("toolbox.searcher", folder)
        self.side = int(self.model.config.vision_config.image_size)
        self.length = int(self.model.config.text_config.max_position_embeddings)
        self.crops = kind == "clip"
        plain = {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
        self.settings = {**(checkpoints.CLIP if self.crops else plain), **self.settings}

    def by_words(self, text: str) -> Callable[[np.ndarray], float]:
        """Scores a frame (uint8 [H, W, 3]) by the cosine of its features and those of ``text``."""
        import torch

        device = next(self.model.parameters()).device
        tokens = self.tokenizer(
            text, padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        # SigLIP was trained on padding
        names = ("input_ids", "attention_mask") if self.crops else ("input_ids",)
        with torch.inference_mode():
            words = _features(
                self.model.get_text_features(**{name: tokens[name].to(device) for name in names})
            )

        def score(frame: np.ndarray) -> float:
            with torch.inference_mode():
                image = _features(
                    self.model.get_image_features(pixel_values=self.pixel_values(frame).to(device))
                )
            return float((words @ image.T).item())

        return score

    def pixel_values(self, frame: np.ndarray) -> Any:
        """float32 [1, 3, side, side]: CLIP sees the middle square, SigLIP the whole frame stretched."""
        if self.crops:
            side = min(frame.shape[:2])
            top, left = (frame.shape[0] - side) // 2, (frame.shape[1] - side) // 2
            frame = np.ascontiguousarray(frame[top : top + side, left : left + side])
        return checkpoints.normalised(frame, (self.side, self.side), self.settings)


def _features(output: Any) -> Any:
    features = getattr(output, "pooler_output", output).float()
    return features / features.norm(dim=-1, keepdim=True)


@functools.lru_cache(maxsize=1)
def load(folder: str) -> Searcher:
    return Searcher(folder)
