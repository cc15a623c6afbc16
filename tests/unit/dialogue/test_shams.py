"""Shams: only the observation changes, and what an answer owes to it follows from the log-probabilities."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import playing
import pytest
from dialogue_models import ScriptedSession, image_view, renderer
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import RealTools
from test_agent import PICTURE, call

from pixelis.dialogue.agent import Episode, Limits
from pixelis.dialogue.shams import MIN_SHIFT, Shams, calls_shown, elsewhere
from pixelis.errors import BadInput
from pixelis.evaluation.looking import looking
from pixelis.records import REAL, Group, Observation, Question, Trajectory

OTHER = np.random.default_rng(2).integers(0, 256, PICTURE.shape, dtype=np.uint8)
BOXES = ([0, 0, 400, 400], [500, 500, 900, 900], [100, 600, 400, 900])


def played(lines: list[str], question: str = "q", picture: np.ndarray = PICTURE) -> Episode:
    r, image = renderer("nano"), image_view("nano")
    view = picture[: image.view_size[1], : image.view_size[0]]
    tools, limits = RealTools({"img0": picture}, r), Limits(8, 200, 4000, 8)
    asked = Question(id=question, question="Which digit?")
    return playing.run(ScriptedSession(r, lines), asked, [image], [view], tools, limits)


def measure(shams: Shams, episode: Episode, score, picture: np.ndarray = PICTURE) -> None:
    question = Question(id=episode.trajectory.question_id, question="Which digit?")
    asyncio.run(shams.measure(question, episode, RealTools({"img0": picture}, shams.renderer), score))


@settings(max_examples=25)
@given(st.lists(st.sampled_from([*BOXES, "bad"]), max_size=4))
def test_a_sham_replaces_one_observation_and_nothing_else(calls: list) -> None:
    r = renderer("nano")
    lines = [call([3, 3, 2, 2]) if box == "bad" else call(box) for box in calls]
    shams, episode = Shams(r), played([*lines, "<answer>7</answer>"])
    shams.remember(played([call(BOXES[0]), "<answer>1</answer>"], "other", OTHER))
    inputs: list[tuple[list[int], list[np.ndarray]]] = []

    async def score(tokens: list[int], views: list[np.ndarray], count: int) -> float:
        assert tokens[-count:] == episode.trajectory.turns[-1].tokens
        pads = sum(r.spec.image_tokens(*view.shape[:2]) for view in views)
        assert tokens.count(r.spec.image_token) == pads
        inputs.append((tokens, views))
        return -float(len(inputs))

    measure(shams, episode, score)
    t = episode.trajectory
    shown = [o for o in t.observations if o.status == "ok"]
    assert len(shown) == sum(box != "bad" for box in calls)
    kinds = ["blank", "elsewhere", "another"]
    assert [list(o.answer_log_probs) for o in shown] == [[REAL, *kinds]] * len(shown)
    if not shown:
        assert inputs == []
        return
    own, *others = inputs
    assert own[0] == t.token_ids()
    assert all(np.array_equal(a, b) for a, b in zip(own[1], episode.views, strict=True))
    # Equal sizes, so that the tokens differ in nothing, and the views in one.
    for number, (tokens, views) in enumerate(others):
        place = 1 + number // len(kinds)
        assert tokens == own[0]
        assert [not np.array_equal(a, b) for a, b in zip(views, own[1], strict=True)] == [
            i == place for i in range(len(views))
        ]
    values = itertools.count(2)
    for observation in shown:
        assert observation.answer_log_probs == {REAL: -1.0} | {kind: -float(next(values)) for kind in kinds}


def test_a_text_is_replaced_by_none_and_by_what_the_operation_said_elsewhere() -> None:
    """With renderings of other lengths, in the tokens of its own turn alone."""
    r, shams = renderer("nano"), Shams(renderer("nano"))
    episodes = {}
    for question, text in (("q", "the sign says 12"), ("other", "the sign says forty")):
        episode = played([call(BOXES[0]), "<answer>7</answer>"], question=question)
        turn = episode.trajectory.turns[-2]
        said = turn.observation.model_copy(update={"text": text, "images": []})
        episode.trajectory.turns[-2] = r.observation(said, 1)
        episode.trajectory.images, episode.views = episode.trajectory.images[:1], episode.views[:1]
        episodes[question] = episode
    shams.remember(episodes["other"])
    seen: list[str] = []

    async def score(tokens: list[int], views: list[np.ndarray], count: int) -> float:
        seen.append(str(r.tokenizer.decode(tokens)))
        return -1.0

    measure(shams, episodes["q"], score)
    assert [text.count("the sign says 12") for text in seen] == [1, 0, 0]
    assert [text.count("the sign says forty") for text in seen] == [0, 0, 1]
    bare = {text.replace("\nthe sign says 12", "").replace("\nthe sign says forty", "") for text in seen}
    assert len(bare) == 1


def test_a_blank_shows_no_text_beside_its_pictures() -> None:
    r, episode = renderer("nano"), played([call(BOXES[0]), "<answer>7</answer>"])
    turn = episode.trajectory.turns[-2]
    said = turn.observation.model_copy(update={"text": "the track is lost"})
    episode.trajectory.turns[-2] = r.observation(said, 1)
    seen = list[str]()

    async def score(tokens: list[int], views: list[np.ndarray], count: int) -> float:
        seen.append(str(r.tokenizer.decode(tokens)))
        return -1.0

    measure(Shams(r), episode, score)
    (observation,) = episode.trajectory.observations
    shown = dict(zip(observation.answer_log_probs, seen, strict=True))
    assert ["the track is lost" in shown[kind] for kind in (REAL, "blank")] == [True, False]


def test_what_cannot_be_measured_is_left_out() -> None:
    shams = Shams(renderer("nano"))

    async def full(tokens: list[int], views: list[np.ndarray], count: int) -> float:
        raise BadInput("the tokens fill the context", code="over_context")

    async def never(tokens: list[int], views: list[np.ndarray], count: int) -> float:
        raise AssertionError("nothing to score")

    for lines, score in (
        ([call(BOXES[0]), "<answer>7</answer>"], full),
        ([call(BOXES[0]), "I do not know"], never),
        (["<answer>7</answer>"], never),
    ):
        episode = played(lines)
        measure(shams, episode, score)
        assert all(o.causal_use is None for o in episode.trajectory.observations)
    assert list(calls_shown(played(["<answer>7</answer>"]))) == []


@given(st.tuples(*[st.floats(0, 1)] * 4))
def test_elsewhere_is_a_region_of_the_same_size_that_hardly_overlaps(corners: tuple[float, ...]) -> None:
    x0, x1 = sorted(corners[:2])
    y0, y1 = sorted(corners[2:])
    if x1 - x0 < 0.01 or y1 - y0 < 0.01:
        return
    moved = elsewhere({"box": (x0, y0, x1, y1), "padding": 0.1})
    fits = min(x1 - x0, y1 - y0) < 0.4
    assert (moved is not None) >= fits
    if moved is not None:
        a, b, c, d = moved["box"]
        assert (c - a, d - b) == pytest.approx((x1 - x0, y1 - y0))
        assert min(a, b) >= 0
        assert max(c, d) <= 1 + 1e-9
        assert max(abs(a - x0) / (x1 - x0), abs(b - y0) / (y1 - y0)) >= MIN_SHIFT
        assert moved["padding"] == 0.1


def test_causal_use_and_its_summary() -> None:
    """Against the definition of docs/looking.md, by hand."""
    values = {
        "decisive": {REAL: -0.1, "blank": -2.1, "elsewhere": -2.5, "another": -9.0},
        "ignored": {REAL: -0.1, "blank": -0.2, "elsewhere": -0.1},
        "text": {REAL: -0.5, "blank": -2.5, "elsewhere": -6.5, "another": -3.5},
        "unmeasured": {},
    }
    observations = {
        name: Observation(
            status="ok",
            text="12" if name == "text" else "",
            data={"op": "read_text" if name == "text" else "zoom_in"},
            answer_log_probs=v,
        )
        for name, v in values.items()
    }
    uses = {name: o.causal_use for name, o in observations.items()}
    assert uses == {
        "decisive": pytest.approx(2.2),
        "ignored": pytest.approx(0.05),
        "text": pytest.approx(2.0),
        "unmeasured": None,
    }
    assert observations["decisive"].sham_uses == pytest.approx([0.4, -0.4])
    episode = played([call(BOXES[0]), "<answer>7</answer>"]).trajectory

    def shown(*names: str) -> Trajectory:
        turns = [episode.turns[0].model_copy(update={"observation": observations[name]}) for name in names]
        return episode.model_copy(update={"turns": turns})

    group = Group(
        id="g",
        question=Question(id="q", question="Which?"),
        trajectories=[shown("ignored", "decisive"), shown("ignored"), shown("text", "unmeasured")],
    )
    summary = looking([group])
    assert (summary["n"], summary["questions"]) == (3, 1), "the last measured call of an episode decides"
    assert summary["mean"] == pytest.approx((2.2 + 0.05 + 2.0) / 3)
    assert summary["kinds"]["another"] == pytest.approx((8.9 + 3.0) / 2)
    bars = {op: result["bar"] for op, result in summary["operations"].items()}
    assert bars == {
        "read_text": 0.0,  # texts from elsewhere mislead, so a blank is the only sham
        "zoom_in": pytest.approx(np.percentile([0.4, -0.4, -0.1, 0.1], 95)),
    }
    assert summary["unused"] == pytest.approx(1 / 3)
    assert looking([group.model_copy(update={"trajectories": []})]) == {}
