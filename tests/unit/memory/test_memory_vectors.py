"""The vector of a question: .7 images and .3 text by default; an image's nearest neighbour is itself."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_policy import policy

from pixelis.errors import BadInput
from pixelis.policy.embed import image_vector, question_vectors
from pixelis.policy.model import load_model
from pixelis.records.vectors import combine


def test_vectors_are_normalised_before_they_are_weighted() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_vectors_do_not_depend_on_the_other_questions(family: str) -> None:
    model, _, spec = load_model(policy(family), "cpu")
    rng = np.random.default_rng(0)
    side = spec.multiple
    views = [
        [rng.integers(0, 256, (side * h, side * w, 3), dtype=np.uint8) for h, w in sizes]
        for sizes in ([(4, 4)], [(2, 5), (4, 4)], [])
    ]
    texts = [[5, 6, 7], [9], [11, 12]]
    together = question_vectors(model, spec, texts, views)
    for tokens, images, (visual, text) in zip(texts, views, together, strict=True):
        ((visual_alone, text_alone),) = question_vectors(model, spec, [tokens], [images])
        np.testing.assert_allclose(text, text_alone, atol=1e-5)
        assert text.shape == (model.config.text_config.hidden_size,)
        assert (visual is None) == (not images)
        if visual is not None:
            np.testing.assert_allclose(visual, visual_alone, atol=1e-4)
    assert question_vectors(model, spec, [[]], [[]]) == [(None, None)]


def test_an_image_vector_depends_neither_on_a_constant_nor_on_the_size() -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(4 * 8, 40, generator=rng)
    vector = image_vector(features, 4, 8)
    assert vector.shape == (40,)
    torch.testing.assert_close(image_vector(features + 7, 4, 8), vector, atol=1e-5, rtol=0)
    doubled = features.reshape(4, 1, 8, 1, 40).expand(4, 2, 8, 2, 40).reshape(-1, 40)
    torch.testing.assert_close(image_vector(doubled, 8, 16), vector, atol=1e-5, rtol=0)
    torch.testing.assert_close(image_vector(features[:1], 1, 1), features[0])


@pytest.mark.slow
def test_the_nearest_neighbour_of_a_compressed_image_is_the_image() -> None:
    """With the embedded model, compressed copies pass the default similarity of a neighbour."""
    from pixelis.config import EvolutionConfig, MemoryConfig, load
    from pixelis.datasets.cards import render
    from pixelis.datasets.questions import read_questions

    config = load(None)
    model, tokenizer, spec = load_model(config.policy, "cpu")
    source = read_questions("cards:?split=validation&seed=11")
    questions = [next(source) for _ in range(40)]
    images = [
        Image.fromarray(render(q.media[0].uri)).resize((64, 64), Image.Resampling.BICUBIC) for q in questions
    ]

    def compressed(image: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=70)
        return Image.open(buffer)

    def embedded(images: list[Image.Image]) -> np.ndarray:
        texts = [tokenizer(q.question, add_special_tokens=False)["input_ids"] for q in questions]
        vectors = question_vectors(model, spec, texts, [[np.asarray(image)] for image in images])
        return np.stack([combine(*v, (MemoryConfig().visual, MemoryConfig().text)) for v in vectors])

    stored = embedded(images)
    cosines = embedded([compressed(image) for image in images]) @ stored.T
    assert (cosines.argmax(1) == np.arange(40)).all()
    to_itself, threshold = np.diag(cosines).copy(), EvolutionConfig().neighbours.min_similarity
    np.fill_diagonal(cosines, -1)
    assert (to_itself >= threshold).mean() >= 0.9
    assert cosines.max() < threshold
