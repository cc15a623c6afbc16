"""pixelis-nano: its tokenizer, its shape, and what the committed base can and cannot do."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nano_lessons import Lessons, Views
from nano_losses import Heads, evaluate, lesson_loss
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen3VLForConditionalGeneration

from pixelis.datasets import cards
from pixelis.errors import BadInput
from pixelis.families.vision import batch_windows, patchify
from pixelis.nano import BASE
from pixelis.nano.architecture import build
from pixelis.nano.tokenizer import BINS, SPECIAL, ZOOM_CALL, build_tokenizer

TOKENIZER = build_tokenizer()


def tokens(text: str) -> list[str]:
    return [TOKENIZER.decode([i]) for i in TOKENIZER(text, add_special_tokens=False)["input_ids"]]


@given(st.text(max_size=60))
def test_any_text_survives(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_the_protocol_takes_few_tokens():
    call = (
        "<think>zoom in on the red "
        f"frame</think><tool_call>{ZOOM_CALL}120,340,220,440]}}}}</tool_call><|im_end|>"
    )
    assert len(tokens(call)) == 20
    assert tokens("<answer>7</answer><|im_end|>") == ["<answer>", "7", "</answer>", "<|im_end|>"]
    assert len(tokens("Which digit is in the purple frame?")) == 8
    assert len(tokens("<tool_response>obs1 = zoom_in(img0)</tool_response>")) == 6
    for value in BINS:
        assert tokens(f"[{value},") == ["[", str(value), ","]
    for name in ("img0", "obs1", "obs8", *SPECIAL):
        assert tokens(name) == [name]
    assert tokens("768") == ["7", "6", "8"]


def test_a_saved_tokenizer_is_the_same(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    repeated = AutoTokenizer.from_pretrained(tmp_path)
    text = '<|im_start|>user\nRead 120 and 123, it\'s "çà" 日本\n\n<answer>7</answer><|im_end|>'
    assert repeated(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(BASE).get_vocab() == TOKENIZER.get_vocab()


def test_the_chat_template_writes_qwen_turns():
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]},
        {"role": "assistant", "content": "here"},
        {"role": "tool", "content": "obs1"},
    ]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where?<|im_end|>\n"
        "<|im_start|>assistant\nhere<|im_end|>\n"
        "<|im_start|>user\n<tool_response>obs1</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_both_families_build_load_and_run(family, tmp_path):
    model = build(TOKENIZER, family, seed=3).eval()
    assert model.config.model_type == family
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    model.save_pretrained(tmp_path)
    repeated = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    pixels, grid = patchify(
        [Views(cards.world("train").backgrounds).overview(cards.scene_of("train", 0, 0))], 8, 2, 2
    )
    ids = TOKENIZER("<|vision_start|>" + "<|image_pad|>" * 16 + "<|vision_end|>Where?", return_tensors="pt")[
        "input_ids"
    ]
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, repeated(**inputs).logits)
    same = build(TOKENIZER, family, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("wrong", [{"depth": 4}, {"family": "llava"}])
def test_unknown_sizes_and_families_are_refused(wrong):
    with pytest.raises(BadInput):
        build(TOKENIZER, **wrong)


def test_lessons_repeat_and_hold_no_protocol():
    lessons = Lessons(Views(cards.world("train").backgrounds), TOKENIZER, [(0, 16), (16, 24)], seed=5)
    first, repeated = lessons[1], lessons[1]
    assert all(torch.equal(a, b) for a, b in zip(vars(first).values(), vars(repeated).values(), strict=True))
    call = TOKENIZER.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "<answer>", "</answer>"])
    for number, row in enumerate(first.ids.tolist()):
        echo = (16 + number) % 12 == 11
        assert echo or not set(row) & set(call)
        if echo:
            text = TOKENIZER.decode(row)
            assert not re.search(r"<tool_call>\{.*\]\}\}</tool_call>|<answer>\d</answer>", text)


def test_a_lesson_teaches_every_part():
    batch = Lessons(Views(cards.world("train").backgrounds), TOKENIZER, [(0, 12)], seed=1)[0]
    model = build(TOKENIZER)
    heads = Heads(model.config.text_config.hidden_size)
    bins = torch.tensor([TOKENIZER(str(v))["input_ids"][0] for v in BINS])
    loss, parts = lesson_loss(model, heads, batch, bins)
    loss.backward()
    assert set(parts) == {"colour", "place", "digit", "point", "read", "rest"}
    assert all(p.grad is not None for p in [*model.parameters(), *heads.parameters()])
    assert set(lesson_loss(model, heads, batch, bins, language=False)[1]) == {"colour", "place", "digit"}


@pytest.fixture(scope="module")
def base():
    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32).eval()
    batch_windows(model)
    return model


def test_the_base_is_small_untied_and_stock(base):
    assert type(base) is Qwen3VLForConditionalGeneration
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 10_000_000
    assert base.config.tie_word_embeddings is False
    assert json.loads((BASE / "config.json").read_text())["pixelis_nano"] is True
    assert base.generation_config.eos_token_id == TOKENIZER.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.slow
def test_the_base_sees_unseen_digits_on_unseen_photographs(base):
    scores = evaluate(base, TOKENIZER, "test", count=200, seed=3)
    assert scores["read"] > 0.9
    assert scores["point"] > 0.85
    assert scores["both"] > 0.8
