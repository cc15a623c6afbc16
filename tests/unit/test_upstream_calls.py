"""Calls of the seed systems: input, upstream's value (action, answer, error or `nothing`), ours, reason."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import skimage.data
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pixelis.dialogue.dialects import DIALECTS
from pixelis.operations import OPERATIONS, Scene, execute
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView

VIEWS = [ImageView(id="img0", view_size=(560, 280)), ImageView(id="obs1", view_size=(280, 140))]
SCALE = Scale.of("pixels", VIEWS, slack=28)


def crop(box: str, target: str = "1") -> str:
    return f'<tool_call>{{"name":"crop_image_normalized","arguments":{{"bbox_2d":{box},"target_image":{target}}}}}</tool_call>'


def ground(box: str, source: str = '"original_image"') -> str:
    return f'<think>t</think><grounding>{{"bbox_2d": {box}, "source": {source}}}</grounding>'


def zoom(arguments: str, name: str = "image_zoom_in_tool") -> str:
    return f'<think>t</think><tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'


def qwen(box: str) -> str:
    return f'<tool_call>{{"name":"zoom_in","arguments":{{"bbox_2d":{box}}}}}</tool_call>'


def native(box: str = "[0,0,500,1000]", more: str = ',"img_idx":0') -> str:
    return zoom(f'{{"label":"it","bbox_2d":{box}{more}}}')


def turn(angle: str) -> str:
    return zoom(f'{{"angle":{angle}}}', "image_rotate_tool")


def box(*edges: float, target: str = "img0", **more: Any) -> tuple[str, dict[str, Any]]:
    return target, {"box": list(edges), **more}


def padded(*edges: float, target: str = "img0") -> tuple[str, dict[str, Any]]:
    return box(*edges, target=target, padding=0.1)


LEFT, RIGHT, PART = "[0,0,280,280]", "[280,0,560,280]", "[0,0,0.5,1]"
IN_LEFT = box(0, 0, 0.5, 1)
IN_CROP = box(0, 0, 0.5, 1, target="obs1")
WIDENED = (26 / 560, 13 / 280, 91 / 560, 46 / 280)
"""Qwen-Agent widens a region of less than 32 pixels around its center."""
SAME = "as upstream"
TABLE: list[tuple[str, str, Any, Any, str]] = [
    # dialect, text, upstream's value, ours, note
    # -- boxes outside the picture
    ("pixel_reasoner", crop("[280,0,900,280]"), padded(0.5, 0, 1, 1), SAME, ""),
    ("pixel_reasoner", crop("[-0.5,0,0.5,0.9]"), padded(0, 0, 0.5, 0.9), SAME, ""),
    ("pixel_reasoner", crop("[0.5,0,1.02,0.9]"), "pixels", "bad_box", "a mixture of scales, for upstream pixels"),
    ("pixel_reasoner", crop("[600,0,900,280]"), "error", "out_of_range", "wholly outside"),
    ("deepeyes", zoom('{"bbox_2d":[280,0,900,400]}'), box(0.5, 0, 1, 1), SAME, ""),
    ("deepeyes", zoom('{"bbox_2d":[-50,-9,280,280]}'), IN_LEFT, SAME, ""),
    ("deepeyes", zoom('{"bbox_2d":[600,0,900,280]}'), "error", "out_of_range", "wholly outside"),
    ("deepeyes", zoom('{"bbox_2d":[0,0,' + "9" * 4000 + ",280]}"), box(0, 0, 1, 1), SAME, ""),
    ("mini_o3", ground("[0.5,0,1.02,1]"), box(0.5, 0, 1, 1), "out_of_range", "dialogue.clamp=true does as upstream"),
    ("qwen", qwen("[280,0,900,280]"), None, "out_of_range", "our own dialect"),
    # -- DeepEyes' arguments
    ("deepeyes", zoom('{"bbox_2d":[0.4,0.0,279.6,280.0]}'), IN_LEFT, SAME, "rounded, as by PIL"),
    ("deepeyes", zoom('{"bbox_2d":[0.1,0.2,0.3,0.4]}'), "error", "bad_box", "fractions are less than a pixel"),
    ("deepeyes", zoom(f'{{"bbox_2d":{LEFT},"label":null}}'), IN_LEFT, SAME, ""),
    ("deepeyes", zoom(f'{{"bbox_2d":{LEFT},"label":7}}'), IN_LEFT, SAME, ""),
    ("deepeyes", zoom(f'{{"bbox_2d":{LEFT},"target":"obs1"}}'), IN_LEFT, SAME, "its crops are of the picture"),
    ("deepeyes", zoom(f'{{"bbox_2d":{LEFT}}}').replace('{"name"', '{"id":1,"name"'), IN_LEFT, SAME, ""),
    ("deepeyes", zoom(f'{{"bbox":{LEFT}}}'), "error", "bad_arguments", SAME),
    ("deepeyes", zoom('{"bbox_2d":[100,100,130,200]}'), "error", "too_small", "30 pixels"),
    ("deepeyes", zoom('{"bbox_2d":[100,100,131,200]}'), box(100 / 560, 100 / 280, 131 / 560, 200 / 280), SAME, ""),
    ("deepeyes", zoom('{"bbox_2d":[0,100,560,120]}'), "error", "too_small", "30 pixels"),
    ("deepeyes", turn("90"), ("img0", {"angle": -90}), ("img0", {"angle": 90.0}), "ours turns as it describes"),
    ("deepeyes", turn("-90"), ("img0", {"angle": 90}), ("img0", {"angle": 270.0}), "the same turn in degrees clockwise"),
    ("deepeyes", turn("0"), ("img0", {"angle": 0}), ("img0", {"angle": 0.0}), SAME),
    ("deepeyes", turn("45"), ("img0", {"angle": -45}), ("img0", {"angle": 45.0}), "clockwise; nothing is cut off"),
    ("deepeyes", turn("22.5"), ("img0", {"angle": -22.5}), ("img0", {"angle": 22.5}), "clockwise"),
    ("deepeyes", turn('"90"'), "error", "bad_arguments", SAME),
    ("deepeyes", turn("true"), ("img0", {"angle": -1}), "bad_arguments", "no number"),
    # -- several calls in a turn
    ("pixel_reasoner", crop(LEFT) + crop(RIGHT), padded(0.5, 0, 1, 1), SAME, "the last"),
    ("pixel_reasoner", crop("[1") + "\n" + crop(RIGHT), padded(0.5, 0, 1, 1), SAME, "the last"),
    ("deepeyes", zoom(f'{{"bbox_2d":{LEFT}}}') + zoom(f'{{"bbox_2d":{RIGHT}}}')[16:], box(0.5, 0, 1, 1), SAME, "the last"),
    ("deepeyes", turn("90") + turn("180")[16:] * 2, ("img0", {"angle": -180}), ("img0", {"angle": 180.0}), "the last"),
    ("mini_o3", ground(PART) + ground("[0.5,0,1,1]")[16:], IN_LEFT, SAME, "the first"),
    ("qwen", qwen("[0,0,9,9]") * 2, None, "limit", "our own dialect"),
    # -- a call and an answer in a turn
    ("deepeyes", turn("90") + "<answer>7</answer>", "answer: 7", SAME, ""),
    ("deepeyes", turn("90") + "so \\boxed{7}", ("img0", {"angle": -90}), ("img0", {"angle": 90.0}), "only tags end its episodes"),
    ("mini_o3", ground(PART) + "<answer>7</answer>", IN_LEFT, SAME, "the call"),
    ("mini_o3", "<think>t</think><answer>7</answer>" + ground(PART)[16:], IN_LEFT, SAME, "the call"),
    ("pixel_reasoner", crop(LEFT) + " so \\boxed{7}", "answer: 7", SAME, "a turn is a call only if it ends with one"),
    ("pixel_reasoner", "\\boxed{7}? " + crop(LEFT), padded(0, 0, 0.5, 1), SAME, "a turn is a call only if it ends with one"),
    ("pixel_reasoner", crop(LEFT) + " Let us see.", "nothing", SAME, "a turn is a call only if it ends with one"),
    ("qwen", qwen("[0,0,9,9]") + "<answer>7</answer>", None, "limit", "our own dialect"),
    # -- what Qwen-Agent's image_zoom_in_tool does with the calls of Qwen3-VL
    ("qwen_zoom", native(), IN_LEFT, SAME, ""),
    ("qwen_zoom", native(more=',"img_idx":1'), IN_CROP, SAME, "all images in the order shown"),
    ("qwen_zoom", native(more=',"img_idx":2'), "error", "bad_target", "no such image"),
    ("qwen_zoom", native(more=',"img_idx":-1'), IN_CROP, "bad_target", "upstream counts from the end"),
    ("qwen_zoom", native(more=',"img_idx":0.0'), "error", "bad_target", "no index"),
    ("qwen_zoom", native(more=""), "error", IN_LEFT, "Qwen3.5 leaves it out (Qwen-Agent, issue 879)"),
    ("qwen_zoom", zoom('{"bbox_2d":[0,0,500,1000],"img_idx":0}'), "error", IN_LEFT, "a label changes nothing"),
    ("qwen_zoom", native(more=',"img_idx":0,"zoom":2'), IN_LEFT, SAME, "further fields"),
    ("qwen_zoom", native("[500,-9,1200,1000]"), box(0.5, 0, 1, 1), SAME, "cut at the border"),
    ("qwen_zoom", native("[1100,0,1200,1000]"), "error", "out_of_range", "wholly outside"),
    ("qwen_zoom", native("[0,0,499.6,1000]"), box(0, 0, 0.4996, 1), IN_LEFT, "rounded"),
    ("qwen_zoom", native("[100,100,110,110]"), box(*WIDENED), box(0.1, 0.1, 0.11, 0.11), "shown as it is, enlarged"),
    ("qwen_zoom", native().replace('"', "'"), IN_LEFT, "bad_json", "upstream reads JSON5"),
    ("qwen_zoom", native() + native("[500,0,1000,1000]")[16:], "both", IN_LEFT, "the first dialogue.max_calls"),
    ("qwen_zoom", native() + "<answer>7</answer>", IN_LEFT, SAME, "the call"),
    ("qwen_zoom", "<think>" + native()[16:] + "</think><answer>7</answer>", "answer: 7", SAME, "no call in a thought"),
    ("qwen_zoom", "It is 7.", "answer: It is 7.", "nothing", "rewards.extractor=whole reads it"),
    # -- what Mini-o3 reads
    ("mini_o3", ground(PART, '"observation_0"'), IN_LEFT, SAME, "the picture"),
    ("mini_o3", ground(PART, '"observation_1"'), IN_CROP, SAME, ""),
    ("mini_o3", ground(PART, '"observation_1 (zoom)"'), IN_CROP, SAME, ""),
    ("mini_o3", ground(PART, '"observation_10"'), "error", "bad_target", "not observation 1"),
    ("mini_o3", "<grounding>{'bbox_2d': [0, 0, 0.5, 1], 'source': 'observation_1'}</grounding>", IN_CROP, SAME, "single quotes"),
    ("mini_o3", ground(PART, "'original_image'"), IN_LEFT, SAME, "mixed quotes"),
    ("mini_o3", ground(PART, "'original_image\""), IN_LEFT, SAME, "mixed quotes"),
    ("mini_o3", ground(PART, "'observation_1 (the dog\"").replace('"source"', "'source'"), "error", IN_CROP, "and keys"),
    ("mini_o3", ground(PART, '"observation_1 (the dog\'s ear)"'), IN_CROP, SAME, "an apostrophe is no quote"),
    ("mini_o3", ground(PART, "original_image"), "error", "bad_json", "a name needs quotes"),
    ("mini_o3", "<think>Maybe " + ground(PART)[16:] + "</think><answer>7</answer>", IN_LEFT, SAME, "the first call ends it"),
    ("mini_o3", ground("(0,0,0.5,1)"), IN_LEFT, "bad_json", "upstream evaluates Python, ours never does"),
    ("mini_o3", ground("__import__('os').getcwd()"), "evaluated", "bad_json", "upstream evaluates Python, ours never does"),
    ("mini_o3", "<think>t</think><answer>" + "7" * 1001 + "</answer>", "answer: " + "7" * 1001, SAME, "an answer however long"),
    ("mini_o3", "<think>t</think> so <answer>7</answer> ok", "answer: 7", SAME, "text between tags is no answer and no error"),
]  # fmt: skip


def value(dialect: str, text: str, scale: Scale = SCALE) -> Any:
    reply = DIALECTS[dialect].parse(text, OPERATIONS, scale)
    if reply.action is not None:
        return reply.action.target, reply.action.arguments
    if reply.error is not None:
        assert 0 < len(reply.error.message) <= 120
        return reply.error.code
    return "nothing" if reply.answer is None else f"answer: {reply.answer}"


@pytest.mark.parametrize(("dialect", "text", "upstream", "ours", "reason"), TABLE)
def test_a_call_is_read_as_its_system_reads_it(
    dialect: str, text: str, upstream: Any, ours: Any, reason: str
) -> None:
    result, expected = value(dialect, text), upstream if ours == SAME else ours
    if isinstance(expected, tuple):
        assert result[0] == expected[0]
        assert result[1].keys() == expected[1].keys()
        for key, number in expected[1].items():
            assert result[1][key] == pytest.approx(number), reason
    else:
        assert result == expected, reason


@pytest.mark.parametrize(
    "after", ["", " ", " Let me see.", "<answer>7</answer>", ground("[0.5,0,1,1]")[16:], "</grounding>"]
)
def test_a_turn_of_mini_o3_ends_with_its_first_call(after: str) -> None:
    dialect, call = DIALECTS["mini_o3"], ground("[0,0,0.5,1]")
    assert dialect.well_formed(call + after)
    assert dialect.thought(call + after) == "t"
    assert value("mini_o3", call + after) == box(0, 0, 0.5, 1)
    action = Action(op="zoom_in", target="obs1", arguments={"box": [0.5, 0, 1, 1]})
    rewritten = dialect.rewrite(call + after, [action], dataclasses.replace(SCALE, kind="unit"))
    assert rewritten == ground("[0.5, 0.0, 1.0, 1.0]", '"observation_1"') + after
    assert not dialect.well_formed(f"so {call}{after}")


@pytest.mark.parametrize("dialect", ["qwen", "qwen_zoom", "mini_o3", "pixel_reasoner", "deepeyes"])
@pytest.mark.parametrize("clamp", [True, False])
def test_clamping_is_a_switch_in_every_dialect(dialect: str, clamp: bool) -> None:
    texts = {
        "qwen": qwen("[280,0,900,280]"),
        "qwen_zoom": native("[500,0,1200,1000]"),
        "mini_o3": ground("[0.5,-0.2,1.02,1]"),
        "pixel_reasoner": crop("[280,0,900,280]"),
        "deepeyes": zoom('{"bbox_2d":[280,0,900,280]}'),
    }
    result = value(dialect, texts[dialect], Scale.of("pixels", VIEWS, clamp=clamp))
    if clamp:
        assert result[1]["box"] == [0.5, 0, 1, 1]
    else:
        assert result == "out_of_range"


MINI_O3_PARSER = re.compile(r'\{"bbox_2d": \[(.*?)\], "source": "(original_image|observation_\d+)"\}')
"""The form that Mini-o3's own parser reads: a blank after colons and commas, the box first."""


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=2, unique=True).map(sorted),
    st.lists(st.integers(0, 1000), min_size=2, max_size=2, unique=True).map(sorted),
    st.sampled_from(["img0", "obs1"]),
)
def test_what_is_written_in_mini_o3_is_read_by_its_own_parser(
    columns: list[int], rows: list[int], target: str
) -> None:
    edges = [columns[0] / 1000, rows[0] / 1000, columns[1] / 1000, rows[1] / 1000]
    action = Action(op="zoom_in", target=target, arguments={"box": edges})
    text = "".join(DIALECTS["mini_o3"].render(action, SCALE, "t"))
    match = MINI_O3_PARSER.search(text)
    assert [float(number) for number in match[1].split(", ")] == edges
    assert value("mini_o3", text) == (target, {"box": edges})


def test_a_crop_that_deepeyes_refuses_earns_nothing() -> None:
    reply = DIALECTS["deepeyes"].parse(zoom('{"bbox_2d":[10,10,40,40]}'), OPERATIONS, SCALE)
    # So it is an error observation, and no executed operation for tool_if_correct
    assert reply.action is None
    assert reply.error.code == "too_small"
    thin = Scale.of("pixels", [ImageView(id="img0", view_size=(6000, 280))])
    assert value("deepeyes", zoom('{"bbox_2d":[0,0,3101,31]}'), thin) == "bad_box"
    assert value("deepeyes", zoom('{"bbox_2d":[0,0,3100,31]}'), thin)[0] == "img0"


@pytest.mark.parametrize(
    ("angle", "quarter_turns"), [(0, 0), (90, 3), (180, 2), (270, 1), (-90, 1), (360, 0)]
)
def test_rotate_turns_clockwise_and_says_so(angle: float, quarter_turns: int) -> None:
    picture = skimage.data.coffee()
    scene = Scene({"img0": picture}, [ImageView(id="img0", source_size=(600, 400), view_size=(600, 400))])
    observation, views = execute(
        Action(op="rotate", arguments={"angle": angle, "box": [0.5, 0, 1, 0.5]}), scene
    )
    assert observation.status == "ok"
    np.testing.assert_array_equal(views[0], np.rot90(picture[:200, 300:], quarter_turns))
    assert observation.images[0].box == (0.5, 0.0, 1.0, 0.5)
    assert "clockwise" in observation.text
    assert observation.data["angle"] == angle % 360


def test_rotate_by_any_angle_cuts_nothing_off_and_has_errors_with_codes() -> None:
    picture = np.full((100, 200, 3), 255, np.uint8)
    scene = Scene({"img0": picture}, [ImageView(id="img0", source_size=(200, 100), view_size=(200, 100))])
    observation, (view,) = execute(Action(op="rotate", arguments={"angle": 30}), scene)
    expected = np.asarray(Image.fromarray(picture).rotate(-30, Image.Resampling.BICUBIC, expand=True))
    np.testing.assert_array_equal(view, expected)
    assert abs(int((view > 127).all(axis=-1).sum()) - 100 * 200) < 300  # the whole picture is there
    for arguments, code in (
        ({"angle": 720}, "bad_arguments"),
        ({"angle": 90, "box": [1, 0, 0, 1]}, "bad_box"),
    ):
        observation, views = execute(Action(op="rotate", arguments=arguments), scene)
        assert (observation.status, observation.code, views) == ("error", code, [])
