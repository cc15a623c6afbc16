"""The vector of a question: .7 picture, .3 words, and a picture finds itself rather than another one."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_policy import policy

from pixelis.errors import BadInput
from pixelis.memory import combine
from pixelis.policy.embed import picture_vector, question_parts
from pixelis.policy.model import load_model


def test_parts_are_brought_to_length_one_before_they_are_weighted() -> None:
    visual, text = np.array([3.0, 0.0]), np.array([0.0, 0.2])
    expected = np.array([0.7, 0.3]) / np.hypot(0.7, 0.3)
    np.testing.assert_allclose(combine(visual, text, (0.7, 0.3)), expected, atol=1e-7)
    np.testing.assert_allclose(combine(None, text), [0, 1])
    np.testing.assert_allclose(combine(visual, None), [1, 0])
    np.testing.assert_allclose(combine(visual, np.zeros(2)), [1, 0])
    np.testing.assert_allclose(combine(visual, text, (0.0, 1.0)), [0, 1])
    np.testing.assert_allclose(combine(visual, -visual, (0.5, 0.5)), [1, 0])
    assert combine(visual, text).dtype == np.float32
    for nothing in ((None, None), (np.zeros(2), None)):
        with pytest.raises(BadInput):
            combine(*nothing)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_parts_of_questions_do_not_depend_on_their_neighbours(family: str) -> None:
    model, _, spec = load_model(policy(family), "cpu")
    rng = np.random.default_rng(0)
    side = spec.multiple
    views = [
        [rng.integers(0, 256, (side * h, side * w, 3), dtype=np.uint8) for h, w in sizes]
        for sizes in ([(4, 4)], [(2, 5), (4, 4)], [])
    ]
    texts = [[5, 6, 7], [9], [11, 12]]
    together = question_parts(model, spec, texts, views)
    for tokens, shown, (visual, text) in zip(texts, views, together, strict=True):
        ((alone, words),) = question_parts(model, spec, [tokens], [shown])
        np.testing.assert_allclose(text, words, atol=1e-5)
        assert text.shape == (model.config.text_config.hidden_size,)
        assert (visual is None) == (not shown)
        if visual is not None:
            np.testing.assert_allclose(visual, alone, atol=1e-4)
    assert question_parts(model, spec, [[]], [[]]) == [(None, None)]


def test_what_all_places_share_is_left_out_of_a_picture() -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(4 * 8, 40, generator=rng)
    there = picture_vector(features, 4, 8)
    assert there.shape == (40,)
    torch.testing.assert_close(picture_vector(features + 7, 4, 8), there, atol=1e-5, rtol=0)
    # Twice the size, the same picture.
    larger = features.reshape(4, 1, 8, 1, 40).expand(4, 2, 8, 2, 40).reshape(-1, 40)
    torch.testing.assert_close(picture_vector(larger, 8, 16), there, atol=1e-5, rtol=0)
    torch.testing.assert_close(picture_vector(features[:1], 1, 1), features[0])


def test_a_compressed_picture_finds_itself() -> None:
    """The embedded model: near-duplicates pass the default similarity of a neighbour, other pictures do not."""
    from pixelis.config import EvolutionConfig, MemoryConfig, load
    from pixelis.datasets.cards import render
    from pixelis.datasets.questions import read_questions

    config = load(None)
    model, tokenizer, spec = load_model(config.policy, "cpu")
    source = read_questions("cards:?split=validation&seed=11")
    asked = [next(source) for _ in range(40)]
    seen = [Image.fromarray(render(q.media[0].uri)).resize((64, 64), Image.Resampling.BICUBIC) for q in asked]

    def compressed(picture: Image.Image) -> Image.Image:
        held = io.BytesIO()
        picture.save(held, "JPEG", quality=70)
        return Image.open(held)

    def embedded(pictures: list[Image.Image]) -> np.ndarray:
        texts = [tokenizer(q.question, add_special_tokens=False)["input_ids"] for q in asked]
        parts = question_parts(model, spec, texts, [[np.asarray(p)] for p in pictures])
        return np.stack([combine(*p, (MemoryConfig().visual, MemoryConfig().text)) for p in parts])

    stored = embedded(seen)
    cosines = embedded([compressed(p) for p in seen]) @ stored.T
    assert (cosines.argmax(1) == np.arange(40)).all()
    own, least = np.diag(cosines).copy(), EvolutionConfig().neighbours.min_similarity
    np.fill_diagonal(cosines, -1)
    assert (own >= least).mean() >= 0.9
    assert cosines.max() < least
