"""The picture world: same name same pixels, splits that share nothing."""

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nano_lessons import Views

from pixelis.datasets import card_questions, cards
from pixelis.errors import BadInput
from pixelis.operations.pixel_budget import fit
from pixelis.records import Demonstration, Question

SHIFTS = ["", "rotate,lowcontrast", "digits,invert", "warm,noise"]


def test_a_name_always_gives_the_same_pixels():
    uri = cards.picture_uri("train", 42, 17, "noise")
    first = cards.render(uri)
    assert first.shape == (768, 768, 3)
    assert first.dtype == np.uint8
    cards.draw_card.cache_clear()
    assert np.array_equal(first, cards.render(uri))
    assert not np.array_equal(first, cards.render(cards.picture_uri("train", 42, 18, "noise")))
    assert not np.array_equal(first, cards.render(cards.picture_uri("train", 43, 17, "noise")))


def test_describe_says_what_the_picture_shows():
    scene = cards.describe("cards:?split=test&seed=3&index=5&shift=")
    picture = cards.render("cards:?split=test&seed=3&index=5&shift=")
    assert 1 <= len(scene.cards) <= 3
    assert len({card.colour for card in scene.cards}) == len(scene.cards)
    for card in scene.cards:
        x1, y1, x2, y2 = (round(v * 768) for v in card.box)
        assert 0 <= x1 < x2 <= 768
        assert 0 <= y1 < y2 <= 768
        frame = picture[y1 + 4, x1 + 4].astype(int)
        assert np.abs(frame - np.asarray(cards.PALETTE[card.colour])).max() <= 21


@pytest.mark.parametrize(("split", "shift"), [*zip(cards.SPLITS, SHIFTS, strict=False), ("test", SHIFTS[3])])
def test_cheap_views_equal_the_views_of_the_whole_picture(split, shift):
    world = Views(cards.world(split).backgrounds)
    for index in range(4):
        scene = cards.scene_of(split, 9, index, shift)
        picture = world.picture(scene)
        assert np.array_equal(world.overview(scene), fit(picture, cards.VIEW_BUDGET, cards.VIEW_MULTIPLE))
        box = cards.zoom_box(scene.target)
        x1, y1, x2, y2 = (round(v * 768) for v in box)
        crop = fit(picture[y1:y2, x1:x2], cards.VIEW_BUDGET, cards.VIEW_MULTIPLE)
        assert np.array_equal(world.crop(scene, box), crop)


def test_splits_share_no_digit_and_no_photograph():
    for source in ("mnist", "digits"):
        members = [set(cards._members(source, split).tolist()) for split in cards.SPLITS]
        assert all(members)
        assert not any(a & b for a, b in itertools.combinations(members, 2))
        shift = "digits" if source == "digits" else ""
        scenes = [cards.scene_of("test", 1, index, shift) for index in range(300)]
        assert {card.image for scene in scenes for card in scene.cards} <= members[2]
    images = cards._digits("mnist")[0]
    prints = [{images[i].tobytes() for i in cards._members("mnist", split)} for split in cards.SPLITS]
    assert not prints[0] & prints[1]
    assert not prints[0] & prints[2]
    names = [name for split in cards.SPLITS for name in cards.PHOTOGRAPHS[split]]
    assert len(names) == len(set(names))


def test_a_shift_changes_the_cards_and_nothing_else():
    plain, noisy = cards.scene_of("test", 5, 3), cards.scene_of("test", 5, 3, "noise")
    assert [c.box for c in plain.cards] == [c.box for c in noisy.cards]
    assert [c.digit for c in plain.cards] == [c.digit for c in noisy.cards]
    changed = (cards.world("test").picture(plain) != cards.world("test").picture(noisy)).any(axis=-1)
    inside = np.zeros((768, 768), bool)
    for card in plain.cards:
        inside[card.top : card.top + cards.CARD, card.left : card.left + cards.CARD] = True
    assert changed.any()
    assert not (changed & ~inside).any()


def test_questions_and_demonstrations():
    rows, repeated = (
        [card_questions.question_row("validation", 2, index, "invert") for index in range(5)] for _ in "ab"
    )
    assert rows == repeated
    for row in rows:
        scene = cards.describe(row["media"][0]["uri"])
        assert row["answers"] == [str(scene.target.digit)]
        assert scene.target.colour in row["question"]
        assert row["split"] == "validation"
    shown = list(card_questions.demonstration_rows("train", 400, seed=1, direct_share=0.7))
    direct = sum(len(row["turns"]) == 1 for row in shown) / len(shown)
    assert 0.6 < direct < 0.8
    for row in shown:
        scene = cards.describe(row["media"][0]["uri"])
        assert row["turns"][-1] == {"answer": str(scene.target.digit)}
        for turn in row["turns"][:-1]:
            x1, y1, x2, y2 = turn["box"]
            assert all(abs(v * 50 - round(v * 50)) < 1e-9 for v in turn["box"])
            left, top, right, bottom = scene.target.box
            middle_x, middle_y = (left + right) / 2, (top + bottom) / 2
            assert x1 + 0.02 < middle_x < x2 - 0.02
            assert y1 + 0.02 < middle_y < y2 - 0.02


def test_only_the_history_of_a_follow_up_names_the_frame():
    rows = [card_questions.question_row("test", 7, index, follow_up=0.5) for index in range(200)]
    follow_ups = [row for row in rows if "history" in row]
    assert 70 < len(follow_ups) < 130
    for row in follow_ups:
        question = Question.model_validate(row)
        assert question.answers == [str(cards.describe(question.media[0].uri).target.digit)]
        assert row["meta"]["colour"] in question.history[0].question
        assert not any(colour in question.question for colour in cards.COLOURS)
        assert question.history[0].media == ["img0"]
    with pytest.raises(BadInput, match="follow_up"):
        card_questions.question_row("test", 7, 0, follow_up=2)


def test_a_crop_in_the_history_shows_the_card_of_the_first_question():
    rows = card_questions.demonstration_rows("train", 300, 1, direct_share=0.0, follow_up=1.0, crops=0.5)
    shown = [Demonstration.model_validate(row) for row in rows if len(row["media"]) > 1]
    assert 100 < len(shown) < 200
    for row in shown:
        assert row.history[0].media == ["img0", "img1"]
        scene, (left, top, right, bottom), _ = cards._parse(row.media[1].uri)
        first = next(card for card in scene.cards if card.colour in row.history[0].question)
        x = (first.box[0] + first.box[2]) / 2 * cards.PICTURE
        y = (first.box[1] + first.box[3]) / 2 * cards.PICTURE
        assert left < x < right
        assert top < y < bottom
        seen = row.meta.get("seen", False)
        assert seen == (first is scene.target) == (len(row.turns) == 1)
        assert seen != (scene.target.colour in row.question)
    seen_share = sum(row.meta.get("seen", False) for row in shown) / len(shown)
    assert 0.4 < seen_share < 0.8
    with pytest.raises(BadInput, match="crops"):
        card_questions.question_row("test", 7, 0, crops=2)


def test_a_corrected_demonstration_looks_again():
    options = {"direct_share": 1.0, "follow_up": 0.2, "clips": 0.2}
    plain, mixed = (
        list(card_questions.demonstration_rows("train", 200, 1, corrected=share, **options))
        for share in (0.0, 0.5)
    )
    corrected = [row for row, other in zip(mixed, plain, strict=True) if row != other]
    assert 30 < len(corrected) < 100
    for row in corrected:
        demonstration = Demonstration.model_validate(row)
        ((truth,), (exchange,)) = demonstration.answers, demonstration.history
        words, question = demonstration.question.split("\n")
        assert (words, exchange.question) == (f"No, it is a {truth}.", question)
        assert exchange.answer != truth
        assert [turn.op for turn in demonstration.turns] == ["zoom_in", None]
        assert demonstration.turns[-1].answer == truth


@pytest.mark.parametrize(
    "uri",
    ["file:///etc/passwd", "cards:?split=train", "cards:?split=dev&index=1", "cards:?index=1&shift=fog"],
)
def test_a_name_of_nothing_is_refused(uri):
    with pytest.raises(BadInput):
        cards.render(uri)


@pytest.mark.parametrize(
    ("uri", "checksum"),
    [
        ("cards:?split=train&seed=42&index=17&shift=", "b6b59cffc5bf78a4"),
        ("cards:?split=validation&seed=9&index=3&shift=warm,noise", "8115f456a4da030c"),
        ("cards:?split=test&seed=7&index=5&shift=rotate,digits&second=3", "bc459c32fde0bfe9"),
    ],
)
def test_pictures_without_sizes_are_what_they_have_always_been(uri, checksum):
    assert hashlib.sha256(cards.render(uri).tobytes()).hexdigest()[:16] == checksum


@given(st.integers(0, 10**6), st.lists(st.integers(1, cards.MAX_SIZE), min_size=1, max_size=4))
def test_enlarged_cards_stay_in_the_picture_and_apart(index, factors):
    sizes = ",".join(map(str, factors))
    scene, plain = cards.scene_of("test", 3, index, sizes=sizes), cards.scene_of("test", 3, index)
    target, *others = scene.cards
    assert target.size in factors
    assert {card.size for card in others} <= {1}
    assert (target.colour, target.digit) == (plain.target.colour, plain.target.digit)
    assert {card.colour for card in others} <= {card.colour for card in plain.cards}
    for card in scene.cards:
        assert min(card.box) >= 0
        assert max(card.box) <= 1
    for one, other in itertools.combinations(scene.cards, 2):
        assert one.is_apart(other)
        assert other.is_apart(one)
    x1, y1, x2, y2 = cards.zoom_box(target)
    assert min(x1, y1) >= 0
    assert max(x2, y2) <= 1
    assert x2 - x1 == pytest.approx(0.1 * target.size)
    left, top, right, bottom = target.box
    assert x1 <= (left + right) / 2 <= x2
    assert y1 <= (top + bottom) / 2 <= y2


def test_a_size_shows_in_the_picture_and_in_the_category_of_its_question():
    (question,) = card_questions.read("cards:?split=test&seed=7&sizes=6", None, 0, 1, 1)
    assert question.meta["category"] == "size 6"
    assert question.id.endswith("-size6")
    picture, card = cards.render(question.media[0].uri), cards.describe(question.media[0].uri).target
    face = picture[card.top : card.top + 360, card.left : card.left + 360]
    assert np.array_equal(face[::6, ::6].repeat(6, 0).repeat(6, 1), face)
    assert np.array_equal(face[::6, ::6], cards.draw_card(dataclasses.replace(card, size=1)))
    shown = list(card_questions.demonstration_rows("train", 60, 1, direct_share=0.0, sizes="1,10"))
    widths = {row["meta"]["category"]: row["turns"][0]["box"][2] - row["turns"][0]["box"][0] for row in shown}
    assert widths == {"size 1": pytest.approx(0.1), "size 10": pytest.approx(1.0)}
    for wrong in ("0", "11", "2,x", ","):
        with pytest.raises(BadInput, match="sizes"):
            cards.scene_of("test", 7, 0, sizes=wrong)
