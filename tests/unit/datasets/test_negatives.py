"""Mistakes are wrong for the question's own scorer, plausible, and really executed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from clips import encode, footage

from pixelis.datasets.cards import describe
from pixelis.datasets.questions import read_demonstrations
from pixelis.datasets.synthesis.checking import COLOURS, alternatives, is_right, is_wrong, wrong_answer
from pixelis.datasets.synthesis.executor import Executor, Session
from pixelis.datasets.synthesis.negatives import make_negative
from pixelis.errors import DataFailure
from pixelis.records import Annotations, Demonstration, Event, Line, Media, Question, Region
from pixelis.rewards.scorers import box_iou

EXECUTOR = Executor()


def with_annotations(question: Demonstration) -> Demonstration:
    """A demonstration of cards with what the picture shows as annotations."""
    cards = describe(question.media[0].uri).cards
    regions = [
        Region(id=f"r{i}", label=f"{card.colour} frame", box=card.box, attributes={"digit": card.digit})
        for i, card in enumerate(cards)
    ]
    return question.model_copy(update={"annotations": Annotations(regions=regions)})


@pytest.fixture(scope="module")
def cards() -> list[Demonstration]:
    rows = [with_annotations(row) for row in read_demonstrations("cards:?split=train", 40, 5, 0.0)]
    several = [row for row in rows if row.annotations and len(row.annotations.regions) == 3]
    return [replayed(row)[0] for row in several[:6]]


def replayed(row: Demonstration) -> tuple[Demonstration, Session]:
    session = EXECUTOR.open(row)
    session.replay(row.turns)
    return session.demonstration(), session


def ask(text: str, answer: str, scorer: str = "exact", **fields: object) -> Question:
    return Question(id="q", question=text, answers=[answer], scorer=scorer, **fields)  # type: ignore[arg-type]


SCENE = Annotations(
    regions=[
        Region(id="a", label="dog", box=(0.1, 0.1, 0.3, 0.3), attributes={"material": "wood"}),
        Region(id="b", label="cat", box=(0.5, 0.1, 0.7, 0.3), attributes={"material": "steel"}),
    ],
    lines=[Line(text="EXIT"), Line(text="NO ENTRY")],
)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (ask("Which is larger, the dog or the bird?", "dog"), {"bird"}),
        (ask("What is this?", "dog", annotations=SCENE), {"cat"}),
        (ask("What is it made of?", "wood", annotations=SCENE), {"steel"}),
        (ask("What does the sign say?", "EXIT", annotations=SCENE), {"NO ENTRY"}),
        (ask("Where does it go?", "to the left"), {"to the right"}),
        (ask("Is it open?", "Yes"), {"No"}),
        (ask("How many?", "3", "count"), {"2", "4", "5", "1", "6"}),
        (ask("Pick one.\nA. red\nB. blue", "B", "mc_letter"), {"A"}),
        (ask("Colour?", "red"), set(COLOURS) - {"red"}),
    ],
)
def test_a_wrong_answer_is_of_the_same_kind(question: Question, expected: set[str]) -> None:
    for seed in range(5):
        answer, _ = wrong_answer(question, question.answers[0], np.random.default_rng(seed))  # type: ignore[index]
        assert is_wrong(question, answer)
        assert answer in expected


@pytest.mark.parametrize("scorer", ["exact", "partial", "anls", "cer", "numeric_band", "count"])
@pytest.mark.parametrize("answer", ["12", "0", "3.50", "Résumé 7", "a", "Straße 12", "１２"])
def test_every_wrong_answer_is_rejected_by_the_scorer(scorer: str, answer: str) -> None:
    question = ask("?", answer, scorer)
    if scorer == "count" and not answer.strip().isdecimal():
        return
    rng = np.random.default_rng(0)
    if not any(is_wrong(question, other) for other, _ in alternatives(question, answer, rng)):
        with pytest.raises(DataFailure, match="no wrong answer"):
            wrong_answer(question, answer, np.random.default_rng(0))
        return
    result, _ = wrong_answer(question, answer, np.random.default_rng(0))
    assert is_wrong(question, result)
    assert not is_right(question, result)


@pytest.mark.parametrize("kind", ["outcome_negative", "trap_logical", "trap_perceptual"])
def test_mistakes_of_cards(cards: list[Demonstration], kind: str) -> None:
    for number, golden in enumerate(cards):
        wrong = make_negative(kind, golden, EXECUTOR.open(golden), np.random.default_rng(number))  # type: ignore[arg-type]
        assert wrong.kind == kind
        assert is_wrong(golden, wrong.final)
        assert wrong.question == golden.question
        assert wrong.answers == golden.answers
        assert wrong.provenance.parent == golden.id
        assert wrong.provenance.injected["answer"] == wrong.final
        same_calls = [(s.op, s.arguments) for s in wrong.steps] == [(s.op, s.arguments) for s in golden.steps]
        assert same_calls == (kind != "trap_perceptual")
        if kind == "outcome_negative":
            assert wrong.turns[-1].think == golden.turns[-1].think
        if kind == "trap_logical":
            assert str(wrong.final) in str(wrong.turns[-1].think)


def test_the_answer_of_a_perceptual_trap_follows_from_its_views(cards: list[Demonstration]) -> None:
    for number, golden in enumerate(cards):
        wrong = make_negative("trap_perceptual", golden, EXECUTOR.open(golden), np.random.default_rng(number))
        place = wrong.steps[0].arguments["box"]
        assert box_iou(place, golden.steps[0].arguments["box"]) < 0.1
        shown = max(golden.annotations.regions, key=lambda r: box_iou(r.box, place))  # type: ignore[union-attr]
        assert wrong.final == str(shown.attributes["digit"])
        repeated, _ = replayed(wrong)
        assert [s.observation for s in repeated.turns] == [s.observation for s in wrong.turns]


def test_measuring_another_thing_reverses_a_comparison() -> None:
    """The larger of two cards' crops; pointing at a third thing that is smaller gives the other name."""
    row = read_demonstrations("cards:?split=train", 1, 5, 0.0)[0]
    regions = [
        Region(id="a", label="tall box", box=(0.1, 0.1, 0.4, 0.6)),
        Region(id="b", label="flat box", box=(0.6, 0.1, 0.8, 0.3)),
        Region(id="c", label="tiny box", box=(0.1, 0.8, 0.15, 0.85)),
    ]
    text = "Which is larger, the tall box or the flat box?"
    update = {"question": text, "answers": ["tall box"], "annotations": Annotations(regions=regions)}
    session = EXECUTOR.open(row.model_copy(update=update))
    for region in regions[:2]:
        session.call("I measure it.", "get_properties", box=region.box, groups=["size"])
    session.answer("The tall box is larger.", "tall box")
    golden = session.demonstration()
    wrong = make_negative("trap_perceptual", golden, session, np.random.default_rng(0))
    assert wrong.final in ("flat box", "tiny box")
    assert wrong.provenance.injected["by"].startswith("size.")


def test_another_name_of_the_same_colour_is_not_wrong() -> None:
    questions_asked = ask("What colour is it?", "gray")
    assert not is_wrong(questions_asked, "grey")
    assert is_wrong(questions_asked, "teal")
    assert not is_wrong(ask("Which?", "the teal cup"), "the cyan cup")


def test_counting_one_more_thing_is_a_perceptual_trap() -> None:
    row = read_demonstrations("cards:?split=train", 1, 5, 0.0)[0]
    regions = [
        Region(id=str(i), label="plate", box=(0.1 + 0.2 * i, 0.1, 0.2 + 0.2 * i, 0.2)) for i in range(3)
    ]
    update = {"question": "How many?", "answers": ["2"], "scorer": "count"}
    annotated = row.model_copy(update=update | {"annotations": Annotations(regions=regions)})
    session = EXECUTOR.open(annotated)
    for region in regions[:2]:
        session.call("One.", "segment_object_at", box=region.box)
    session.answer("Two of them.", "2")
    wrong = make_negative("trap_perceptual", session.demonstration(), session, np.random.default_rng(0))
    assert wrong.final == "3"
    assert [step.op for step in wrong.steps] == ["segment_object_at"] * 3
    ratio = {"question": "How many times larger is it?", "answers": ["2.00"], "scorer": "numeric_band"}
    measured = session.demonstration(**ratio)
    measured.turns[-1] = measured.turns[-1].model_copy(update={"answer": "2.00"})
    with pytest.raises(DataFailure) as failure:  # one of two things measured, not two things counted
        make_negative("trap_perceptual", measured, session, np.random.default_rng(0))
    assert failure.value.code == "no_conclusion"


def test_other_frames_show_another_event(tmp_path: Path) -> None:
    path = tmp_path / "bikes.mp4"
    path.write_bytes(encode(footage(count=30)))
    events = [Event(text="a man waves", start=0, end=0.4), Event(text="a man sits", start=0.6, end=9)]
    media = [Media(id="vid0", uri=str(path), kind="video")]
    question = ask("What happens?", "a man waves", media=media, annotations=Annotations(events=events))
    session = EXECUTOR.open(question)
    session.call("Early.", "select_frames", frames=[0, 1])
    session.answer("He waves.", "a man waves")
    golden = session.demonstration()
    for seed in (0, 2):
        wrong = make_negative("trap_perceptual", golden, session, np.random.default_rng(seed))
        assert wrong.final == "a man sits"
