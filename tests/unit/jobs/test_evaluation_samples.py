"""Several samples per question, accuracies by tool use and split, and another model's answers from a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import get_args

import pytest
from command_line import job_of
from PIL import Image

from pixelis.config import RewardsConfig, load, parse
from pixelis.config.evaluate import System
from pixelis.errors import BadInput, MissingFile
from pixelis.evaluation import foreign_answers, outputs, table
from pixelis.evaluation.metrics import evaluation_metrics
from pixelis.evaluation.samples import breakdown, count_errors, pass_at, sample_metrics, seed_metrics
from pixelis.evaluation.statistics import compare
from pixelis.jobs import evaluate, evaluate_api, evaluation_arms
from pixelis.records import Action, Group, Observation, Question, StopReason, Trajectory, Turn
from pixelis.rewards.services import Services
from pixelis.rewards.terms import score_group


@pytest.fixture(scope="module")
def services():
    services = Services(RewardsConfig())
    yield services
    services.close()


def group(
    name: str, answers: list[str | None], truth: str | None = "1/2", operations: int = 0, split: str = "test"
) -> Group:
    question = Question(id=name, question="?", answers=truth and [truth], scorer="math", split=split)
    trajectories = [
        Trajectory(id=f"{name}-{i}", question_id=name, group_id=name, answer=answer)
        for i, answer in enumerate(answers)
    ]
    for trajectory in trajectories:
        trajectory.turns = [Turn(role="tool", observation=Observation(status="ok"))] * operations
        trajectory.stop_reason = StopReason.LENGTH if trajectory.answer is None else StopReason.ANSWER
    return Group(id=name, question=question, trajectories=trajectories)


def scored_all(groups: list[Group], services: Services) -> list[Group]:
    return [score_group(g, RewardsConfig(), services=services) for g in groups]


def rates(parts: dict) -> dict:
    return {name: (part["accuracy"], part["n"]) for name, part in parts.items()}


def test_avg_pass_and_maj_at_k(services):
    groups = [
        group("a", ["1/2", "0.5", "3", "3"]),  # the majority is a tie, the first wins
        group("b", ["4", "4.0", "0.5", "1/2", r"\frac{8}{2}"][:4]),
        group("c", ["4", "4.0", r"\frac{8}{2}", "0.5"]),  # three spellings of the same wrong answer
        group("d", [None, None, None, None]),
        group("e", ["1", "1", "1", "1"], truth=None),  # not scored
    ]
    result = sample_metrics(scored_all(groups, services), RewardsConfig(), services)
    expected = {"1": pytest.approx(1.25 / 4), "2": pytest.approx((5 / 6 + 5 / 6 + 1 / 2) / 4), "4": 0.75}
    assert result.pop("pass") == expected
    intervals = result.pop("ci95@k")
    for name in ("avg@k", "pass@k", "maj@k"):
        low, high = intervals[name]
        assert 0 <= low <= result[name] <= high <= 1
    expected = {"k": 4, "avg@k": pytest.approx((0.5 + 0.5 + 0.25 + 0) / 4), "pass@k": 0.75, "maj@k": 0.25}
    assert result == expected
    assert sample_metrics(scored_all([group("a", ["1/2"])], services), RewardsConfig(), services) == {}


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n, right, k in itertools.product(range(1, 6), range(6), range(1, 6)):
        if right <= n and k <= n:
            subsets = list(itertools.combinations([i < right for i in range(n)], k))
            assert pass_at(right, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_accuracy_with_and_without_operations_and_by_split(services):
    groups = [
        group("a", ["1/2", "3"], operations=2, split="id"),
        group("b", ["3", "3"], split="ood"),
        group("c", ["1/2"], split="ood"),
    ]
    result = breakdown(scored_all(groups, services))
    assert rates(result["splits"]) == {"id": (0.5, 2), "ood": (pytest.approx(1 / 3), 3)}
    operations = {name: result[name] for name in ("with_operations", "without_operations")}
    assert rates(operations) == {"with_operations": (0.5, 2), "without_operations": (pytest.approx(1 / 3), 3)}
    for scores in operations.values():
        assert scores["ci95"][0] <= scores["accuracy"] <= scores["ci95"][1]
    assert "tasks" not in result
    assert "lengths" not in result


def test_accuracy_by_the_number_of_turns_and_the_share_that_a_limit_stopped(services):
    groups = [group("a", ["1/2", "3", None, None])]
    for trajectory, turns in zip(groups[0].trajectories, (1, 2, 2, 3), strict=True):
        trajectory.turns = [Turn(role="assistant", text="...")] * turns
    scored = scored_all(groups, services)
    assert rates(breakdown(scored)["lengths"]) == {
        "1 turn": (1.0, 1),
        "2 turns": (0.0, 2),
        "3 turns": (0.0, 1),
    }
    lines = list(table.lines(evaluation_arms.summary_of(parse({}), "v", scored, services)))
    assert any("stopped by a limit" in line and "0.500" in line and "length 2" in line for line in lines)


def test_seeds_are_compared_on_the_same_questions(services):
    groups = [group("a", ["1/2", "3", "1/2", "1/2"]), group("b", ["3", "3", "1/2", "3"])]
    scored = scored_all(groups, services)
    result = seed_metrics(scored, [42, 7], 2)
    assert rates(result["seeds"]) == {"42": (0.25, 4), "7": (0.75, 4)}
    assert (result["seed_mean"], result["seed_std"]) == (0.5, pytest.approx(0.125**0.5))
    assert seed_metrics(scored, [42], 4) == {}


def test_the_table_shows_intervals_seeds_and_paired_differences(services):
    groups = [group(f"q{i}", ["1/2", "3"] if i % 2 else ["1/2", "1/2"], operations=i % 3) for i in range(12)]
    for i, g in enumerate(groups):
        g.question.meta["category"] = "near" if i < 6 else "far"
    scored, config = scored_all(groups, services), parse({})
    summary = evaluation_arms.summary_of(config, "v", scored, services, [1, 2], 1)
    arm = evaluation_arms.Arm("v", summary, scored, [])
    wrong = dict.fromkeys(arm.correct, 0.0)
    summary |= {
        "direct": evaluation_arms.summary_of(config, "d", scored, services),
        "operations_gain": compare(arm.correct, wrong),
    }
    summary["baseline"] = compare(arm.correct, arm.correct)
    shown = list(table.lines(summary))
    assert shown[0].startswith("v: accuracy 0.750 [0.6")
    assert shown[0].endswith("on 12 questions, 24 episodes")
    text = {line[2:].split("  ")[0].strip(): line for line in shown[1:]}
    assert "1.000 [" in text["pass@2"]
    assert text["seeds"].endswith("0.750 +- 0.354  (1: 1.000, 2: 0.500)")
    assert "[" in text["far"]
    assert "[" in text["used operations"]
    assert "+0.750 [+0.6" in text["gain by operations"]
    assert text["minus baseline"].endswith("+0.000 [+0.000, +0.000], p 1 on 12 questions in pairs")
    assert 0 < summary["operations_gain"]["p"] < 0.01


def test_an_evaluation_in_which_nobody_answered_says_so(services, capsys):
    scored = scored_all([group("a", [None, None]), group("b", ["3", None])], services)
    summary = evaluation_arms.summary_of(parse({}), "v", scored, services)
    assert summary["answered"] == 1
    evaluate.show(summary)
    assert "warning: 3 of 4 episodes gave no answer" in capsys.readouterr().err
    wrong = scored_all([group("c", ["3"])], services)
    evaluate.show(evaluation_arms.summary_of(parse({}), "v", wrong, services))
    assert capsys.readouterr().err == "", "a wrong answer is one"


def test_scores_by_question_are_written_and_compared_with_an_earlier_evaluation(services, tmp_path):
    groups = [group("a", ["1/2", None]), group("b", ["3", "1/2"]), group("c", ["3", "3"], truth=None)]
    scored, config = scored_all(groups, services), parse({})
    arm = evaluation_arms.Arm("v", evaluation_arms.summary_of(config, "v", scored, services), scored, [])
    evaluation_arms.save(config, tmp_path, arm)
    rows = [json.loads(line) for line in (tmp_path / "scores-v.jsonl").read_text().splitlines()]
    assert [(row["id"], row["answers"], row["scores"]) for row in rows] == [
        ("a", ["1/2", None], [1.0, 0.0]),
        ("b", ["3", "1/2"], [0.0, 1.0]),
        ("c", ["3", "3"], [None, None]),
    ]
    assert rows[2]["unscored"] == ["no_answer_key"] * 2 or all(rows[2]["unscored"])
    better = scored_all([group(name, ["1/2"]) for name in "ab"], services)
    summary = evaluation_arms.summary_of(config, "new", better, services)
    other = evaluation_arms.Arm("new", summary, better, [])
    expected = {"mean": 0.5, "ci95": [0.5, 0.5], "n": 2, "p": 0.5}
    assert evaluation_arms.compare_with(str(tmp_path), other) == expected
    rows[0]["answers"] = ["one\u2028two\x85"]  # they end a line of text, but not one of JSON
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "scores-v.jsonl").write_text(text, encoding="utf-8")
    assert evaluation_arms.compare_with(str(tmp_path), other)["n"] == 2
    with pytest.raises(MissingFile):
        evaluation_arms.compare_with(str(tmp_path / "none"), other)
    (tmp_path / "scores-new.jsonl").write_text("{}")
    with pytest.raises(BadInput, match="no file of scores"):
        evaluation_arms.compare_with(str(tmp_path), other)


def test_accuracy_by_category_and_the_files_of_other_systems(services):
    groups = [group("vstar-a", ["1/2", "3"]), group("vstar-b", ["1/2", "1/2"]), group("vstar-c", [None, "4"])]
    categories = "direct_attributes", "relative_position", "relative_position"
    for g, category in zip(groups, categories, strict=True):
        g.question.meta["category"], g.question.task = category, "vstar"
        for t in g.trajectories:
            t.turns = [
                Turn(role="user", text="?"),
                Turn(role="assistant", text=f"<answer>{t.answer}</answer>"),
            ]
    scored = scored_all(groups, services)
    result = breakdown(scored)["categories"]
    assert rates(result) == {"direct_attributes": (0.5, 2), "relative_position": (0.5, 4)}
    scored[0].question.meta["category"] = ["direct_attributes", "hard"]
    assert rates(breakdown(scored)["categories"])["hard"] == (0.5, 2), (
        "a question may have several categories"
    )
    scored[0].question.meta["category"] = "direct_attributes"
    answers = {t.id: t.answer for g in scored for t in g.trajectories}
    written = {}
    for system in get_args(System):
        written |= outputs.files(system, "v", scored, answers, "models/m")
    metric = {"benchname": "vstar", "pass1": 0.5, "ncorrect": 1.5, "ntotal": 3, "modelpath": "models/m"}
    assert json.loads(written["metrics_v.json"]) == [metric]
    rows = [json.loads(line) for line in written["sample.eval_v.jsonl"].splitlines()]
    assert [row["correctness"] for row in rows] == [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert rows[0]["solutions"] == ["<answer>1/2</answer>", "<answer>3</answer>"]
    r1_v = json.loads(written["r1_v_v.json"])
    assert (r1_v["accuracy"], len(r1_v["results"]), r1_v["results"][1]["extracted_answer"]) == (50.0, 6, "3")
    expected = {"direct_attributes": 0.5, "relative_position": 0.5, "overall": 0.5}
    assert json.loads(written["final_acc_v.json"]) == expected
    assert len(written["result_v.jsonl"].splitlines()) == 6
    stats = json.loads(written["mini_o3-v/stats.json"])
    assert [(row["doc_id"], row["pass_at_k"]) for row in stats[:2]] == [("vstar-a", 0.5), ("vstar-b", 1.0)]
    first, _ = stats[0]["rollouts"]
    assert first == {"output": "<answer>1/2</answer>", "score": 1.0, "format_reward": 1.0, "acc_reward": 1.0}
    assert json.loads(written["mini_o3-v/metrics.json"]) == {"val/test_score/vstar/total": 0.5}


def test_files_of_other_systems_name_the_benchmark_and_pixel_reasoners_bonus_and_cost(services):
    groups = [group("vstar-direct-1", ["1/2"]), *(group(name, ["3"]) for name in ("infovqa-9", "17", "x-1"))]
    groups[0].question.task, groups[0].question.meta = "search", {"source": "vstar", "original_id": "1"}
    groups[3].question.task = "own"
    call = Turn(role="assistant", text="c", action=Action(op="zoom_in", arguments={"box": [0, 0, 0.5, 0.5]}))
    seen = Turn(role="tool", observation=Observation(status="ok", id="obs1"))
    other = groups[1].trajectories[0]
    groups[1].trajectories = [
        other.model_copy(update={"id": f"t{calls}", "turns": [call, seen] * calls}) for calls in (3, 0, 0, 0)
    ]
    scored, written = scored_all(groups, services), {}
    for system in ("pixel_reasoner", "mini_o3"):
        written |= outputs.files(system, "v", scored, {}, "m")
    metrics = json.loads(written["metrics_v.json"])
    assert [row["benchname"] for row in metrics] == ["infovqa", "own", "v", "vstar"]
    assert "val/test_score/vstar/total" in json.loads(written["mini_o3-v/metrics.json"])
    rows = [json.loads(line) for line in written["sample.eval_v.jsonl"].splitlines()]
    # its code: max(0.3 - RaPR, 0) / 2 / RaPR * 0.25, and -0.05 for each call but the first
    assert rows[1]["curiosity"] == pytest.approx([0.05 / 2 / 0.25 * 0.25, 0, 0, 0])
    assert rows[1]["penalty"] == pytest.approx([-0.1, 0, 0, 0])


def test_the_trajectory_file_of_mini_o3_has_each_turn_and_the_errors() -> None:
    failed = Observation(status="error", code="bad_box", text="x")
    turns = [
        Turn(role="system", text="You search."),
        Turn(role="user", text="Which?"),
        Turn(role="assistant", text="<grounding>{}</grounding>"),
        Turn(role="tool", text="ERROR: bad_box", observation=failed),
        Turn(role="assistant", text="<grounding>..</grounding>"),
        Turn(role="tool", text="Observation 1", observation=Observation(status="ok", id="obs1")),
        Turn(role="assistant", text="<answer>7</answer>"),
    ]
    question = Question(id="../d/1", question="Which?", answers=["7"])
    answered = {"answer": "7", "stop_reason": StopReason.ANSWER}
    episode = Trajectory(question_id=question.id, group_id="g", turns=turns, **answered)
    played = Group(id="g", question=question, trajectories=[episode])
    written = outputs.files("mini_o3", "v", [played], {}, "m")
    (path,) = [path for path in written if path.endswith("traj.jsonl")]
    assert path.startswith("mini_o3-v/")
    assert ".." not in path
    assert path.count("/") == 2
    assert [json.loads(line) for line in written[path].splitlines()] == [
        {"doc_id": "../d/1", "initial_prompt": "Which?", "ground_truth": "7"},
        {"turn_idx": 0, "text_output": "<grounding>{}</grounding>"},
        {"error_info": "ERROR: bad_box"},
        {"turn_idx": 1, "text_output": "<grounding>..</grounding>"},
        {"turn_idx": 2, "text_output": "<answer>7</answer>"},
    ]


def test_the_evaluation_of_several_sets_during_training_counts_by_its_mean():
    summary = {"rapr": 1.0, "tool_error_rate": 0.0, "turns": 2.0}
    metrics = evaluation_metrics({"id": {**summary, "accuracy": 0.9}, "ood": {**summary, "accuracy": 0.5}})
    assert metrics["evaluate/accuracy"] == pytest.approx(0.7)
    assert (metrics["evaluate/accuracy_id"], metrics["evaluate/accuracy_ood"]) == (0.9, 0.5)
    assert evaluation_metrics({"": {**summary, "accuracy": None}}).keys() == {
        f"evaluate/{key}" for key in summary
    }


@pytest.mark.parametrize(
    ("job", "more", "opened"),
    [
        ("sft", ["sft.evaluate_every=1", "sft.evaluate_episodes=1"], True),
        ("sft", ["sft.evaluate_every=1"], False),
        ("rft", ["rft.evaluate_first=true"], True),
        ("rft", [], False),
        ("evaluate", [], True),
    ],
)
def test_a_dry_run_opens_the_sets_of_evaluations_that_take_place(job, more, opened):
    settings = load(None, ["evaluate.sets={id: 'cards:?split=test', ood: 'cards:?split=test&seed=2'}", *more])
    keys = [key for key, _, _ in job_of(job).inputs(settings) if "evaluate" in key]
    assert keys == (["evaluate.sets.id", "evaluate.sets.ood"] if opened else [])


def test_names_of_picture_folders_do_not_lead_out():
    names = ["q-1.a", "../../etc/x", "a/b", "a_b", ".", "", "é" * 300]
    files = [outputs.file_name(name) for name in names]
    assert files[0] == "q-1.a"
    assert all("/" not in file and not file.startswith(".") and 0 < len(file) < 100 for file in files)
    assert len(set(files)) == len(names)


ROWS = [
    {"id": 1, "image": "a.png", "problem": "How many?", "solution": "<answer>7</answer>", "answer": "7"},
    {"id": 2, "image": "a.png", "problem": "How many?", "solution": "<answer>3</answer>", "answer": "3"},
]
PREDICTIONS = ["<think>so</think><answer>7</answer>", "The answer is 4."]


def test_another_models_answers_are_scored_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    rows = [{**row, "pred": text} for row, text in zip(ROWS, PREDICTIONS, strict=True)]
    (tmp_path / "count.json").write_text(json.dumps(rows))
    file = f"{tmp_path}/count.json"
    keys = [f"evaluate.answers={file}", f"data.evaluate={file}?format=reason_rft", "rewards.preset=rr-count"]
    config = load(None, keys)
    summary = evaluate_api.score_answers(config, tmp_path)
    assert (summary["accuracy"], summary["n"]) == (0.5, 2)
    written = json.loads((tmp_path / "count_with_score.json").read_text())
    assert [row["score"] for row in written] == [1.0, 0.0]
    assert [row["extracted_answer"] for row in written] == ["7", "4"]
    assert all(row["pred"] == text for row, text in zip(written, PREDICTIONS, strict=True))
    evaluate.show(summary)
    assert "accuracy 0.500" in capsys.readouterr().out


def test_published_files_of_answers_by_id_are_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"question": "Which?", "choices": ["red", "blue"], "split": "test"}
    question |= {"grade": "grade1", "subject": "natural science"}
    problems = {str(i): {**question, "answer": i % 2} for i in range(4)}
    (tmp_path / "problems.json").write_text(json.dumps(problems))
    (tmp_path / "pid_splits.json").write_text(json.dumps({"test": list(problems)}))
    answers = str(tmp_path / "gpt3.json")
    config = parse({"evaluate": {"answers": answers}, "data": {"evaluate": f"scienceqa:{tmp_path}"}})
    numbers = {"acc": 75.0, "results": {"0": 0, "1": 1, "2": 0, "3": -1}, "outputs": {}}  # of ScienceQA
    texts = {"0": "A", "1": "The answer is (B).", "2": "red", "3": "?"}  # of MM-Vet and MMMU
    for answers in (numbers, texts):
        (tmp_path / "gpt3.json").write_text(json.dumps(answers))
        assert evaluate_api.score_answers(config, tmp_path)["accuracy"] == 0.75
    rows = [json.loads(line) for line in (tmp_path / "scores-gpt3.jsonl").read_text().splitlines()]
    assert [row["scores"] for row in rows] == [[1.0], [1.0], [1.0], [0.0]]
    (tmp_path / "gpt3.json").write_text(json.dumps({"0": ["A"]}))
    with pytest.raises(BadInput) as error:
        evaluate_api.score_answers(config, tmp_path)
    assert error.value.code == "no_output"
    (tmp_path / "gpt3.json").unlink()
    with pytest.raises(MissingFile):
        evaluate_api.score_answers(config, tmp_path)


def test_errors_of_counts(services) -> None:
    groups = [group("a", ["9", "seven cups", None], truth="7"), group("b", ["3", "4", "3"], truth="3")]
    for g in groups:
        g.question.scorer = "count"
    answers = {t.id: t.answer for g in groups for t in g.trajectories}
    assert count_errors(groups, answers) == {
        "count_errors": {"mae": 0.75, "rmse": pytest.approx((5 / 4) ** 0.5), "n": 4}
    }
    groups[0].question.scorer = groups[1].question.scorer = "math"
    assert count_errors(groups, answers) == {}


def test_answers_and_questions_must_fit() -> None:
    questions = [Question(id=str(i), question="?", answers=["7"]) for i in range(2)]
    by_id = [{"id": "1", "pred": "a"}, {"id": "0", "pred": "b"}, {"id": "0", "pred": "c"}]
    in_order = [{"model_output": "a"}, {"model_output": "b"}]
    for rows, expected in ((by_id, [["b", "c"], ["a"]]), (in_order, [["a"], ["b"]])):
        groups = foreign_answers.episodes(rows, questions)
        assert [[t.turns[0].text for t in g.trajectories] for g in groups] == expected
    for rows, code in (
        ([{"id": "0", "text": "a"}], "no_output"),
        ([{"id": "7", "pred": "a"}], "unpaired"),
        ([{"id": "0", "pred": "a"}], "unpaired"),
    ):
        with pytest.raises(BadInput) as error:
            foreign_answers.episodes(rows, questions)
        assert error.value.code == code
