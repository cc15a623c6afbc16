"""One episode for a person: pictures with the boxes of zooms, turns, findings, rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from pixelis.errors import OperationError
from pixelis.operations import geometry
from pixelis.operations.pictures import frame_label
from pixelis.records import Box, ImageView, Question, Trajectory, Turn
from pixelis.telemetry.html.details import Details, details_of, use_of
from pixelis.telemetry.html.drawings import drawings, full_picture
from pixelis.telemetry.html.filters import PAGE_PIXELS


@dataclass(frozen=True)
class Mark:
    """A numbered box where the policy zoomed in, on the picture or frame ``root``."""

    number: int
    root: str
    box: Box


@dataclass(frozen=True)
class Shot:
    """A view with its pixels (None when they were not kept) and the boxes to draw on it."""

    view: ImageView
    picture: np.ndarray | None
    marks: Sequence[Mark] = ()

    @property
    def caption(self) -> str:
        return frame_label(self.view.frame, self.view.time)


@dataclass(frozen=True)
class Crop:
    """A picture that an observation returned: name, mark and pixels if known, size of its source region."""

    name: str
    mark: Mark | None
    picture: np.ndarray | None
    source_size: tuple[int, int]


@dataclass(frozen=True)
class TurnPage:
    """A turn: its number among the policy's turns, or what the observation of a tool shows."""

    turn: Turn
    number: int = 0
    is_answer: bool = False
    drawings: Sequence[tuple[str, np.ndarray]] = ()
    crops: Sequence[Crop] = ()
    frames: Sequence[Shot] = ()
    details: Details | None = None
    use: str = ""


@dataclass
class EpisodePage:
    """An episode with its pixels; the page names the missing ones."""

    question: Question
    trajectory: Trajectory
    pictures: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Image id -> uint8 [height, width, 3]: the question's pictures at full size, observations and frames as the
    policy saw them, and `drawings.required_frames` at full size under `drawings.frame_key`."""
    title: str = ""
    is_demonstration: bool = False

    @property
    def correct(self) -> bool | None:
        """Whether the answer is right, by the accuracy reward or its text; None without accepted answers."""
        if "accuracy" in self.trajectory.rewards:
            return self.trajectory.rewards["accuracy"] >= 1.0
        if not self.question.answers:
            return None
        answer = (self.trajectory.answer or "").strip().casefold()
        return answer in {truth.strip().casefold() for truth in self.question.answers}

    def stills(self) -> list[Shot]:
        # An episode whose prompt did not fit has no images, but the question still has its own.
        views = self.trajectory.images or [
            ImageView(id=media.id) for media in self.question.media if media.kind == "image"
        ]
        return [Shot(v, self.pictures.get(v.id), self._marks_on(v.id)) for v in views if v.parent is None]

    def first_look(self, shot: Shot) -> np.ndarray | None:
        """What the policy saw of a picture at first, if that is much smaller than what the page shows."""
        size = shot.view.view_size
        if shot.picture is None or not 0 < max(size) <= min(PAGE_PIXELS, *shot.picture.shape[:2]) // 2:
            return None
        # As operations.pixel_budget.fit reduces it
        small = Image.fromarray(shot.picture).resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
        return np.asarray(small)

    def starts(self) -> list[Crop]:
        """What the episode's environment showed first."""
        first = self._first()
        return [
            Crop(view.id, None, self.pictures.get(view.id), view.source_size)
            for view in self.trajectory.images
            if view.parent is not None and view.frame is None and view.id in first
        ]

    def clips(self) -> dict[str, list[Shot]]:
        first = self._first()
        clips: dict[str, list[Shot]] = {}
        for view in self.trajectory.images:
            if view.parent is not None and view.frame is not None and (view.id in first or not first):
                clips.setdefault(view.parent, []).append(self._frame(view))
        return clips

    def missing_clips(self) -> list[str]:
        """Clips of the question of which no frame is known."""
        clips = self.clips()
        return [media.id for media in self.question.media if media.kind == "video" and media.id not in clips]

    def _first(self) -> set[str]:
        """Images of the prompts: what the policy saw before it called anything."""
        return {name for turn in self.trajectory.turns if turn.role == "user" for name in turn.images}

    def turns(self) -> Iterator[TurnPage]:
        policy_turns = [turn for turn in self.trajectory.turns if turn.is_policy]
        number = 0
        for place, turn in enumerate(self.trajectory.turns):
            failed = turn.observation is not None and turn.observation.status == "error"
            if turn.is_policy:
                number += 1
                is_answer = number == len(policy_turns) and self.trajectory.answer is not None
                yield TurnPage(turn, number, is_answer)
            elif turn.role == "tool" and not failed:
                yield self._tool_turn(place, turn)
            else:
                yield TurnPage(turn)

    def _tool_turn(self, place: int, turn: Turn) -> TurnPage:
        observation, images = turn.observation, self.trajectory.images
        painted = [
            (d.caption, picture)
            for d in drawings(self.trajectory, place)
            if (picture := d.paint(self.pictures, images)) is not None
        ]
        names = turn.images or ([view.id for view in observation.images] if observation is not None else [])
        views, marks = {view.id: view for view in images}, self._marks()
        frames = [views[name] for name in names if name in views and views[name].frame is not None]
        if painted and observation is not None and observation.data.get("tracks"):
            frames = []  # the drawings already show them, with the track
        crops = [
            Crop(name, marks.get(name), self.pictures.get(name), views[name].source_size)
            for name in names
            if name in views and views[name].frame is None
        ]
        shown = painted, crops, [self._frame(view) for view in frames]
        if observation is None:
            return TurnPage(turn, 0, False, *shown)
        return TurnPage(turn, 0, False, *shown, details_of(observation), use_of(observation))

    def _frame(self, view: ImageView) -> Shot:
        """A view of a frame, with the boxes of later zooms if it shows the whole frame."""
        picture = self.pictures.get(view.id)
        if view.parent is not None and view.box is None:
            picture = full_picture(self.pictures, self.trajectory.images, view.parent, view.frame)
        return Shot(view, picture, self._marks_on(view.id))

    def _marks_on(self, root: str) -> list[Mark]:
        return [mark for mark in self._marks().values() if mark.root == root]

    def _marks(self) -> dict[str, Mark]:
        """Observation id -> its mark."""
        marks: dict[str, Mark] = {}
        for view in self.trajectory.images:
            if view.parent is None or (view.frame is not None and view.box is None):
                continue
            try:
                links = geometry.chain(self.trajectory.images, view.id)
            except OperationError:  # a view without its parent has no place; its crop is still shown
                continue
            # Part of a frame that is not on the page
            if links[0].frame is not None and links[0].box is not None:
                continue
            marks[view.id] = Mark(len(marks) + 1, links[0].id, geometry.to_root(links))
        return marks
