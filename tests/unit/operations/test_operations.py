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


def zoom(target="img0", images=(ROOT,), picture=PICTURE, budget=NATIVE, multiple=1, **arguments):
    action = Action(op="zoom_in", target=target, arguments=arguments)
    return execute(action, Scene({"img0": picture}, list(images), budget=budget, multiple=multiple))


def test_zoom_shows_the_full_resolution_pixels_of_the_box():
    observation, views = zoom(box=[0.1, 0.25, 0.3, 0.5])
    np.testing.assert_array_equal(views[0], PICTURE[200:400, 100:300])
    (image,) = observation.images
    assert (observation.status, observation.id, observation.code) == ("ok", None, None)
    assert (image.parent, image.box) == ("img0", (0.1, 0.25, 0.3, 0.5))
    assert (image.source_size, image.view_size) == ((200, 200), (200, 200))
    assert observation.data["op"] == "zoom_in"
    assert observation.data["target"] == "img0"


def test_views_obey_the_crop_budget_and_hold_no_reference_to_the_picture():
    _, views = zoom(box=[0.0, 0.0, 1.0, 1.0], budget=PixelBudget(32 * 32, 64 * 64), multiple=32)
    assert views[0].shape[0] % 32 == views[0].shape[1] % 32 == 0
    assert 32 * 32 <= views[0].shape[0] * views[0].shape[1] <= 64 * 64
    _, native = zoom(box=[0.0, 0.0, 0.5, 0.5])
    assert not np.shares_memory(native[0], PICTURE)
    native[0][:] = 0
    assert PICTURE[:400, :500].any()


def test_same_crop_as_the_training_world_draws():
    from pixelis.datasets import cards

    uri = cards.picture_uri("validation", 3, 5)
    scene = cards.describe(uri)
    box = list(cards.zoom_box(scene.target))
    _, views = zoom(
        box=box, picture=cards.render(uri), budget=cards.VIEW_BUDGET, multiple=cards.VIEW_MULTIPLE
    )
    x1, y1, x2, y2 = (round(v * cards.PICTURE) for v in box)
    crop = cards.world("validation").picture(scene, (x1, y1, x2, y2))
    np.testing.assert_array_equal(views[0], fit(crop, cards.VIEW_BUDGET, cards.VIEW_MULTIPLE))


def test_a_plain_box_says_nothing_and_an_adjusted_one_says_what_is_shown():
    plain, _ = zoom(box=[0.1003, 0.25, 0.3, 0.5])  # rounded to pixel edges, as every box is
    assert (plain.text, plain.data["adjusted"]) == ("", False)
    assert plain.data["pixels"] == [100, 200, 300, 400]
    expected = (1.0, [200, 200], [200, 200])
    assert (plain.data["zoom_level"], plain.data["source_size"], plain.data["view_size"]) == expected
    clamped, views = zoom(box=[-0.2, 0.5, 0.3, 1.7])
    np.testing.assert_array_equal(views[0], PICTURE[400:800, 0:300])
    assert clamped.images[0].box == (0.0, 0.5, 0.3, 1.0)
    assert clamped.text == "shows 0,500,300,1000 of img0, 300x400 px, at 300x400"
    assert clamped.data["adjusted"]


def test_centre_and_factor():
    observation, views = zoom(center=[0.5, 0.5], factor=4)
    np.testing.assert_array_equal(views[0], PICTURE[300:500, 375:625])
    assert observation.text == "shows 375,375,625,625 of img0, 250x200 px, at 250x200"
    corner, views = zoom(center=[0.0, 1.0], factor=4)  # keeps its size and moves inside
    np.testing.assert_array_equal(views[0], PICTURE[600:800, 0:250])
    assert corner.images[0].box == (0.0, 0.75, 0.25, 1.0)


def test_padding_adds_a_share_of_the_target_within_it():
    observation, views = zoom(box=[0.5, 0.5, 0.7, 0.6], padding=0.1)
    np.testing.assert_array_equal(views[0], PICTURE[320:560, 400:800])
    assert observation.data["pixels"] == [400, 320, 800, 560]
    assert observation.text.startswith("shows 400,400,800,700 of img0")
    edge, _ = zoom(box=[0.0, 0.9, 0.2, 1.0], padding=0.5)
    assert edge.images[0].box == (0.0, 0.4, 0.7, 1.0)
    crop = ImageView(
        id="obs1", parent="img0", box=(0.2, 0.2, 0.4, 0.4), source_size=(200, 160), view_size=(64, 64)
    )
    inner, views = zoom("obs1", (ROOT, crop), box=[0.0, 0.0, 0.5, 0.5], padding=0.25)
    np.testing.assert_array_equal(views[0], PICTURE[160:280, 200:350])
    assert inner.images[0].box == pytest.approx((0.0, 0.0, 0.75, 0.75))
    assert zoom(box=[0.1, 0.25, 0.3, 0.5], padding=0)[0].text == ""


share = st.floats(0, 1, allow_nan=False)


@settings(deadline=None, max_examples=100)
@given(share, share, st.floats(1.0001, 200), st.floats(0, 0.5))
def test_any_zoom_shows_just_the_pixels_it_says(x: float, y: float, factor: float, padding: float):
    observation, views = zoom(center=[x, y], factor=factor, padding=padding)
    left, top, right, bottom = observation.data["pixels"]
    np.testing.assert_array_equal(views[0], PICTURE[top:bottom, left:right])
    (image,) = observation.images
    assert image.source_size == (right - left, bottom - top)
    # Looked at again, the whole of the view is the same region.
    repeated, _ = zoom("obs1", (ROOT, image.model_copy(update={"id": "obs1"})), box=[0, 0, 1, 1])
    assert repeated.data["pixels"] == observation.data["pixels"]
    assert left - 1 <= x * 1000 <= right + 1
    assert top - 1 <= y * 800 <= bottom + 1


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
    observation, views = execute(action, Scene({"img0": PICTURE}, [ROOT]), {"zoom_in": Slow})
    assert (observation.status, observation.code, views) == ("error", "timeout", [])


def test_select_names_the_operation_that_does_not_exist():
    assert select(["zoom_in"]) == [OPERATIONS["zoom_in"]]
    with pytest.raises(BadConfig, match="zoom_inn") as error:
        select(["zoom_inn"])
    assert "zoom_in?" in error.value.fix
