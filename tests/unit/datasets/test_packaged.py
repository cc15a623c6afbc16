"""Packaged sources: annotations agree with the pixels, names and splits hold, mistakes are named."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pixelis.config import ToolboxConfig
from pixelis.datasets import cards, packaged, packaged_clips, pasting
from pixelis.datasets.media import open_media
from pixelis.datasets.synthesis import geometry
from pixelis.errors import BadInput
from pixelis.operations import masks
from pixelis.operations.video import Clip
from pixelis.records import Question

SETTINGS = ToolboxConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("media")


def read(name: str, folder, count: int = 4, **options) -> list[Question]:
    query = "&".join(f"{key}={value}" for key, value in {"count": count, **options}.items())
    return list(packaged.read(f"packaged:{name}?{query}", folder))


def pixels(box, picture: np.ndarray) -> list[int]:
    height, width = picture.shape[:2]
    return [round(v * side) for v, side in zip(box, (width, height) * 2, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged.SOURCES)
def test_items_are_annotated_and_reproducible(name, folder):
    first = read(name, folder, 3, seed=3)
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert first == read(name, folder, 3, seed=3)  # now from what lies there
    assert stamps == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert first != read(name, folder, 3, seed=4)
    assert len({question.id for question in first}) == 3
    for question in first:
        annotations = question.annotations
        assert question.question == ""
        assert question.answers is None
        assert question.meta["source"] == f"packaged:{name}"
        assert annotations.regions or annotations.lines
        opened = open_media(question.media[0], SETTINGS)
        size = (opened.width, opened.height) if isinstance(opened, Clip) else opened.shape[1::-1]
        assert size == (question.media[0].width, question.media[0].height)
        boxes = [thing.box for thing in (*annotations.regions, *annotations.lines) if thing.box]
        assert all(0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1 for x0, y0, x1, y1 in boxes)
        for region in annotations.regions:
            if region.mask is not None:
                assert masks.decode(region.mask, *size[::-1]).box == region.box


def test_drawings_have_one_ink_inside_of_the_mask(folder):
    inks = {name: rgb for rgb, name in pasting.INKS.items()}
    for question in read("shapes", folder, 6):
        picture = open_media(question.media[0], SETTINGS)
        for region in question.annotations.regions:
            mask = masks.decode(region.mask).full()
            distance = np.abs(picture[mask].astype(int) - inks[region.attributes["color"]]).max(1)
            assert np.mean(distance == 0) > 0.4  # the rest is the smoothed edge
            assert np.median(distance) == 0
            x0, y0, x1, y1 = masks.decode(region.mask).edges
            share = {"rectangle": 1.0, "circle": np.pi / 4, "triangle": 0.5}[region.label]
            assert np.count_nonzero(mask) / ((x1 - x0) * (y1 - y0)) == pytest.approx(share, abs=0.13)


@pytest.mark.slow
def test_no_drawing_is_in_two_splits_and_none_is_of_the_test_set():
    members = [{number for number, _ in packaged._drawings(split)} for split in cards.SPLITS]
    assert not any(a & b for a, b in itertools.combinations(members, 2))
    assert sum(map(len, members)) > 3500
    assert max(map(max, members)) < 4000  # numbers of data/train


def test_grounds_and_objects_are_split_as_the_photographs_of_cards():
    shared = {"skimage/data/coins.png"}
    own = {split: {thing.source for thing in packaged.cut_outs(split)} - shared for split in cards.SPLITS}
    for a, b in itertools.permutations(cards.SPLITS, 2):
        assert not own[a] & {*own[b], *packaged.GROUNDS[b], *cards.PHOTOGRAPHS[b]}


def test_digits_know_all_cards_and_a_crop_shows_one(folder):
    for question in read("digits", folder, 9):
        scene = cards.describe(question.media[0].uri)
        picture = open_media(question.media[0], SETTINGS)
        notes = [region.attributes for region in question.annotations.regions]
        cards_shown = {(note["color"], note["digit"]) for note in notes}
        if question.meta["level"] == "simple":
            assert cards_shown == {(scene.target.colour, str(scene.target.digit))}
            assert picture.shape[0] < 90
        else:
            assert cards_shown == {(card.colour, str(card.digit)) for card in scene.cards}
        for region in question.annotations.regions:
            x0, y0, x1, y1 = pixels(region.box, picture)
            assert (x1 - x0, y1 - y0) == (cards.CARD, cards.CARD)
            rim = picture[y0 : y0 + 4, x0:x1].reshape(-1, 3).mean(0)
            assert np.abs(rim - cards.PALETTE[region.attributes["color"]]).max() < 25


def test_pasted_things_do_not_touch_and_look_like_what_was_pasted(folder):
    for question in read("photos", folder, 6):
        picture = open_media(question.media[0], SETTINGS)
        inside = [masks.decode(region.mask).full() for region in question.annotations.regions]
        assert np.sum(inside, 0).max() <= 1
        things = {thing.label: thing for thing in packaged.cut_outs("train")}
        for region, mask in zip(question.annotations.regions, inside, strict=True):
            thing = things[region.label]
            assert np.abs(picture[mask].mean(0) - thing.pixels[thing.mask].mean(0)).max() < 12


def test_words_are_at_their_annotated_boxes(folder):
    question = read("text", folder, 3)[1]
    picture = open_media(question.media[0], SETTINGS)
    lines = [line for line in question.annotations.lines if line.level == "line"]
    words = [line for line in question.annotations.lines if line.level == "word"]
    assert [word.text for word in words] == [word for line in lines for word in line.text.split()]
    for word in words:
        assert sum(geometry.covered(word.box, line.box) > 0.99 for line in lines) == 1
        x0, y0, x1, y1 = pixels(word.box, picture)
        part = picture[y0:y1, x0:x1].astype(int)
        assert part.std() > 20  # letters stand out


def test_clips_show_a_thing_only_during_its_event(folder):
    for question in read("clips", folder, 3, seed=3):
        clip = open_media(question.media[0], SETTINGS)
        annotations = question.annotations
        assert len(clip.times) == packaged_clips.FRAMES
        for event in annotations.events:
            frames = [r.frame for r in annotations.regions if f"the {r.label} is in view" == event.text]
            start, end = event.start - 1e-3, event.end - 1e-3
            assert frames == [n for n, t in enumerate(clip.times) if start <= t < end]
        for track in {region.track for region in annotations.regions}:
            regions = [region for region in annotations.regions if region.track == track]
            if len(regions) < packaged_clips.FRAMES:
                inside = regions[0]
                outside = regions[0].frame - 1 if regions[0].frame else regions[-1].frame + 1
                x0, y0, x1, y1 = pixels(inside.box, clip.frame(outside))
                change = np.abs(clip.frame(inside.frame).astype(int) - clip.frame(outside))
                assert change[y0:y1, x0:x1].mean() > 10


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("packaged:shape", "did you mean .shapes."),
        ("packaged:nothing", "choose from"),
        ("packaged:shapes?split=dev", "unknown split"),
        ("packaged:shapes?count=-1", "count=-1"),
        ("packaged:shapes?count=x", "count=x"),
        ("packaged:shapes?size=3", "unknown option 'size'"),
        ("packaged:digits?level=easy", "unknown level"),
        ("packaged:coins?level=easy", "unknown option 'level'"),
    ],
)
def test_a_wrong_source_is_named(source, said):
    with pytest.raises(BadInput, match=said):
        next(packaged.read(source))
