"""Whether a policy looks: the causal use of its calls (docs/looking.md), from observations that were measured."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from pixelis.evaluation.statistics import bootstrap_mean
from pixelis.records import REAL, Group, Observation

PERCENTILE = 95
"""Of the uses of an operation's shams: a call below it did not decide its answer."""


def spread(count: int, total: int) -> set[int]:
    """Numbers of ``count`` of ``total`` questions, evenly spread: the first of a set are often of one kind."""
    count = min(count, total)
    return {i * total // count for i in range(count)}


def looking(groups: Sequence[Group]) -> dict[str, Any]:
    """Causal use in nats of the deciding calls, the last ones that were measured of their episodes; empty without any.

    ``n`` calls of ``questions``, their ``mean`` use and its interval ``ci95`` (bootstrap over questions; None for one);
    ``kinds``: mean loss of log-probability by kind of sham; ``sham``: mean absolute use of a sham against the
    others; ``operations``: n, mean and sham of each, ``bar``: the percentile of the shams' uses, and ``unused``:
    share of the calls below it; ``unused`` of all: share below the bars of their operations.
    """
    by_question = defaultdict[str, list[Observation]](list)
    by_operation = defaultdict[str, list[Observation]](list)
    losses = defaultdict[str, list[float]](list)
    for group in groups:
        for trajectory in group.trajectories:
            for call in [o for o in trajectory.observations if o.causal_use is not None][-1:]:
                by_question[group.question.id].append(call)
                by_operation[str(call.data.get("op"))].append(call)
                for kind, value in call.answer_log_probs.items():
                    if kind != REAL:
                        losses[kind].append(call.answer_log_probs[REAL] - value)
    calls = [call for of_question in by_question.values() for call in of_question]
    if not calls:
        return {}
    means = [_mean(of_question) for of_question in by_question.values()]
    operations = {op: _of_operation(of_op) for op, of_op in sorted(by_operation.items())}
    return {
        "n": len(calls),
        "questions": len(means),
        "mean": _mean(calls),
        "ci95": list(bootstrap_mean(means)) if len(means) > 1 else None,
        "kinds": {kind: statistics.fmean(values) for kind, values in sorted(losses.items())},
        "sham": _sham(calls),
        "unused": math.fsum(result["unused"] * result["n"] for result in operations.values()) / len(calls),
        "operations": operations,
    }


def _of_operation(calls: Sequence[Observation]) -> dict[str, Any]:
    shams = [use for call in calls for use in call.sham_uses]
    bar = float(np.percentile(shams, PERCENTILE)) if shams else 0.0
    unused = statistics.fmean((call.causal_use or 0.0) < bar for call in calls)
    return {"n": len(calls), "mean": _mean(calls), "sham": _sham(calls), "bar": bar, "unused": unused}


def _mean(calls: Sequence[Observation]) -> float:
    return statistics.fmean(use for call in calls if (use := call.causal_use) is not None)


def _sham(calls: Sequence[Observation]) -> float | None:
    shams = [abs(use) for call in calls for use in call.sham_uses]
    return statistics.fmean(shams) if shams else None
