"""GET_PROPERTIES: closed forms on drawn shapes, colour names on swatches and photos, and hostile calls."""

from __future__ import annotations

import json
import math

import cv2
import numpy as np
import pytest
import skimage.data
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pixelis.operations import Scene, colours, execute, masks
from pixelis.operations.get_properties import GROUPS, GetProperties
from pixelis.operations.segment_object_at import SegmentObjectAt
from pixelis.records import Action, ImageView

OPERATIONS = {"get_properties": GetProperties, "segment_object_at": SegmentObjectAt}
SIDE = 500


def call(picture: np.ndarray, objects=None, views=(), target="img0", **arguments):
    height, width = picture.shape[:2]
    root = ImageView(id="img0", source_size=(width, height), view_size=(width, height))
    scene = Scene({"img0": picture}, [root, *views], objects or {})
    return execute(Action(op="get_properties", target=target, arguments=arguments), scene, OPERATIONS)


def values(mask: np.ndarray, picture: np.ndarray | None = None, **arguments) -> dict:
    picture = (
        np.where(mask[..., None], np.uint8(200), np.uint8(30)).repeat(3, 2) if picture is None else picture
    )
    observation, views = call(picture, mask=masks.encode(mask), **arguments)
    assert observation.status == "ok", observation.text
    assert views == []
    return {
        f"{g}.{n}": v["value"]
        for g, group in observation.data["properties"].items()
        for n, v in group.items()
    }


def turned(degrees: float, x: float = 250.2, y: float = 249.7) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates along and across an axis turned counter-clockwise, at the middle of each pixel."""
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    u, v = columns - x, y - rows
    return u * c + v * s, v * c - u * s


def ellipse(a: float, b: float, degrees: float = 0.0) -> np.ndarray:
    u, v = turned(degrees)
    return (u / a) ** 2 + (v / b) ** 2 <= 1


def rectangle(length: float, width: float, degrees: float = 0.0) -> np.ndarray:
    u, v = turned(degrees, 250, 250) if degrees == 0 else turned(degrees)
    return (abs(u) < length / 2) & (abs(v) < width / 2)


def around_ellipse(a: float, b: float) -> float:
    """Ramanujan's second formula, exact to far below 1e-6 here."""
    h = ((a - b) / (a + b)) ** 2
    return math.pi * (a + b) * (1 + 3 * h / (10 + math.sqrt(4 - 3 * h)))


def close(value: float) -> object:
    return pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("radius", [20, 50, 120, 240])
def test_a_disc(radius: int):
    v = values(ellipse(radius, radius))
    assert v["size.area_pixels"] == close(math.pi * radius**2)
    assert v["size.equivalent_diameter"] == close(2 * radius)
    assert v["shape.perimeter"] == close(2 * math.pi * radius)
    assert v["shape.circularity"] == close(1)
    assert v["shape.solidity"] == close(1)
    assert v["shape.aspect_ratio"] == close(1)
    assert v["shape.eccentricity"] < 0.1
    assert (v["shape.corners"], v["shape.holes"], v["shape.orientation"]) == (0, 0, None)
    assert v["position.is_centered"]


@pytest.mark.parametrize(
    ("a", "b", "degrees"), [(200, 80, 0), (150, 60, 30), (100, 40, 117), (120, 90, 90), (40, 25, 160)]
)
def test_an_ellipse(a: int, b: int, degrees: int):
    v = values(ellipse(a, b, degrees))
    length = around_ellipse(a, b)
    assert v["size.area_pixels"] == close(math.pi * a * b)
    assert v["shape.perimeter"] == close(length)
    assert v["shape.circularity"] == close(4 * math.pi * math.pi * a * b / length**2)
    assert v["shape.eccentricity"] == close(math.sqrt(1 - (b / a) ** 2))
    assert v["shape.rotated_aspect_ratio"] == close(a / b)
    assert v["shape.solidity"] == close(1)
    assert (v["shape.orientation"] - degrees + 90) % 180 == pytest.approx(90, abs=0.5)
    assert v["shape.corners"] == 0


@pytest.mark.parametrize(
    ("length", "width", "degrees"),
    [(200, 200, 0), (300, 120, 0), (300, 120, 25), (200, 100, 63), (240, 160, 150), (60, 100, 0)],
)
def test_a_rectangle(length: int, width: int, degrees: int):
    v = values(rectangle(length, width, degrees))
    long, short = max(length, width), min(length, width)
    assert v["size.area_pixels"] == close(length * width)
    assert v["shape.perimeter"] == close(2 * (length + width))
    assert v["shape.circularity"] == pytest.approx(
        4 * math.pi * length * width / (2 * (length + width)) ** 2, rel=0.01
    )
    assert v["shape.solidity"] == close(1)
    assert v["shape.rotated_aspect_ratio"] == close(long / short)
    assert v["shape.rotated_length"] == close(long)
    assert v["shape.rotated_width"] == close(short)
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
    """An octagon and all with more corners were taken for discs."""
    angles = 0.2 + 2 * math.pi * np.arange(sides) / sides
    corners = 250 + 150 * np.stack([np.cos(angles), np.sin(angles)], 1)
    inside = np.zeros((SIDE, SIDE), np.uint8)
    cv2.fillPoly(inside, [np.round(corners * 16).astype(np.int32)], 1, shift=4)
    assert values(inside > 0)["shape.corners"] == sides


def test_a_triangle_a_ring_and_an_l():
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    v = values((rows >= 100) & (rows <= 400) & (abs(columns - 250) <= (rows - 100) / 2))
    assert v["size.area_pixels"] == close(300 * 300 / 2)
    assert v["shape.perimeter"] == close(300 + 2 * math.hypot(300, 150))
    assert v["shape.solidity"] == close(1)
    assert v["shape.corners"] == 3
    assert v["position.normalised"] == [pytest.approx(0.5, abs=1e-3), pytest.approx(300 / 500, abs=2e-3)]
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
    mask = np.zeros((200, 400), bool)
    mask[0:20, 380:400] = True
    v = values(mask, groups=["position"])
    assert v["position.centroid"] == [390, 10]
    assert v["position.normalised"] == [0.975, 0.05]
    assert v["position.quadrant"] == "upper right"
    assert v["position.distance_from_center"] == pytest.approx(
        math.hypot(190, 90) / (math.hypot(400, 200) / 2), abs=1e-4
    )
    assert not v["position.is_centered"]
    assert set(v["position.touches_edge"]) == {"top", "right"}
    assert v["position.edge_distance"] == 0
    mask = np.zeros((200, 400), bool)
    mask[90:110, 30:60] = True
    assert values(mask, groups=["position"])["position.nearest_edge"] == "left"
    assert values(mask, groups=["position"])["position.edge_distance"] == 30


# --- colour
# ---------------------------------------------------------------------------------------------------------------------

SWATCHES = {
    "red": [(255, 0, 0), (200, 30, 30), (139, 0, 0), (220, 20, 60)],
    "green": [(0, 255, 0), (0, 128, 0), (34, 139, 34), (85, 107, 47), (154, 205, 50)],
    "blue": [(0, 0, 255), (0, 0, 128), (65, 105, 225), (135, 206, 235)],
    "yellow": [(255, 255, 0), (255, 215, 0), (240, 230, 60)],
    "orange": [(255, 165, 0), (255, 128, 0), (230, 120, 20)],
    "brown": [(139, 69, 19), (101, 67, 33), (160, 82, 45), (92, 64, 51)],
    "pink": [(255, 192, 203), (255, 105, 180), (255, 20, 147)],
    "purple": [(128, 0, 128), (148, 0, 211), (75, 0, 130), (147, 112, 219)],
    "black": [(0, 0, 0), (20, 20, 22), (12, 8, 8)],
    "white": [(255, 255, 255), (250, 248, 245)],
    "grey": [(128, 128, 128), (70, 70, 72), (190, 190, 190), (112, 128, 144)],
    "cyan": [(0, 255, 255), (0, 180, 190), (64, 224, 208)],
    "beige": [(245, 245, 220), (210, 180, 140)],
}


@pytest.mark.parametrize("name", [n for n in SWATCHES if n != "beige"])
def test_names_hold_under_shading_and_noise(name: str):
    """A swatch lit from the side (down to 70 %) with sensor noise, on a background of another colour."""
    colour = np.array(SWATCHES[name][0], float)
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
    expected = ("red", "orange")
    assert (colours.name(np.array([255, 80, 0])), colours.between(np.array([255, 80, 0]))) == expected
    expected = ("purple", "blue")
    assert (colours.name(np.array([128, 0, 255])), colours.between(np.array([128, 0, 255]))) == expected
    for plain in ([255, 0, 0], [0, 200, 0], [128, 128, 128], [0, 0, 0]):
        assert colours.between(np.array(plain)) is None or plain == [255, 0, 0]
    picture = np.full((40, 40, 3), (255, 80, 0), np.uint8)
    view = ImageView(id="img0", source_size=(40, 40), view_size=(40, 40))
    action = Action(op="get_properties", target="img0", arguments={"groups": ["color"]})
    observation, _ = execute(action, Scene({"img0": picture}, [view]))
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
    import cv2

    def of(picture):
        properties = call(picture, groups=["texture", "appearance"])[0].data["properties"]
        return {n: v["value"] for group in properties.values() for n, v in group.items() if n != "contrast"}

    gravel = np.repeat(skimage.data.gravel()[..., None], 3, 2)
    plain = of(np.full((99, 99, 3), 90, np.uint8))
    rough = of(gravel)
    soft = of(cv2.GaussianBlur(gravel, (0, 0), 3))
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
# -------------------------------------------------------------------------------------------------------------------


def test_an_object_found_before():
    picture = skimage.data.coffee()
    root = ImageView(id="img0", source_size=(600, 400), view_size=(600, 400))
    result, _ = execute(
        Action(op="segment_object_at", arguments={"box": [0.54, 0.62, 0.68, 0.82]}),
        Scene({"img0": picture}, [root]),
        OPERATIONS,
    )
    (record,) = result.data["objects"]
    observation, views = call(picture, {record["id"]: record}, object=record["id"])
    assert views == []
    properties = observation.data["properties"]
    assert tuple(properties) == GROUPS
    assert properties["size"]["area_pixels"] == {"value": record["area"], "unit": "px^2"}
    assert all(
        set(v) == {"value", "unit"} and v["unit"] for group in properties.values() for v in group.values()
    )
    assert json.loads(json.dumps(observation.data, allow_nan=False)) == observation.data
    assert record["id"] in observation.text.splitlines()[0]
    assert len(observation.text.splitlines()) == 1 + len(GROUPS)
    assert len(observation.text) < 1200
    assert "histogram" not in observation.text
    assert observation == call(picture, {record["id"]: record}, object=record["id"])[0]
    # the same object asked for through a crop: the same values, places written in the crop's numbers
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


MASK = {"size": [400, 600], "counts": [0, 240_000]}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"object": "deadbeef"}, "unknown_object"),
        ({"object": "deadbeef", "box": [0.1, 0.1, 0.5, 0.5]}, "bad_arguments"),
        ({"box": [0.5, 0.1, 0.1, 0.5]}, "bad_box"),
        ({"box": [1.5, 0.1, 1.6, 0.5]}, "out_of_range"),
        ({"box": [0.1, 0.1, 0.101, 0.5]}, "too_small"),
        ({"groups": []}, "bad_arguments"),
        ({"groups": ["smell"]}, "bad_arguments"),
        ({"mask": "x"}, "bad_arguments"),
        ({"mask": {**MASK, "size": [600, 400]}}, "bad_arguments"),
        ({"mask": {**MASK, "counts": [240_000]}}, "nothing_found"),
    ],
)
def test_refused_arguments(arguments: dict, code: str):
    observation, views = call(skimage.data.coffee(), **arguments)
    assert (observation.status, observation.code, views) == ("error", code, [])
    assert 0 < len(observation.text) < 120


@given(hnp.arrays(bool, st.tuples(st.integers(4, 20), st.integers(4, 20))), st.integers(0, 255))
def test_any_mask_of_any_plain_picture_is_measured(mask: np.ndarray, level: int):
    if mask.any():
        picture = np.full((*mask.shape, 3), level, np.uint8)
        v = values(mask, picture)
        assert v["size.area_pixels"] == mask.sum()
        numbers = [n for n in v.values() if isinstance(n, float)]
        assert all(math.isfinite(n) for n in numbers)
