"""Blind comparisons by people: what they are shown, and the statistics of what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from command_line import pixelis
from rated import group, rate_all, rating, save_evaluation

from pixelis.errors import BadInput
from pixelis.evaluation.agreement import cohen_kappa, fleiss_kappa, icc, icc_interval
from pixelis.evaluation.ratings import RatingFile, RatingKey, analyse, describe, draw_pairs

FLEISS = [
    [0, 0, 0, 0, 14],
    [0, 2, 6, 4, 2],
    [0, 0, 3, 5, 6],
    [0, 3, 9, 2, 0],
    [2, 2, 8, 1, 1],
    [7, 7, 0, 0, 0],
    [3, 2, 6, 3, 0],
    [2, 5, 3, 2, 2],
    [6, 5, 2, 1, 0],
    [0, 2, 2, 3, 7],
]
"""Counts of five classes for ten subjects and fourteen raters; kappa .210
(wikipedia.org/wiki/Fleiss'_kappa).
"""
SHROUT_FLEISS = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]]
"""Table 2 of Shrout and Fleiss 1979, of which ICC(2,1) is .29; its interval in McGraw and Wong 1996."""


def test_agreement_of_published_tables():
    table = [[k for k, count in enumerate(row) for _ in range(count)] for row in FLEISS]
    assert fleiss_kappa(table) == pytest.approx(0.210, abs=5e-4)
    assert icc(SHROUT_FLEISS) == pytest.approx(0.29, abs=5e-3)
    assert icc_interval(SHROUT_FLEISS) == pytest.approx([0.0188, 0.7611], abs=5e-4)


def test_raters_who_always_say_the_same_have_no_measure():
    same = [[1.0, 1.0], [1.0, 1.0]]
    assert (cohen_kappa(same), fleiss_kappa(same), icc(same), icc_interval(same)) == (None, None, None, None)
    assert icc([[1, 1], [5, 5]]) == 1


def evaluations(questions: int = 40) -> tuple[list, list]:
    a = [group(f"q{i}", "cat", zooms=i < questions - 4) for i in range(questions)]
    return a, [group(f"q{i}", "dog") for i in range(2, questions + 2)]


def test_pairs_are_drawn_evenly_over_operations_with_sides_at_random():
    a, b = evaluations()
    key, pairs = draw_pairs(a, b, ("a.jsonl", "b.jsonl"), count=8, seed=3)
    real = [item for item in key.items.values() if not item.is_check]
    assert Counter(item.stratum for item in real) == {"no operation": 4, "zoom_in": 4}
    assert len({item.question for item in real}) == 8
    assert sum(item.is_check for item in key.items.values()) == 1
    for pair in pairs:
        item = key.items[pair.item]
        answers = {"a": "cat", "b": "dog"}
        assert (pair.left.answer, pair.right.answer) == (answers[item.left], answers[item.right])
        assert pair.left.question_id == pair.right.question_id == item.question
    everything = [draw_pairs(a, b, ("a", "b"), 100, seed)[0] for seed in range(3)]
    for drawn in everything:
        assert len({item.question for item in drawn.items.values()}) == 38, "only shared questions"
        lefts = Counter(item.left for item in drawn.items.values() if not item.is_check)
        assert min(lefts.values()) > 8
    assert len({tuple(item.question for item in drawn.items.values()) for drawn in everything}) == 3
    with pytest.raises(BadInput, match="share no answered question"):
        draw_pairs(a[:1], b[5:], ("a", "b"), 5, 0)


def test_results_follow_the_arms_and_not_the_sides():
    key, _ = draw_pairs(*evaluations(), ("sft.jsonl", "rft.jsonl"), 30, seed=1)
    report = analyse(
        key, [rate_all(key, "ann", ["b", "b", "equal"], (2, 4)), rate_all(key, "bob", ["b"], (2, 4))]
    )
    assert (report["questions"], report["preferred"]["a"]) == (30, 0)
    assert report["preferred"]["b"] + report["preferred"]["equal"] == 60
    by_name = {row["name"]: row for row in report["comparisons"]}
    assert by_name["correct"] | {"a": 0, "b": 1, "difference": -1} == by_name["correct"]
    assert by_name["coherence"]["difference"] == -2
    assert all(row["p"] <= row["p_holm"] < 0.001 for row in report["comparisons"])
    assert report["disputed"] == []
    text = "\n".join(describe(report))
    assert "a = sft.jsonl" in text
    assert "ann: 32 items, checks passed 2 of 2, 0 items in less than 30 s" in text


@pytest.mark.slow
def test_raters_who_agree_do_not_narrow_the_interval_of_the_preferred_share():
    key, _ = draw_pairs(*evaluations(60), ("a", "b"), 50, seed=1)
    files = [rate_all(key, rater, ["b", "a", "a"], (5, 5)) for rater in ("ann", "bob", "eve")]
    (low, high), (low3, high3) = (analyse(key, files[:n])["preferred"]["share_a_ci95"] for n in (1, 3))
    assert (low3, high3) == (pytest.approx(low, abs=0.03), pytest.approx(high, abs=0.03))
    always = [rate_all(key, rater, ["a"], (5, 5)) for rater in ("ann", "bob", "eve")]
    low, high = analyse(key, always)["preferred"]["share_a_ci95"]
    assert (low, high) == (pytest.approx(0.929, abs=1e-3), 1.0)  # Wilson, 50 of 50
    undecided = rate_all(key, "ann", ["equal"], (5, 5))
    assert analyse(key, [undecided])["preferred"]["share_a_ci95"] == [0, 1]


@pytest.mark.slow
def test_raters_that_hurry_fail_checks_or_disagree_are_named():
    key, _ = draw_pairs(*evaluations(), ("a", "b"), 10, seed=1)
    careful = rate_all(key, "ann", ["a"], (5, 1))
    careless = []
    for item, of in key.items.items():
        side = {"preference": "left" if of.is_check else "right"}
        careless.append(rating(key, item, "b", (1, 5), seconds=3).model_copy(update=side))
    report = analyse(key, [careful, RatingFile(page=key.page, rater="bob", ratings=careless)])
    (ann, bob) = report["raters"]
    assert (ann["checks_passed"], ann["hasty"]) == (1, 0)
    assert (bob["checks_passed"], bob["hasty"]) == (0, 11)
    assert len(report["disputed"]) == 10
    assert report["agreement"]["correct"]["cohen_kappa"]["value"] == pytest.approx(-1)
    assert "an expert should decide" in "\n".join(describe(report))


def test_ratings_of_another_page_or_twice_by_a_rater_are_refused():
    key, _ = draw_pairs(*evaluations(), ("a", "b"), 10, seed=1)
    file = rate_all(key, "ann", ["a"])
    with pytest.raises(BadInput, match="several files of ann"):
        analyse(key, [file, file])
    with pytest.raises(BadInput, match="rated the page"):
        analyse(key, [file.model_copy(update={"page": "other"})])
    with pytest.raises(BadInput, match="repeated or unknown items"):
        analyse(key, [file.model_copy(update={"ratings": [*file.ratings, file.ratings[0]]})])
    with pytest.raises(BadInput, match="0 questions are rated"):
        analyse(key, [file.model_copy(update={"ratings": []})])


@pytest.mark.slow
def test_the_command_makes_a_blind_page_and_results(capsys, monkeypatch, tmp_path: Path):
    a, b = (
        save_evaluation(tmp_path / name, answer, name == "rft")
        for name, answer in (("sft", "dog"), ("rft", "cat"))
    )
    # Ends a line of text, but not one of JSON
    a.write_text(a.read_text().replace("What is on", "What is on\u2028"))
    out = tmp_path / "page"

    def rate(*arguments: object) -> tuple[int, str, str]:
        return pixelis(capsys, monkeypatch, "rate", *map(str, arguments))

    code, printed, error = rate("page", a, b, "--out", out, "--seed", 5)
    assert (code, error) == (0, "")
    assert "4 questions and 1 attention checks" in printed
    page, key = (out / "page.html").read_text(), RatingKey.model_validate_json((out / "key.json").read_text())
    for secret in ("sft", "rft", "astronaut", "truth", "reward", "policy version"):
        assert secret not in re.sub('base64,[^"]*', "", page)
    assert page.count("data:image/png") + page.count("data:image/jpeg") > 10
    assert "was not kept" not in page
    code, _, error = rate("page", a, b, "--out", out)
    assert (code, "may be with raters" in error) == (2, True)

    (tmp_path / "ann.json").write_text(rate_all(key, "ann", ["b"], (1, 5)).model_dump_json())
    code, printed, _ = rate("results", out, tmp_path / "ann.json")
    assert (code, "4 questions, 1 raters" in printed) == (0, True)
    assert json.loads((out / "ratings.json").read_text())["preferred"]["b"] == 4

    (tmp_path / "bad.json").write_text('{"page": 1}')
    code, _, error = rate("results", out, tmp_path / "bad.json")
    assert (code, "does not hold ratings" in error) == (1, True)
    for image in tmp_path.rglob("images"):
        image.rename(image.with_name("gone"))
    a.write_text(re.sub(r'"uri":"images/[^"]*"', '"uri":""', a.read_text()))
    code, _, error = rate("page", a, b, "--out", tmp_path / "other")
    assert (code, "evaluate.images=true" in error) == (1, True)
