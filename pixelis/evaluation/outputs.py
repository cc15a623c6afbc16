"""Results of an evaluation in the files of other systems."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pixelis.config import RewardsConfig
from pixelis.config.evaluate import System
from pixelis.evaluation.metrics import operation_counts
from pixelis.evaluation.samples import category_of
from pixelis.records import Group, Trajectory
from pixelis.rewards.services import Services
from pixelis.rewards.terms import Context, curiosity_bonus, efficiency

Answers = Mapping[str, str | None]


def files(system: System, name: str, groups: Sequence[Group], answers: Answers, model: str) -> dict[str, str]:
    return _WRITERS[system](name, groups, answers, model)


def file_name(name: str) -> str:
    """``name`` or, because ids come from data sets, its harmless part and a hash."""
    harmless = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:80]
    if harmless and harmless == name:
        return name
    return f"{harmless}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _pixel_reasoner(name: str, groups: Sequence[Group], answers: Answers, model: str) -> dict[str, str]:
    """``metrics_NAME.json``: the mean by benchmark; ``sample.eval_NAME.jsonl``."""
    rows, benchmarks = [], defaultdict[str, list[float]](list)
    code = RewardsConfig(preset="pr-repo")
    for group in groups:
        scored = [t.rewards["accuracy"] for t in group.trajectories if "accuracy" in t.rewards]
        if scored:
            benchmarks[_benchmark(group, name)].append(statistics.fmean(scored))
        counts = [operation_counts(t) for t in group.trajectories]
        context = Context(group, code, Services(code), ())
        rows.append(
            {
                "qids": group.question.id,
                "solutions": [_text(t) for t in group.trajectories],
                "gts": group.question.answers,
                "correctness": [t.rewards.get("accuracy") for t in group.trajectories],
                "n_call": [requested for requested, _ in counts],
                "n_fail": [failed for _, failed in counts],
                "curiosity": [curiosity_bonus(t, context) for t in group.trajectories],
                "penalty": [efficiency(t, context) for t in group.trajectories],
            }
        )
    metrics = [
        {
            "benchname": task,
            "pass1": statistics.fmean(of),
            "ncorrect": sum(of),
            "ntotal": len(of),
            "modelpath": model,
        }
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


def _mini_o3(name: str, groups: Sequence[Group], answers: Answers, model: str) -> dict[str, str]:
    """``mini_o3-NAME/ID/traj.jsonl``, ``stats.json``, ``metrics.json``."""
    folder, written, stats = f"mini_o3-{name}", dict[str, str](), list[dict[str, Any]]()
    scores, rollouts = defaultdict[str, list[float]](list), 0
    for group in groups:
        question, several = group.question, len(group.trajectories) > 1
        for k, t in enumerate(group.trajectories):
            doc_id = f"{question.id}_{k}" if several else question.id
            written[f"{folder}/{file_name(doc_id)}/traj.jsonl"] = _lines(_mini_o3_lines(group, t, doc_id))
            if t.reward is not None:
                scores[_benchmark(group, name)].append(t.reward)
        right = [t.rewards.get("accuracy") == 1.0 for t in group.trajectories]
        stats.append(
            {
                "id": rollouts,
                "doc_id": question.id,
                "input": _prompt(group.trajectories[0]) if group.trajectories else "",
                "ground_truth": _truth(group),
                "data_source": _benchmark(group, name),
                "rollouts": [
                    {
                        "output": _text(t),
                        "score": t.reward,
                        "format_reward": t.rewards.get("format"),
                        "acc_reward": t.rewards.get("accuracy"),
                    }
                    for t in group.trajectories
                ],
                "pass_at_k": statistics.fmean(right) if right else None,
            }
        )
        rollouts += len(group.trajectories)
    metrics = {f"val/test_score/{task}/total": statistics.fmean(of) for task, of in scores.items()}
    return written | {f"{folder}/stats.json": _json(stats), f"{folder}/metrics.json": _json(metrics)}


def _mini_o3_lines(group: Group, trajectory: Trajectory, doc_id: str) -> list[dict[str, Any]]:
    """The question, then each turn of the policy by number, and the error after a refused call."""
    lines: list[dict[str, Any]] = [
        {"doc_id": doc_id, "initial_prompt": _prompt(trajectory), "ground_truth": _truth(group)}
    ]
    number = 0
    for turn in trajectory.turns:
        if turn.is_policy:
            lines.append({"turn_idx": number, "text_output": turn.text})
            number += 1
        elif turn.observation is not None and turn.observation.status == "error":
            lines.append({"error_info": turn.text})
    return lines


def _benchmark(group: Group, name: str) -> str:
    """The annotated set or task, else how the id begins (Pixel-Reasoner), else ``name``."""
    question = group.question
    if {"original_id", "source"} <= question.meta.keys():
        return str(question.meta["source"])
    first, dash, _ = question.id.partition("-")
    return question.task if question.task != "qa" else first if dash else name


def _prompt(trajectory: Trajectory) -> str:
    return next((turn.text for turn in trajectory.turns if turn.role == "user"), "")


def _truth(group: Group) -> str | None:
    return group.question.answers[0] if group.question.answers else None


def _text(trajectory: Trajectory) -> str:
    return "\n".join(turn.text for turn in trajectory.replies)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _lines(rows: Sequence[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


_WRITERS: dict[System, Callable[[str, Sequence[Group], Answers, str], dict[str, str]]] = {
    "pixel_reasoner": _pixel_reasoner,
    "r1_v": _r1_v,
    "deepeyes": _deepeyes,
    "mini_o3": _mini_o3,
}
