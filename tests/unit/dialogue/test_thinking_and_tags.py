"""The native form of Qwen3.5: calls with tags for parameters, and a thought that the prompt begins."""

from __future__ import annotations

import copy

import pytest
from dialogue_models import image_view, renderer
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config import DialogueConfig
from pixelis.dialogue.dialects import DIALECTS
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadConfig
from pixelis.operations import OPERATIONS, select
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView, Observation, Question

XML = DIALECTS["qwen_xml"]
SCALE = Scale.of("thousand", [ImageView(id="img0", view_size=(560, 280))])
ZOOM = Action(op="zoom_in", target="img0", arguments={"box": [0.12, 0.34, 0.22, 0.44]})
CALL = "<tool_call>\n<function=zoom_in>\n<parameter=bbox_2d>\n[120, 340, 220, 440]\n</parameter>\n</function>\n</tool_call>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
"""The turns and the switch of Qwen3.5's template."""


def thinking_renderer(template: str = TEMPLATE, **settings) -> Renderer:
    base = renderer("nano")
    tokenizer = copy.deepcopy(base.tokenizer)
    tokenizer.chat_template = template
    config = DialogueConfig(dialect="qwen_xml", **settings)
    return Renderer(tokenizer, base.spec, config, select(["zoom_in"]))


def test_a_call_has_a_tag_for_the_function_and_for_each_parameter():
    assert "".join(XML.render(ZOOM, SCALE)) == CALL
    assert "".join(XML.render(ZOOM, SCALE, "look")) == f"<think>\nlook\n</think>\n\n{CALL}"
    reply = XML.parse(f"look\n</think>\n\n{CALL}", OPERATIONS, SCALE)
    assert (reply.think, reply.action) == ("look\n", ZOOM)
    assert "<function=" in "".join(map(str, XML.system([image_view("nano")], OPERATIONS, "thousand")))


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>\r"), max_size=60).filter(
        str.strip
    )
)
def test_what_is_written_is_read(text: str):
    arguments = OPERATIONS["find"].check({"text": text}).model_dump(mode="json", exclude_none=True)
    for action in (Action(op="find", target="img0", arguments=arguments), ZOOM):
        reply = XML.parse("".join(XML.render(action, SCALE)), OPERATIONS, SCALE)
        assert (reply.error, reply.action) == (None, action)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('{"name": "zoom_in", "arguments": {"bbox_2d": [1, 2, 30, 40]}}', "bad_json"),
        ("<function=rm_rf>\n</function>", "unknown_op"),
        ("<function=zoom_in>\n</function>", "bad_arguments"),
        ("<function=zoom_in>\n<parameter=bbox_2d>\n[1, 2, 30, 40]\n</function>", "bad_json"),
        ("<function=zoom_in>\n<parameter=bbox_2d>\n[1, 2\n</parameter>\n</function>", "bad_json"),
        (
            "<function=zoom_in>\n"
            + "<parameter=bbox_2d>\n[1, 2, 30, 40]\n</parameter>\n" * 2
            + "</function>",
            "bad_json",
        ),
        (
            "<function=zoom_in>\n<parameter=bbox_2d>\n[1, 2, 30, 40]\n</parameter>\nand\n</function>",
            "bad_json",
        ),
        ("<function=zoom_in>\n<parameter=bbox_2d>\n[1, 2, 30]\n</parameter>\n</function>", "bad_box"),
    ],
)
def test_broken_calls_are_named(body: str, code: str):
    reply = XML.parse(f"<tool_call>\n{body}\n</tool_call>", OPERATIONS, SCALE)
    assert reply.error is not None
    assert reply.error.code == code


@pytest.mark.parametrize("thinking", [True, False])
def test_prompts_and_observations_end_as_the_template_does(thinking: bool):
    own = thinking_renderer(thinking=thinking, system="none")
    (turn,) = own.prompt(Question(id="q", question="Which digit?"), [])
    messages = [{"role": "user", "content": [{"type": "text", "text": "Which digit?"}]}]
    expected = own.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )
    assert turn.tokens == expected
    observation = own.observation(Observation(id="obs1", status="ok", text="two"))
    end = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
    assert own.tokenizer.decode(observation.tokens) == (
        "\n<|im_start|>user\n<tool_response>\nobs1\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        + end
    )


def test_a_thought_that_the_prompt_begins_belongs_to_the_turn():
    own = thinking_renderer()
    encoded = own.tokenizer.encode(f"look\n</think>\n\n{CALL}<|im_end|>", add_special_tokens=False)
    turn, reply = own.read(encoded, [0.0] * len(encoded), [image_view("nano")])
    assert (turn.tokens, reply.think, turn.action.op) == (encoded, "\nlook\n", "zoom_in")
    assert own.dialect.well_formed(turn.text)
    shown = own.assistant(ZOOM, "look", [image_view("nano")])
    assert (shown.tokens, shown.text) == (encoded, turn.text)
    silent = own.assistant("7")
    assert own.tokenizer.decode(silent.tokens) == "\n</think>\n\n<answer>7</answer><|im_end|>"


def test_a_model_that_always_thinks_refuses_the_switch():
    always = TEMPLATE.replace("enable_thinking is defined and not enable_thinking", "false")
    assert thinking_renderer(always).prompt(Question(id="q", question="?"), [])
    with pytest.raises(BadConfig, match=r"dialogue\.thinking"):
        thinking_renderer(always, thinking=False)
