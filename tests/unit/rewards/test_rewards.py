"""Rewards of whole groups: what scores, what is unscored, and each term by hand."""

from __future__ import annotations

import math
import time

import pytest
from scored_episodes import CALL, episode, group

from pixelis.config import RewardsConfig, RewardWeightsConfig, TaskRewardsConfig
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Action, Media, Observation, Question, StopReason, Trajectory, Turn
from pixelis.rewards import formats
from pixelis.rewards.coherence import coherence, misuse, violations
from pixelis.rewards.extraction import untagged
from pixelis.rewards.mathematics import equal
from pixelis.rewards.scorers import SCORERS, func_seq, letter
from pixelis.rewards.terms import reward_metrics, score_group

ALL = RewardsConfig(weights=RewardWeightsConfig(accuracy=1, format=0.5, curiosity=1))


def only(name: str, weight: float = 1.0, **more) -> RewardsConfig:
    return RewardsConfig(weights=RewardWeightsConfig(**{"accuracy": 0.0, name: weight}), **more)


def values(name: str, settings: RewardsConfig, *trajectories: Trajectory, **more) -> list[float]:
    return [t.rewards[name] for t in score_group(group(*trajectories, **more), settings).trajectories]


def test_reward_is_the_weighted_sum_of_raw_terms():
    first, second = score_group(group(episode("7", ok=1), episode("1")), ALL).trajectories
    assert first.rewards == {"accuracy": 1.0, "format": 1.0, "curiosity": 0.0}
    assert first.weighted == {"accuracy": 1.0, "format": 0.5, "curiosity": 0.0}
    assert first.reward == pytest.approx(1.5)
    assert second.rewards == {"accuracy": 0.0, "format": 1.0, "curiosity": 0.0}
    assert second.reward == pytest.approx(0.5)
    assert first.unscored is second.unscored is None


def test_the_default_weighs_the_answer_alone_and_logs_three_terms():
    (trajectory,) = score_group(group(episode("7", ok=3)), RewardsConfig()).trajectories
    assert trajectory.rewards == {"accuracy": 1.0, "format": 1.0, "curiosity": pytest.approx(-0.1)}
    assert (trajectory.weighted, trajectory.reward) == ({"accuracy": 1.0}, 1.0)


def test_a_task_has_weights_and_a_format_of_its_own_and_the_total_is_clipped():
    heavy = RewardWeightsConfig(accuracy=100, format=1)
    other = RewardsConfig(tasks={"math": TaskRewardsConfig(weights=heavy, format="think_answer")}, clip=10)
    assert score_group(group(episode("7"), task="math"), other).trajectories[0].reward == 10.0
    assert score_group(group(episode("7")), other).trajectories[0].reward == 1.0


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({}, [0.0, -0.05, -0.1]),
        ({"reference_operations": ["zoom_in", "zoom_in"]}, [0.0, 0.0, -0.05]),
        ({"reference_operations": "zoom_in"}, [0.0, -0.05, -0.1]),
    ],
)
def test_calls_that_the_reference_of_a_refined_question_makes_are_free(meta, expected):
    busy = [episode("1", ok=n) for n in (1, 2, 3)]
    assert values("curiosity", only("curiosity"), *busy, meta=meta) == pytest.approx(expected)


def test_step_markers():
    texts = {
        "Step 1: a. Step 2: b": 2 / 3,
        "1. one\n- two\n* three": 1.0,
        "First, x. Next, y. Finally, z. Second, w.": 1.0,
        "no steps": 0.0,
    }
    said = [episode("7").model_copy(update={"turns": [Turn(role="assistant", text=t)]}) for t in texts]
    assert values("step_markers", only("step_markers"), *said) == pytest.approx(list(texts.values()))


def test_the_majority_scores_without_a_truth_and_the_same_with_a_scrambled_one():
    def scored(*answers: str | None, truths=None, **vote) -> list[tuple[float | None, str | None]]:
        stops = [StopReason.LENGTH if a is None else StopReason.ANSWER for a in answers]
        row = group(*(episode(a, stop=s) for a, s in zip(answers, stops, strict=True)), answers=truths)
        settings = RewardsConfig(preset="ttrl", vote=vote)
        return [(t.reward, t.unscored) for t in score_group(row, settings).trajectories]

    for truths in (None, ["7"], ["scrambled"]):
        expected = [(1.0, None), (1.0, None), (0.0, None), (0.0, None)]
        assert scored("7", " 7 ", "1", None, truths=truths) == expected
    assert scored("7", "1") == [(1.0, None), (0.0, None)]
    assert scored("7", "1", tie="abstain") == [(None, "tie")] * 2
    assert scored("7", "1", min_share=0.6) == [(None, "no_majority")] * 2
    assert scored(None, None, truths=["7"]) == [(None, "no_majority")] * 2


def test_votes_for_a_choice_are_letters():
    episodes = [episode("B. cat"), episode("(b)"), episode("A"), episode("A"), episode("cat")]
    more = {"answers": None, "scorer": "mc_letter", "meta": {"options": ["dog", "cat"]}}
    expected = [1.0, 1.0, 0.0, 0.0, 1.0]
    assert values("majority_vote", RewardsConfig(preset="ttrl"), *episodes, **more) == expected


def test_episodes_that_the_system_ended_are_unscored_and_do_not_count():
    broken = episode(None, ok=1, stop=StopReason.ERROR, unscored="bad_token")
    late = episode(None, ok=1, stop=StopReason.DEADLINE)
    scored = score_group(
        group(episode("7", ok=1), *[episode("7") for _ in range(7)], broken, late), ALL
    ).trajectories
    assert scored[0].rewards["curiosity"] == pytest.approx(0.0875)
    expected = [(None, {}, "bad_token"), (None, {}, "deadline")]
    assert [(t.reward, t.rewards, t.unscored) for t in scored[-2:]] == expected


@pytest.mark.parametrize(
    "stop", [StopReason.NO_ACTION, StopReason.LENGTH, StopReason.OVER_TURN, StopReason.OVER_CONTEXT]
)
def test_episodes_that_the_policy_wasted_score_zero(stop):
    (trajectory,) = score_group(group(episode(None, stop=stop)), ALL).trajectories
    expected = (0.0, 0.0, 0.0)
    assert (trajectory.reward, trajectory.rewards["accuracy"], trajectory.rewards["format"]) == expected


def test_no_truth_is_unscored_and_a_pseudo_label_scores_without_looking_at_the_truth():
    for answers in (None, []):
        (blind,) = score_group(group(episode("7"), answers=answers), ALL).trajectories
        assert (blind.reward, blind.unscored) == (None, "no_truth")
        assert "accuracy" not in blind.rewards
    for answers in (None, ["1"]):
        scored = score_group(
            group(episode("7"), episode("1"), answers=answers), ALL, truths=["7"]
        ).trajectories
        assert [(t.rewards["accuracy"], t.reward, t.unscored) for t in scored] == [
            (1.0, 1.5, None),
            (0.0, 0.5, None),
        ]


def raising(error: Exception):
    def scorer(case, tools):
        raise error

    return scorer


@pytest.mark.parametrize(
    ("scorer", "cause"),
    [
        (raising(ValueError("hung up")), "scorer_failed"),
        (raising(DataFailure("no", code="truth_unparsable")), "truth_unparsable"),
        (lambda case, tools: math.nan, "not_finite"),
        (lambda case, tools: 2.0, "out_of_range"),
        (lambda case, tools: "1", "wrong_type"),
    ],
)
def test_a_scorer_that_fails_is_a_cause_not_a_zero(scorer, cause, monkeypatch):
    monkeypatch.setitem(SCORERS, "own", scorer)
    (trajectory,) = score_group(group(episode("7"), scorer="own"), ALL).trajectories
    assert (trajectory.reward, trajectory.unscored, trajectory.weighted) == (None, cause, {})
    assert "accuracy" not in trajectory.rewards


def test_an_unknown_scorer_is_bad_input():
    for scorer, code, message in (
        ("mc_leter", "unknown_scorer", "did you mean `mc_letter`"),
        ("judge", "no_judge", "judge"),
    ):
        with pytest.raises(BadInput, match=message) as caught:
            score_group(group(episode("7"), scorer=scorer, answers=["seven"]), ALL)
        assert caught.value.code == code
    forced = RewardsConfig(scorer="exact")
    assert score_group(group(episode("7"), scorer="judge"), forced).trajectories[0].reward == 1.0


def test_format_requires_every_turn_well_formed():
    good = episode("7", ok=2)
    assert formats.dialect(good) == 1.0
    for change in ({"text": "zoom " + CALL}, {"error": "bad_box"}):
        turns = [good.turns[0], good.turns[1].model_copy(update=change), *good.turns[2:]]
        assert formats.dialect(good.model_copy(update={"turns": turns})) == 0.0
    assert formats.dialect(Trajectory(question_id="q")) == 0.0


T, A = "<think>so</think>", "<answer>7</answer>"


@pytest.mark.parametrize(
    ("kind", "texts", "value"),
    [
        ("think_answer", [T + "\n" + A], 1.0),
        ("think_answer", [A], 0.0),
        ("think_answer", [T + A + "!"], 0.0),
        ("caption", ["<summary>s</summary> <caption>c</caption> " + T + A], 1.0),
        ("caption", ["<caption>c</caption><summary>s</summary>" + T + A], 0.0),
        ("turns", [T + CALL, T + A], 1.0),
        ("turns", [T + "<grounding>{}</grounding>\n", T + A], 1.0),
        ("turns", [CALL, T + A], 0.0),
        ("turns", [T + CALL + CALL, T + A], 0.0),
        ("turns", [T + CALL, T + A + CALL], 0.0),
        ("turns", [T + CALL], 0.0),
        ("think_boxed", [T + r" so \boxed{7}."], 1.0),
        ("think_boxed", [r"< think >a< / think > \boxed{7}"], 1.0),
        ("think_boxed", [r"\boxed{7}"], 0.0),
        ("think_boxed", [T + r"\boxed{7"], 0.0),
        ("think_answer", [T + T + A], 1.0),
        ("think_answer", ["<think><answer></think></answer>"], 0.0),
        ("balanced", [T + CALL, T + A], 0.0),
        ("balanced", ["<think>" + T + A], -1.0),
        ("balanced", [T + "<answer>7"], -1.0),
        ("boxed_once", [T + r"\boxed{7}"], 0.0),
        ("boxed_once", [T + "7"], -1.0),
        ("boxed_once", [T + r"\boxed{7} \boxed{8}"], -1.0),
        ("boxed_once", [r"<think>\boxed{7}</think>"], -1.0),
    ],
)
def test_formats(kind, texts, value):
    trajectory = Trajectory(question_id="q", turns=[Turn(role="assistant", text=text) for text in texts])
    assert formats.FORMATS[kind](trajectory) == value


@pytest.mark.parametrize(
    ("unit", "start"),
    [
        ("a(", ""),
        ("answer is ", ""),
        (" ", "the answer is x"),
        ("</think>\\boxed{", "<think>"),
        ("(A) ", ""),
        ("**a** ", ""),
        ("is so ", "x = "),
        ("</think><answer></answer>", "<think>"),
        ("</summary><caption></caption><think></think>", "<summary>"),
    ],
)
def test_no_text_of_a_policy_takes_long_to_read(unit, start):
    text = start + unit * (200_000 // len(unit)) + "x"
    turns = [Turn(role="assistant", text=text)]
    trajectory = Trajectory(question_id="q", turns=turns, stop_reason=StopReason.NO_ACTION)
    started = time.process_time()
    untagged(trajectory)
    for kind in ("think_answer", "caption", "think_boxed"):
        assert formats.FORMATS[kind](trajectory) == 0.0
    func_seq(text, ["change_size(1, small)"])
    letter(text, ("a cat", "a dog"))
    assert not equal(text, "7", lambda a, b: False)
    assert time.process_time() - started < 2.0  # each takes some 10 ms; what backtracks takes minutes


def test_an_answer_that_is_too_long_is_wrong_and_badly_formed():
    settings = RewardsConfig(
        weights=RewardWeightsConfig(accuracy=1, format=1), format="balanced", max_answer_chars=10
    )
    (trajectory,) = score_group(group(episode("7" * 10), answers=["7" * 10]), settings).trajectories
    assert trajectory.rewards["accuracy"] == 0.0
    assert (trajectory.rewards["format"], trajectory.reward) == (-1.0, -1.0)


# -- sequences of operations ---------------------------------------------------------------------------------


def chain(*ops: str | Action, think_last: bool = False, status: str = "ok") -> Trajectory:
    turns = []
    for number, op in enumerate(ops):
        action = op if isinstance(op, Action) else Action(op=op, arguments={"language": str(number)})
        turns.append(Turn(role="assistant", text=CALL, action=action))
        turns.append(Turn(role="tool", observation=Observation(status=status)))
    turns.append(Turn(role="assistant", text=(T if think_last else "") + A))
    return Trajectory(question_id="q", group_id="g", turns=turns, answer="7", stop_reason=StopReason.ANSWER)


POINT = Action(op="segment_object_at", arguments={"point": [0.5, 0.5]})


@pytest.mark.parametrize(
    ("trajectory", "value"),
    [
        (chain(), 0.0),
        (chain("zoom_in"), 0.0),
        (chain("zoom_in", "read_text"), 0.2),
        (chain(POINT, "get_properties"), 0.2),
        (chain(POINT, "track_object"), 0.2),
        (chain("read_text", think_last=True), 0.2),
        (chain("zoom_in", "zoom_in"), -0.3),
        (chain(Action(op="zoom_in"), Action(op="zoom_in")), (-0.5 - 0.3) / 2),
        (chain(Action(op="read_text"), Action(op="read_text")), -0.5),
        (chain("get_properties"), -0.3),
        (chain("get_properties", POINT), (-0.3 - 0.3) / 2),
        (chain(Action(op="get_properties", arguments={"box": [0, 0, 1, 1]})), 0.0),
        (chain(*["track_object"] * 4), max(-1.0, (-0.3 * 3 - 1.2) / 4)),
    ],
)
def test_coherence(trajectory, value):
    assert coherence(trajectory)[0] == pytest.approx(value)


@pytest.mark.parametrize(
    ("states", "value"),
    [
        ([[1, 0], [0.5, math.sqrt(0.75)]], 0.3),
        ([[1, 0], [1, 0.01]], -0.2),
        ([[1, 0], [0, 1]], -0.3),
        ([[1, 0], [0.8, 0.6]], 0.0),
    ],
)
def test_coherence_depends_on_the_similarity_of_states(states, value):
    assert coherence(chain("zoom_in"), states)[0] == pytest.approx(value)


PICTURE = Question(id="q", question="?", media=[Media(id="img0", uri="a.png")])
CLIP = Question(id="q", question="?")
ERRORS = [Turn(role="assistant", error=e) for e in ("out_of_range", "out_of_range", "bad_json", "unknown_op")]


@pytest.mark.parametrize(
    ("trajectory", "question", "counts", "penalty"),
    [
        (chain("zoom_in"), PICTURE, {}, 0.0),
        (chain(*["zoom_in"] * 5), PICTURE, {"overuse_zoom_in": 2}, -0.2),
        (
            chain("track_object"),
            PICTURE,
            {"missing_prerequisite_track_object": 1, "track_on_static_image": 1},
            -0.3,
        ),
        (chain("get_properties"), CLIP, {"missing_prerequisite_get_properties": 1}, -0.1),
        (chain(POINT, "get_properties", "track_object"), CLIP, {}, 0.0),
        (
            chain(POINT, "get_properties", status="error"),
            CLIP,
            {"missing_prerequisite_get_properties": 1},
            -0.1,
        ),
        (
            Trajectory(question_id="q", turns=ERRORS),
            PICTURE,
            {"out_of_bounds_coordinates": 2, "invalid_operation": 2, "missing_answer": 1},
            -0.05 * 2 - 0.5 * 2 - 0.1,
        ),
    ],
)
def test_misuse_is_counted_by_name(trajectory, question, counts, penalty):
    assert violations(trajectory, question) == counts
    assert misuse(counts) == pytest.approx(penalty)


def test_misuse_is_a_metric():
    metrics = reward_metrics([score_group(group(chain(*["zoom_in"] * 5)), only("tool_misuse"))])
    assert metrics["reward/tool_misuse"] == pytest.approx(-0.2)
    assert metrics["misuse/overuse_zoom_in"] == 2.0


def test_metrics_hold_raw_and_weighted_terms_and_causes_of_mixed_questions():
    unlabelled = group(episode("7"), answers=None)
    metrics = reward_metrics(
        [score_group(group(episode("7"), episode("1")), ALL), score_group(unlabelled, ALL)]
    )
    assert metrics["reward/accuracy"] == metrics["reward_weighted/accuracy"] == 0.5
    assert (metrics["reward/format"], metrics["reward_weighted/format"]) == (1.0, 0.5)
    expected = (pytest.approx(1.0), pytest.approx(1 / 3))
    assert (metrics["reward/total"], metrics["unscored/no_truth"]) == expected
    assert reward_metrics([]) == {}
