"""Metrics of a training batch: raw and weighted reward terms, group difficulty, tool use, stop reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pixelis.evaluation.metrics import calls_of, exploration_efficiency, has_loop, operation_counts, summarise
from pixelis.records import Group
from pixelis.rewards.terms import reward_metrics

BINS = (
    (0.0, "none"),
    (0.25, "quarter"),
    (0.5, "half"),
    (0.75, "three_quarters"),
    (0.9999, "most"),
    (1.0, "all"),
)
"""Upper edges and names of the bins of a group's share of right answers."""

NO_MAJORITY = ("no_majority", "tie")
"""Causes of unscored rollouts in groups without a majority."""


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a batch of scored groups; empty without groups. docs/metrics.md lists them."""
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        return {}
    summary = summarise(trajectories, interval=False)
    calls = [calls_of(t) for t in trajectories]
    out = {
        "rollout/rapr": summary["rapr"],
        "rollout/tool_error_rate": summary["tool_error_rate"],
        "rollout/calls": sum(operation_counts(t)[0] for t in trajectories) / len(trajectories),
        "rollout/loops": sum(map(has_loop, calls)) / len(calls),
        "rollout/exploration": sum(map(exploration_efficiency, calls)) / len(calls),
        "rollout/turns": summary["turns"],
        "rollout/tokens": sum(t.learnt_tokens for t in trajectories) / len(trajectories),
        "rollout/unscored": sum(t.reward is None for t in trajectories) / len(trajectories),
    }
    uses = [use for t in trajectories for o in t.observations if (use := o.causal_use) is not None]
    if uses:
        out["rollout/causal_use"] = sum(uses) / len(uses)
    if summary["accuracy"] is not None:
        out["train/accuracy"] = summary["accuracy"]
    for reason, count in summary["stop_reasons"].items():
        out[f"stop/{reason}"] = count / len(trajectories)
    for name, count in Counter(op for episode in calls for op, _, _ in episode).items():
        out[f"operation/{name}"] = count / len(trajectories)
    return out | reward_metrics(groups) | _difficulty(groups) | _votes(groups)


def _votes(groups: Sequence[Group]) -> dict[str, float]:
    """Quality of the majority vote as a label (TTRL, arXiv 2504.16084)."""
    voting = [
        g
        for g in groups
        if any("majority_vote" in t.rewards or t.unscored in NO_MAJORITY for t in g.trajectories)
    ]
    elected = [g for g in voting if any("majority_vote" in t.rewards for t in g.trajectories)]
    voted = [[t.rewards for t in g.trajectories if "majority_vote" in t.rewards] for g in elected]
    if not voting:
        return {}
    out = {"vote/none": 1 - len(voted) / len(voting)}
    if voted:
        sizes = [len(g.trajectories) for g in elected]
        ratios = [
            sum(r["majority_vote"] >= 1 for r in rewards) / n for rewards, n in zip(voted, sizes, strict=True)
        ]
        means = [sum(r["majority_vote"] for r in rewards) / len(rewards) for rewards in voted]
        out["vote/majority_ratio"] = sum(ratios) / len(ratios)
        out["vote/majority_voting_reward"] = sum(means) / len(means)
    labelled = [scored for rewards in voted if (scored := [r for r in rewards if "accuracy" in r])]
    if labelled:
        right = [any(r["accuracy"] > 0 for r in rewards if r["majority_vote"] > 0) for rewards in labelled]
        out["vote/label_accuracy"] = sum(right) / len(right)
    return out | _against_truth(labelled, "vote/")


def learnt_votes(groups: Sequence[Group]) -> dict[str, float]:
    """``vote/learnt_*``: as ``vote/*`` against the truth, for the rollouts in the batch."""
    rewards = [
        [t.rewards for t in g.trajectories if {"majority_vote", "accuracy"} <= t.rewards.keys()]
        for g in groups
    ]
    return _against_truth([r for r in rewards if r], "vote/learnt_")


def _against_truth(groups: list[list[dict[str, float]]], prefix: str) -> dict[str, float]:
    """Compare the votes with the truth, given the rollouts' rewards by group."""
    if not groups:
        return {}
    flat = [(r["majority_vote"] > 0, r["accuracy"] > 0) for rewards in groups for r in rewards]
    return {
        f"{prefix}reward_accuracy": sum(vote == truth for vote, truth in flat) / len(flat),
        f"{prefix}truth_share": sum(truth for _, truth in flat) / len(flat),
        f"{prefix}pass_at_n": sum(any(r["accuracy"] > 0 for r in rewards) for rewards in groups)
        / len(groups),
    }


def _difficulty(groups: Sequence[Group]) -> dict[str, float]:
    rates = []
    for group in groups:
        scores = [t.rewards["accuracy"] for t in group.trajectories if "accuracy" in t.rewards]
        if scores:
            rates.append(sum(scores) / len(scores))
    if not rates:
        return {}
    bins = dict.fromkeys((name for _, name in BINS), 0)
    for rate in rates:
        bins[next(name for edge, name in BINS if rate <= edge + 1e-9)] += 1
    out = {f"group/right_{name}": count / len(rates) for name, count in bins.items()}
    return out | {"group/saturated": out["group/right_none"] + out["group/right_all"]}
