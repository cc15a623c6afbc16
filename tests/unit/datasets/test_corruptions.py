"""The corruptions of ImageNet-C, as functions of pictures and as options of sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config import ToolboxConfig
from pixelis.datasets import cards, packaged
from pixelis.datasets.corruptions import KINDS, SEVERITIES, Corruption
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_questions
from pixelis.errors import BadInput


@pytest.fixture(scope="module")
def picture():
    return np.ascontiguousarray(cards.render(cards.picture_uri("test", 7, 0))[:256, :256])


def corrupted(picture: np.ndarray, kind: str, severity: int, seed: int = 0) -> np.ndarray:
    return Corruption(kind, severity).apply(picture, np.random.default_rng(seed))


def change(picture: np.ndarray, kind: str, severity: int) -> float:
    return float(np.abs(corrupted(picture, kind, severity).astype(float) - picture).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_a_corruption_depends_on_its_generator_alone_and_the_severest_changes_more_than_the_mildest(
    picture, kind
):
    before = picture.copy()
    assert np.array_equal(corrupted(picture, kind, 3), corrupted(picture, kind, 3))
    assert np.array_equal(picture, before)
    mild, severe = change(picture, kind, 1), change(picture, kind, 5)
    assert mild > 0.3
    assert severe > 0.3 if kind == "elastic_transform" else severe > mild  # its severities differ in kind


@given(
    st.tuples(st.integers(4, 60), st.integers(4, 60)),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(SEVERITIES),
    st.sampled_from([0, 128, 255]),
)
def test_a_picture_of_any_size_stays_a_picture_of_that_size(size, kind, severity, value):
    result = corrupted(np.full((*size, 3), value, np.uint8), kind, severity)
    assert result.shape == (*size, 3)
    assert result.dtype == np.uint8


def test_a_corrupted_card_world_has_the_same_questions_about_other_pictures():
    source = "cards:?split=test&seed=7&clips=0.5"
    clean = list(read_questions(source, limit=6, epochs=1))
    foggy = list(read_questions(f"{source}&corruption=fog&severity=4", limit=6, epochs=1))
    for before, after in zip(clean, foggy, strict=True):
        assert before.model_copy(update={"media": []}) == after.model_copy(update={"media": []})
    assert {q.media[0].kind for q in clean} == {"image", "video"}
    for before, after in zip(clean, foggy, strict=True):
        a, b = ((m.frames or [m.uri])[-1] for m in (before.media[0], after.media[0]))
        assert not np.array_equal(cards.render(a), cards.render(b))


@pytest.mark.parametrize("name", ["shapes", "digits", "coins", "text", "photos"])
def test_packaged_pictures_keep_their_annotations_and_ids(name, tmp_path):
    (clean,), (dark,) = (
        list(packaged.read(f"packaged:{name}?split=test&count=1{more}", tmp_path))
        for more in ("", "&corruption=contrast&severity=5")
    )
    assert (clean.id, clean.annotations) == (dark.id, dark.annotations)
    a, b = (open_media(question.media[0], ToolboxConfig()) for question in (clean, dark))
    assert a.shape == b.shape
    assert b.std() < a.std() / 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("packaged:text?corruption=fogg", "did you mean 'fog'"),
        ("packaged:text?corruption=fog&severity=6", "is not 1 to 5"),
        ("packaged:text?severity=2", "severity goes with corruption"),
        ("packaged:clips?corruption=fog", "unknown option 'corruption'"),
        ("cards:?corruption=smog", "unknown corruption 'smog'"),
    ],
)
def test_wrong_options_are_named(source, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        next(iter(read_questions(source, limit=1, epochs=1)))
