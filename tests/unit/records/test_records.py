"""Records survive the trip through JSON and refuse what would corrupt training."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pixelis.errors import BadImage, Overloaded
from pixelis.records import (
    Action,
    Demonstration,
    Function,
    Group,
    ImageView,
    Observation,
    Question,
    StopReason,
    Trajectory,
    Turn,
)

unit = st.floats(0, 1)
text = st.text(max_size=40)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    tokens = draw(st.lists(st.integers(0, 10**6), max_size=12))
    role = draw(st.sampled_from(["user", "assistant", "tool", "system"]))
    count = len(tokens) if role == "assistant" else 0
    probs = draw(st.lists(st.floats(-50, 0), min_size=count, max_size=count))
    arguments = st.dictionaries(text, unit | text, max_size=3)
    action = draw(st.none() | st.builds(Action, op=text, arguments=arguments))
    seen = draw(st.none() | st.builds(Observation, status=st.just("ok"), id=text, text=text, seconds=unit))
    return Turn(role=role, text=draw(text), tokens=tokens, log_probs=probs, action=action, observation=seen)


boxes = st.none() | st.tuples(unit, unit, unit, unit)
trajectories = st.builds(
    Trajectory,
    question_id=text,
    turns=st.lists(turns(), max_size=5),
    images=st.lists(st.builds(ImageView, id=text, box=boxes), max_size=3),
    answer=st.none() | text,
    stop_reason=st.sampled_from(list(StopReason)),
    rewards=st.dictionaries(text, st.floats(-10, 10), max_size=3),
    reward=st.none() | st.floats(-10, 10),
)


@given(trajectories)
def test_a_trajectory_comes_back_from_json_equal(trajectory: Trajectory) -> None:
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


@given(trajectories)
def test_masks_and_log_probs_line_up_with_the_tokens(trajectory: Trajectory) -> None:
    mask = trajectory.loss_mask()
    assert len(mask) == len(trajectory.token_ids()) == len(trajectory.behaviour_log_probs())
    assert sum(mask) == sum(len(t.tokens) for t in trajectory.turns if t.role == "assistant")
    assert all(p == 0.0 for p, m in zip(trajectory.behaviour_log_probs(), mask, strict=True) if not m)


def test_log_probs_that_do_not_fit_their_tokens_are_refused() -> None:
    with pytest.raises(ValidationError, match="2 log-probs for 3 assistant tokens"):
        Trajectory(question_id="q", turns=[Turn(role="assistant", tokens=[1, 2, 3], log_probs=[-1.0, -1.0])])
    with pytest.raises(ValidationError, match="user"):
        Trajectory(question_id="q", turns=[Turn(role="user", tokens=[1], log_probs=[-1.0])])


def test_another_schema_version_is_refused_not_guessed() -> None:
    row = Trajectory(question_id="q").model_dump()
    row["schema_version"] = 99
    with pytest.raises(ValidationError, match="schema 99"):
        Trajectory.model_validate(row)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="colour"):
        Question.model_validate({"id": "q", "question": "?", "colour": "red"})


def test_a_group_holds_one_question_only() -> None:
    question, good = Question(id="q", question="?"), Trajectory(question_id="q", group_id="g")
    assert Group(id="g", question=question, trajectories=[good]).trajectories == [good]
    for strange in ({"question_id": "other", "group_id": "g"}, {"question_id": "q", "group_id": "h"}):
        with pytest.raises(ValidationError, match="does not belong"):
            Group(id="g", question=question, trajectories=[good, Trajectory(**strange)])


def test_errors_survive_the_trip_between_processes() -> None:
    error = pickle.loads(pickle.dumps(BadImage("too large", code="image_too_large", fix="shrink it")))
    assert (type(error), error.code, error.fix) == (BadImage, "image_too_large", "shrink it")
    assert str(error) == "too large\n  fix: shrink it"
    busy = pickle.loads(pickle.dumps(Overloaded("full", retry_after_s=2.5)))
    assert (busy.code, busy.retry_after_s) == ("overloaded", 2.5)


def test_a_weight_is_a_finite_number() -> None:
    row = '{"id": "a", "question": "Which?", "turns": [{"answer": "1"}], "weight": Infinity}'
    with pytest.raises(ValidationError, match="finite"):
        Demonstration.model_validate_json(row)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (("img0", "img1", "img0"), "several `media` have the id img0"),
        (("img0", "obs12"), "cannot be named obs12"),
    ],
)
def test_each_medium_has_an_id_of_its_own(ids: tuple[str, ...], message: str) -> None:
    """Pictures are looked up by id: one of two with the same id would never be shown."""
    media = [{"id": id, "uri": "a.png"} for id in ids]
    with pytest.raises(ValidationError, match=message):
        Question.model_validate({"id": "q", "question": "?", "media": media})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "two words"}, "pattern"),
        ({"name": "a" * 65}, "pattern"),
        ({"parameters": {"type": "strng"}}, "no JSON schema"),
        ({"parameters": {"type": "array"}}, "`object`"),
        ({"parameters": {"properties": {"a": {"$ref": "http://127.0.0.1/schema"}}}}, "no part of it"),
        ({"parameters": {"properties": {"a": {"$ref": "#/$defs/missing"}}}}, "no part of it"),
        ({"parameters": {"description": "a" * 20_000}}, "longer"),
        ({"parameters": {"default": float("nan")}}, "JSON"),
    ],
)
def test_a_function_is_refused_for_what_would_hurt_later(fields, message):
    with pytest.raises(ValidationError, match=message):
        Function(**{"name": "f", **fields})


def test_functions_of_a_question_have_names_of_their_own_and_an_end():
    deep = {}
    for _ in range(5000):
        deep = {"not": deep}
    with pytest.raises(ValidationError, match="too deep"):
        Function(name="f", parameters=deep)
    functions = [Function(name=f"f{i}") for i in range(129)]
    with pytest.raises(ValidationError, match="at most 128"):
        Question(id="q", question="?", functions=functions)
    with pytest.raises(ValidationError, match="called f1"):
        Question(id="q", question="?", functions=[*functions[:3], functions[1]])
    schema = {"properties": {"$ref": {"type": "string"}, "of": {"$ref": "#/$defs/of"}}, "$defs": {"of": {}}}
    Question(id="q", question="?", functions=[Function(name="f", parameters=schema)])
    for outcome in ({"a": float("inf")}, {"a b": 1.0}, {str(i): 1.0 for i in range(17)}):
        with pytest.raises(ValidationError):
            Trajectory(question_id="q", outcome=outcome)
