"""Metrics of a training batch: raw and weighted reward terms, group difficulty, tool use, stop reasons."""

from __future__ import annotations

from collections.abc import Sequence

from pixelis.evaluation.metrics import operation_counts, summarise
from pixelis.records import Group
from pixelis.rewards.terms import reward_metrics

BINS = ((0.0, "none"), (0.25, "quarter"), (0.5, "half"), (0.75, "three_quarters"), (0.9999, "most"), (1.0, "all"))
"""Upper edges of a group's share of right answers, and what the bin is called."""

NO_MAJORITY = ("no_majority", "tie")
"""Why a rollout of a group that did not agree is unscored."""


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a batch of scored groups; empty for no groups.

    ``group/right_*`` are the shares of groups by their rate of right answers, ``group/saturated`` those that are all right or all
    wrong: they have no gradient from accuracy. ``rollout/calls`` counts requested operations per episode.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        return {}
    summary = summarise(trajectories)
    out = {
        "rollout/rapr": summary["rapr"],
        "rollout/tool_error_rate": summary["tool_error_rate"],
        "rollout/calls": sum(operation_counts(t)[0] for t in trajectories) / len(trajectories),
        "rollout/turns": summary["turns"],
        "rollout/tokens": sum(sum(t.loss_mask()) for t in trajectories) / len(trajectories),
        "rollout/unscored": sum(t.reward is None for t in trajectories) / len(trajectories),
    }
    if summary["accuracy"] is not None:
        out["train/accuracy"] = summary["accuracy"]
    for reason, count in summary["stop_reasons"].items():
        out[f"stop/{reason}"] = count / len(trajectories)
    return out | reward_metrics(groups) | _difficulty(groups) | _votes(groups)


def _votes(groups: Sequence[Group]) -> dict[str, float]:
    """How well the majority does as a label (TTRL, arXiv 2504.16084); what needs a truth is left out where there is none.

    ``vote/label_accuracy``: majorities that are right; ``vote/none``: groups without one; and what ``_against_truth`` tells.
    """
    asked = [g for g in groups if any("majority_vote" in t.rewards or t.unscored in NO_MAJORITY for t in g.trajectories)]
    voted = [[t.rewards for t in g.trajectories if "majority_vote" in t.rewards] for g in asked]
    voted = [rewards for rewards in voted if rewards]
    if not asked:
        return {}
    out = {"vote/none": 1 - len(voted) / len(asked)}
    if voted:
        out["vote/majority_share"] = sum(sum(r["majority_vote"] > 0 for r in rewards) / len(rewards) for rewards in voted) / len(
            voted
        )
    known = [[r for r in rewards if "accuracy" in r] for rewards in voted]
    known = [rewards for rewards in known if rewards]
    if known:
        won = [[r["accuracy"] > 0 for r in rewards if r["majority_vote"] > 0] for rewards in known]
        out["vote/label_accuracy"] = sum(any(right) for right in won) / len(known)
    return out | _against_truth(known, "vote/")


def learnt_votes(groups: Sequence[Group]) -> dict[str, float]:
    """``vote/learnt_*``: what ``_against_truth`` tells of the rollouts that are learnt from, where more have voted."""
    rewards = [[t.rewards for t in g.trajectories if {"majority_vote", "accuracy"} <= t.rewards.keys()] for g in groups]
    return _against_truth([r for r in rewards if r], "vote/learnt_")


def _against_truth(known: list[list[dict[str, float]]], name: str) -> dict[str, float]:
    """Of rollouts' rewards by group: ``reward_accuracy``, rollouts whose reward is as the truth would have it; ``truth_share``,
    rollouts that are right; ``pass_at_n``, groups with one that is.
    """
    if not known:
        return {}
    flat = [(r["majority_vote"] > 0, r["accuracy"] > 0) for rewards in known for r in rewards]
    return {
        f"{name}reward_accuracy": sum(vote == truth for vote, truth in flat) / len(flat),
        f"{name}truth_share": sum(truth for _, truth in flat) / len(flat),
        f"{name}pass_at_n": sum(any(r["accuracy"] > 0 for r in rewards) for rewards in known) / len(known),
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
