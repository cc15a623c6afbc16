"""GET_PROPERTIES: closed forms on drawn shapes, colour names on swatches and photos, and hostile calls."""

from __future__ import annotations

import json
import math

import calling
import cv2
import numpy as np
import pytest
import skimage.data
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pixelis.operations import colours, masks
from pixelis.operations.get_properties import GROUPS
from pixelis.records import ImageView

SIDE = 500


def call(picture: np.ndarray, objects=None, views=(), target="img0", **arguments):
    return calling.call("get_properties", picture, target, views, {"objects": objects or {}}, **arguments)


def values(mask: np.ndarray, picture: np.ndarray | None = None, **arguments) -> dict:
    """The properties of a mask, of a bright object on a dark ground if there is no picture."""
    if picture is None:
        picture = np.where(mask[..., None], np.uint8(200), np.uint8(30)).repeat(3, 2)
    observation, views = call(picture, mask=masks.encode(mask), **arguments)
    assert (observation.status, views) == ("ok", []), observation.text
    groups = observation.data["properties"].items()
    return {f"{group}.{name}": v["value"] for group, all in groups for name, v in all.items()}


def turned(degrees: float, x: float = 250.2, y: float = 249.7) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates along and across an axis turned counter-clockwise, at the middle of each pixel."""
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    u, v = columns - x, y - rows
    return u * c + v * s, v * c - u * s


def ellipse(a: float, b: float, degrees: float = 0.0) -> np.ndarray:
    u, v = turned(degrees)
    return (u / a) ** 2 + (v / b) ** 2 <= 1


def close(value: float) -> object:
    return pytest.approx(value, rel=0.01)


@pytest.mark.parametrize(
    ("a", "b", "degrees"),
    [(20, 20, 0), (240, 240, 0), (200, 80, 0), (150, 60, 30), (100, 40, 117), (40, 25, 160)],
)
def test_an_ellipse(a: int, b: int, degrees: int):
    v = values(ellipse(a, b, degrees))
    h = ((a - b) / (a + b)) ** 2
    length = math.pi * (a + b) * (1 + 3 * h / (10 + math.sqrt(4 - 3 * h)))  # Ramanujan's second formula
    assert v["size.area_pixels"] == close(math.pi * a * b)
    assert v["size.equivalent_diameter"] == close(2 * math.sqrt(a * b))
    assert v["shape.perimeter"] == close(length)
    assert v["shape.circularity"] == close(4 * math.pi * math.pi * a * b / length**2)
    assert v["shape.solidity"] == close(1)
    assert (v["shape.corners"], v["shape.holes"]) == (0, 0)
    if a == b:
        assert v["shape.aspect_ratio"] == close(1)
        assert v["shape.eccentricity"] < 0.1
        assert v["shape.orientation"] is None
    else:
        assert v["shape.rotated_aspect_ratio"] == close(a / b)
        assert v["shape.eccentricity"] == close(math.sqrt(1 - (b / a) ** 2))
        assert (v["shape.orientation"] - degrees + 90) % 180 == pytest.approx(90, abs=0.5)


@pytest.mark.parametrize(
    ("length", "width", "degrees"),
    [(200, 200, 0), (300, 120, 0), (300, 120, 25), (240, 160, 150), (60, 100, 0)],
)
def test_a_rectangle(length: int, width: int, degrees: int):
    u, v = turned(degrees, 250, 250) if degrees == 0 else turned(degrees)
    v = values((abs(u) < length / 2) & (abs(v) < width / 2))
    long, short = max(length, width), min(length, width)
    assert v["size.area_pixels"] == close(length * width)
    assert v["shape.perimeter"] == close(2 * (length + width))
    assert v["shape.circularity"] == close(math.pi * length * width / (length + width) ** 2)
    assert v["shape.solidity"] == close(1)
    assert (v["shape.rotated_length"], v["shape.rotated_width"]) == (close(long), close(short))
    assert v["shape.rotated_aspect_ratio"] == close(long / short)
    assert v["shape.corners"] == 4
    if degrees == 0:
        assert v["shape.aspect_ratio"] == close(length / width)
        assert (v["size.bbox_width"], v["size.bbox_height"]) == (length, width)
        assert v["size.diagonal"] == close(math.hypot(length, width))
    if long != short:
        main = degrees if length > width else (degrees + 90) % 180
        assert (v["shape.orientation"] - main + 90) % 180 == pytest.approx(90, abs=0.5)
        assert v["shape.eccentricity"] == close(math.sqrt(1 - (short / long) ** 2))


@pytest.mark.parametrize("sides", range(3, 9))
def test_corners_of_regular_polygons(sides: int):
    angles = 0.2 + 2 * math.pi * np.arange(sides) / sides
    corners = 250 + 150 * np.stack([np.cos(angles), np.sin(angles)], 1)
    inside = np.zeros((SIDE, SIDE), np.uint8)
    cv2.fillPoly(inside, [np.round(corners * 16).astype(np.int32)], 1, shift=4)
    assert values(inside > 0)["shape.corners"] == sides


def test_a_ring_and_an_l():
    ring = values(ellipse(100, 100) & ~ellipse(60, 60))
    assert ring["size.area_pixels"] == close(math.pi * (100**2 - 60**2))
    assert ring["shape.perimeter"] == close(2 * math.pi * 160)
    assert ring["shape.solidity"] == close(1 - 0.36)
    assert (ring["shape.holes"], ring["shape.corners"]) == (1, 0)
    l_shape = np.zeros((SIDE, SIDE), bool)
    l_shape[100:400, 100:200] = l_shape[300:400, 100:400] = True
    v = values(l_shape)
    assert v["shape.solidity"] == close(50_000 / (90_000 - 200 * 200 / 2))
    assert v["shape.perimeter"] == close(1200)
    assert v["shape.convexity"] == close((300 + 300 + 100 + 100 + math.hypot(200, 200)) / 1200)
    assert v["shape.corners"] == 6


def test_positions():
    def at(rows: slice, columns: slice) -> dict:
        mask = np.zeros((200, 400), bool)
        mask[rows, columns] = True
        return {name.split(".")[1]: v for name, v in values(mask, groups=["position"]).items()}

    corner = at(slice(0, 20), slice(380, 400))
    assert (corner["centroid"], corner["normalised"]) == ([390, 10], [0.975, 0.05])
    distance = math.hypot(190, 90) / (math.hypot(400, 200) / 2)
    assert corner["distance_from_center"] == pytest.approx(distance, abs=1e-4)
    assert (corner["quadrant"], corner["is_centered"], corner["edge_distance"]) == ("upper right", False, 0)
    assert set(corner["touches_edge"]) == {"top", "right"}
    inner = at(slice(90, 110), slice(30, 60))
    assert (inner["nearest_edge"], inner["edge_distance"]) == ("left", 30)
    assert at(slice(90, 110), slice(190, 210))["is_centered"]


# --- colour

SWATCHES = {
    "red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0),
    "orange": (255, 165, 0), "brown": (139, 69, 19), "pink": (255, 192, 203), "purple": (128, 0, 128),
    "black": (0, 0, 0), "white": (255, 255, 255), "grey": (128, 128, 128), "cyan": (0, 255, 255),
}  # fmt: skip


@pytest.mark.parametrize("name", SWATCHES)
def test_names_hold_under_shading_and_noise(name: str):
    """A swatch lit from the side (down to 70 %) with sensor noise, on a background of another colour."""
    colour = np.array(SWATCHES[name], float)
    light = np.linspace(0.7, 1.0, 120)[None, :, None]
    noise = np.random.default_rng(0).normal(0, 4, (100, 120, 3))
    picture = np.full((140, 160, 3), (60, 90, 60), np.uint8)
    picture[20:120, 20:140] = np.clip(colour * light + noise, 0, 255).astype(np.uint8)
    mask = np.zeros((140, 160), bool)
    mask[20:120, 20:140] = True
    v = values(mask, picture, groups=["color"])
    # white in the shade is a light grey to any camera
    assert v["color.name"] in {name, "grey"} if name == "white" else v["color.name"] == name
    assert v["color.dominant_share"] > 0.5


def test_colours_of_real_photos():
    from sklearn.datasets import load_sample_image

    def seen(picture, box):
        observation, _ = call(picture, box=box, groups=["color"])
        return observation.data["properties"]["color"]["name"]["value"]

    astronaut, coffee = skimage.data.astronaut(), skimage.data.coffee()
    assert seen(astronaut, [0.15, 0.6, 0.3, 0.68]) in {"orange", "red"}  # the suit
    assert seen(astronaut, [0.64, 0.9, 0.76, 0.98]) == "black"  # the visor
    assert seen(coffee, [0.42, 0.3, 0.54, 0.42]) in {"orange", "brown"}  # the crema
    assert seen(coffee, [0.17, 0.65, 0.26, 0.75]) in {"red", "brown"}  # the saucer
    assert seen(load_sample_image("flower.jpg"), [0.4, 0.4, 0.6, 0.6]) in {"orange", "red", "pink"}
    assert seen(skimage.data.rocket(), [0.3, 0.1, 0.45, 0.25]) == "blue"  # the evening sky
    assert seen(np.repeat(skimage.data.camera()[..., None], 3, 2), [0.1, 0.05, 0.25, 0.15]) == "grey"


def test_colours_between_two_hues_name_both():
    for rgb, expected in (([255, 80, 0], ("red", "orange")), ([128, 0, 255], ("purple", "blue"))):
        assert (colours.name(np.array(rgb)), colours.between(np.array(rgb))) == expected
    for plain in ([0, 200, 0], [128, 128, 128], [0, 0, 0]):
        assert colours.between(np.array(plain)) is None
    observation, _ = call(np.full((40, 40, 3), (255, 80, 0), np.uint8), groups=["color"])
    assert observation.text.splitlines()[1].startswith("color: name red, near orange")


def test_mean_variance_and_histogram_are_exact():
    picture = skimage.data.coffee()
    mask = np.zeros(picture.shape[:2], bool)
    mask[50:300, 100:480] = np.random.default_rng(1).random((250, 380)) < 0.4
    v = values(mask, picture, groups=["color"])
    inside = picture[mask].astype(float)
    np.testing.assert_allclose(v["color.mean"], inside.mean(0), atol=1e-3)
    np.testing.assert_allclose(v["color.variance"], inside.var(0), rtol=1e-5)
    np.testing.assert_allclose(np.sum(v["color.histogram"], axis=1), 1, atol=1e-4)
    truth = [np.histogram(inside[:, c], 8, (0, 256))[0] / len(inside) for c in range(3)]
    np.testing.assert_allclose(v["color.histogram"], truth, atol=1e-5)


def test_texture_and_sharpness_tell_plain_from_rough_and_sharp_from_blurred():
    def of(picture):
        properties = call(picture, groups=["texture", "appearance"])[0].data["properties"]
        return {n: v["value"] for group in properties.values() for n, v in group.items()}

    gravel = np.repeat(skimage.data.gravel()[..., None], 3, 2)
    plain, rough, soft = map(
        of, (np.full((99, 99, 3), 90, np.uint8), gravel, cv2.GaussianBlur(gravel, (0, 0), 3))
    )
    assert (plain["entropy"], plain["edge_density"], plain["energy"], plain["homogeneity"]) == (0, 0, 1, 1)
    assert (plain["sharpness"], plain["focus"]) == (0, None)
    assert rough["entropy"] > 6
    assert rough["edge_density"] > soft["edge_density"]
    assert rough["sharpness"] > 10 * soft["sharpness"]
    assert rough["focus"] > soft["focus"] + 0.2
    assert rough["homogeneity"] < soft["homogeneity"]


def test_the_background_does_not_count():
    """A plain disc on noise: its texture is plain although its window is not."""
    mask = ellipse(100, 100)
    picture = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    picture[mask] = (10, 120, 30)
    v = values(mask, picture)
    assert v["texture.entropy"] == 0
    assert v["texture.homogeneity"] == 1
    assert v["color.variance"] == [0, 0, 0]
    assert v["color.dominant"] == [10, 120, 30]
    assert v["appearance.contrast"] == 0


# --- the call


def test_an_object_found_before():
    picture = skimage.data.coffee()
    found, _ = calling.call("segment_object_at", picture, box=[0.54, 0.62, 0.68, 0.82])
    (record,) = found.data["objects"]
    observation, views = call(picture, {record["id"]: record}, object=record["id"])
    properties = observation.data["properties"]
    assert (views, tuple(properties)) == ([], GROUPS)
    assert properties["size"]["area_pixels"] == {"value": record["area"], "unit": "px^2"}
    measures = [v for group in properties.values() for v in group.values()]
    assert all(set(v) == {"value", "unit"} and v["unit"] for v in measures)
    assert json.loads(json.dumps(observation.data, allow_nan=False)) == observation.data
    assert record["id"] in observation.text.splitlines()[0]
    assert len(observation.text.splitlines()) == 1 + len(GROUPS)
    assert len(observation.text) < 1200
    assert "histogram" not in observation.text
    # Asked for through a crop: the same values, places written in the crop's numbers
    crop = ImageView(id="obs1", parent="img0", box=(0.5, 0.5, 1.0, 1.0), view_size=(300, 200))
    through, _ = call(picture, {record["id"]: record}, [crop], "obs1", object=record["id"])
    assert through.data["properties"] == properties
    assert "of obs1" in through.text
    assert through.text != observation.text


def test_a_rectangle_has_no_shape_unless_asked():
    picture = skimage.data.coffee()
    observation, _ = call(picture)
    assert "shape" not in observation.data["properties"]
    assert "segment_object_at" in observation.text
    asked, _ = call(picture, groups=["shape", "size"])
    assert asked.data["properties"]["shape"]["solidity"]["value"] == close(1)
    assert asked.data["properties"]["size"]["area_pixels"]["value"] == 240_000
    only, _ = call(picture, box=[0.0, 0.0, 0.5, 0.5], groups=["color"])
    assert list(only.data["properties"]) == ["color"]


@given(hnp.arrays(bool, st.tuples(st.integers(4, 20), st.integers(4, 20))), st.integers(0, 255))
def test_any_mask_of_any_plain_picture_is_measured(mask: np.ndarray, level: int):
    if mask.any():
        picture = np.full((*mask.shape, 3), level, np.uint8)
        v = values(mask, picture)
        assert v["size.area_pixels"] == mask.sum()
        numbers = [n for n in v.values() if isinstance(n, float)]
        assert all(math.isfinite(n) for n in numbers)
