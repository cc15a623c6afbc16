"""Clusters of an evaluation's questions: which are wrong more often than the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pixelis.actors.evaluation_report import choose_wrong
from pixelis.config import parse
from pixelis.errors import BadInput
from pixelis.evaluation import table
from pixelis.evaluation.clusters import EXAMPLES, balanced_vectors, error_clusters, is_notable
from pixelis.evaluation.metrics import summarise
from pixelis.evaluation.samples import breakdown
from pixelis.records import Group, ImageView, Question, StopReason, Trajectory
from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.report import render_report

COLOURS = ("red", "green", "blue")


def group(number: int, text: str, *accuracies: float) -> Group:
    """A question with an episode of each accuracy."""
    id = f"q{number}"
    common = {"question_id": id, "group_id": id, "images": [ImageView(id="img0")]}
    common |= {"answer": f"answer {number}", "stop_reason": StopReason.ANSWER}
    trajectories = [Trajectory(**common, rewards={"accuracy": accuracy}) for accuracy in accuracies]
    question = Question(id=id, question=text, answers=["7"])
    return Group(id=id, question=question, trajectories=trajectories)


def three_kinds(wrong: tuple[int, int, int], each: int = 20) -> tuple[list[Group], np.ndarray]:
    """Questions about red, green and blue things, of which so many are wrong; vectors near the three axes."""
    rng, pairs = np.random.default_rng(0), []
    for kind, (colour, errors) in enumerate(zip(COLOURS, wrong, strict=True)):
        for i in range(each):
            vector = np.eye(3)[kind] + rng.normal(0, 0.02 * (1 + i), 3)
            text = f"Which digit is on the {colour} card?"
            pairs.append((group(kind * each + i, text, float(i >= errors)), vector))
    order = rng.permutation(len(pairs))
    return [pairs[i][0] for i in order], np.stack([pairs[i][1] for i in order]).astype(np.float32)


def test_the_kind_of_question_that_is_wrong_comes_first():
    groups, vectors = three_kinds((2, 14, 1))
    clusters = error_clusters(groups, vectors, 3)
    first, *others = clusters
    assert set(first["ids"]) == {f"q{i}" for i in range(20, 40)}
    assert (first["questions"], first["wrong"], first["error_rate"]) == (20, 14, 0.7)
    assert first["ci95"][0] < 0.7 < first["ci95"][1]
    assert first["rest_error_rate"] == pytest.approx(3 / 40)
    assert first["difference"] == pytest.approx(0.7 - 3 / 40)
    assert first["words"] == [{"word": "green", "share": 1.0, "rest": 0.0}]
    assert first["p"] < first["p_holm"] == pytest.approx(3 * first["p"]), "the smallest of three p values"
    assert [is_notable(cluster) for cluster in clusters] == [True, False, False], (
        "the others are wrong less often"
    )
    assert others[0]["p_holm"] == pytest.approx(
        max(2 * min(c["p"] for c in others), max(c["p"] for c in others))
    )


def test_examples_are_the_wrong_answers_nearest_to_the_centre():
    groups, vectors = three_kinds((0, 14, 0))
    (first, *others) = error_clusters(groups, vectors, 3)
    by_id = {g.question.id: (g, v) for g, v in zip(groups, vectors, strict=True)}
    centre = np.mean([by_id[id][1] for id in first["ids"]], axis=0)
    distances = [float(np.linalg.norm(by_id[id][1] - centre)) for id in first["ids"]]
    assert distances == sorted(distances)
    wrong = [id for id in first["ids"] if by_id[id][0].trajectories[0].rewards["accuracy"] == 0]
    assert first["examples"] == wrong[:EXAMPLES]
    assert [cluster["examples"] for cluster in others] == [[], []]


def test_errors_spread_evenly_make_no_cluster_notable():
    groups, vectors = three_kinds((6, 7, 6))
    clusters = error_clusters(groups, vectors, 3)
    assert not any(map(is_notable, clusters))
    summary = {"name": "x", **summarise(groups), **breakdown(groups), "clusters": clusters}
    assert "none of 3 is wrong more often than the others (p > .05, Holm)" in "\n".join(table.lines(summary))


@given(
    n=st.integers(2, 12),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    share=st.floats(0.05, 0.95),
)
def test_pictures_and_texts_have_their_shares_of_the_variance_whatever_their_scale(n, seed, scale, share):
    rng = np.random.default_rng(seed)
    visual, text = 5 + scale * rng.normal(size=(n, 3)), rng.normal(size=(n, 4))
    vectors = balanced_vectors(list(zip(visual, text, strict=True)), (share, 1 - share))
    variances = vectors.var(0)
    assert variances.sum() == pytest.approx(1)
    assert variances[:-4].sum() == pytest.approx(share)


def test_parts_that_are_missing_or_the_same_separate_nothing():
    same, a, b = np.full(3, 0.1, np.float32), np.array([1.0, 0.0]), np.array([0.0, 1.0])
    vectors = balanced_vectors([(a, same), (b, same), (None, same)], (0.7, 0.3))
    assert not vectors[2].any(), "in the middle"
    assert vectors[0] == pytest.approx(-vectors[1])
    only_text = balanced_vectors([(None, a), (None, b), (None, a)], (0.7, 0.3))
    assert only_text[0] == pytest.approx(only_text[2])
    assert only_text.var(0).sum() == pytest.approx(0.3)
    assert not balanced_vectors([(None, same)] * 4, (0.7, 0.3)).any()


def test_the_table_and_the_page_show_the_clusters_with_pictures():
    groups, vectors = three_kinds((2, 14, 1))
    clusters = error_clusters(groups, vectors, 3)
    summary = {"name": "cards", **summarise(groups), **breakdown(groups), "clusters": clusters}
    text = "\n".join(table.lines(summary))
    assert "cluster 1        wrong 0.700 [0.481, 0.855] of 20, others 0.075, p " in text
    assert "cluster 2" not in text
    picture = np.full((48, 64, 3), 200, np.uint8)
    chosen = choose_wrong(clusters, groups, [None] * len(groups))
    examples = [
        [EpisodePage(g.question, g.trajectories[0], {"img0": picture}) for _, g, _ in of_cluster]
        for of_cluster in chosen
    ]
    page = render_report({"arms": [summary]}, [], [], examples={"cards": examples})
    section = page[page.index("Where <bdi>cards</bdi> is wrong") : page.index("Source of the numbers")]
    assert section.count("data:image/") == sum(len(c["examples"]) for c in clusters) == 7
    assert "Cluster 1: 14 of 20 wrong, 70.0 %" in section
    assert "+62.5 points against all other questions" in section
    assert "“<bdi>green</bdi>” <small>100.0 % against 0.0 %</small>" in section
    for cluster in clusters:
        for id in cluster["examples"]:
            assert f"answer {id[1:]}</bdi>" in section
    assert "Where <bdi>" not in render_report({"arms": [{**summary, "clusters": []}]}, [], [])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"clusters": 1}, "set 2 or more"),
        ({"clusters": 8, "questions": 15}, "questions=16"),
        ({"clusters": 8, "api": {"url": "http://localhost:1/v1"}}, "vectors of a policy"),
        ({"clusters": 8, "answers": "pred.json"}, "vectors of a policy"),
    ],
)
def test_a_configuration_without_vectors_or_questions_is_refused(keys, message):
    with pytest.raises((BadInput, ValidationError), match=message):
        parse({"evaluate": keys})


@pytest.mark.slow
def test_too_few_questions_are_refused():
    with pytest.raises(BadInput, match=r"too few for evaluate\.clusters=3") as caught:
        error_clusters(three_kinds((0, 0, 0))[0][:5], np.eye(5, dtype=np.float32), 3)
    assert "lower evaluate.clusters to 2" in caught.value.fix
