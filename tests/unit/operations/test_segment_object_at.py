"""SEGMENT_OBJECT_AT on real photos with known masks, on hostile calls."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import calling
import cv2
import numpy as np
import pytest
import skimage.data
from clips import BIKES
from safetensors.numpy import load_file, save_file
from scipy import ndimage
from skimage.filters import sobel
from skimage.segmentation import watershed

from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, MissingFile
from pixelis.operations import masks, mobilenet, sam
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.segment_object_at import SegmentObjectAt
from pixelis.operations.video import open_clip
from pixelis.records import ImageView


def call(picture: np.ndarray, target: str = "img0", views=(), scene=None, **arguments):
    return calling.call("segment_object_at", picture, target, views, scene, **arguments)


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
    scene = {"budget": PixelBudget(32 * 32, 256 * 256), "multiple": 16}
    observation, (view,) = call(picture, point=[x / width, y / height], scene=scene)
    assert observation.status == "ok", observation.text
    (record,) = observation.data["objects"]
    assert set(record) == {"id", "kind", "root", "frame", "box", "area", "score", "method", "mask"}
    expected = ("object", "img0", None, "mobilenet")
    assert (record["kind"], record["root"], record["frame"], record["method"]) == expected
    assert json.loads(json.dumps(record)) == record
    mask = masks.decode(record["mask"], height, width)
    assert iou(mask.full(), truth[5]) > 0.95
    assert (record["area"], record["box"]) == (mask.area, list(mask.box))
    # The text in the model's own numbers (0..1000), rounded outwards
    numbers = json.loads(observation.text.split("box ")[1].split(" of img0")[0])
    assert all(abs(n / 1000 - v) <= 0.001 for n, v in zip(numbers, record["box"], strict=True))
    assert all(words in observation.text for words in (record["id"], "approximate", f"{record['area']} px"))
    # The overlay is the region around the object, tinted where the mask is
    box = observation.images[0].box
    assert box[0] < record["box"][0] < record["box"][2] < box[2]
    assert 32 * 32 <= view.shape[0] * view.shape[1] <= 256 * 256
    rows = np.linspace(box[1] * height, box[3] * height, view.shape[0], endpoint=False).astype(int)
    columns = np.linspace(box[0] * width, box[2] * width, view.shape[1], endpoint=False).astype(int)
    magenta = view[..., 0].astype(int) - view[..., 1] > 30  # the photo is grey
    assert iou(mask.full()[np.ix_(rows, columns)], magenta) > 0.8  # the outline straddles the border
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
    picture, truth = coins()
    y, x = ndimage.center_of_mass(truth[5])
    wall = np.repeat(skimage.data.brick()[..., None], 3, 2)
    for seen, point, unsure in (
        (wall, [0.5, 0.5], True),
        (picture, [x / picture.shape[1], y / picture.shape[0]], False),
    ):
        observation, _ = call(seen, point=point)
        assert (observation.data["objects"][0]["score"] < 0.5) is unsure
        assert ("unsure" in observation.text) is unsure


def test_a_point_of_a_crop_gives_a_mask_of_the_whole_picture():
    picture, truth = coins()
    height, width = truth[7].shape
    middle = np.array(ndimage.center_of_mass(truth[7]))[::-1] / (width, height)
    low, high = np.clip(middle - 0.2, 0, 1), np.clip(middle + 0.2, 0, 1)
    crop = ImageView(id="obs1", parent="img0", box=(*low.tolist(), *high.tolist()), view_size=(64, 64))
    observation, _ = call(picture, "obs1", [crop], point=((middle - low) / (high - low)).tolist())
    (record,) = observation.data["objects"]
    assert record["mask"]["size"] == [height, width]
    assert iou(masks.decode(record["mask"]).full(), truth[7]) > 0.95
    assert observation.images[0].parent == "obs1"
    assert "of obs1" in observation.text


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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A SAM and a SAM 2 of random weights, as small as they go."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("segmenters")
    decoder = {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
    prompt = {"hidden_size": 32, "image_size": 128, "patch_size": 16, "mask_input_channels": 4}
    first = hf.SamConfig(
        vision_config=hf.SamVisionConfig(
            hidden_size=32, output_channels=32, num_hidden_layers=2, num_attention_heads=2, image_size=128,
            patch_size=16, window_size=4, global_attn_indexes=[1], mlp_dim=64, num_pos_feats=16,
        ),
        prompt_encoder_config=hf.SamPromptEncoderConfig(**prompt),
        mask_decoder_config=hf.SamMaskDecoderConfig(**decoder),
    )  # fmt: skip
    backbone = hf.Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, image_size=[128, 128], blocks_per_stage=[1, 2, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 1, 2, 4],
        global_attention_blocks=[4], window_size_per_stage=[8, 4, 4, 4],
    )  # fmt: skip
    vision = hf.Sam2VisionConfig(
        backbone_config=backbone, backbone_channel_list=[128, 64, 32, 16], fpn_hidden_size=32,
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
    )  # fmt: skip
    second = hf.Sam2Config(
        vision_config=vision,
        prompt_encoder_config=hf.Sam2PromptEncoderConfig(**prompt),
        mask_decoder_config=hf.Sam2MaskDecoderConfig(**decoder),
    )
    hf.SamModel(first).save_pretrained(folder / "sam")
    hf.Sam2Model(second).save_pretrained(folder / "sam2")
    return {"sam": folder / "sam", "sam2": folder / "sam2"}


@pytest.mark.parametrize("kind", ["sam", "sam2"])
@pytest.mark.parametrize(
    "arguments", [{"point": [0.4, 0.6]}, {"box": [0.2, 0.3, 0.7, 0.9]}], ids=["point", "box"]
)
def test_a_checkpoint_answers_at_the_size_of_the_picture(checkpoints, kind: str, arguments: dict):
    picture = skimage.data.coffee()
    scene = {"settings": ToolboxConfig(segmenter=str(checkpoints[kind]))}
    observation, views = call(picture, scene=scene, **arguments)
    assert observation.status == "ok", observation.text
    (record,) = observation.data["objects"]
    assert (record["method"], record["mask"]["size"], len(views)) == ("sam", list(picture.shape[:2]), 1)
    assert "(sam)" in observation.text
    assert 0 <= record["score"] <= 1
    assert observation == call(picture, scene=scene, **arguments)[0]
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
    def broken(folder: Path | str) -> Exception:
        with pytest.raises((MissingFile, BadConfig)) as caught:
            SegmentObjectAt.ready(ToolboxConfig(segmenter=str(folder)))
        assert caught.value.fix
        assert "toolbox.segmenter" in caught.value.message
        return caught.value

    SegmentObjectAt.ready(ToolboxConfig())
    SegmentObjectAt.ready(ToolboxConfig(segmenter=str(checkpoints["sam2"])))
    assert isinstance(broken(tmp_path / "nowhere"), MissingFile)
    whole = (checkpoints["sam"] / "config.json").read_text()
    for text, words in (('{"model_type": "bert"}', "bert"), ("{", "JSON"), (whole, "cannot be loaded")):
        (tmp_path / "config.json").write_text(text)
        assert words in broken(tmp_path).message
    weights = load_file(checkpoints["sam"] / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "neck" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    assert "lacks" in broken(tmp_path).message


def test_a_frame_of_a_clip_is_a_picture():
    clip = open_clip(BIKES, ToolboxConfig())
    frame = ImageView(id="obs1", parent="vid0", frame=20, view_size=(320, 136))
    result, views = calling.call(
        "segment_object_at", {"vid0": clip}, "obs1", [frame], box=[0.3, 0.3, 0.7, 0.9]
    )
    assert (result.status, len(views)) == ("ok", 1), result.text
    (record,) = result.data["objects"]
    expected = ("vid0", 20, [clip.height, clip.width])
    assert (record["root"], record["frame"], record["mask"]["size"]) == expected
    # Its properties can be asked for by its id alone, whatever the target
    track = {**record, "id": "0badcafe", "kind": "track", "mask": None}
    scene = {"objects": {record["id"]: record, "0badcafe": track}}
    for target, name in itertools.product(("vid0", "obs1"), scene["objects"]):
        properties, _ = calling.call("get_properties", {"vid0": clip}, target, [frame], scene, object=name)
        assert properties.status == "ok", properties.text
        assert name in properties.text
        assert properties.data["properties"]["size"]["bbox_width"]["value"] > 4
