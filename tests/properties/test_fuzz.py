"""Fuzzing of what reads hostile input: decoders of pictures and clips, dialects, readers of data sets."""

from __future__ import annotations

import copy
import functools
import io
import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clips import encode
from format_rows import demonstration_rows, question_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official_sets import SETS
from PIL import Image

from pixelis.config import ToolboxConfig
from pixelis.datasets import readers
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.formats import read_records
from pixelis.dialogue.dialects import DIALECTS
from pixelis.errors import BadImage, PixelisError
from pixelis.operations import OPERATIONS
from pixelis.operations.image import load_image
from pixelis.operations.scale import Scale
from pixelis.operations.video import open_clip
from pixelis.records import ImageView, Question

MAX_PIXELS = 100_000
LIMITS = ToolboxConfig(max_image_pixels=MAX_PIXELS, max_video_frames=200, max_video_seconds=60.0)
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
fuzz = settings(suppress_health_check=SLOW)

# -- mutations -----------------------------------------------------------------------------------------------

EDGES = [b"\0", b"\xff", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\1"]
PLACES = st.integers(0, 9999)
KINDS = st.sampled_from(["set", "insert", "delete", "cut", "repeat", "splice"])
VALUES = st.one_of(st.sampled_from(EDGES), st.binary(min_size=1, max_size=8))
EDITS = st.lists(st.tuples(KINDS, PLACES, VALUES), min_size=1, max_size=6)


def mutate(data: bytes, edits: list[tuple[str, int, bytes]], other: bytes) -> bytes:
    """The data after the edits, whose places are ten thousandths of its length."""
    for kind, place, value in edits:
        at = len(data) * place // 9999 if place % 2 else min(len(data), place // 16)
        if kind == "set":
            data = data[:at] + value + data[at + len(value) :]
        elif kind == "insert":
            data = data[:at] + value + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + 4 * len(value) :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "repeat":
            data = data[:at] + data[max(0, at - 64) : at] * (1 + value[0] % 4) + data[at:]
        else:
            data = data[:at] + other[len(other) * place // 9999 :]
    return data


def outcome(call: Callable[[], Any], error: type[Exception]) -> Any:
    """The value of a call, or its error of this kind."""
    try:
        return call()
    except error as failure:
        return failure


# -- pictures and clips --------------------------------------------------------------------------------------


@functools.cache
def pictures() -> list[bytes]:
    """A picture of 24 x 16 pixels in each mode, format and compression that Pillow writes and we read."""
    pixels = np.random.default_rng(3).integers(0, 256, (16, 24, 4), np.uint8)
    full = Image.fromarray(pixels, "RGBA")
    exif = Image.Exif()
    exif[274] = 6
    out = []

    def add(image: Image.Image, format: str, **options: Any) -> None:
        stream = io.BytesIO()
        image.save(stream, format, **options)
        out.append(stream.getvalue())

    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        deep = Image.fromarray(pixels[..., 0].astype(np.uint16))
        add(deep if mode == "I;16" else full.convert(mode), "PNG")
    for mode in ("L", "RGB", "CMYK"):
        add(full.convert(mode), "JPEG", exif=exif, progressive=mode == "RGB")
    add(full, "WEBP", lossless=True)
    add(full.convert("RGB"), "WEBP", exif=exif.tobytes())
    frames = [full.convert("P"), full.rotate(90).convert("P")]
    add(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=40)
    add(full.convert("RGB"), "BMP")
    add(full.convert("P"), "BMP")
    for compression in ("raw", "tiff_lzw", "tiff_deflate", "packbits", "jpeg"):
        add(full.convert("RGB"), "TIFF", compression=compression, exif=exif)
    add(full.convert("1"), "TIFF", compression="group4")
    return out


@functools.cache
def clips() -> list[bytes]:
    """Six frames of 32 x 32 pixels in several containers."""
    frames = list(np.random.default_rng(4).integers(0, 256, (6, 32, 32, 3), np.uint8))
    kinds = [("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4"), ("mpegts", "mpeg2video")]
    kinds.append(("webm", "libvpx"))
    return [encode(frames, container, codec) for container, codec in kinds]


@fuzz
@given(st.integers(0, 99), EDITS, st.integers(0, 99))
def test_a_damaged_picture_is_pixels_within_the_limit_or_a_bad_image(
    seed: int, edits: list, other: int
) -> None:
    corpus = pictures()
    data = mutate(corpus[seed % len(corpus)], edits, corpus[other % len(corpus)])
    picture = outcome(lambda: load_image(data, 1_000_000, MAX_PIXELS), BadImage)
    if isinstance(picture, BadImage):
        assert picture.code.startswith("image_")
        return
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert 0 < picture.shape[0] * picture.shape[1] <= MAX_PIXELS


@pytest.mark.slow
@fuzz
@given(st.integers(0, 99), EDITS, st.integers(0, 99))
def test_a_damaged_clip_is_frames_within_the_limit_or_a_bad_image(seed: int, edits: list, other: int) -> None:
    corpus = clips()
    data = mutate(corpus[seed % len(corpus)], edits, corpus[other % len(corpus)])
    clip = outcome(lambda: open_clip(data, LIMITS), BadImage)
    if isinstance(clip, BadImage):
        assert clip.code.startswith(("video_", "image_"))
        return
    assert 0 < len(clip.times) <= LIMITS.max_video_frames
    assert np.isfinite(clip.times).all()
    assert (np.diff(clip.times) > 0).all()
    assert clip.width * clip.height <= MAX_PIXELS
    for number in {0, len(clip.times) // 2, len(clip.times) - 1}:
        frame = outcome(functools.partial(clip.frame, number), BadImage)
        if isinstance(frame, BadImage):
            assert frame.code == "video_undecodable"
        else:
            assert frame.shape == (clip.height, clip.width, 3)


# -- dialects ------------------------------------------------------------------------------------------------

VIEWS = [ImageView(id="img0", view_size=(560, 280)), ImageView(id="obs1", view_size=(280, 560))]
TURNS = [
    """<think>a</think><tool_call>{"name": "zoom_in", "arguments":
    {"bbox_2d": [1, 2, 30, 40], "label": "x"}}</tool_call>""",
    """<think>a</think><tool_call>{"name": "select_frames", "arguments":
    {"target_frames": [1, 2]}}</tool_call>""",
    '<think>a</think><grounding>{"bbox_2d": [0.1, 0.2, 0.5, 0.6], "source": "original_image"}</grounding>',
    """<tool_call>{"name": "crop_image_normalized", "arguments":
    {"bbox_2d": [0, 0.5, 1, 1], "target_image": 1}}</tool_call>""",
    '<tool_call>[{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 9, 9]}}]</tool_call>',
    "<think>so</think><answer>\\boxed{\\frac{1}{2}}</answer>",
    "",
    "Therefore, the final answer is $\\boxed{7}$ Answer: 7",
]
NUMBERS = ["1e999", "-0", "1e-400", "NaN", "Infinity", "9" * 400, "[[[[", "]" * 50, '"\\ud800"', "null"]
NUMBERS += ["true", "{}", "\\u0000"]
TAGS = [
    "<tool_call>",
    "</tool_call>",
    "</think>",
    "<answer>",
    "</answer>",
    "<grounding>",
    "\\boxed{",
    "{" * 2000,
]
TOKENS = st.one_of(st.sampled_from(NUMBERS), st.text(max_size=6), st.sampled_from(TAGS))
CODES = {"bad_json", "unknown_op", "bad_arguments", "bad_target", "bad_box", "out_of_range", "limit"}


@fuzz
@given(
    st.sampled_from(sorted(DIALECTS)),
    st.sampled_from(TURNS),
    st.lists(st.tuples(PLACES, PLACES, TOKENS), max_size=5),
)
def test_a_damaged_turn_is_an_action_an_answer_or_a_named_error(
    name: str, turn: str, edits: list[tuple[int, int, str]]
) -> None:
    for start, length, token in edits:
        at = len(turn) * start // 9999
        turn = turn[:at] + token + turn[at + length % 12 :]
    dialect = DIALECTS[name]
    reply = dialect.parse(turn, OPERATIONS, Scale.of(dialect.scale or "thousand", VIEWS))
    assert (reply.action is not None) + (reply.error is not None) + (reply.answer is not None) <= 1
    if reply.error is not None:
        assert reply.error.code in CODES
    if reply.action is not None:
        json.dumps(reply.action.model_dump(mode="json"), allow_nan=False)
    if dialect.well_formed(turn):
        assert reply.action or reply.error or reply.answer is not None


# -- data sets and rows --------------------------------------------------------------------------------------

JUNK: list[Any] = [None, True, -1, 0, 10**30, 1e308, float("inf"), float("nan"), "", "x" * 300, [], {}]
JUNK += ["../../etc/passwd", "\ud800", [[]], {"": None}, [10**9], "http://127.0.0.1/x", "1,2,3", -0.0, "NaN"]
JSON_EDITS = st.lists(
    st.tuples(PLACES, st.integers(0, 2), st.sampled_from(range(len(JUNK)))), min_size=1, max_size=4
)


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Container and key of every node of a JSON value."""
    out: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        out.append((value, key))
        out += nodes(item)
    return out


def mutate_json(value: Any, edits: list[tuple[int, int, int]]) -> Any:
    """The value with some nodes replaced, removed or doubled."""
    value = copy.deepcopy(value)
    for place, kind, junk in edits:
        places = nodes(value)
        if not places:
            return JUNK[junk]
        container, key = places[place % len(places)]
        if kind == 0:
            container[key] = copy.deepcopy(JUNK[junk])
        elif kind == 1:
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        else:
            container[str(JUNK[junk])] = copy.deepcopy(container[key])
    return value


def check_rows(read: Callable[[], Any]) -> None:
    """Rows are questions that survive JSON, or bad rows with a code."""
    rows = outcome(lambda: list(read()), PixelisError)
    if isinstance(rows, PixelisError):
        assert rows.code
        return
    for row in rows:
        if isinstance(row, BadRow):
            assert row.code
        else:
            assert isinstance(row, Question)
            text = row.model_dump_json()
            assert type(row).model_validate_json(text).model_dump_json() == text


@pytest.mark.slow
@fuzz
@given(draw=st.data(), name=st.sampled_from(sorted(SETS)))
def test_a_damaged_data_set_is_questions_and_bad_rows_or_a_typed_error(
    draw: st.DataObject, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    try:
        source = SETS[name].write(folder)
        path = draw.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
        content = path.read_bytes()
        try:
            value, is_json = json.loads(content), True
        except ValueError:
            value, is_json = None, False
        if is_json and draw.draw(st.booleans()):
            path.write_text(json.dumps(mutate_json(value, draw.draw(JSON_EDITS))), encoding="utf-8")
        else:
            path.write_bytes(mutate(content, draw.draw(EDITS), content))
        check_rows(lambda: readers.read(source))
    finally:
        shutil.rmtree(folder)


@fuzz
@given(
    rows=st.lists(st.tuples(st.integers(0, 99), JSON_EDITS), min_size=1, max_size=3),
    edits=st.one_of(st.none(), EDITS),
    intact_first=st.booleans(),
)
def test_a_damaged_file_of_rows_is_records_and_bad_rows_or_a_typed_error(
    rows: list, edits: list | None, intact_first: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seeds = [*question_rows("7", 1).values(), *demonstration_rows("7", 1).values()]
    lines = [json.dumps(mutate_json(seeds[number % len(seeds)], changes)) for number, changes in rows]
    if intact_first:
        lines.insert(0, json.dumps(seeds[rows[0][0] % len(seeds)]))
    content = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    folder = tmp_path_factory.mktemp("rows")
    try:
        file = folder / "rows.jsonl"
        file.write_bytes(mutate(content, edits, content) if edits else content)
        check_rows(lambda: read_records(str(file)))
    finally:
        shutil.rmtree(folder)
