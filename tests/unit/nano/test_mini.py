"""pixelis-mini: its tokenizer, its lessons about text, and what the committed base can do."""

from __future__ import annotations

import nano_texts
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nano_losses import evaluate
from nano_texts import Texts, evaluate_texts
from nano_widening import widen
from transformers import AutoModelForImageTextToText

from pixelis.families import NANO
from pixelis.families.vision import batch_windows
from pixelis.nano.architecture import MINI_SIZES, build
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.model_path import resolve

TOKENIZER = build_tokenizer(mini=True)
OBSERVATIONS = {
    "object ee7b777e\nbox [338, 296, 433, 407] of img0\narea 1.0 % of the whole image (2216 px)\nscore 0.76 "
    "(mobilenet, a small network: approximate)": 30,
    "object ee7b777e of img0\ncolor: name green, dominant 3 255 2 RGB 0..255, dominant share 1, mean 34.6 254 33.5 RGB "
    "0..255, brightness 0.996, saturation 0.866, hue 120 deg": 45,
    "220,625,383,677 Harbour": 16,
    '<tool_call>{"name":"segment_object_at","arguments":{"point_2d":[374,350]}}</tool_call>': 7,
}


@given(st.text(max_size=60))
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def test_calls_and_observations_take_few_tokens():
    for text, most in OBSERVATIONS.items():
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        assert TOKENIZER.decode(ids) == text
        assert len(ids) <= most


@given(
    st.integers(0, 2**32), st.sampled_from([nano_texts.reading, nano_texts.properties, nano_texts.outline])
)
def test_the_text_of_a_lesson_says_the_answers(seed, kind):
    text, pairs = kind(np.random.default_rng(seed))
    for questions, answer in pairs:
        assert answer in text or answer.replace(",", ", ") in text or questions[0].startswith("Where")


@given(st.integers(0, 2**32))
def test_the_way_of_a_track_is_that_of_its_boxes(seed):
    text, pairs = nano_texts.tracking(np.random.default_rng(seed))
    answers = {questions[0]: answer for questions, answer in pairs}
    assert answers["Is the object still in view at the end?"] == (
        "no" if "was not seen after" in text else "yes"
    )
    assert answers["Does it move?"] == ("no" if "stationary" in text else "yes")
    first, *_, last = [
        [int(v) for v in box.split(", ")] for box in text.split("[")[1:] for box in [box.split("]")[0]]
    ]
    way = answers.get("Where does it go: left, right, up or down?")
    inside = all(0 < edge < 1000 for edge in (*first, *last))
    if way in ("left", "right") and inside:
        assert (last[0] > first[0]) == (way == "right")
    if way in ("up", "down") and inside:
        assert (last[1] > first[1]) == (way == "down")


def test_only_what_the_assistant_says_is_learnt_and_a_batch_has_a_number():
    texts = Texts(TOKENIZER, seed=3, repeating=2)
    for number in (0, 5):
        batch, again = texts.batch(number), texts.batch(number)
        assert torch.equal(batch.ids, again.ids)
        for ids, weights in zip(batch.ids.tolist(), batch.weights.tolist(), strict=True):
            dialogue = TOKENIZER.decode(ids)
            said = [turn.partition("<|im_end|>")[0] for turn in dialogue.split("<|im_start|>assistant\n")[1:]]
            learnt = [token for token, weight in zip(ids, weights, strict=True) if weight]
            assert TOKENIZER.decode(learnt) == "".join(f"{answer}<|im_end|>" for answer in said)
    repetition = TOKENIZER.decode(texts.batch(0).ids[0]).partition("Repeat: ")[2]
    asked, _, rest = repetition.partition("<|im_end|>\n<|im_start|>assistant\n")
    assert rest.startswith(f"{asked}<|im_end|>")


@torch.no_grad()
def test_a_widened_model_says_what_the_smaller_one_says():
    small = AutoModelForImageTextToText.from_pretrained(resolve("nano"), dtype=torch.float32).eval()
    known, large = build_tokenizer(), build(TOKENIZER, NANO, seed=2, **MINI_SIZES).eval()
    widen(small, large, known, TOKENIZER)
    text = "<|im_start|>user\nWhere is the red frame?<|im_end|>\n<|im_start|>assistant\n["
    before, after = (
        model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
        for model, tokenizer in ((small, known), (large, TOKENIZER))
    )
    places, own = known.get_vocab(), TOKENIZER.get_vocab()
    common = sorted(places.keys() & own.keys())
    before = before[:, [places[token] for token in common]]
    after = after[:, [own[token] for token in common]]
    assert float((after - before).std()) < 0.02 * float(before.std())


@pytest.fixture(scope="module")
def base():
    model = AutoModelForImageTextToText.from_pretrained(resolve("mini"), dtype=torch.float32).eval()
    batch_windows(model)
    return model


def test_the_base_is_small(base):
    assert sum(file.stat().st_size for file in resolve("mini").iterdir()) <= 9_000_000
    assert sum(parameter.numel() for parameter in base.parameters()) <= 4_000_000
    stored = AutoModelForImageTextToText.from_pretrained(resolve("mini"), dtype="auto")
    assert stored.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.long
def test_the_base_sees_digits_and_looks_up_values_of_unseen_texts(base):
    scores = evaluate(base, TOKENIZER, "test", count=200, seed=3)
    assert scores["read"] > 0.88
    assert scores["point"] > 0.85
    assert evaluate_texts(base, Texts(TOKENIZER, seed=77), 200) > 0.7
