"""FIND: detectors of random weights in local folders, with boxes as transformers maps them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import skimage.data
from calling import call
from tiny_tokenizer import save_tokenizer

from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, MissingFile
from pixelis.operations import find
from pixelis.operations.find import Find
from pixelis.records import ImageView

COFFEE = skimage.data.coffee()
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    import torch
    import transformers

    out = {}
    for kind, name in (("owlvit", "OwlViT"), ("owlv2", "Owlv2")):
        torch.manual_seed(0)
        text = {**SMALL, "vocab_size": 10, "max_position_embeddings": 8}
        vision = {**SMALL, "image_size": 64, "patch_size": 16}
        config = getattr(transformers, f"{name}Config")(
            text_config=text, vision_config=vision, projection_dim=16
        )
        out[kind] = tmp_path_factory.mktemp(kind)
        model = getattr(transformers, f"{name}ForObjectDetection")(config)
        # Boxes near the grid of patches instead of beyond the border
        model.box_head.dense2.weight.data *= 0.02
        for layer in (model.class_head.logit_scale, model.class_head.logit_shift):  # scores that differ
            layer.weight.data *= 0
            layer.bias.data *= 0
        model.save_pretrained(out[kind])
        save_tokenizer(out[kind])
    return out


def run(folder: Path, target: str = "img0", views=(), **arguments):
    return call("find", COFFEE, target, views, {"settings": ToolboxConfig(detector=str(folder))}, **arguments)


@pytest.mark.parametrize("kind", ["owlvit", "owlv2"])
def test_boxes_and_scores_are_those_of_transformers(kind: str, folders, monkeypatch):
    import torch
    import transformers

    detector = find.load(str(folders[kind]))
    processor = getattr(
        transformers, {"owlvit": "OwlViTImageProcessorPil", "owlv2": "Owlv2ImageProcessorPil"}[kind]
    )(
        size={"height": 64, "width": 64},
        **({"crop_size": {"height": 64, "width": 64}} if kind == "owlvit" else {}),
    )
    tokens = transformers.AutoTokenizer.from_pretrained(folders[kind])(
        ["red cup"], padding="max_length", max_length=8, return_tensors="pt"
    )
    # transformers 5 pads with black; OWLv2 was trained with grey (Scenic's implementation), so the square is
    # given.
    square = np.concatenate([COFFEE, np.full((200, 600, 3), 128, np.uint8)]) if kind == "owlv2" else COFFEE
    pixels = processor(images=square, return_tensors="pt")["pixel_values"]
    # OWLv2's own resizing blurs a little more
    assert (detector._pixels(COFFEE)["pixel_values"] - pixels).abs().mean() < 0.1
    monkeypatch.setattr(detector, "_pixels", lambda picture: {"pixel_values": pixels})
    boxes, scores = detector.detect(COFFEE, "red cup")
    with torch.inference_mode():
        output = detector.model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], pixel_values=pixels
        )
    (expected,) = processor.post_process_object_detection(
        output, threshold=0.0, target_sizes=torch.tensor([[400, 600]])
    )
    theirs = expected["boxes"].numpy().reshape(-1, 4) / (600, 400, 600, 400)
    assert len(boxes) == len(scores)
    assert len(boxes) > 3
    for box, score in zip(boxes, scores, strict=True):
        distances = np.abs(theirs.clip(0, 1) - box).max(1) + np.abs(expected["scores"].numpy() - score)
        assert distances.min() < 1e-4


def test_objects_can_be_measured_and_are_of_the_whole_picture(folders, monkeypatch):
    monkeypatch.setitem(find.THRESHOLDS, "owlvit", 0.0)
    find.load.cache_clear()
    crop = ImageView(
        id="obs1", parent="img0", box=(0.5, 0.5, 1.0, 1.0), source_size=(300, 200), view_size=(300, 200)
    )
    observation, (view,) = run(folders["owlvit"], "obs1", (crop,), text="red cup", box=[0, 0, 0.5, 1])
    find.load.cache_clear()
    assert observation.status == "ok", observation.text
    records = observation.data["objects"]
    assert 1 <= len(records) <= find.MAX_OBJECTS
    assert len({record["id"] for record in records}) == len(records)
    scores = [record["score"] for record in records]
    assert scores == sorted(scores, reverse=True)
    for record in records:
        x0, y0, x1, y1 = record["box"]
        assert 0.5 - 1e-6 <= x0 < x1 <= 0.75 + 1e-6
        assert 0.5 - 1e-6 <= y0 < y1 <= 1 + 1e-6
        assert record["id"] in observation.text
    assert (view.shape[0], view.shape[1]) == (200, 150)
    large = max(records, key=lambda r: (r["box"][2] - r["box"][0]) * (r["box"][3] - r["box"][1]))
    known = {"objects": {record["id"]: record for record in records}}
    measured, _ = call("get_properties", COFFEE, scene=known, object=large["id"], groups=["size"])
    width = measured.data["properties"]["size"]["bbox_width"]["value"]
    assert width == pytest.approx(600 * (large["box"][2] - large["box"][0]), abs=2)


def test_finding_nothing_is_a_result(folders, monkeypatch):
    monkeypatch.setitem(find.THRESHOLDS, "owlvit", 0.999)
    find.load.cache_clear()
    observation, views = run(folders["owlvit"], text="red cup")
    find.load.cache_clear()
    assert (observation.status, observation.data["objects"], views) == ("ok", [], [])
    assert "no red cup found; the best score 0." in observation.text


def test_folders_that_hold_no_detector(folders, tmp_path: Path):
    with pytest.raises(MissingFile, match="names no folder") as caught:
        Find.ready(ToolboxConfig())
    assert "toolbox.detector=google/owlv2" in str(caught.value.fix)
    (tmp_path / "config.json").write_text((folders["owlvit"] / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folders["owlvit"] / "model.safetensors").read_bytes())
    with pytest.raises(BadConfig, match="has no tokenizer"):
        Find.ready(ToolboxConfig(detector=str(tmp_path)))
    Find.ready(ToolboxConfig(detector=str(folders["owlvit"])))


@pytest.mark.slow
def test_grounding_dino_sees_what_its_processor_shows_it(tmp_path: Path):
    import torch
    import transformers

    vision = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    text = transformers.BertConfig(**SMALL, vocab_size=10, max_position_embeddings=300)
    config = transformers.GroundingDinoConfig(
        backbone_config=vision, text_config=text, num_queries=20, d_model=32, max_text_len=16,
        encoder_ffn_dim=16, encoder_layers=2, encoder_attention_heads=2,
        decoder_ffn_dim=16, decoder_layers=2, decoder_attention_heads=2,
    )  # fmt: skip
    transformers.GroundingDinoForObjectDetection(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    detector = find.load(str(tmp_path))
    picture = COFFEE[:100, :160]
    pixels = transformers.GroundingDinoImageProcessorPil()(images=picture, return_tensors="pt")
    assert torch.equal(detector._pixels(picture)["pixel_values"], pixels["pixel_values"])
    boxes, scores = detector.detect(picture, "Red cup")
    assert len(boxes) == len(scores) > 0
    assert (boxes[:, :2] < boxes[:, 2:]).all()
    tokens = detector._tokens("Red cup. ")
    assert detector.tokenizer.decode(tokens["input_ids"][0]) == "<s> red cup . </s>"
