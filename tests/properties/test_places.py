"""Coordinate arguments of every operation survive the way to the policy's scale and back."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis.dialogue.dialects import DIALECTS
from pixelis.errors import OperationError
from pixelis.operations import OPERATIONS, Operation, OperationArguments, geometry
from pixelis.operations.operation import BoxArgument, PointArgument
from pixelis.operations.scale import MAX_PLACES, PLACES, Scale
from pixelis.records import Action, ImageView

IMAGES = [ImageView(id="img0", view_size=(560, 280)), ImageView(id="obs1", view_size=(112, 448))]
KINDS = st.sampled_from(["thousand", "unit", "pixels"])


class EveryPlaceArguments(OperationArguments):
    other: str | None = None
    like: str | None = None
    box: BoxArgument | None = None
    point: PointArgument | None = None
    center: PointArgument | None = None
    end_point: PointArgument | None = None
    vertex: PointArgument | None = None
    other_box: BoxArgument | None = None
    like_box: BoxArgument | None = None
    boxes: list[BoxArgument] | None = None
    points: list[PointArgument] | None = None


class EveryPlace(Operation):
    name, description, Arguments = "every_place", "Takes every coordinate argument.", EveryPlaceArguments


ALL = {**OPERATIONS, "every_place": EveryPlace}
QWEN = DIALECTS["qwen"]


def test_the_example_has_every_coordinate_argument():
    fields = {"box", *EveryPlaceArguments.model_fields} - {"other", "like"}
    assert fields == set(PLACES)
    # An argument that looks like a place but is not converted would be in another scale
    for operation in OPERATIONS.values():
        for name, annotation in get_type_hints(operation.Arguments, include_extras=True).items():
            is_place = any(part in repr(annotation) for part in ("as_box", "as_point"))
            assert is_place == (name in PLACES), (operation.name, name)


def extent(kind: str, name: str) -> tuple[int, int]:
    return IMAGES[[image.id for image in IMAGES].index(name)].view_size if kind == "pixels" else (1000, 1000)


@st.composite
def places(draw, kind: str, count: int, name: str) -> list[float]:
    width, height = extent(kind, name)
    if count == 2:
        return [draw(st.integers(0, width)) / width, draw(st.integers(0, height)) / height]
    (x0, x1), (y0, y1) = (
        sorted(draw(st.lists(st.integers(0, side), min_size=2, max_size=2, unique=True)))
        for side in (width, height)
    )
    return [x0 / width, y0 / height, x1 / width, y1 / height]


@pytest.mark.parametrize("dialect", ["qwen", "qwen_xml"])
@settings(deadline=None, max_examples=40)
@given(KINDS, st.sampled_from(["img0", "obs1"]), st.sampled_from([None, "img0", "obs1"]), st.data())
def test_each_place_comes_back_from_the_scale_of_its_own_image(
    dialect: str, kind: str, target: str, other: str | None, data
):
    arguments: dict[str, Any] = {} if other is None else {"other": other, "like": other}
    for name, place in PLACES.items():
        image = target if place.image == "target" or other is None else other
        one = places(kind, place.count, image)
        arguments[name] = data.draw(st.lists(one, max_size=4) if place.many else one)
    action = Action(op="every_place", target=target, arguments=arguments)
    scale = Scale.of(kind, IMAGES)
    own = DIALECTS[dialect]
    reply = own.parse("".join(own.render(action, scale, "look")), ALL, scale)
    assert reply.error is None
    assert (reply.action.op, reply.action.target) == (action.op, target)
    assert set(reply.action.arguments) == set(arguments)
    for name in PLACES:
        ours, theirs = np.atleast_2d(arguments[name]), np.atleast_2d(reply.action.arguments[name])
        assert len(ours) == len(theirs)
        np.testing.assert_allclose(theirs, ours, atol=1e-9)


@pytest.mark.parametrize(
    "dialect", [d for d in DIALECTS.values() if "qwen" not in d.name], ids=lambda d: d.name
)
def test_other_dialects_write_no_place_they_cannot_read(dialect):
    assert not dialect.offers(EveryPlace)
    action = Action(op="every_place", target="img0", arguments={"vertex": [0.5, 0.5]})
    with pytest.raises(OperationError):
        dialect.render(action, Scale.of("thousand", IMAGES), "x")


def test_a_list_of_places_is_limited_and_described():
    with pytest.raises(OperationError) as caught:
        Scale.of("thousand", IMAGES).read_argument("points", [[1, 1]] * (MAX_PLACES + 1), "img0")
    assert caught.value.code == "limit"
    schema = QWEN.schema(EveryPlace, "pixels")["function"]["parameters"]["properties"]
    assert schema["bboxes_2d"]["items"]["minItems"] == 4
    assert schema["bboxes_2d"]["maxItems"] == MAX_PLACES
    described = "left, top, right, bottom in pixels of the image `other` as shown"
    assert schema["other_bbox_2d"]["description"] == described


@settings(deadline=None, max_examples=200)
@given(st.integers(40, 4000), st.integers(40, 4000), st.booleans(), st.data())
def test_whole_pixels_of_a_crop_in_full_size_come_back_exactly(width: int, height: int, rounded: bool, data):
    def sides(low: int, high: int) -> tuple[int, int]:
        start = data.draw(st.integers(low, high - 1))
        return start, data.draw(st.integers(start + 1, high))

    (left, right), (top, bottom) = sides(0, width), sides(0, height)
    (x0, x1), (y0, y1) = sides(left, right), sides(top, bottom)
    box = [x0 / width, y0 / height, x1 / width, y1 / height]
    if rounded:  # as in the data of results
        box = [round(v, 6) for v in box]
    shown = (left / width, top / height, right / width, bottom / height)
    crop = ImageView(id="obs1", parent="img0", box=shown, view_size=(right - left, bottom - top))
    inner = [min(max(v, 0.0), 1.0) for v in geometry.relative(crop.box, tuple(box))]
    assert Scale.of("pixels", [crop]).around(inner, "obs1") == [x0 - left, y0 - top, x1 - left, y1 - top]
