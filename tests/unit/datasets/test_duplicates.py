"""Repetitions are found by content, near ones by text and the look of their pictures; different ones stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from refined import demonstration, zoom

from pixelis.config import ToolboxConfig
from pixelis.datasets.refinement import duplicates
from pixelis.datasets.refinement.media_hashes import MediaHashes, group_similar
from pixelis.errors import BadImage, BadInput
from pixelis.records import Media, Step


def photo(seed: int, side: int = 256) -> np.ndarray:
    """A smooth random picture."""
    small = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC))


def image(path: Path) -> Media:
    return Media(id="img0", uri=str(path))


def test_the_content_hash_ignores_ids_weights_and_observations():
    one = demonstration("a")
    changes = {"id": "b", "quality": 0.3, "question": " which DIGIT is in the red  frame?"}
    same = one.model_copy(update=changes)
    assert duplicates.content_hash(one, ["p"]) == duplicates.content_hash(same, ["p"])
    others = [
        (demonstration("a"), ["q"]),
        (demonstration("a", zooms=1), ["p"]),
        (demonstration("a", answers=["8"]), ["p"]),
        (demonstration("a", kind="trap_logical"), ["p"]),
        (demonstration("a", turns=[zoom(1, 0.001), zoom(2), one.turns[-1]]), ["p"]),
    ]
    hashes = [duplicates.content_hash(one, ["p"])] + [duplicates.content_hash(d, p) for d, p in others]
    assert len(set(hashes)) == len(hashes)
    assert duplicates.exact(["x", "y", "x", "x"]) == {2: 0, 3: 0}


def test_near_duplicates_share_kind_answer_pictures_and_words():
    def said(name: str, words: str, **fields):
        return demonstration(name, turns=[zoom(think=words), Step(think="It is 7", answer="7")], **fields)

    long = "I should look closer at the small red frame in the lower left corner: the digit in it is tiny"
    other = "Something else altogether: walls, windows, and a door beside the car in front of the house"
    rows = [
        said("a", long),
        said("b", long + " indeed"),
        said("c", other),
        said("d", long, kind="self_correction"),
        said("e", long),
        said("f", long, question="How many windows has the blue house behind the tall trees on the hill?"),
    ]
    pictures = [("p",)] * 4 + [("q",), ("p",)]
    assert duplicates.near(rows, pictures, 0.9) == {1: 0}
    assert duplicates.near(rows, pictures, 1.0) == {}


WORDS = st.lists(
    st.sampled_from(["red", "blue", "seven", "frame", "near", "the", "a"]), min_size=1, max_size=6
)


@settings(max_examples=50)
@given(st.lists(WORDS, max_size=12), st.floats(0.3, 1))
def test_near_duplicates_equal_those_of_a_plain_loop(texts: list[list[str]], similarity: float):
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [words for words in texts if words] * 2
    if not texts:
        return
    matrix = TfidfVectorizer(analyzer=lambda words: words, dtype=np.float64).fit_transform(texts)
    cosines, remaining = (matrix @ matrix.T).toarray(), []
    for i in range(len(texts)):
        if not any(cosines[i, j] >= similarity - 1e-6 for j in remaining):
            remaining.append(i)
    dropped = duplicates.greedy(matrix, similarity - 1e-6)
    assert [i for i in range(len(texts)) if i not in dropped] == remaining
    assert all(cosines[i, j] >= similarity - 2e-6 and j < i and j in remaining for i, j in dropped.items())


def test_perceptual_hashes_survive_scaling_and_saving_and_differ_between_pictures(tmp_path: Path):
    first, second = photo(1), photo(2)
    Image.fromarray(first).save(tmp_path / "a.png")
    Image.fromarray(first).resize((180, 180)).save(tmp_path / "b.jpg", quality=70)
    Image.fromarray(second).save(tmp_path / "c.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    pictures = MediaHashes(ToolboxConfig(), tmp_path / "kept.jsonl")
    names = ("a.png", "b.jpg", "c.png", "copy.png")
    contents = [pictures.content(image(tmp_path / name)) for name in names]
    assert contents[0] == contents[3]
    assert len(set(contents)) == 3
    hashes = [pictures.perceptual_hash(image(tmp_path / name)) for name in names]
    groups = group_similar(hashes, 3)
    assert groups[0] == groups[1] == groups[3] != groups[2]
    reopened = MediaHashes(ToolboxConfig(), tmp_path / "kept.jsonl")
    assert reopened.perceptual_hash(image(tmp_path / "a.png")) == hashes[0]
    Image.fromarray(second).save(tmp_path / "a.png")  # a changed file is another picture
    changed = MediaHashes(ToolboxConfig(), tmp_path / "kept.jsonl")
    assert changed.perceptual_hash(image(tmp_path / "a.png")) == hashes[2]


def test_missing_pictures_have_an_error_code(tmp_path: Path):
    pictures = MediaHashes(ToolboxConfig())
    with pytest.raises(BadInput, match=r"none\.png"):
        pictures.content(image(tmp_path / "none.png"))
    (tmp_path / "bad.png").write_bytes(b"\x89PNG no")
    with pytest.raises(BadImage):
        pictures.perceptual_hash(image(tmp_path / "bad.png"))
