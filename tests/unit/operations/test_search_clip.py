"""SEARCH_CLIP on real footage: a frame found by its picture, cuts, motion; words only with a checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from calling import call, whole
from clips import BIKES, BUNNY, CARPHONE, encode, footage
from tiny_tokenizer import save_tokenizer

from pixelis.config import ToolboxConfig
from pixelis.operations import search_clip
from pixelis.operations.search_clip import SearchClip
from pixelis.operations.video import Clip, open_clip
from pixelis.records import ImageView


@functools.cache
def three_scenes() -> Clip:
    """72 frames at 25 a second; new scenes begin with the frames 30 and 50."""
    parts = [*footage(BIKES, 30), *footage(BUNNY, 20), *footage(CARPHONE, 22)]
    return open_clip(encode(parts), ToolboxConfig())


def run(clip: Clip | None = None, target: str = "vid0", pictures=None, images=(), settings=None, **arguments):
    size = {"source_size": (160, 96), "view_size": (160, 96)}
    shown = ImageView(id="vid0.0", parent="vid0", frame=40, time=1.6, **size)
    media = {"vid0": clip or three_scenes(), **(pictures or {})}
    scene = {"settings": settings or ToolboxConfig()}
    return call("search_clip", media, target, [shown, *images], scene, **arguments)


def test_cuts_are_found_to_the_frame(monkeypatch):
    observation, views = run(event="cut")
    assert [moment["frame"] for moment in observation.data["moments"]] == [30, 50]
    assert "2 hard cuts in vid0: frame 30 at 1.20 s" in observation.text
    assert [image.frame for image in observation.images] == [30, 50]
    np.testing.assert_array_equal(views[0], three_scenes().frame(30))
    assert run(event="cut", start=1.3, end=1.9)[0].text.startswith("no hard cut in vid0")
    monkeypatch.setattr(search_clip, "MAX_SAMPLES", 8)
    observation, _ = run(event="cut")
    assert [moment["frame"] for moment in observation.data["moments"]] == [30, 50]
    assert observation.data["frames_seen"] == 8
    assert "8 of 72 frames were compared first" in observation.text


@pytest.mark.parametrize("samples", [240, 12])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_flash_is_no_cut(samples: int, length: int, monkeypatch):
    monkeypatch.setattr(search_clip, "MAX_SAMPLES", samples)
    frames = [three_scenes().frame(number) for number in range(50, 72)]
    for start in range(5, 10):  # one of them is the frame of a sample
        flash = [*frames[:start], *[np.full_like(frames[0], 250)] * length, *frames[start + length :]]
        observation, _ = run(open_clip(encode(flash), ToolboxConfig()), event="cut")
        assert observation.text.startswith("no hard cut in vid0"), start


@pytest.mark.parametrize("samples", [240, 9])
def test_the_moment_that_shows_a_picture(samples: int, monkeypatch):
    monkeypatch.setattr(search_clip, "MAX_SAMPLES", samples)
    picture = three_scenes().frame(59)
    observation, _ = run(pictures={"img0": picture}, like="img0")
    best = observation.data["moments"][0]
    assert abs(best["frame"] - 59) <= 1
    assert best["score"] > 0.95
    assert "best matches" in observation.text


def test_a_region_is_found_where_it_is_and_another_picture_is_unsure():
    observation, _ = run(like="vid0.0", like_box=[0.3, 0.2, 0.7, 0.9])
    assert 30 <= observation.data["moments"][0]["frame"] < 50
    assert observation.data["moments"][0]["score"] > 0.9
    noise = np.random.default_rng(0).integers(0, 256, (96, 160, 3), dtype=np.uint8)
    assert run(pictures={"img0": noise}, like="img0")[0].text.startswith("unsure")


def test_a_region_too_small_to_look_for_says_how_large_it_must_be():
    cells = [np.random.default_rng(i).integers(0, 256, (60, 100, 3), dtype=np.uint8) for i in range(4)]
    frames = [cell.repeat(8, axis=0).repeat(8, axis=1) for cell in cells]
    clip = open_clip(encode(frames, "matroska", "ffv1"), ToolboxConfig())
    shown = whole(frames[2], "vid0.2", parent="vid0", frame=2, time=0.08)
    for width, height in ((18, 18), (800, 14), (18, 300)):
        observation, _ = run(clip, images=[shown], like="vid0.2", like_box=[0, 0, width / 800, height / 480])
        assert observation.code == "too_small"
        assert f"{width}x{height} pixels, give one of at least 30x30" in observation.text
    for width, height in ((30, 30), (800, 30), (30, 300), (800, 480)):
        observation, _ = run(clip, images=[shown], like="vid0.2", like_box=[0, 0, width / 800, height / 480])
        assert observation.data["moments"][0]["frame"] == 2
        assert observation.text.startswith("best matches"), (width, height)


def test_motion_is_when_most_moves():
    still = [three_scenes().frame(60)] * 40
    moving = [np.roll(three_scenes().frame(60), 2 * i, axis=1) for i in range(20)]
    clip = open_clip(encode([*still, *moving, *still]), ToolboxConfig())
    observation, _ = run(clip, event="motion")
    assert all(40 <= moment["frame"] <= 60 for moment in observation.data["moments"])
    assert observation.data["moments"]
    assert run(clip, event="motion", end=1.4)[0].text == "nothing moves in vid0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A CLIP checkpoint of random weights with a tokenizer of a few words."""
    from transformers import CLIPConfig, CLIPModel

    path = tmp_path_factory.mktemp("clip")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 1}
    text = {**small, **ids, "vocab_size": 10, "max_position_embeddings": 8}
    vision = {**small, "image_size": 32, "patch_size": 16}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.mark.slow
def test_words_are_scored_as_transformers_scores_them(folder: Path):
    import torch
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    settings = ToolboxConfig(searcher=str(folder))
    SearchClip.ready(settings)
    observation, views = run(text="a bike", settings=settings)
    assert observation.status == "ok", observation.text
    assert 1 <= len(views) <= 4
    moment = observation.data["moments"][0]
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    square = three_scenes().frame(moment["frame"])[:, 32:128]
    pixels = CLIPImageProcessorPil(**size)(images=square, return_tensors="pt")["pixel_values"]
    tokens = AutoTokenizer.from_pretrained(folder)(
        ["a bike"], padding="max_length", max_length=8, return_tensors="pt"
    )
    model = CLIPModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        output = model(tokens["input_ids"], pixels, tokens["attention_mask"])
    expected = output.logits_per_image.item() / model.logit_scale.exp().item()
    assert moment["score"] == pytest.approx(expected, abs=5e-3)
    SearchClip.ready(ToolboxConfig())
    assert "toolbox.searcher" in run(text="a bike")[0].text
