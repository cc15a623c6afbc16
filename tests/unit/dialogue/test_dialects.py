"""What counts as a call, what as an answer, and what the model is told when a call is broken."""

from __future__ import annotations

import json

import pytest

from pixelis.config import ToolboxConfig
from pixelis.dialogue.dialects import DIALECTS
from pixelis.errors import OperationError
from pixelis.operations import OPERATIONS, Operation, OperationArguments, Result
from pixelis.operations.operation import BoxArgument, PointArgument
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView

QWEN = DIALECTS["qwen"]
VIEWS = [ImageView(id="img0", view_size=(560, 280)), ImageView(id="obs1", view_size=(280, 140))]
THOUSAND, PIXELS = Scale.of("thousand", VIEWS), Scale.of("pixels", VIEWS, slack=28)


def call(arguments: str, name: str = '"zoom_in"') -> str:
    return f'<tool_call>{{"name":{name},"arguments":{arguments}}}</tool_call>'


def test_call_is_written_as_compact_json_and_target_only_when_it_is_not_the_first_picture():
    box = [0.12, 0.34, 0.22, 0.44]
    on_picture = QWEN.render(Action(op="zoom_in", arguments={"box": box}), THOUSAND, "look")
    on_crop = QWEN.render(Action(op="zoom_in", target="obs1", arguments={"box": box}), THOUSAND)
    body = '{"name":"zoom_in","arguments":{"bbox_2d":[120,340,220,440]%s}}'
    assert "".join(on_picture) == "<think>look</think><tool_call>" + body % "" + "</tool_call>"
    assert "".join(on_crop) == "<tool_call>" + body % ',"target":"obs1"' + "</tool_call>"


def test_boxes_are_parts_of_the_named_image_in_both_scales():
    text = call('{"bbox_2d":[0,70,140,140],"target":"obs1"}')
    assert QWEN.parse(text, OPERATIONS, THOUSAND).action.arguments == {"box": [0.0, 0.07, 0.14, 0.14]}
    assert QWEN.parse(text, OPERATIONS, PIXELS).action.arguments == {"box": [0.0, 0.5, 0.5, 1.0]}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<tool_call>zoom in please</tool_call>", "bad_json"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "bad_json"),
        ('<tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[1,2', "bad_json"),
        ("<tool_call>{'name':'zoom_in','arguments':{'bbox_2d':[1,2,30,40]}}</tool_call>", "bad_json"),
        (call('{"bbox_2d":[1,2,30,40],"bbox_2d":[5,6,70,80]}'), "bad_json"),
        (call('{"bbox_2d":[NaN,2,30,40]}'), "bad_json"),
        (call('{"bbox_2d":[1,2,30,40]}', '"rm_rf"'), "unknown_op"),
        (call("{}"), "bad_arguments"),
        (call('{"bbox_2d":[1,2,30,40],"factor":2}'), "bad_arguments"),
        (call('{"box":[0.1,0.2,0.3,0.4]}'), "bad_arguments"),
        (call('{"bbox_2d":[1,2,30,40],"target":"obs7"}'), "bad_target"),
        (call('{"bbox_2d":[1,2,30]}'), "bad_box"),
        (call('{"bbox_2d":[30,2,1,40]}'), "bad_box"),
        (call('{"bbox_2d":[0.1,0.2,0.3,0.4]}'), "bad_box"),
        (call('{"bbox_2d":[-500,2,30,40]}'), "out_of_range"),
        (call('{"bbox_2d":[1,2,1700,40]}'), "out_of_range"),
        (call('{"bbox_2d":[1,2,30,40]}') * 2, "limit"),
        (call('{"bbox_2d":[1,2,30,40]}') + "<answer>7</answer>", "limit"),
    ],
)
@pytest.mark.parametrize("scale", [THOUSAND, PIXELS], ids=["thousand", "pixels"])
def test_broken_calls_are_named_not_raised_and_the_message_is_short(text: str, code: str, scale: Scale):
    reply = QWEN.parse(text, {name: OPERATIONS[name] for name in ToolboxConfig().operations}, scale)
    assert (reply.error.code, reply.action, reply.answer) == (code, None, None)
    assert 0 < len(reply.error.message) <= 100


def test_pixel_boxes_may_touch_just_beyond_the_border_but_not_another_scale():
    slightly = QWEN.parse(call('{"bbox_2d":[300,100,566,280]}'), OPERATIONS, PIXELS)
    assert slightly.action.arguments["box"][2] == 566 / 560
    for right, scale in ((900, PIXELS), (1001, THOUSAND)):
        reply = QWEN.parse(call(f'{{"bbox_2d":[300,100,{right},280]}}'), OPERATIONS, scale)
        assert reply.error.code == "out_of_range"


@pytest.mark.parametrize(
    ("text", "answer", "fine"),
    [
        ("<answer>7</answer>", "7", True),
        ("<think>hm</think>\n<answer>7</answer>", "7", True),
        ("<think>a 7, or <answer>1</answer>?</think><answer> 7\n</answer>", "7", False),
        ("so it was the case that </think><answer>7</answer>", "7", False),
        ("<answer>1</answer> no, <answer>7</answer>", "7", False),
        ("<answer></answer>", "", True),
        ("<answer>7", None, False),
        ("7", None, False),
        ("<think><answer>7</answer></think>", None, False),
        ("<answer>7</answer> I think", "7", False),
        ("I think <answer>7</answer>", "7", False),
        ("<think>a</think><think>b</think><answer>7</answer>", "7", False),
        ("<think><think>a</think><answer>7</answer>", "7", False),
    ],
)
def test_the_last_answer_outside_the_thought_counts_and_well_formed_is_one_of_each(
    text: str, answer: str | None, fine: bool
):
    reply = QWEN.parse(text, OPERATIONS, THOUSAND)
    assert (reply.answer, reply.action, reply.error) == (answer, None, None)
    assert QWEN.well_formed(text) is fine


def test_a_well_formed_call_is_one_with_at_most_a_thought():
    assert QWEN.well_formed("<think>hm</think>" + call("{}"))
    assert not QWEN.well_formed(call("{}") * 2)


def test_a_box_below_the_grid_cannot_be_written():
    with pytest.raises(OperationError) as error:
        QWEN.render(Action(op="zoom_in", arguments={"box": [0.1, 0.1, 0.1001, 0.2]}), THOUSAND)
    assert error.value.code == "too_small"


class Place(Operation):
    """An operation of a user's own that takes a point."""

    name = "place"
    description = "Look at a place."

    class Arguments(OperationArguments):
        point: PointArgument
        box: BoxArgument | None = None
        radius: int | None = None

    @classmethod
    def run(cls, arguments, target, scene):
        return Result(str(arguments.point))


def test_points_are_written_and_read_in_the_scale_of_the_model():
    action = Action(op="place", target="obs1", arguments={"point": [0.25, 0.5], "radius": 3})
    for scale, numbers in ((THOUSAND, [250, 500]), (PIXELS, [70, 70])):
        text = "".join(QWEN.render(action, scale))
        assert json.loads(text[11:-12])["arguments"] == {"point_2d": numbers, "radius": 3, "target": "obs1"}
        assert QWEN.parse(text, {"place": Place}, scale).action == action


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ('{"point_2d":[0.5,0.5]}', "bad_point"),
        ('{"point_2d":[1,1001]}', "out_of_range"),
        ('{"point":[0.5,0.5]}', "bad_arguments"),
        ('{"point_2d":[1,2],"radius":"3"}', "bad_arguments"),
    ],
)
def test_broken_points_get_a_named_error(arguments, code):
    assert QWEN.parse(call(arguments, '"place"'), {"place": Place}, THOUSAND).error.code == code


def test_the_schema_names_places_as_the_model_writes_them():
    schema = QWEN.schema(Place, "thousand")["function"]["parameters"]
    assert list(schema["properties"]) == ["point_2d", "bbox_2d", "radius", "target"]
    assert schema["required"] == ["point_2d"]
    assert schema["properties"]["point_2d"]["maxItems"] == 2
    assert "0 to 1000" in schema["properties"]["bbox_2d"]["description"]
    assert schema["properties"]["radius"] == {"type": "integer"}


FRAMES = [
    ImageView(id=f"vid0.{i}", parent="vid0", frame=9 * i, time=0.3 * i, view_size=(280, 140))
    for i in range(2)
]


def test_a_question_of_a_clip_alone_is_about_the_clip_by_default():
    text = call('{"bbox_2d":[0,0,140,70]}')
    by_frame = call('{"bbox_2d":[0,0,140,70],"target":"vid0.1"}')
    scale = Scale.of("pixels", FRAMES)
    assert QWEN.parse(text, OPERATIONS, scale).action.target == "vid0"
    assert QWEN.parse(by_frame, OPERATIONS, scale).action == Action(
        op="zoom_in", target="vid0.1", arguments={"box": [0.0, 0.0, 0.5, 0.5]}
    )
    assert "".join(QWEN.render(QWEN.parse(text, OPERATIONS, scale).action, scale)) == text
    assert QWEN.parse(text, OPERATIONS, Scale.of("pixels", [*VIEWS, *FRAMES])).action.target == "img0"
