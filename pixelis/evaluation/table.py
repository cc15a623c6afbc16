"""The table that an evaluation prints: accuracies with their 95 % intervals, and paired comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pixelis.evaluation.clusters import is_notable

PARTS = ("splits", "tasks", "categories", "lengths")
LIMITS = ("over_turn", "over_context", "over_images", "length", "deadline")
"""Reasons for which an episode stops without having ended."""
SCORE_NAMES = {
    "shown": "thing in view",
    "iou": "IoU of the outline",
    "right_object": "right object",
    "read": "characters read",
    "frames_f1": "F1 of the frames",
    "track_iou": "IoU of the track",
}
DETAIL_NAMES = {
    "boundary_f1": "boundary F1",
    "cer": "character error rate",
    "wer": "word error rate",
    "hota": "HOTA",
    "idf1": "IDF1",
    "mota": "MOTA",
    "motp": "MOTP",
}
"""What the scores and details of ``capabilities`` are, in words."""


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a summary with an accuracy: one for the whole, the others indented."""
    low, high = summary["ci95"]
    head = f"{summary['name']}: accuracy {summary['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
    yield f"{head} on {summary['questions']} questions, {summary['n']} episodes"
    if summary.get("truncated"):
        yield "  only the first questions of a larger set: evaluate.questions=0 takes all, as leaderboards do"
    rows = list(_rows(summary))
    width = max((len(name) for name, _ in rows), default=0)
    yield from (f"  {name:<{width}}  {text}" for name, text in rows)


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "k" in summary:
        for name in ("avg@k", "pass@k", "maj@k"):
            yield name.replace("k", str(summary["k"])), _value(summary[name], summary["ci95@k"][name])
    for part in PARTS:
        for value, scores in summary.get(part, {}).items():
            if scores["n"]:
                yield value, f"{_value(scores['accuracy'], scores['ci95'])}  {scores['n']}"
    if "count_errors" in summary:
        errors = summary["count_errors"]
        error = f"mean {errors['mae']:.3f}, root mean square {errors['rmse']:.3f}"
        yield "count errors", f"{error} on {errors['n']} numbers"
    if "seed_mean" in summary:
        names = ", ".join(
            f"{seed}: {scores['accuracy']:.3f}" for seed, scores in summary["seeds"].items() if scores["n"]
        )
        yield "seeds", f"{summary['seed_mean']:.3f} +- {summary['seed_std']:.3f}  ({names})"
    for key, name in (("with_operations", "used operations"), ("without_operations", "used none")):
        if (part := summary[key])["n"] and part["n"] < summary["n"]:
            yield name, f"{_value(part['accuracy'], part['ci95'])}  {part['n']}"
    if "direct" in summary and summary["direct"]["accuracy"] is not None:
        direct = summary["direct"]
        accuracy = _value(direct["accuracy"], direct["ci95"])
        yield "without operations", f"{accuracy}  {direct['n']}, the same questions"
        yield from _difference("gain by operations", summary["operations_gain"])
    if "baseline" in summary:
        yield from _difference("minus baseline", summary["baseline"])
    if "capabilities" in summary:
        result = summary["capabilities"]
        for op, scores in result["operations"].items():
            score = ""
            if "score" in scores:
                score = f"{SCORE_NAMES[scores['score']]} {_value(scores['mean'], scores['ci95'])}, "
            yield op, f"{score}used in {scores['used']:.3f} of {scores['n']}"
            parts = [f"{name} {scores[key]:.3f}" for key, name in DETAIL_NAMES.items() if key in scores]
            if "switches" in scores:
                parts.append(f"{scores['switches']} identity switches")
            if parts:
                yield "", ", ".join(parts)
        order = _value(result["order"]["mean"], result["order"]["ci95"])
        unnecessary = f"{result['unnecessary']:.2f} unnecessary ones by episode"
        yield "expected calls", f"in order in {order}, {unnecessary}"
    if summary.get("error_causes"):
        yield (
            "wrong",
            ", ".join(f"{cause} {count}" for cause, count in summary["error_causes"].items() if count),
        )
    if "clusters" in summary:
        yield from _clusters(summary["clusters"])
    if "looking" in summary:
        yield from _looking(summary["looking"])
    stops = summary["stop_reasons"]
    if exceeded := {name: stops[name] for name in LIMITS if name in stops}:
        share = sum(exceeded.values()) / sum(stops.values())
        yield (
            "stopped by a limit",
            f"{share:.3f} of the episodes: {', '.join(f'{k} {n}' for k, n in exceeded.items())}",
        )
    use = f"{summary['rapr']:.3f} of the episodes, {summary['tool_error_rate']:.3f} of the calls failed"
    yield "pixel reasoning", use
    if summary["unscored"]:
        yield "unscored", ", ".join(f"{cause} {count}" for cause, count in summary["unscored"].items())


def _looking(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    mean = _value(result["mean"], result["ci95"]) if result["ci95"] else f"{result['mean']:.3f}"
    yield "causal use", f"{mean} nats{_beside_shams(result)} calls unused"
    if len(result["operations"]) > 1:
        for op, scores in result["operations"].items():
            yield f"  {op}", f"{scores['mean']:.3f}{_beside_shams(scores)} unused"


def _beside_shams(result: Mapping[str, Any]) -> str:
    sham = f", a sham's {result['sham']:.3f}" if result["sham"] is not None else ""
    return f"{sham}, {result['unused']:.3f} of {result['n']}"


def _clusters(clusters: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Those that are wrong more often than the others."""
    for number, cluster in enumerate(clusters, 1):
        if is_notable(cluster):
            rate = f"wrong {_value(cluster['error_rate'], cluster['ci95'])} of {cluster['questions']}"
            parts = [f"others {cluster['rest_error_rate']:.3f}, p {cluster['p_holm']:.2g} (Holm)"]
            if causes := cluster["causes"]:
                parts.append(f"mostly {max(causes, key=causes.get)}")
            if words := cluster["words"]:
                parts.append(", ".join(word["word"] for word in words))
            yield f"cluster {number}", f"{rate}, {'; '.join(parts)}"
    if not any(map(is_notable, clusters)):
        yield "clusters", f"none of {len(clusters)} is wrong more often than the others (p > .05, Holm)"


def _difference(name: str, pair: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if pair is not None:
        low, high = pair["ci95"]
        difference = f"{pair['mean']:+.3f} [{low:+.3f}, {high:+.3f}], p {pair['p']:.2g}"
        yield name, f"{difference} on {pair['n']} questions in pairs"


def _value(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
