"""Whether a policy looks: the causal use of its calls (docs/looking.md), from observations that were measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from pixelis.evaluation.statistics import bootstrap_mean
from pixelis.records import REAL, Group, Observation

PERCENTILE = 95
"""Of the shams' uses: a call below it did not decide its answer."""


def looking(groups: Sequence[Group]) -> dict[str, Any]:
    """Causal use of the measured calls in nats; empty without any.

    ``n`` calls of ``questions``, their ``mean`` use and its interval ``ci95`` (bootstrap over questions; None for one);
    ``kinds``: mean loss of log-probability by kind of sham; ``sham``: mean absolute use of a sham against the
    others; ``bar``: the percentile of the shams' uses, and ``unused``: share of the calls below it;
    ``operations``: n, mean and unused of each.
    """
    by_question: dict[str, list[Observation]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            measured = [o for o in trajectory.observations if o.causal_use is not None]
            by_question[group.question.id] += measured
    calls = [observation for of_question in by_question.values() for observation in of_question]
    if not calls:
        return {}
    shams = [use for call in calls for use in call.sham_uses]
    bar = float(np.percentile(shams, PERCENTILE)) if shams else 0.0
    losses, operations = defaultdict[str, list[float]](list), defaultdict[str, list[Observation]](list)
    for call in calls:
        operations[str(call.data.get("op"))].append(call)
        for kind, value in call.answer_log_probs.items():
            if kind != REAL:
                losses[kind].append(call.answer_log_probs[REAL] - value)
    means = [_mean(of_question) for of_question in by_question.values() if of_question]
    return {
        "n": len(calls),
        "questions": len(means),
        "mean": _mean(calls),
        "ci95": list(bootstrap_mean(means)) if len(means) > 1 else None,
        "kinds": {kind: statistics.fmean(values) for kind, values in sorted(losses.items())},
        "sham": statistics.fmean(map(abs, shams)) if shams else None,
        "bar": bar,
        "unused": _unused(calls, bar),
        "operations": {
            op: {"n": len(of_op), "mean": _mean(of_op), "unused": _unused(of_op, bar)}
            for op, of_op in sorted(operations.items())
        },
    }


def _mean(calls: Sequence[Observation]) -> float:
    return statistics.fmean(use for call in calls if (use := call.causal_use) is not None)


def _unused(calls: Sequence[Observation], bar: float) -> float:
    return statistics.fmean((call.causal_use or 0.0) < bar for call in calls)
