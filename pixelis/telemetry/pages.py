"""One episode as a person looks at it:

the picture or frames with boxes where the policy zoomed, each turn's text, what the operations found, the rewards.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from pixelis.errors import BadInput, OperationError
from pixelis.operations import geometry
from pixelis.operations.pictures import frame_label
from pixelis.records import Box, ImageView, Media, Question, StopReason, Trajectory, Turn
from pixelis.telemetry.findings import drawn, findings, pixels_of, shots, words
from pixelis.telemetry.words import MAX_TEXT, number, safe, text

PAGE_PIXELS = 640
"""Longest side of a picture on a page."""
LOSSLESS_PIXELS = 128
"""Pictures up to this side are kept exactly: they are what the policy saw, pixel by pixel."""
SHOT_PIXELS = 360
"""Longest side of a frame of a clip."""
BOX_COLOURS = 4
PADS = re.compile(r"(?:<\|(?:image|video)_pad\|>)+")

Marks = Mapping[str, tuple[int, str, Box]]
"""Where the policy zoomed: observation id -> (number on the page, id of the picture or frame, box there)."""

STOPS = {
    StopReason.ANSWER: "gave an answer",
    StopReason.NO_ACTION: "stopped: neither an answer nor a call",
    StopReason.LENGTH: "stopped: a turn grew too long",
    StopReason.OVER_TURN: "stopped: no turns left",
    StopReason.OVER_CONTEXT: "stopped: no room left in the context",
    StopReason.OVER_IMAGES: "stopped: too many pictures",
    StopReason.DEADLINE: "stopped: out of time",
    StopReason.ERROR: "stopped by a failure of the system",
}


@dataclass
class EpisodePage:
    """An episode with its pixels.

    `pictures`: image id -> uint8 [height, width, 3]; the question's own pictures (`img0`) at full size, observations (`obs1`)
    and frames (`vid0.0`) as the policy saw them, and frames of clips at full size under `findings.frame_key` (those named by
    `findings.wanted_frames`); a missing one is said to be missing. `truth`: accepted answers, by default the question's. `title`:
    what is special about this episode, for example the arm it comes from. `made`: a demonstration, nobody's rollout.
    """

    question: Question
    trajectory: Trajectory
    pictures: Mapping[str, np.ndarray] = field(default_factory=dict)
    truth: Sequence[str] | None = None
    title: str = ""
    made: bool = False

    @property
    def truths(self) -> list[str]:
        """Accepted answers; empty when unknown."""
        return list(self.truth if self.truth is not None else self.question.answers or [])

    @property
    def correct(self) -> bool | None:
        """Whether the answer is right: by the scorer's accuracy term, else by comparing texts; None when no truth is known."""
        if "accuracy" in self.trajectory.rewards:
            return self.trajectory.rewards["accuracy"] >= 1.0
        if not self.truths:
            return None
        answer = (self.trajectory.answer or "").strip().casefold()
        return answer in {truth.strip().casefold() for truth in self.truths}


def render_page(page: EpisodePage, place: int = 1) -> str:
    """The episode as an HTML fragment with the id `episode-PLACE`; style and document come from `report`.

    All text is escaped.
    """
    trajectory = page.trajectory
    verdict = {True: ("right", "right"), False: ("wrong", "wrong"), None: ("", "not scored")}[page.correct]
    title = ("Demonstration" if page.made else "Episode") + f" {place}" + (f" · {text(page.title)}" if page.title else "")
    answer = f"<b>{text(trajectory.answer)}</b>" if trajectory.answer is not None else "<b>no answer</b>"
    truth = f" · truth: <b>{text(' or '.join(page.truths))}</b>" if page.truths else ""
    marks = _marks(trajectory.images)
    return (
        f'<article class="episode" id="episode-{place}">'
        f'<header><h3>{title}</h3><span class="pill {verdict[0]}">{verdict[1]}</span></header>'
        f'<p class="question">{text(page.question.question)}</p>'
        f"<p>Answer: {answer}{truth} · {STOPS[trajectory.stop_reason]}</p>"
        f'<div class="episode-body"><div class="scenes">{_scenes(page, marks)}</div>'
        f'<ol class="turns">{_turns(page, marks)}</ol></div>{"" if page.made else _rewards(trajectory)}</article>'
    )


def data_url(picture: np.ndarray, longest: int = PAGE_PIXELS) -> str:
    """The picture, uint8 [height, width, 3], as a data URL:

    scaled down to `longest`; PNG when small, else JPEG. Raises BadInput.
    """
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or 0 in picture.shape:
        raise BadInput(f"expected a uint8 picture [height, width, 3], got {picture.dtype} {list(picture.shape)}")
    image = Image.fromarray(np.ascontiguousarray(picture))
    image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    if max(image.size) <= LOSSLESS_PIXELS:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _marks(images: Sequence[ImageView]) -> dict[str, tuple[int, str, Box]]:
    """Observation id -> (its number on the page, the question's picture or the frame, the box there)."""
    marks: dict[str, tuple[int, str, Box]] = {}
    for view in images:
        if view.parent is None or (view.frame is not None and view.box is None):
            continue
        try:
            links = geometry.chain(images, view.id)
        except OperationError:  # a broken chain has no place in the picture; the crop is still shown
            continue
        if links[0].frame is not None and links[0].box is not None:  # a part of a frame that is not on the page
            continue
        marks[view.id] = (len(marks) + 1, links[0].id, geometry.to_root(links))
    return marks


def _scenes(page: EpisodePage, marks: Marks) -> str:
    out = []
    # An episode whose prompt did not fit has no images, but the question still has its own.
    views = page.trajectory.images or [ImageView(id=media.id) for media in page.question.media if media.kind == "image"]
    for view in views:
        if view.parent is not None:
            continue
        picture = page.pictures.get(view.id)
        if picture is None:
            out.append(f'<p class="missing">The picture {text(view.id)} was not kept.</p>')
            continue
        height, width = picture.shape[:2]
        boxes, count = _boxes(view.id, marks)
        looked = {0: "The policy did not look closer.", 1: "The box is where the policy looked closer."}.get(
            count, "The numbered boxes are where the policy looked closer, in order."
        )
        image = f'<img alt="the picture {safe(view.id)} with {count} boxes" src="{data_url(picture)}">'
        caption = f"<figcaption>The whole picture, {width} × {height} pixels. {looked}</figcaption>"
        out.append(f'<figure><div class="frame">{image}{boxes}</div>{caption}</figure>{_first_look(view, picture)}')
    shown = {name for turn in page.trajectory.turns if turn.role == "user" for name in turn.images}
    clips: dict[str, list[ImageView]] = {}
    for view in page.trajectory.images:
        if view.parent is not None and view.frame is not None and (view.id in shown or not shown):
            clips.setdefault(view.parent, []).append(view)
    for clip, frames in clips.items():
        width, height = frames[0].source_size
        seen = "{} × {}".format(*frames[0].view_size)
        size = f", {width} × {height} pixels" if width and height else ""
        out.append(
            f"<h4>The clip {text(clip)}{size}</h4>{shots([_shot(v, page, marks) for v in frames])}"
            f'<p class="caption">The frames that the policy sees at first, each at {seen} pixels.</p>'
        )
    out += [f'<p class="missing">The clip {text(m.id)} was not kept.</p>' for m in page.question.media if _unseen(m, clips)]
    return "".join(out)


def _unseen(media: Media, clips: Mapping[str, list[ImageView]]) -> bool:
    return media.kind == "video" and media.id not in clips


def _boxes(name: str, marks: Marks) -> tuple[str, int]:
    """The numbered boxes on a picture or frame, and how many they are."""
    here = [(n, box) for n, root, box in marks.values() if root == name]
    return "".join(_drawn(n, box) for n, box in here), len(here)


def _shot(view: ImageView, page: EpisodePage, marks: Marks) -> tuple[str, str]:
    """A view of a frame, with the boxes of later zooms when it shows all of it, and its caption."""
    picture = page.pictures.get(view.id)
    if view.parent is not None and view.box is None:
        picture = pixels_of(page.pictures, page.trajectory.images, view.parent, view.frame)
    caption = f"{text(view.id, 40)}: {frame_label(view.frame, view.time)}"
    if picture is None:
        return '<p class="missing">not kept</p>', caption
    image = f'<img alt="{safe(frame_label(view.frame, view.time))}" src="{data_url(picture, SHOT_PIXELS)}">'
    return f'<div class="frame">{image}{_boxes(view.id, marks)[0]}</div>', caption


def _drawn(n: int, box: Box) -> str:
    x0, y0, x1, y1 = box
    place = f"left:{x0:.2%};top:{y0:.2%};width:{x1 - x0:.2%};height:{y1 - y0:.2%}"
    return f'<span class="box b{(n - 1) % BOX_COLOURS}" style="{place}"><b>{n}</b></span>'


def _first_look(view: ImageView, picture: np.ndarray) -> str:
    """What the policy was given of a large picture, when that is much less than the page shows."""
    width, height = view.view_size
    if not 0 < min(width, height) <= max(width, height) <= min(PAGE_PIXELS, *picture.shape[:2]) // 2:
        return ""
    # The same reduction as operations.pixel_budget.fit, so that the reader sees what the policy saw.
    small = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0))
    return (
        f'<figure class="small"><img class="pixels" alt="the first look of the policy" src="{data_url(small)}">'
        f"<figcaption>What the policy gets to see of it at first: {width} × {height} pixels.</figcaption></figure>"
    )


def _turns(page: EpisodePage, marks: Marks) -> str:
    out, policy_turns = [], 0
    for place, turn in enumerate(page.trajectory.turns):
        if turn.is_policy:
            policy_turns += 1
            out.append(f'<li class="policy"><h4>Turn {policy_turns}: the policy {_deed(turn, page)}</h4>{_raw(turn)}</li>')
        elif turn.role == "tool":
            out.append(_reply(place, page, marks))
        else:
            out.append(f'<li class="prompt">{_folded(turn, "prompt")}</li>')
    return "".join(out)


def _deed(turn: Turn, page: EpisodePage) -> str:
    if turn.action is not None:
        return f"calls {text(turn.action.op, 80)} on {text(turn.action.target, 80)}"
    if turn.error is not None:
        return f"makes a call that cannot be read ({text(turn.error, 80)})"
    last = [t for t in page.trajectory.turns if t.is_policy][-1] is turn
    return "answers" if last and page.trajectory.answer is not None else "says"


def _reply(place: int, page: EpisodePage, marks: Marks) -> str:
    turn = page.trajectory.turns[place]
    observation = turn.observation
    if observation is not None and observation.status == "error":
        code = text(observation.code or "error", 80)
        return (
            f'<li class="tool failed"><h4>The call fails: {code}</h4><p>{text(observation.text)}</p>{_folded(turn, "reply")}</li>'
        )
    views = {view.id: view for view in page.trajectory.images}
    ids = turn.images or ([view.id for view in observation.images] if observation is not None else [])
    figures, frames = [_found(place, page)], []
    tracked = bool(figures[0]) and observation is not None and bool(observation.data.get("tracks"))
    for name in ids:
        mark = marks.get(name)
        if name in views and views[name].frame is not None:
            if not tracked:  # else they are there already, with the track on them
                frames.append(_shot(views[name], page, marks))
            continue
        label = f'<span class="mark b{(mark[0] - 1) % BOX_COLOURS}">{mark[0]}</span> ' if mark else ""
        picture = page.pictures.get(name)
        if picture is None:
            figures.append(f'<p class="missing">{label}The picture {text(name)} was not kept.</p>')
            continue
        view = views.get(name)
        known = view is not None and all(view.source_size)
        source = f"{view.source_size[0]} × {view.source_size[1]} pixels of the picture, " if view and known else ""
        figures.append(
            f'<figure class="small"><img class="pixels" alt="what {safe(name)} shows" src="{data_url(picture)}">'
            f"<figcaption>{label}{text(name)}: {source}seen at {picture.shape[1]} × {picture.shape[0]}.</figcaption></figure>"
        )
    figures += [shots(frames)] if frames else []
    figures += [words(observation)] if observation is not None else []
    if not any(figures):
        return f'<li class="tool"><h4>The operation replies</h4>{_raw(turn)}</li>'
    return f'<li class="tool"><h4>The operation replies</h4>{"".join(figures)}{_folded(turn, "reply")}</li>'


def _found(place: int, page: EpisodePage) -> str:
    """The picture or frames with what an observation found drawn on them."""
    drawings = []
    for finding in findings(page.trajectory, place):
        picture = drawn(finding, page.pictures, page.trajectory.images)
        if picture is not None:
            image = f'<img alt="{safe(finding.caption)}" src="{data_url(picture)}">'
            drawings.append((image, text(finding.caption, 80)))
    if len(drawings) == 1:
        image, caption = drawings[0]
        return f'<figure class="found">{image}<figcaption>{caption}</figcaption></figure>'
    return shots(drawings) if drawings else ""


def _folded(turn: Turn, what: str) -> str:
    return f"<details><summary>The {what} as the policy reads it ({turn.role})</summary>{_raw(turn)}</details>"


def _raw(turn: Turn) -> str:
    if not turn.text:
        return ""
    # A picture is hundreds of placeholder tokens: one short note says as much.
    folded = PADS.sub(lambda run: f"[picture: {run.group().count('_pad|>')} tokens]", turn.text[: 50 * MAX_TEXT])
    return f"<pre>{text(folded.strip())}</pre>"


def _rewards(trajectory: Trajectory) -> str:
    terms = [f"{safe(name)} <b>{number(value)}</b>" for name, value in trajectory.rewards.items()]
    if trajectory.reward is not None:
        terms.insert(0, f"reward <b>{number(trajectory.reward)}</b>")
    if trajectory.unscored is not None:
        terms.append(f"unscored: {text(trajectory.unscored)}")
    if trajectory.advantage is not None:
        terms.append(f"advantage <b>{trajectory.advantage:+.2f}</b>")
    tokens = sum(len(turn.tokens) for turn in trajectory.turns if turn.is_policy)
    terms.append(f"policy version <b>{trajectory.policy_version}</b>")
    if tokens:
        terms.append(f"<b>{tokens}</b> tokens written")
    if trajectory.seconds:
        terms.append(f"<b>{trajectory.seconds:.2f}</b> s")
    return f'<ul class="terms">{"".join(f"<li>{term}</li>" for term in terms)}</ul>'
