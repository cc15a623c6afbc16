"""Clips of the card world: a question about one second needs a frame to be selected and then a zoom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import pixelis.nano
from pixelis.config import Config, DialogueConfig
from pixelis.config.dialogue import PixelRangeConfig
from pixelis.datasets import cards
from pixelis.datasets.card_questions import question_row
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.questions import read_demonstrations, read_questions
from pixelis.datasets.synthesis.executor import Executor, Session
from pixelis.errors import BadInput
from pixelis.operations.geometry import chain, to_root
from pixelis.records import Question

NANO = str(Path(pixelis.nano.__file__).parent / "base")
VIEW = PixelRangeConfig(min_pixels=cards.VIEW**2, max_pixels=cards.VIEW**2)
DIALOGUE = DialogueConfig(frames=1, input=VIEW, crop=VIEW, frame=VIEW, max_context=512)
EXECUTOR = Executor(dialogue=DIALOGUE, multiple=cards.VIEW_MULTIPLE)
LEGIBLE = 0.5
"""Pixels of a view for each pixel of the picture from which on a digit of 28 pixels can be read."""


def questions(count: int) -> list[Question]:
    return list(read_questions("cards:?split=test&seed=7&clips=1", limit=count, epochs=1))


def readable(session: Session, colour: str) -> set[tuple[int, int]]:
    """What an oracle reads in the views: the seconds in which the card of a colour is legible."""
    found = set()
    for image in session.images:
        x0, y0, x1, y1 = to_root(chain(session.images, image.id))
        frame = chain(session.images, image.id)[0].frame
        scene = cards.describe(session.question.media[0].frames[frame])
        (card,) = [card for card in scene.cards if card.colour == colour]
        inside = x0 <= card.box[0] and y0 <= card.box[1] and card.box[2] <= x1 and card.box[3] <= y1
        if inside and image.view_size[0] / ((x1 - x0) * cards.PICTURE) >= LEGIBLE:
            found.add((frame, card.digit))
    return found


def play(question: Question, operations: Sequence[str]) -> Session:
    """All that these operations can show of the card: every frame where one can be selected."""
    session = EXECUTOR.open(question)
    if "select_frames" in operations:
        session.execute("select_frames", "vid0", frames=list(range(cards.CLIP_SECONDS)))
    if "zoom_in" in operations:
        box = list(cards.zoom_box(cards.describe(question.media[0].frames[0]).target))
        for image in list(session.images):
            session.execute("zoom_in", image.id, box=box)
    return session


@pytest.mark.slow
def test_neither_operation_alone_shows_the_answer():
    for question in questions(8):
        colour, second, truth = question.meta["colour"], question.meta["second"], int(question.answers[0])
        assert readable(play(question, []), colour) == set()
        assert readable(play(question, ["select_frames"]), colour) == set()  # all frames, all too small
        by_zoom = readable(play(question, ["zoom_in"]), colour)
        # The one frame that is shown first
        assert {frame for frame, _ in by_zoom} == {cards.CLIP_SECONDS // 2}
        assert truth not in {digit for _, digit in by_zoom}
        assert (second, truth) in readable(play(question, ["select_frames", "zoom_in"]), colour)


@pytest.mark.slow
def test_demonstrations_select_and_zoom_in_the_words_of_the_embedded_model():
    rows = read_demonstrations("cards:?split=train&clips=1", 12, 3, 0.0)
    player = Player(Config(dialogue=DialogueConfig(frames=1, max_context=512)), NANO)
    for row in rows[:4]:
        trajectory, views = player.play(row)
        called = [turn.actions[0].op for turn in trajectory.turns if turn.is_policy and turn.actions]
        assert called == ["select_frames", "zoom_in"]
        assert all(observation.status == "ok" for observation in trajectory.observations)
        assert trajectory.answer == row.answers[0]
        assert len(trajectory.token_ids()) < 260
        # As docs/data.md says
        assert max(len(turn.tokens) for turn in trajectory.turns if turn.is_policy) <= 48
        assert len(views) == 3
        session = EXECUTOR.open(row)
        session.replay(row.turns)
        assert (row.meta["second"], int(row.answers[0])) in readable(session, row.meta["colour"])
    assert {len(row.turns) for row in read_demonstrations("cards:?split=train&clips=1", 60, 3, 0.5)} == {1, 3}


def test_a_card_has_another_digit_in_every_second_and_nothing_else_changes():
    for index in range(6):
        scenes = [cards.scene_of("train", 1, index, second=second) for second in range(cards.CLIP_SECONDS)]
        for number, card in enumerate(scenes[0].cards):
            assert len({scene.cards[number].digit for scene in scenes}) == cards.CLIP_SECONDS
            same = {(scene.cards[number].box, scene.cards[number].colour) for scene in scenes}
            assert same == {(card.box, card.colour)}
        assert scenes[0] == cards.scene_of("train", 1, index)
        assert len({scene.background for scene in scenes}) == 1
    uri = cards.picture_uri("train", 1, 0, second=3)
    assert cards.describe(uri) == cards.scene_of("train", 1, 0, second=3)
    x0, y0, x1, y1 = (round(v * cards.PICTURE) for v in cards.describe(uri).target.box)
    changed = (cards.render(uri) != cards.render(cards.picture_uri("train", 1, 0))).any(-1)
    assert changed[y0:y1, x0:x1].any()
    outside = np.ones_like(changed)
    for card in cards.describe(uri).cards:
        outside[card.top : card.top + cards.CARD, card.left : card.left + cards.CARD] = False
    assert not changed[outside].any()


def test_without_the_option_the_questions_are_what_they_were():
    plain, mixed = (
        list(read_questions(f"cards:?split=train&seed=4{option}", limit=60, epochs=1))
        for option in ("", "&clips=0.5")
    )
    assert all(question.media[0].kind == "image" for question in plain)
    clips = [question for question in mixed if question.media[0].kind == "video"]
    assert 15 < len(clips) < 45
    kept = {question.id: question for question in mixed}
    assert all(kept.get(question.id, question) == question for question in plain)


@pytest.mark.parametrize("uri", ["cards:?index=1&second=5", "cards:?index=1&second=-1"])
def test_a_second_that_does_not_exist_is_refused(uri):
    with pytest.raises(BadInput):
        cards.render(uri)
    with pytest.raises(BadInput, match="clips"):
        question_row("test", 7, 0, clips=1.5)
