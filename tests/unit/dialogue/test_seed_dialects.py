"""The dialects of the seed systems: their exact forms, what they refuse, and whole episodes in each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import playing
import pytest
import skimage.data
from clips import encode, footage
from dialogue_models import ScriptedSession, nano_folder, renderer
from PIL import Image
from playing import RealTools
from pydantic import ValidationError

from pixelis.config import DialogueConfig, ToolboxConfig, parse
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import Limits
from pixelis.dialogue.dialects import DIALECTS, offered
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadConfig, DataFailure, OperationError
from pixelis.operations import OPERATIONS
from pixelis.operations.media import first_look
from pixelis.operations.scale import Scale
from pixelis.records import (
    Action,
    Demonstration,
    ImageView,
    Media,
    Observation,
    Question,
    StopReason,
    Trajectory,
)
from pixelis.rewards import formats

VIEWS = [ImageView(id="img0", view_size=(560, 280)), ImageView(id="obs1", view_size=(280, 140))]
FRAMES = [
    ImageView(id=f"vid0.{i}", parent="vid0", frame=9 * i, time=0.3 * i, view_size=(280, 140))
    for i in range(2)
]
PICTURE, CLIP = Scale.of("pixels", VIEWS, slack=28), Scale.of("pixels", FRAMES, slack=28)
ALL = OPERATIONS
SEEDS = ["mini_o3", "pixel_reasoner", "deepeyes", "qwen_zoom", "qwen_zoom_xml", "plain"]


def zoom(target: str = "img0", **more: object) -> Action:
    return Action(op="zoom_in", target=target, arguments={"box": [0.1, 0.25, 0.5, 0.75], **more})


def ground(box: str, source: str = '"original_image"') -> str:
    return f'<think>t</think><grounding>{{"bbox_2d": {box}, "source": {source}}}</grounding>'


def crop(box: str, target: str = "1") -> str:
    return f'<tool_call>{{"name":"crop_image_normalized","arguments":{{"bbox_2d":{box},"target_image":{target}}}}}</tool_call>'


def frames(numbers: str, think: str = "Let us see.") -> str:
    return f'{think}\n<tool_call>{{"name":"select_frames","arguments":{{"target_frames":{numbers}}}}}</tool_call>'


def tool(arguments: str, name: str = "image_zoom_in_tool") -> str:
    return f'<think>t</think><tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'


def native(box: str, number: int = 0, label: str = "region", think: str = "t") -> str:
    """As Qwen3-VL writes it in its cookbook's output."""
    arguments = f'{{"label": "{label}", "bbox_2d": {box}, "img_idx": {number}}}'
    call = f'<tool_call>\n{{"name": "image_zoom_in_tool", "arguments": {arguments}}}\n</tool_call>'
    return f"<think>\n{think}\n</think>\n\n{call}"


def tagged(box: str, number: int = 0, label: str = "region", think: str = "t") -> str:
    """As the chat template of Qwen3.5 writes it."""
    values = {"label": label, "bbox_2d": box, "img_idx": number}
    tags = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    call = f"<tool_call>\n<function=image_zoom_in_tool>\n{tags}</function>\n</tool_call>"
    return f"<think>\n{think}\n</think>\n\n{call}"


SELECT = Action(op="select_frames", target="vid0", arguments={"frames": [2, 3, 8]})
ROTATE = Action(op="rotate", arguments={"angle": 90})
FORMS = [
    ("mini_o3", PICTURE, zoom(), ground("[0.1, 0.25, 0.5, 0.75]")),
    ("mini_o3", PICTURE, zoom("obs1"), ground("[0.1, 0.25, 0.5, 0.75]", '"observation_1"')),
    ("mini_o3", CLIP, zoom("vid0.0"), ground("[0.1, 0.25, 0.5, 0.75]")),
    ("mini_o3", CLIP, zoom("vid0.1"), ground("[0.1, 0.25, 0.5, 0.75]", '"vid0.1"')),
    ("pixel_reasoner", PICTURE, zoom(padding=0.1), "t\n" + crop("[0.1,0.25,0.5,0.75]")),
    ("pixel_reasoner", PICTURE, zoom("obs1", padding=0.1), "t\n" + crop("[0.1,0.25,0.5,0.75]", "2")),
    ("pixel_reasoner", CLIP, zoom("vid0.1", padding=0.1), "t\n" + crop("[0.1,0.25,0.5,0.75]", "2")),
    ("pixel_reasoner", CLIP, SELECT, frames("[3,4,9]", "t")),
    ("deepeyes", PICTURE, zoom(), tool('{"bbox_2d":[56,70,280,210]}')),
    ("deepeyes", CLIP, zoom("vid0.0"), tool('{"bbox_2d":[28,35,140,105]}')),
    ("deepeyes", PICTURE, ROTATE, tool('{"angle":90}', "image_rotate_tool")),
    ("qwen_zoom", PICTURE, zoom(), native("[100, 250, 500, 750]")),
    ("qwen_zoom", PICTURE, zoom("obs1"), native("[100, 250, 500, 750]", 1)),
    ("qwen_zoom", CLIP, zoom("vid0.1"), native("[100, 250, 500, 750]", 1)),
    ("qwen_zoom_xml", PICTURE, zoom(), tagged("[100, 250, 500, 750]")),
    ("qwen_zoom_xml", PICTURE, zoom("obs1"), tagged("[100, 250, 500, 750]", 1)),
]


@pytest.mark.parametrize(("dialect", "scale", "action", "text"), FORMS)
def test_calls_are_written_in_the_form_of_the_seed_system_and_read_back(
    dialect: str, scale: Scale, action: Action, text: str
) -> None:
    spoken = DIALECTS[dialect]
    assert "".join(spoken.render(action, scale, "t")) == text
    reply = spoken.parse(text, ALL, scale)
    assert (reply.action, (reply.think or "").strip(), reply.error) == (action, "t", None)
    assert spoken.well_formed(text)


BOX = "[0.1,0.2,0.3,0.4]"
BAD = [
    ("mini_o3", "<grounding>look left</grounding>", "bad_json"),
    ("mini_o3", '<grounding>{"bbox_2d":[0.1,0.2', "bad_json"),
    ("mini_o3", f'<grounding>{{"bbox_2d":{BOX}}}</grounding>', "bad_arguments"),
    ("mini_o3", ground(f'{BOX},"zoom":2'), "bad_arguments"),
    ("mini_o3", ground(BOX, '"observation_2"'), "bad_target"),
    ("mini_o3", ground(BOX, '"obs1"'), "bad_target"),
    ("mini_o3", ground("[0.3,0.2,0.3,0.4]"), "bad_box"),
    ("mini_o3", ground("[10,20,300,400]"), "out_of_range"),
    ("pixel_reasoner", "<tool_call>crop it</tool_call>", "bad_json"),
    ("pixel_reasoner", tool("{}", "zoom_in"), "unknown_op"),
    ("pixel_reasoner", tool(f'{{"bbox_2d":{BOX}}}', "crop_image_normalized"), "bad_arguments"),
    ("pixel_reasoner", crop(BOX, '1,"padding":0.5'), "bad_arguments"),
    ("pixel_reasoner", crop(BOX, "0"), "bad_target"),
    ("pixel_reasoner", crop(BOX, '"img0"'), "bad_target"),
    ("pixel_reasoner", crop("[10.5,20,300,40]"), "bad_box"),
    ("pixel_reasoner", frames("3"), "bad_arguments"),
    ("pixel_reasoner", frames("[0,1]"), "out_of_range"),
    ("deepeyes", "<tool_call>{'name':'image_zoom_in_tool'}</tool_call>", "bad_json"),
    ("deepeyes", tool('{"bbox_2d":[1,2,30,40]}', "crop_image_normalized"), "unknown_op"),
    ("deepeyes", tool('{"bbox":[1,2,30,40]}'), "bad_arguments"),
    ("deepeyes", tool('{"bbox_2d":[0.1,0.2,0.3,0.4]}'), "bad_box"),
    ("deepeyes", tool("{}", "image_rotate_tool"), "bad_arguments"),
    ("qwen_zoom", "<tool_call>zoom in</tool_call>", "bad_json"),
    ("qwen_zoom", '<tool_call>{"name": "image_zoom_in_tool", "arguments": {', "bad_json"),
    ("qwen_zoom", tool("{}", "zoom_in"), "unknown_op"),
    ("qwen_zoom", tool('{"label":"cup","img_idx":0}'), "bad_arguments"),
    ("qwen_zoom", tool('"[1,2,3,4]"'), "bad_arguments"),
    ("qwen_zoom", native("[0, 0, 500]"), "bad_box"),
    ("qwen_zoom", native("[500, 0, 100, 100]"), "bad_box"),
    ("qwen_zoom", native("[0.1, 0.2, 0.3, 0.4]"), "bad_box"),
    ("qwen_zoom", native("[1001, 0, 1100, 100]"), "out_of_range"),
    ("qwen_zoom", native("[0, 0, 500, 500]", 2), "bad_target"),
    ("qwen_zoom", native("[0, 0, 500, 500]", -1), "bad_target"),
    ("qwen_zoom", tool('{"bbox_2d":[0,0,9,9],"img_idx":true}'), "bad_target"),
    ("qwen_zoom_xml", native("[0, 0, 500, 500]"), "bad_json"),
    ("qwen_zoom_xml", tagged("[0, 0, 500, 500"), "bad_json"),
    ("qwen_zoom_xml", tagged("[0, 0, 500, 500]", 2), "bad_target"),
    ("qwen_zoom_xml", tagged("[0, 0, 500, 500]").replace("image_zoom_in_tool", "zoom_in"), "unknown_op"),
]


@pytest.mark.parametrize(("dialect", "text", "code"), BAD)
def test_broken_calls_are_named_not_raised_and_the_message_is_short(
    dialect: str, text: str, code: str
) -> None:
    reply = DIALECTS[dialect].parse(text, ALL, PICTURE)
    assert reply.error is not None, reply
    assert (reply.error.code, reply.action, reply.answer) == (code, None, None)
    assert 0 < len(reply.error.message) <= 100


def test_what_is_not_offered_cannot_be_called() -> None:
    turn = tool('{"angle":90}', "image_rotate_tool")
    calls = {"mini_o3": ground(BOX), "pixel_reasoner": crop(BOX), "deepeyes": turn}
    calls |= {"qwen_zoom": native("[0, 0, 500, 500]"), "qwen_zoom_xml": tagged("[0, 0, 500, 500]")}
    for dialect, text in calls.items():
        assert DIALECTS[dialect].parse(text, {}, PICTURE).error.code == "unknown_op"
    idle = DIALECTS["plain"].parse(turn, ALL, PICTURE)
    assert (idle.action, idle.answer, idle.error) == (None, None, None)


TAGGED = ("mini_o3", "deepeyes", "plain")


@pytest.mark.parametrize(
    ("dialects", "text", "answer", "fine"),
    [
        (TAGGED, "<think>t</think> <answer>7</answer>", "7", True),
        (TAGGED, "<answer>7</answer>", "7", False),
        (("mini_o3", "plain"), "<think>t</think><answer>1</answer><answer>7</answer>", "7", False),
        (SEEDS, "seven", None, False),
        (("deepeyes", "plain"), "<think>t</think>It is \\boxed{7}", "7", False),
        (("mini_o3",), "<think>t</think>It is \\boxed{7}", None, False),
        (("plain",), "<think>t</think><answer>\\boxed{7}</answer>", "\\boxed{7}", True),
        (("pixel_reasoner",), "So it is \\boxed{7}.", "7", True),
        (("pixel_reasoner",), "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True),
        (("pixel_reasoner",), "\\boxed{1}, no, \\boxed{7}", "7", False),
        (("pixel_reasoner",), "\\boxed{7} I think", "7", False),
        (("pixel_reasoner",), "\\boxed{7", None, False),
        (("pixel_reasoner",), "<think>\\boxed{1}?</think>It is \\boxed{7}", "7", True),
        (("pixel_reasoner",), "<answer>7</answer>", "7", False),  # its code counts the tags
        (("qwen_zoom", "qwen_zoom_xml"), "<answer>7</answer>", "7", True),
        (("qwen_zoom", "qwen_zoom_xml"), "The sign says 7, so: <answer>7</answer>", "7", True),
        (("qwen_zoom", "qwen_zoom_xml"), "<think>\nt\n</think>\n\nIt is \\boxed{7}.", "7", False),
        (("qwen_zoom", "qwen_zoom_xml"), "<answer>7</answer> I think", "7", False),
    ],
)
def test_answers_and_order(dialects: Sequence[str], text: str, answer: str | None, fine: bool) -> None:
    for dialect in dialects:
        reply = DIALECTS[dialect].parse(text, ALL, PICTURE)
        assert (reply.answer, reply.action, reply.error) == (answer, None, None)
        assert DIALECTS[dialect].well_formed(text) is fine


def test_an_answer_that_would_end_its_own_box_is_refused() -> None:
    assert "".join(DIALECTS["pixel_reasoner"].render("{1,2}", PICTURE, "t")) == "t\n\\boxed{{1,2}}"
    with pytest.raises(OperationError, match="braces"):
        DIALECTS["pixel_reasoner"].render("1}", PICTURE)


def test_other_zooms_become_boxes_and_other_operations_are_refused() -> None:
    around = Action(op="zoom_in", arguments={"center": [0.9, 0.5], "factor": 2.0, "padding": 0.1})
    np.testing.assert_allclose(DIALECTS["mini_o3"].adapt(around).arguments["box"], [0.4, 0.15, 1.0, 0.85])
    assert DIALECTS["pixel_reasoner"].adapt(zoom()) == zoom(padding=0.1)
    by_time = Action(op="select_frames", target="vid0", arguments={"times": [1.0]})
    part = Action(op="rotate", arguments={"angle": 90, "box": [0, 0, 1, 1]})
    for dialect, action, scale in (
        *((name, Action(op="read_text"), PICTURE) for name in SEEDS),
        ("deepeyes", zoom("obs1"), PICTURE),
        ("deepeyes", part, PICTURE),
        ("pixel_reasoner", by_time, CLIP),
    ):
        with pytest.raises(OperationError):
            DIALECTS[dialect].render(action, scale)


def test_only_operations_with_a_form_in_the_dialect_are_offered() -> None:
    rotate = [*ToolboxConfig().operations, "rotate"]

    def names(dialect: str) -> list[str]:
        settings = {"dialogue": {"dialect": dialect}, "toolbox": {"operations": rotate}}
        return [operation.name for operation in offered(parse(settings))]

    assert {dialect: names(dialect) for dialect in DIALECTS} == {
        "qwen": rotate,
        "qwen_xml": rotate,
        "qwen_zoom": ["zoom_in"],
        "qwen_zoom_xml": ["zoom_in"],
        "mini_o3": ["zoom_in"],
        "pixel_reasoner": ["zoom_in", "select_frames"],
        "deepeyes": ["zoom_in", "rotate"],
        "plain": [],
        "dapo": [],
    }
    large = renderer("large")
    with pytest.raises(BadConfig, match="mini_o3 does not support read_text"):
        Renderer(large.tokenizer, large.spec, DialogueConfig(dialect="mini_o3"), [OPERATIONS["read_text"]])
    for dialect in ("mini_o3", "qwen_zoom"):
        with pytest.raises(ValidationError, match="has its own"):
            DialogueConfig(dialect=dialect, coordinates="pixels")


# -- wording, in tokens


@cache
def speaker(dialect: str) -> Renderer:
    """A renderer of the model shaped like Qwen2.5-VL."""
    large = renderer("large")
    return Renderer(large.tokenizer, large.spec, DialogueConfig(dialect=dialect), list(ALL.values()))


SCHEMAS = {
    "pixel_reasoner": ["crop_image_normalized", "select_frames"],
    "deepeyes": ["image_zoom_in_tool", "image_rotate_tool"],
    "qwen_zoom": ["image_zoom_in_tool"],
    "qwen_zoom_xml": ["image_zoom_in_tool"],
}


@pytest.mark.parametrize("dialect", SEEDS)
def test_prompts_and_observations_say_how_to_reply_and_text_of_others_stays_text(dialect: str) -> None:
    r = speaker(dialect)
    views = [ImageView(id="img0", view_size=(112, 56)), ImageView(id="<|im_end|>", view_size=(56, 56))]
    prompt = r.prompt(Question(id="q", question="How many? <|im_end|></tool_call>"), views)
    assert [turn.role for turn in prompt] == (["user"] if dialect == "plain" else ["system", "user"])
    text = r.tokenizer.decode([t for turn in prompt for t in turn.tokens], skip_special_tokens=False)
    assert ("\\boxed{" if dialect == "pixel_reasoner" else "answer>") in text
    assert text.count("<|image_pad|>") == 8 + 4
    assert sum(turn.tokens.count(r.spec.stop) for turn in prompt) == len(prompt)
    lines = text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines() if "<tools>" in text else []
    assert [json.loads(line)["function"]["name"] for line in lines] == SCHEMAS.get(dialect, [])
    bare = r.prompt(Question(id="q", question="How many?"), views, operations=False)
    assert not any(word in turn.text for turn in bare for word in ("<tool_call>", "<grounding>", "<tools>"))
    shown = Observation(
        status="ok", id="obs2", images=[ImageView(id="obs2", view_size=(56, 56))], data={"op": "zoom_in"}
    )
    broken = Observation(status="error", code="bad_box", text="four numbers <|im_end|>")
    for observation in (shown, broken):
        turn = r.observation(observation, 2)
        assert turn.tokens.count(r.spec.stop) == 1
        assert turn.tokens.count(r.spec.image_token) == 4 * len(observation.images)
    assert "bad_box: four numbers" in r.observation(broken, 2).text
    names = {"mini_o3": "observation_2:", "pixel_reasoner": "Image 3, "}
    assert names.get(dialect, "") in r.observation(shown, 2).text


# -- whole episodes, with the real operations

ANSWER = "<think>t</think><answer>a cup</answer>"


def play(dialect: str, lines: Sequence[str], media: Media) -> Trajectory:
    r, opened = speaker(dialect), {media.id: open_media(media, ToolboxConfig())}
    small = {"min_pixels": 56 * 56, "max_pixels": 224 * 224}
    dialogue = DialogueConfig.model_validate({"input": small, "frame": small, "frames": 3})
    images, views = first_look(opened, dialogue, r.spec.multiple)
    session, question = ScriptedSession(r, lines), Question(id="q", question="What is it?", media=[media])
    limits = Limits(len(lines), 400, 9000, 9)
    return playing.run(
        session, question, images, views, RealTools(opened, r, min_tokens=4), limits
    ).trajectory


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Media:
    path = tmp_path_factory.mktemp("picture") / "coffee.png"
    Image.fromarray(skimage.data.coffee()).save(path)
    return Media(id="img0", uri=str(path))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Media:
    path = tmp_path_factory.mktemp("clip") / "bikes.mp4"
    path.write_bytes(encode(footage()))
    return Media(id="vid0", uri=str(path), kind="video")


def finished(t: Trajectory, dialect: str, images: list[str]) -> None:
    assert (t.stop_reason, t.answer, t.dialect) == (StopReason.ANSWER, "a cup", dialect)
    assert [image.id for image in t.images] == images
    assert formats.dialect(t) == float(all(turn.error is None for turn in t.turns))


def test_an_episode_in_mini_o3_numbers_observations_by_success(picture: Media) -> None:
    first, lost = ground("[0.2,0.2,0.8,0.8]"), ground("[0.2,0.2,0.8,0.8]", '"observation_9"')
    second = ground("[0.25,0.5,0.75,1.0]", '"observation_1"')
    t = play("mini_o3", [first, lost, second, ANSWER], picture)
    finished(t, "mini_o3", ["img0", "obs1", "obs2"])
    assert [o.code for o in t.observations] == [None, "bad_target", None]
    names = ["observation_1", "error bad_target", "observation_2"]
    assert [turn.text.split(":")[0] for turn in t.turns if turn.role == "tool"] == names
    assert t.images[2].parent == "obs1"
    assert formats.turns(play("mini_o3", [first, ANSWER], picture)) == 1.0


def test_an_episode_in_pixel_reasoner_pads_its_crops_and_counts_images(picture: Media, clip: Media) -> None:
    answer, region = "\\boxed{a cup}", "[0.2,0.2,0.8,0.8]"
    t = play("pixel_reasoner", [crop(region), "t\n" + crop(region, "2"), answer], picture)
    finished(t, "pixel_reasoner", ["img0", "obs1", "obs2"])
    np.testing.assert_allclose([image.box for image in t.images[1:]], [[0.1, 0.1, 0.9, 0.9]] * 2, atol=2e-3)
    width, height = t.images[1].view_size
    shown = next(turn.text for turn in t.turns if turn.role == "tool")
    assert shown == f"Image 2, the region asked for ({width}x{height}): "
    t = play("pixel_reasoner", [frames("[3,4,9]"), crop(region, "5"), answer], clip)
    finished(t, "pixel_reasoner", ["vid0.0", "vid0.1", "vid0.2", "obs1.0", "obs1.1", "obs1.2", "obs2"])
    assert [image.frame for image in t.images[3:6]] == [2, 3, 8]
    assert t.images[6].parent == "obs1.1"
    assert "Images 4 to 6, frames 3, 4, 9" in next(turn.text for turn in t.turns if turn.role == "tool")


def test_an_episode_in_deepeyes_zooms_in_pixels_of_the_view_and_turns_the_picture(picture: Media) -> None:
    look, turn = tool('{"bbox_2d":[28,28,140,84],"label":"cup"}'), tool('{"angle":90}', "image_rotate_tool")
    t = play("deepeyes", [look, turn, ANSWER], picture)
    finished(t, "deepeyes", ["img0", "obs1", "obs2"])
    width, height = t.images[0].view_size
    np.testing.assert_allclose(
        t.images[1].box, [28 / width, 28 / height, 140 / width, 84 / height], atol=3e-3
    )
    turned_width, turned_height = t.images[2].view_size
    assert (width > height, turned_width < turned_height) == (True, True)
    assert formats.balanced(t) == 0.0


QWEN3_VL_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "image_zoom_in_tool", "description": "Zoom in on a specific region '
    'of an image by cropping it based on a bounding box (bbox) and an optional object label", "parameters": '
    '{"type": "object", "properties": {"bbox_2d": {"type": "array", "items": {"type": "number"}, "minItems": 4, '
    '"maxItems": 4, "description": "The bounding box of the region to zoom in, as [x1, y1, x2, y2], where (x1, y1) '
    'is the top-left corner and (x2, y2) is the bottom-right corner"}, "label": {"type": "string", "description": '
    '"The name or label of the object in the specified bounding box"}, "img_idx": {"type": "number", "description": '
    '"The index of the zoomed-in image (starting from 0)"}}, "required": ["bbox_2d", "label", "img_idx"]}}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)  # fmt: skip
"""The system message of Qwen-Agent (nous_fncall_prompt) and of Qwen3-VL's chat template with its zoom."""


def test_qwen3_vl_is_told_of_its_zoom_and_shown_crops_as_it_was_trained(picture: Media) -> None:
    prose = native("[200, 200, 800, 800]", label="cup").partition("</think>\n\n")[2]
    again = native("[300, 300, 600, 600]", label="rim")
    t = play("qwen_zoom", [f"I zoom in on the cup.\n{prose}", again, "So: " + ANSWER[16:]], picture)
    finished(t, "qwen_zoom", ["img0", "obs1", "obs2"])
    assert t.turns[0].text == QWEN3_VL_TOOLS
    assert [image.parent for image in t.images[1:]] == ["img0", "img0"]
    np.testing.assert_allclose(t.images[1].box, [0.2, 0.2, 0.8, 0.8], atol=3e-3)
    shown = [turn for turn in t.turns if turn.role == "tool"]
    pads = "<|image_pad|>" * shown[0].tokens.count(speaker("qwen_zoom").spec.image_token)
    assert speaker("qwen_zoom").tokenizer.decode(shown[0].tokens) == (
        f"\n<|im_start|>user\n<tool_response>\n<|vision_start|>{pads}<|vision_end|>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("dialect", "write"), [("qwen_zoom", native), ("qwen_zoom_xml", tagged)])
def test_img_idx_counts_the_pictures_of_the_user_before_crops(
    dialect: str, write: Callable[..., str]
) -> None:
    later = Scale.of("thousand", [*VIEWS, ImageView(id="img1", view_size=(56, 56))])
    spoken = DIALECTS[dialect]
    for number, target in enumerate(("img0", "img1", "obs1")):
        text = write("[100, 250, 500, 750]", number)
        assert spoken.parse(text, ALL, later).action == zoom(target)
        assert "".join(spoken.render(zoom(target), later, "t")) == text
    moved = spoken.rewrite(write("[0, 0, 9, 9]", 2, "red cup"), [zoom("img1")], later)
    assert moved == write("[100, 250, 500, 750]", 1, "red cup")


def test_an_episode_in_plain_is_one_thought_and_an_answer(picture: Media) -> None:
    t = play("plain", [ANSWER], picture)
    finished(t, "plain", ["img0"])
    assert formats.think_answer(t) == 1.0
    idle = play("plain", [tool('{"bbox_2d":[28,28,140,84]}')], picture)
    assert (idle.stop_reason, formats.dialect(idle)) == (StopReason.NO_ACTION, 0.0)


@pytest.mark.parametrize("dialect", SEEDS)
def test_demonstrations_are_played_as_the_dialect_says_them(dialect: str, picture: Media) -> None:
    pixels = {"min_pixels": 64 * 64, "max_pixels": 64 * 64}
    dialogue = {"dialect": dialect, "max_context": 2048, "input": pixels, "crop": pixels}
    player = Player(parse({"dialogue": dialogue, "learner": {"row_tokens": 2048}}), str(nano_folder()))
    steps = [{"think": "closer", "op": "zoom_in", "box": [0.2, 0.2, 0.8, 0.8]}] if dialect != "plain" else []

    def played(*turns: dict) -> tuple[Trajectory, list[np.ndarray]]:
        row = {
            "id": "q",
            "question": "What?",
            "media": [picture],
            "turns": [*turns, {"think": "t", "answer": "a cup"}],
        }
        return player.play(Demonstration.model_validate(row))

    trajectory, views = played(*steps)
    assert (trajectory.dialect, formats.dialect(trajectory)) == (dialect, 1.0)
    assert len(views) == len(trajectory.images) == 1 + len(steps)
    for turn in [turn for turn in trajectory.turns if turn.is_policy]:
        read, _ = player.renderer.read(turn.tokens, [0.0] * len(turn.tokens), trajectory.images[:1])
        assert (read.action is None, read.error) == (turn.action is None, None)
        if turn.action is not None:  # to the pixel of the view
            boxes = read.action.arguments["box"], turn.action.arguments["box"]
            np.testing.assert_allclose(*boxes, atol=0.5 / 64)
    with pytest.raises(DataFailure) as error:
        played({"op": "read_text"})
    assert error.value.code == "unknown_op"
