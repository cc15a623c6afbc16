"""Results of an evaluation in the files of other systems, for scripts that read those: Pixel-Reasoner, R1-V, DeepEyes."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pixelis.config.evaluate import System
from pixelis.evaluation.metrics import operation_counts
from pixelis.evaluation.samples import category_of
from pixelis.records import Group, Trajectory

Answers = Mapping[str, str | None]
"""Extracted answer by trajectory."""


def files(system: System, name: str, groups: Sequence[Group], answers: Answers, model: str) -> dict[str, str]:
    """The text of each file by name, for the evaluation ``name`` of ``model``."""
    return _WRITERS[system](name, groups, answers, model)


def _pixel_reasoner(name: str, groups: Sequence[Group], answers: Answers, model: str) -> dict[str, str]:
    """``metrics_NAME.json``: the mean over questions by benchmark (the question's task), and ``sample.eval_NAME.jsonl``."""
    rows, benchmarks = [], defaultdict[str, list[float]](list)
    for group in groups:
        scored = [t.rewards["accuracy"] for t in group.trajectories if "accuracy" in t.rewards]
        if scored:
            benchmarks[group.question.task].append(statistics.fmean(scored))
        counts = [operation_counts(t) for t in group.trajectories]
        rows.append(
            {
                "qids": group.question.id,
                "solutions": [_text(t) for t in group.trajectories],
                "gts": group.question.answers,
                "correctness": [t.rewards.get("accuracy") for t in group.trajectories],
                "n_call": [requested for requested, _ in counts],
                "n_fail": [failed for _, failed in counts],
            }
        )
    metrics = [
        {"benchname": task, "pass1": statistics.fmean(of), "ncorrect": sum(of), "ntotal": len(of), "modelpath": model}
        for task, of in sorted(benchmarks.items())
    ]
    return {f"metrics_{name}.json": _json(metrics), f"sample.eval_{name}.jsonl": _lines(rows)}


def _r1_v(name: str, groups: Sequence[Group], answers: Answers, model: str) -> dict[str, str]:
    """``r1_v_NAME.json``: {accuracy in percent, results}."""
    rows = [
        {
            "question": group.question.question,
            "ground_truth": _truth(group),
            "model_output": _text(t),
            "extracted_answer": answers.get(t.id),
            "is_correct": t.rewards["accuracy"] > 0.5,
        }
        for group in groups
        for t in group.trajectories
        if "accuracy" in t.rewards
    ]
    accuracy = 100 * statistics.fmean(bool(row["is_correct"]) for row in rows) if rows else None
    return {f"r1_v_{name}.json": _json({"accuracy": accuracy, "results": rows})}


def _deepeyes(name: str, groups: Sequence[Group], answers: Answers, model: str) -> dict[str, str]:
    """``result_NAME.jsonl``, and ``final_acc_NAME.json``: accuracy by category and ``overall``."""
    rows, categories = [], defaultdict[str, list[float]](list)
    for group in groups:
        category = category_of(group)
        for t in group.trajectories:
            score = t.rewards.get("accuracy")
            if score is not None:
                for key in filter(None, (category, "overall")):
                    categories[key].append(score)
            rows.append(
                {
                    "question": group.question.question,
                    "answer": _truth(group),
                    "pred_ans": answers.get(t.id),
                    "pred_output": [{"role": turn.role, "content": turn.text} for turn in t.turns],
                    "category": category,
                    "acc": score,
                    "image": next((media.uri for media in group.question.media), None),
                }
            )
    accuracies = {key: statistics.fmean(scores) for key, scores in categories.items()}
    return {f"result_{name}.jsonl": _lines(rows), f"final_acc_{name}.json": _json(accuracies)}


def _truth(group: Group) -> str | None:
    return group.question.answers[0] if group.question.answers else None


def _text(trajectory: Trajectory) -> str:
    return "\n".join(turn.text for turn in trajectory.turns if turn.is_policy)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _lines(rows: Sequence[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


_WRITERS: dict[System, Callable[[str, Sequence[Group], Answers, str], dict[str, str]]] = {
    "pixel_reasoner": _pixel_reasoner,
    "r1_v": _r1_v,
    "deepeyes": _deepeyes,
}
