"""Explains in sentences why a run, an evaluation or a service achieves nothing, and names what helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pixelis.telemetry.events import as_number

KL_LIMIT = 0.1
"""KL in nats a token above which an alarm is raised."""
KL = {
    "policy/kl": "from the starting policy",
    "policy/kl_in_reward": "from the starting policy",
    "policy/approx_kl": "from the policy that sampled the rollouts",
}
FUTILE_STEPS = 3
"""Futile steps in a row that raise an alarm: one or two occur in good runs."""
REPEAT_STEPS = 50
"""Steps after which an alarm that still holds is repeated."""
MIN_VOTES = 100
"""Votes in a row below the gate after which a service counts as learning nothing."""
MIN_SHARE = 0.05
"""Share of the episodes from which an end is named."""
SFT = "SFT first, or longer, on demonstrations of the protocol"
ENDS = {
    "length": ("were cut at their token limit", "longer turns (dialogue.max_turn_tokens)"),
    "no_action": ("had neither a call nor an answer", SFT),
    "over_turn": (
        "used up their turns",
        "more turns (dialogue.max_turns, in evaluations dialogue.max_turns_test)",
    ),
    "over_context": (
        "used up their context",
        "a larger dialogue.max_context, or smaller pictures (dialogue.input.max_pixels)",
    ),
    "over_images": ("used up their pictures", "a larger dialogue.max_images"),
    "deadline": ("ran out of time", "a longer engine.rollout_timeout_s"),
    "error": ("failed", "the errors in the logs of the generators"),
}
"""Ends of an episode without an answer: what happened, and what helps."""


class Alarms:
    """Alarms from the metrics of each step of a run. operations: whether the policy is offered any."""

    def __init__(self, operations: bool):
        self.operations = operations
        self.futile: deque[Mapping[str, Any]] = deque(maxlen=REPEAT_STEPS)
        self.raised: dict[str, int] = {}

    def check(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        alarms = {}
        if is_futile(metrics):
            self.futile.append(metrics)
        else:
            self.futile.clear()
        if len(self.futile) >= FUTILE_STEPS:
            alarms["futile"] = f"the last {len(self.futile)} steps taught nothing: {_of_steps(self.futile)}"
        if self.operations and metrics.get("rollout/calls") == 0:
            alarms["calls"] = "no episode of this batch called an operation"
        for key, origin in KL.items():
            if (value := as_number(metrics.get(key)) or 0.0) > KL_LIMIT:
                text = (
                    f"the policy is {value:.2g} nats a token away {origin} ({key} is above {KL_LIMIT}). "
                    "If it answers worse, "
                )
                alarms[f"{key}, {value > 10 * KL_LIMIT}"] = f"{text}lower learner.lr, or raise rft.loss.kl"
        new = {
            kind: text
            for kind, text in alarms.items()
            if step - self.raised.get(kind, -REPEAT_STEPS) >= REPEAT_STEPS
        }
        self.raised |= dict.fromkeys(new, step)
        return list(new.values())


def is_futile(step: Mapping[str, Any]) -> bool:
    """Whether a step had no gradient, or none of a reward: all advantages are 0 and nothing was replayed."""
    return step.get("policy/grad_norm") == 0 or (
        step.get("advantage/abs_mean") == 0 and not step.get("group/replayed")
    )


def of_run(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Why at least half of the steps of a run taught nothing, and what helps; else None."""
    futile = [step for step in steps if is_futile(step)]
    if 2 * len(futile) < max(len(steps), 1):
        return None
    return f"{len(futile)} of {len(steps)} steps taught nothing: {_of_steps(futile)}"


def of_evaluation(summary: Mapping[str, Any]) -> str | None:
    """Why at least half of the episodes of an evaluation gave no answer, and what helps; else None."""
    ends = summary.get("stop_reasons") or {}
    episodes = sum(ends.values())
    silent = episodes - summary.get("answered", ends.get("answer", 0) + ends.get("done", 0))
    if 2 * silent < max(episodes, 1):
        return None
    happened, helps = _ends({name: count / episodes for name, count in ends.items()})
    return _sentence(f"{silent} of {episodes} episodes gave no answer: {happened}", [*helps, SFT])


def of_service(counts: Mapping[str, float]) -> str | None:
    """Why a service learns nothing, and what helps; None if a vote has passed the gate."""
    if (
        (gated := counts.get("gated", 0)) < MIN_VOTES
        or counts.get("update_sent")
        or counts.get("update_refused")
    ):
        return None
    helps = [SFT, "more samples of a request (serve.samples)", "a lower evolution.gate"]
    return _sentence(f"none of {gated:g} votes has passed the gate, so nothing is learnt", helps)


def _of_steps(steps: Sequence[Mapping[str, Any]]) -> str:
    def values(key: str) -> list[float]:
        return [number for step in steps if (number := as_number(step.get(key))) is not None]

    names = {key: f"stop/{key}" for key in ENDS} | {
        "unscored": "rollout/unscored",
        "all_right": "group/right_all",
    }
    share = {name: sum(found) / len(steps) for name, key in names.items() if (found := values(key))}
    happened, helps = _ends(share)
    rewards, is_equal = values("reward/total"), all(step.get("advantage/abs_mean") == 0 for step in steps)
    parts = [f"of the rollouts, {happened}"] if happened else []
    if (unscored := share.get("unscored", 0.0)) >= MIN_SHARE:
        parts.insert(0, f"{100 * unscored:.0f} % of the rollouts have no reward")
        helps.append("the causes, unscored/CAUSE in events.jsonl")
    if rewards and is_equal:
        low, high = min(rewards), max(rewards)
        parts.insert(
            0, f"all rewards of every group were equal ({low:g}{f' to {high:g}' if high > low else ''})"
        )
        helps += ["harder questions"] if share.get("all_right", 0.0) > 0.5 else [SFT, "easier questions"]
    return _sentence("; ".join(parts) or "no token had a gradient", helps)


def _ends(shares: Mapping[str, float]) -> tuple[str, list[str]]:
    """How episodes without an answer ended, the most frequent end first, and what helps."""
    names = sorted(
        (name for name in ENDS if shares.get(name, 0.0) >= MIN_SHARE), key=lambda name: -shares[name]
    )
    return ", ".join(f"{100 * shares[name]:.0f} % {ENDS[name][0]}" for name in names), [
        ENDS[name][1] for name in names
    ]


def _sentence(happened: str, helps: Sequence[str]) -> str:
    return f"{happened}. What helps: {'; '.join(dict.fromkeys(helps))}" if helps else happened
