"""Operations on real arrays: what is cut from where, and what the model is told when it cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis import operations
from pixelis.errors import BadConfig, OperationError
from pixelis.operations import OPERATIONS, Scene, execute, select
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.records import Action, ImageView

PICTURE = np.random.default_rng(0).integers(0, 256, (800, 1000, 3), dtype=np.uint8)
ROOT = ImageView(id="img0", source_size=(1000, 800), view_size=(64, 64))
NATIVE = PixelBudget(1, 10_000_000)


def zoom(box, target="img0", images=(ROOT,), picture=PICTURE, budget=NATIVE, multiple=1, **extra):
    action = Action(op="zoom_in", target=target, arguments={"box": box, **extra})
    return execute(action, Scene({"img0": picture}, list(images), budget=budget, multiple=multiple))


def test_zoom_shows_the_full_resolution_pixels_of_the_box():
    observation, views = zoom([0.1, 0.25, 0.3, 0.5])
    np.testing.assert_array_equal(views[0], PICTURE[200:400, 100:300])
    (image,) = observation.images
    assert (observation.status, observation.id, observation.code) == ("ok", None, None)
    assert (image.parent, image.box) == ("img0", (0.1, 0.25, 0.3, 0.5))
    assert (image.source_size, image.view_size) == ((200, 200), (200, 200))
    assert observation.data["op"] == "zoom_in"
    assert observation.data["target"] == "img0"


def test_zoom_of_a_zoom_of_a_zoom_still_reads_the_full_resolution_picture():
    images, views = [ROOT], []
    for i, box in enumerate([[0.2, 0.2, 0.7, 0.7], [0.5, 0.5, 1.0, 1.0], [0.0, 0.0, 0.2, 0.5]]):
        observation, views = zoom(
            box, images[-1].id, images, budget=PixelBudget(64 * 64, 64 * 64), multiple=16
        )
        images.append(observation.images[0].model_copy(update={"id": f"obs{i + 1}"}))
    # .2..7 -> 200..700 x 160..560; its lower right quarter -> 450..700 x 360..560; of that the left fifth,
    # upper half.
    np.testing.assert_array_equal(views[0], fit(PICTURE[360:460, 450:500], PixelBudget(64 * 64, 64 * 64), 16))
    assert images[-1].source_size == (50, 100)
    assert images[-1].view_size == views[0].shape[1::-1]


def test_views_obey_the_crop_budget_and_hold_no_reference_to_the_picture():
    _, views = zoom([0.0, 0.0, 1.0, 1.0], budget=PixelBudget(32 * 32, 64 * 64), multiple=32)
    assert views[0].shape[0] % 32 == views[0].shape[1] % 32 == 0
    assert 32 * 32 <= views[0].shape[0] * views[0].shape[1] <= 64 * 64
    _, native = zoom([0.0, 0.0, 0.5, 0.5])
    assert not np.shares_memory(native[0], PICTURE)
    native[0][:] = 0
    assert PICTURE[:400, :500].any()


def test_box_is_clamped_to_the_picture():
    observation, views = zoom([-0.2, 0.5, 0.3, 1.7])
    np.testing.assert_array_equal(views[0], PICTURE[400:800, 0:300])
    assert observation.images[0].box == (0.0, 0.5, 0.3, 1.0)


def test_same_crop_as_the_training_world_draws():
    from pixelis.datasets import cards

    uri = cards.picture_uri("validation", 3, 5)
    scene = cards.describe(uri)
    box = list(cards.zoom_box(scene.target))
    _, views = zoom(box, picture=cards.render(uri), budget=cards.VIEW_BUDGET, multiple=cards.VIEW_MULTIPLE)
    x1, y1, x2, y2 = (round(v * cards.PICTURE) for v in box)
    crop = cards.world("validation").picture(scene, (x1, y1, x2, y2))
    np.testing.assert_array_equal(views[0], fit(crop, cards.VIEW_BUDGET, cards.VIEW_MULTIPLE))


def zoom_with(target="img0", images=(ROOT,), **arguments):
    scene = Scene({"img0": PICTURE}, list(images), budget=NATIVE)
    return execute(Action(op="zoom_in", target=target, arguments=arguments), scene)


def test_a_plain_box_says_nothing_and_an_adjusted_one_says_what_is_shown():
    plain, _ = zoom_with(box=[0.1003, 0.25, 0.3, 0.5])  # rounded to pixel edges, as every box is
    assert (plain.text, plain.data["adjusted"]) == ("", False)
    assert plain.data["pixels"] == [100, 200, 300, 400]
    expected = (1.0, [200, 200], [200, 200])
    assert (plain.data["zoom_level"], plain.data["source_size"], plain.data["view_size"]) == expected
    clamped, _ = zoom_with(box=[-0.2, 0.5, 0.3, 1.7])
    assert clamped.text == "shows 0,500,300,1000 of img0, 300x400 px, at 300x400"
    assert clamped.data["adjusted"]


def test_centre_and_factor():
    observation, views = zoom_with(center=[0.5, 0.5], factor=4)
    np.testing.assert_array_equal(views[0], PICTURE[300:500, 375:625])
    assert observation.text == "shows 375,375,625,625 of img0, 250x200 px, at 250x200"
    corner, views = zoom_with(center=[0.0, 1.0], factor=4)  # keeps its size and moves inside
    np.testing.assert_array_equal(views[0], PICTURE[600:800, 0:250])
    assert corner.images[0].box == (0.0, 0.75, 0.25, 1.0)


def test_padding_adds_a_share_of_the_target_within_it():
    observation, views = zoom_with(box=[0.5, 0.5, 0.7, 0.6], padding=0.1)
    np.testing.assert_array_equal(views[0], PICTURE[320:560, 400:800])
    assert observation.data["pixels"] == [400, 320, 800, 560]
    assert observation.text.startswith("shows 400,400,800,700 of img0")
    edge, _ = zoom_with(box=[0.0, 0.9, 0.2, 1.0], padding=0.5)
    assert edge.images[0].box == (0.0, 0.4, 0.7, 1.0)
    crop = ImageView(
        id="obs1", parent="img0", box=(0.2, 0.2, 0.4, 0.4), source_size=(200, 160), view_size=(64, 64)
    )
    inner, views = zoom_with("obs1", (ROOT, crop), box=[0.0, 0.0, 0.5, 0.5], padding=0.25)
    np.testing.assert_array_equal(views[0], PICTURE[160:280, 200:350])
    assert inner.images[0].box == pytest.approx((0.0, 0.0, 0.75, 0.75))
    assert zoom_with(box=[0.1, 0.25, 0.3, 0.5], padding=0)[0].text == ""


share = st.floats(0, 1, allow_nan=False)


@settings(deadline=None, max_examples=100)
@given(share, share, st.floats(1.0001, 200), st.floats(0, 0.5))
def test_any_zoom_shows_just_the_pixels_it_says(x: float, y: float, factor: float, padding: float):
    observation, views = zoom_with(center=[x, y], factor=factor, padding=padding)
    left, top, right, bottom = observation.data["pixels"]
    np.testing.assert_array_equal(views[0], PICTURE[top:bottom, left:right])
    (image,) = observation.images
    assert image.source_size == (right - left, bottom - top)
    # Looked at again, the whole of the view is the same region.
    repeated, _ = zoom_with("obs1", (ROOT, image.model_copy(update={"id": "obs1"})), box=[0, 0, 1, 1])
    assert repeated.data["pixels"] == observation.data["pixels"]
    assert left - 1 <= x * 1000 <= right + 1
    assert top - 1 <= y * 800 <= bottom + 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"center": [0.5, 0.5]}, "bad_arguments"),
        ({"box": [0.1, 0.1, 0.5, 0.5], "center": [0.5, 0.5], "factor": 2.0}, "bad_arguments"),
        *(
            ({"center": [0.5, 0.5], "factor": f}, "bad_arguments")
            for f in (1, 0, -2, 1001, float("nan"), float("inf"), "2", True)
        ),
        *(
            ({"box": [0.1, 0.1, 0.5, 0.5], "padding": p}, "bad_arguments")
            for p in (-0.1, 0.6, float("nan"), "0.1")
        ),
        ({"center": [1.5, 0.5], "factor": 2}, "out_of_range"),
        ({"center": [0.5, 0.5], "factor": 900}, "too_small"),
        ({"box": [0.1, 0.1, 0.104, 0.5]}, "bad_box"),
        ({"box": [0.9979, 0.9, 1.5, 1.0]}, "too_small"),
        ({"box": [0.5, 0.1, 0.4, 0.5]}, "bad_box"),
        ({"box": [float("nan"), 0.1, 0.5, 0.5]}, "bad_box"),
        ({"box": [0.1, 0.1, 0.5]}, "bad_box"),
        ({"box": [1.0, 0.1, 1.2, 0.5]}, "out_of_range"),
        ({}, "bad_arguments"),
        ({"box": [0.1, 0.1, 0.5, 0.5], "pad": 2}, "bad_arguments"),
    ],
)
def test_refused_arguments_are_error_observations(arguments: dict, code: str):
    wide = np.zeros((800, 1000, 3), np.uint8) if code != "bad_box" else np.zeros((4000, 1000, 3), np.uint8)
    action = Action(op="zoom_in", arguments=arguments)
    observation, views = execute(action, Scene({"img0": wide}, [ROOT]))
    expected = ("error", code, None, [], [])
    assert (observation.status, observation.code, observation.id, observation.images, views) == expected
    assert observation.text


def test_targets_that_lead_nowhere():
    orphan = ImageView(id="obs1", parent="gone", box=(0.0, 0.0, 0.5, 0.5))
    circle = [
        ImageView(id="a", parent="b", box=(0.0, 0.0, 0.5, 0.5)),
        ImageView(id="b", parent="a", box=(0.0, 0.0, 0.5, 0.5)),
    ]
    box = [0.1, 0.1, 0.5, 0.5]
    assert zoom(box, "obs9")[0].code == "bad_target"
    assert zoom(box, "obs1", [ROOT, orphan])[0].code == "bad_target"
    assert zoom(box, "a", circle)[0].code == "bad_target"
    assert zoom(box, "img1", [ImageView(id="img1")])[0].code == "bad_target"
    assert execute(Action(op="paint"), Scene({"img0": PICTURE}, [ROOT]))[0].code == "unknown_op"


def test_a_crashing_operation_costs_one_observation(monkeypatch):
    class Broken(operations.Operation):
        name = "broken"
        description = "always fails"
        Arguments = operations.operation.OperationArguments

        @classmethod
        def run(cls, *args):
            raise ValueError("no secrets in here")

    monkeypatch.setitem(OPERATIONS, "broken", Broken)
    observation, views = execute(Action(op="broken"), Scene({"img0": PICTURE}, [ROOT]))
    assert (observation.status, observation.code, views) == ("error", "crashed", [])
    assert "ValueError" in observation.text
    assert "secrets" not in observation.text


def test_our_error_wrapped_by_a_library_keeps_its_code():
    class Slow(operations.zoom_in.ZoomIn):
        @classmethod
        def run(cls, arguments, target, scene):
            try:
                raise OperationError("took more than 30 seconds", code="timeout")
            except OperationError as error:
                raise RuntimeError("the session failed") from error

    action = Action(op="zoom_in", arguments={"box": [0.1, 0.1, 0.5, 0.5]})
    picture = np.zeros((40, 40, 3), np.uint8)
    scene = Scene({"img0": picture}, [ImageView(id="img0", source_size=(40, 40), view_size=(40, 40))])
    observation, views = execute(action, scene, {"zoom_in": Slow})
    assert (observation.status, observation.code, views) == ("error", "timeout", [])


def test_select_names_the_operation_that_does_not_exist():
    assert select(["zoom_in"]) == [OPERATIONS["zoom_in"]]
    with pytest.raises(BadConfig, match="zoom_inn") as error:
        select(["zoom_inn"])
    assert "zoom_in?" in error.value.fix
