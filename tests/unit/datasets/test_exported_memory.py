"""Questions of an exported memory: what the policy saw, without labels."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from memory_entries import made
from PIL import Image

from pixelis.config import MemoryConfig, ToolboxConfig
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_questions, read_rows
from pixelis.memory import Entry, Shard
from pixelis.records import Experience, Media, Question


def asked(number: int, *media: Media) -> Experience:
    """Asked twice under one id, as a client may do."""
    question = Question(id="q", question="Which digit?", media=list(media), answers=["9"], meta={"size": 1})
    return made(number, question=question)


def test_an_exported_memory_is_a_source_of_questions(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    pictures = {"img0": file.getvalue(), "obs1": file.getvalue()}
    image = Media(id="img0", uri="stored:img0", width=768, height=768)
    clip = Media(id="vid0", uri="stored:vid0", kind="video")
    shard, folder = Shard(tmp_path / "memory", MemoryConfig()), tmp_path / "exported"
    folder.mkdir()
    shard.add([Entry(asked(0, image), None, pictures), Entry(asked(1, image), None, pictures)])
    shard.export(folder / "experiences-0.parquet")
    shard.add([Entry(asked(2, clip)), Entry(asked(3, image))])
    shard.export(tmp_path / "more.parquet")
    shard.close()
    questions = list(read_questions(f"{folder}?cache={tmp_path / 'cache'}", epochs=1))
    assert [question.id for question in questions] == ["e0", "e1"]
    for question in questions:
        assert question.answers is None
        assert question.meta == {"size": 1}
        assert np.array_equal(open_media(question.media[0], ToolboxConfig()), pixels)
    *_, lost_clip, lost_picture = read_rows(f"{tmp_path / 'more.parquet'}?cache={tmp_path / 'cache'}")
    assert isinstance(lost_clip, BadRow)
    assert isinstance(lost_picture, BadRow)
    assert lost_clip.code == lost_picture.code == "not_stored"
