"""What counts as a call, what as an answer, and what the model is told when a call is broken."""

from __future__ import annotations

import json

import pytest

from pixelis.dialogue.dialects import DIALECTS
from pixelis.errors import OperationError
from pixelis.operations import OPERATIONS, ZoomIn
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
        ("<tool_call></tool_call>", "bad_json"),
        ("<tool_call>[1,2]</tool_call>", "bad_json"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "bad_json"),
        ('<tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[1,2', "bad_json"),
        ('{"name":"zoom_in","arguments":{}}</tool_call>', "bad_json"),
        ("<tool_call>{'name':'zoom_in','arguments':{'bbox_2d':[1,2,30,40]}}</tool_call>", "bad_json"),
        (call("__import__('os').getcwd()"), "bad_json"),
        (call('{"bbox_2d":[1,2,30,40],"bbox_2d":[5,6,70,80]}'), "bad_json"),
        (call('{"bbox_2d":[NaN,2,30,40]}'), "bad_json"),
        (call('{"bbox_2d":[1,2,Infinity,40]}'), "bad_json"),
        (call('{"bbox_2d":[1,2,1e999,40]}'), "bad_json"),
        (call('{"bbox_2d":[1,2,' + "9" * 5000 + ",40]}"), "bad_json"),
        (call('{"bbox_2d":[1,2,30,40],"target":"\\ud800"}'), "bad_json"),
        ('<tool_call>{"name":"zoom_in"}</tool_call>', "bad_json"),
        ('<tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[1,2,30,40]},"id":1}</tool_call>', "bad_json"),
        (call('{"bbox_2d":[1,2,30,40]}', '"rm_rf"'), "unknown_op"),
        (call('{"bbox_2d":[1,2,30,40]}', "null"), "unknown_op"),
        (call('"[1,2,30,40]"'), "bad_arguments"),
        (call("{}"), "bad_arguments"),
        (call('{"bbox_2d":[1,2,30,40],"factor":2}'), "bad_arguments"),
        (call('{"box":[0.1,0.2,0.3,0.4]}'), "bad_arguments"),
        (call('{"bbox_2d":[1,2,30,40],"target":"obs7"}'), "bad_target"),
        (call('{"bbox_2d":[1,2,30,40],"target":0}'), "bad_target"),
        (call('{"bbox_2d":[1,2,30]}'), "bad_box"),
        (call('{"bbox_2d":[[1,2,30,40]]}'), "bad_box"),
        (call('{"bbox_2d":"1,2,30,40"}'), "bad_box"),
        (call('{"bbox_2d":[true,2,30,40]}'), "bad_box"),
        (call('{"bbox_2d":["1",2,30,40]}'), "bad_box"),
        (call('{"bbox_2d":[30,2,1,40]}'), "bad_box"),
        (call('{"bbox_2d":[30,2,30,40]}'), "bad_box"),
        (call('{"bbox_2d":[0.1,0.2,0.3,0.4]}'), "bad_box"),
        (call('{"bbox_2d":[0.1,20,300,400]}'), "bad_box"),
        (call('{"bbox_2d":[-500,2,30,40]}'), "out_of_range"),
        (call('{"bbox_2d":[1,2,1700,40]}'), "out_of_range"),
        (call('{"bbox_2d":[1,2,30,40]}') * 2, "limit"),
        (call('{"bbox_2d":[1,2,30,40]}') * 100, "limit"),
        ("<tool_call>" + call('{"bbox_2d":[1,2,30,40]}') + "</tool_call>", "limit"),
        (call('{"bbox_2d":[1,2,30,40]}') + "<answer>7</answer>", "limit"),
    ],
)
@pytest.mark.parametrize("scale", [THOUSAND, PIXELS], ids=["thousand", "pixels"])
def test_broken_calls_are_named_not_raised_and_the_message_is_short(text: str, code: str, scale: Scale):
    reply = QWEN.parse(text, OPERATIONS, scale)
    assert (reply.error.code, reply.action, reply.answer) == (code, None, None)
    assert 0 < len(reply.error.message) <= 80


def test_pixel_boxes_may_touch_just_beyond_the_border_but_not_another_scale():
    slightly = QWEN.parse(call('{"bbox_2d":[300,100,566,280]}'), OPERATIONS, PIXELS)
    assert slightly.action.arguments["box"][2] == 566 / 560
    assert QWEN.parse(call('{"bbox_2d":[300,100,900,280]}'), OPERATIONS, PIXELS).error.code == "out_of_range"
    assert QWEN.parse(call('{"bbox_2d":[300,100,1001,280]}'), OPERATIONS, THOUSAND).error.code == "out_of_range"


def test_an_operation_that_is_not_offered_is_unknown():
    reply = QWEN.parse(call('{"bbox_2d":[1,2,30,40]}'), {}, THOUSAND)
    assert reply.error.code == "unknown_op"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<think>a 7, or <answer>1</answer>?</think><answer> 7\n</answer>", "7"),
        ("so it was the case that </think><answer>7</answer>", "7"),
        ("<answer>1</answer> no, <answer>7</answer>", "7"),
        ("<answer></answer>", ""),
        ("<answer>семь — 七</answer>", "семь — 七"),
        ("<answer>7", None),
        ("7", None),
        ("", None),
        ("<think><answer>7</answer></think>", None),
    ],
)
def test_the_last_answer_outside_the_thought_counts(text: str, answer: str | None):
    reply = QWEN.parse(text, OPERATIONS, THOUSAND)
    assert (reply.answer, reply.action, reply.error) == (answer, None, None)


def test_a_call_in_the_thought_is_only_a_thought():
    text = "<think>maybe " + call('{"bbox_2d":[1,2,30,40]}') + "</think><answer>7</answer>"
    assert QWEN.parse(text, OPERATIONS, THOUSAND).answer == "7"


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("<answer>7</answer>", True),
        ("<think>hm</think>\n<answer>7</answer>", True),
        ("<think>hm</think>" + call("{}"), True),
        ("<answer>7</answer> I think", False),
        ("I think <answer>7</answer>", False),
        ("<answer>7</answer><answer>7</answer>", False),
        ("<answer><answer>7</answer></answer>", False),
        ("<think>a</think><think>b</think><answer>7</answer>", False),
        ("<think><think>a</think><answer>7</answer>", False),
        ("a</think><answer>7</answer>", False),
        (call("{}") * 2, False),
        ("7", False),
        ("", False),
    ],
)
def test_well_formed_is_one_thought_and_one_act(text: str, fine: bool):
    assert QWEN.well_formed(text) is fine


def test_schema_describes_what_the_parser_accepts():
    for kind, unit in (("thousand", "1000"), ("pixels", "pixels")):
        function = QWEN.schema(ZoomIn, kind)["function"]
        assert function["name"] == "zoom_in"
        assert function["description"]
        assert set(function["parameters"]["properties"]) == {"bbox_2d", "target"}
        assert function["parameters"]["required"] == ["bbox_2d"]
        assert unit in function["parameters"]["properties"]["bbox_2d"]["description"]
        assert "$defs" not in json.dumps(function)


def test_a_box_below_the_grid_cannot_be_written():
    with pytest.raises(OperationError) as error:
        QWEN.render(Action(op="zoom_in", arguments={"box": [0.1, 0.1, 0.1001, 0.2]}), THOUSAND)
    assert error.value.code == "too_small"
