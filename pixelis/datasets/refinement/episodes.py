"""The policy's episodes on the remaining questions, stored so that they are played once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis.config import Config, ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.datasets.refinement import filters
from pixelis.datasets.refinement.sets import write_rows
from pixelis.errors import DataFailure
from pixelis.files import write_json
from pixelis.records import Group, Media, Question, Region

RELEVANT_SECTIONS = {"policy", "dialogue", "toolbox", "engine", "evaluate", "rewards"}
"""Sections of the configuration that affect episodes: if one changes, the episodes are played again."""
MARGIN = 0.25
"""Of the annotated box, on each side, as a share of its size."""


class Episodes:
    """The questions to play, in ``sources``, and the stored scores by arm, with operations or without.

    ``samples`` of each question and arm. ``glance``: also without operations, after the question with its ``hint``.
    ``annotated``: crops of the annotated boxes take the place of operations. ``whole``: the episodes are stored too.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        questions: Sequence[Question],
        samples: int,
        glance: bool,
        hint: str = "",
        whole: bool = False,
        annotated: bool = False,
    ):
        if annotated:
            questions = [question for question in questions if _annotated_region(question) is not None]
            if not questions:
                raise DataFailure(
                    "no question has an annotated box in a picture",
                    fix="refinement.pass_rate.annotated=false",
                )
        self.folder, self.count, self.samples, self.whole = folder, len(questions), samples, whole
        self.arms = {"looking": not annotated, **({"glance": False} if glance else {})}
        source = folder / "questions.jsonl"
        write_rows(source, questions)
        self.sources = dict.fromkeys(self.arms, source)
        settings = [config.model_dump(mode="json", include=RELEVANT_SECTIONS), config.run.seed, samples]
        if hint:
            self.sources["glance"] = folder / "questions-glance.jsonl"
            hinted = (q.model_copy(update={"question": f"{q.question} {hint}"}) for q in questions)
            write_rows(self.sources["glance"], hinted)
            settings.append(hint)
        if annotated:
            self.sources["looking"] = folder / "questions-looking.jsonl"
            crops = folder / "crops"
            crops.mkdir(exist_ok=True)
            write_rows(self.sources["looking"], (_with_crop(q, config.toolbox, crops) for q in questions))
            settings.append("annotated")
        self.identity = hashlib.sha256(
            source.read_bytes() + json.dumps(settings, sort_keys=True).encode()
        ).hexdigest()
        sampling = config.evaluate.sampling.model_copy(update={"temperature": 1.0})
        self.config = config.model_copy(
            update={"evaluate": config.evaluate.model_copy(update={"sampling": sampling})}
        )

    def missing(self) -> list[str]:
        """Arms without stored scores for these questions and settings."""
        return [arm for arm in self.arms if self._stored(arm).get("identity") != self.identity]

    def store(self, arm: str, groups: Sequence[Group]) -> None:
        if self.whole:
            write_rows(self._trajectories(arm), groups)
        rows = [
            [g.question.id, arm == "looking", t.rewards.get("accuracy")]
            for g in groups
            for t in g.trajectories
        ]
        write_json(self._file(arm), {"identity": self.identity, "rows": rows})

    def outcomes(self) -> dict[str, filters.Outcomes]:
        return filters.group_outcomes(tuple(row) for arm in self.arms for row in self._stored(arm)["rows"])

    def groups(self, arm: str) -> Iterator[Group]:
        """The stored episodes of an arm, in the order of the questions."""
        with self._trajectories(arm).open("rb") as lines:
            yield from map(Group.model_validate_json, lines)

    def _trajectories(self, arm: str) -> Path:
        return self.folder / f"trajectories-{arm}.jsonl"

    def _file(self, arm: str) -> Path:
        return self.folder / f"episodes-{arm}.json"

    def _stored(self, arm: str) -> dict[str, Any]:
        try:
            return json.loads(self._file(arm).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


def _annotated_region(question: Question) -> Region | None:
    """The first annotated box in a picture of the question."""
    pictures = {media.id for media in question.media if media.kind == "image"}
    regions = question.annotations.regions if question.annotations is not None else []
    return next((region for region in regions if region.media in pictures), None)


def _with_crop(question: Question, settings: ToolboxConfig, folder: Path) -> Question:
    """The question with a PNG of its annotated box, wider by MARGIN on each side, as a further picture."""
    region = _annotated_region(question)
    assert region is not None
    picture = open_media(next(media for media in question.media if media.id == region.media), settings)
    assert isinstance(picture, np.ndarray)
    (height, width), (x0, y0, x1, y1) = picture.shape[:2], region.box
    across, down = MARGIN * (x1 - x0), MARGIN * (y1 - y0)
    left, top = int(max(0.0, x0 - across) * width), int(max(0.0, y0 - down) * height)
    right, bottom = math.ceil(min(1.0, x1 + across) * width), math.ceil(min(1.0, y1 + down) * height)
    crop = Image.fromarray(picture[top : max(bottom, top + 1), left : max(right, left + 1)])
    path = folder / f"{hashlib.sha256(question.id.encode()).hexdigest()[:32]}.png"
    crop.save(path)
    media = Media(id=f"img{len(question.media)}", kind="image", uri=str(path.resolve()))
    return question.model_copy(update={"media": [*question.media, media]})
