"""Pass rates and perception utility on tables of outcomes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refined import demonstration

from pixelis.config import ToolboxConfig, load
from pixelis.config.refinement import PassRateConfig
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_questions
from pixelis.datasets.refinement import filters
from pixelis.datasets.refinement.episodes import Episodes
from pixelis.datasets.refinement.filters import Outcomes
from pixelis.errors import DataFailure
from pixelis.records import Group, Question, Trajectory

EIGHT = PassRateConfig(episodes=8)


@pytest.mark.parametrize(
    ("right", "cause"), [(0, "too_hard"), (1, None), (4, None), (7, None), (8, "too_easy")]
)
def test_questions_always_or_never_answered_are_dropped(right: int, cause: str | None):
    assert filters.drop_cause(Outcomes([1.0] * right + [0.0] * (8 - right)), EIGHT) == cause


def test_an_unscored_episode_is_not_a_zero():
    rows = [("q", True, 1.0), ("q", True, None), ("q", True, 0.0), ("lost", True, None)]
    outcomes = filters.group_outcomes(rows)
    assert outcomes["q"].rate == 0.5
    assert filters.drop_cause(outcomes["q"], EIGHT) is None
    assert filters.drop_cause(outcomes["lost"], EIGHT) == "no_pass_rate"
    assert filters.drop_cause(None, EIGHT) == "no_pass_rate"


@pytest.mark.parametrize(
    ("looking", "glance", "cause"),
    [
        ([1, 1, 1, 0], [0, 0, 0, 0], None),
        ([1, 1, 1, 0], [1, 1, 0, 0], None),
        ([1, 1, 1, 0], [1, 1, 1, 0], "looking_does_not_pay"),  # as good at a glance
        ([1, 1, 0, 0], [1, 1, 0, 0], "looking_does_not_pay"),
        ([1, 1, 1, 0], [], "no_pass_rate"),
        ([0, 0, 0, 0], [0, 0, 0, 0], "too_hard"),
    ],
)
def test_questions_without_perception_utility_are_dropped(looking: list, glance: list, cause: str | None):
    rows = [("q", True, float(v)) for v in looking] + [("q", False, float(v)) for v in glance]
    settings = PassRateConfig(episodes=4, utility=True)
    assert filters.drop_cause(filters.group_outcomes(rows)["q"], settings) == cause


def test_evaluation_questions_are_found_by_text_and_picture():
    asked = {"e1": "Which digit is in the red frame?", "e2": "How many?"}
    held_out = [Question(id=name, question=text) for name, text in asked.items()]
    held_pictures = {"e1": ["p1"], "e2": ["p2", "p3"]}
    ours = [
        demonstration("same", question="which digit  is in the RED frame?"),
        demonstration("other picture"),
        demonstration("other question", question="Which colour has the frame?"),
        demonstration("two", question="How many?"),
    ]
    pictures = {"same": ["p1"], "other picture": ["p9"], "other question": ["p1"], "two": ["p3", "p2"]}
    hits = filters.leaks(ours, pictures, held_out, held_pictures)
    assert hits == {"same": "e1", "two": "e2"}
    stricter = filters.leaks(ours, pictures, held_out, held_pictures, "picture")
    assert set(stricter) == {"same", "other question", "two"}
    message = "2 of the questions are evaluation questions: same = e1, two = e2"
    with pytest.raises(DataFailure, match=message) as caught:
        filters.refuse(hits)
    assert caught.value.code == "held_out"
    filters.refuse({})


def test_episodes_are_played_once(tmp_path: Path):
    """What was played counts for the same questions and settings alone; a torn file is played again."""
    questions = [Question(id="q", question="Which digit?", answers=["7"])]

    def episodes(*given: str, glance: bool = False) -> Episodes:
        return Episodes(load(None, given), tmp_path, questions, samples=2, glance=glance)

    one = episodes(glance=True)
    assert one.missing() == ["looking", "glance"]
    assert one.config.evaluate.sampling.temperature == 1.0
    right, unscored = (
        Trajectory(question_id="q", group_id="g", turns=[], rewards=r) for r in ({"accuracy": 1.0}, {})
    )
    one.store("looking", [Group(id="g", question=questions[0], trajectories=[right, unscored])])
    one.store("glance", [Group(id="g", question=questions[0], trajectories=[right])])
    repeated = episodes("refinement.pass_rate.high=1", glance=True)
    assert repeated.missing() == []
    assert repeated.outcomes()["q"] == Outcomes(looking=[1.0], glance=[1.0])
    assert episodes("run.seed=5").missing() == ["looking"]
    (tmp_path / "episodes-looking.json").write_text('{"identity": "', encoding="utf-8")
    assert episodes().missing() == ["looking"]


def test_a_crop_of_the_annotated_box_takes_the_place_of_operations(tmp_path: Path):
    card = next(read_questions("packaged:digits?count=10"))
    plain = Question(id="q", question="Which digit?", answers=["7"])
    episodes = Episodes(load(None), tmp_path, [card, plain], samples=2, glance=True, annotated=True)
    assert (episodes.count, episodes.arms) == (1, {"looking": False, "glance": False})
    (asked,) = map(Question.model_validate_json, episodes.sources["looking"].read_text().splitlines())
    assert asked.media[:-1] == card.media
    whole, crop = (open_media(media, ToolboxConfig()) for media in (asked.media[0], asked.media[-1]))
    assert isinstance(whole, np.ndarray)
    assert isinstance(crop, np.ndarray)
    assert card.annotations is not None
    box = card.annotations.regions[0].box
    for axis, size in enumerate(whole.shape[1::-1]):
        assert crop.shape[1 - axis] <= (1.5 * (box[axis + 2] - box[axis])) * size + 2
        assert crop.shape[1 - axis] >= (box[axis + 2] - box[axis]) * size
    right = Trajectory(question_id=card.id, group_id="g", turns=[], rewards={"accuracy": 1.0})
    for arm in episodes.arms:
        episodes.store(arm, [Group(id="g", question=card, trajectories=[right])])
    assert episodes.outcomes() == {card.id: Outcomes(looking=[1.0], glance=[1.0])}
