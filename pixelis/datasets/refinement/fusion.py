"""Sets by recipe: what SFT imitates, what RFT is asked, and which experiences stay for learning online.

A recipe shares a size out over groups of tasks and of kinds (Pixelis, arXiv 2603.25091). No cell gets more than its share of what
there is, and what could not be filled is said. Only golden demonstrations and self-corrections reach SFT: traps are negatives.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pixelis.config.refinement import OnlineConfig, RecipeConfig
from pixelis.datasets.refinement.actions import WRONG, actions, category, group_of
from pixelis.datasets.refinement.quality import weight
from pixelis.records import Demonstration, Experience, Question, SampleKind

DAY = 86_400.0


@dataclass
class Fused:
    """What a recipe chose. ``wanted`` and ``got`` by ``task/kind``, ``absent`` what a share was given to and nobody has.

    ``left_out`` counts what the recipe's bounds excluded. ``short`` is how many of the size are missing.
    """

    chosen: list[Demonstration]
    size: int
    wanted: dict[str, int] = field(default_factory=dict)
    got: dict[str, int] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def short(self) -> int:
        """How many of the recipe's size there are not."""
        return self.size - len(self.chosen)

    def summary(self) -> dict[str, Any]:
        """Plain values for ``summary.json``."""
        return {
            "size": self.size,
            "count": len(self.chosen),
            "short": self.short,
            "cells": {cell: {"wanted": self.wanted[cell], "got": self.got.get(cell, 0)} for cell in self.wanted},
            "absent": self.absent,
            "left_out": self.left_out,
        }


def sft(demonstrations: Sequence[Demonstration], recipe: RecipeConfig, seed: int) -> Fused:
    """Demonstrations to imitate, their weights set: never one that is wrong on purpose, whatever the recipe says."""
    right = [d for d in demonstrations if d.kind not in WRONG]
    kinds = {kind: share for kind, share in recipe.kinds.items() if kind != "trap"}
    fused = fuse(right, recipe.model_copy(update={"kinds": kinds}), seed)
    if len(right) < len(demonstrations):
        fused.left_out["wrong_on_purpose"] = len(demonstrations) - len(right)
    return fused


def validation(
    chosen: Sequence[Demonstration], pictures: Mapping[str, Sequence[str]], share: float, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """(to learn, to validate): about ``share`` of the first pictures, each with all that was made of it.

    ``pictures``: content hashes by id; without a picture the question decides.
    """
    out: tuple[list[Demonstration], list[Demonstration]] = ([], [])
    for d in chosen:
        key = pictures[d.id][0] if pictures[d.id] else d.question
        out[int(_hash(f"{seed} validation {key}")[:8], 16) < share * 16**8].append(d)
    return out


def rft(demonstrations: Sequence[Demonstration], recipe: RecipeConfig, seed: int) -> tuple[list[Question], Fused]:
    """Questions to roll out, each once, with what is known about it in ``meta``; the policy never sees that.

    ``weight`` is the largest sampling weight among its demonstrations: hard negatives and traps weigh more. ``signals`` holds
    their kinds, wrong answers, level and difficulty; ``reference`` the operations of the best right one, for curiosity.
    """
    fused = fuse(demonstrations, recipe, seed)
    by_question: dict[str, list[Demonstration]] = defaultdict(list)
    for d in fused.chosen:
        by_question[_question_key(d)].append(d)
    return [_asked(group, recipe) for group in by_question.values()], fused


def fuse(demonstrations: Sequence[Demonstration], recipe: RecipeConfig, seed: int) -> Fused:
    """The recipe's choice: at most its size and at most its share of each cell, drawn by weight without replacement."""
    fused = Fused([], recipe.size)
    usable = []
    for d in demonstrations:
        if not recipe.length[0] <= len(actions(d)) <= recipe.length[1]:
            fused.left_out["length"] = fused.left_out.get("length", 0) + 1
        elif len(d.steps) < recipe.operations:
            fused.left_out["operations"] = fused.left_out.get("operations", 0) + 1
        else:
            usable.append(d.model_copy(update={"weight": weigh(d, recipe)}))
    tasks = _shares(recipe.tasks, Counter(category(d.task) for d in usable), fused)
    kinds = _shares(recipe.kinds, Counter(group_of(d.kind) for d in usable), fused)
    cells: dict[tuple[str, str], list[Demonstration]] = defaultdict(list)
    for d in usable:
        cells[category(d.task), group_of(d.kind)].append(d)
    size = min(recipe.size, len(usable))
    chosen: list[Demonstration] = []
    for (task, kind), cell in _quotas(size, tasks, kinds).items():
        members = sorted(cells.get((task, kind), []), key=lambda d: _ticket(d, seed))
        name = f"{task}/{kind}"
        fused.wanted[name], fused.got[name] = cell, min(cell, len(members))
        chosen += members[:cell]
    left = len(usable) - len(chosen)
    if left:
        fused.left_out["beyond_share"] = left
    fused.chosen = sorted(chosen, key=lambda d: _hash(f"{seed} order {d.id}"))
    return fused


def weigh(d: Demonstration, recipe: RecipeConfig) -> float:
    """Sampling weight: that of the kind times quality ** .5, times 1 + ``diversity`` x share of different operations."""
    types: dict[SampleKind, float] = {
        "outcome_negative": recipe.hard_negative,
        "trap_perceptual": recipe.trap,
        "trap_logical": recipe.trap,
        "self_correction": recipe.self_correction,
    }
    names = [step.op for step in d.steps]
    different = len(set(names)) / len(names) if names else 0.0
    return round(weight(d.kind, 1.0 if d.quality is None else d.quality, types) * (1 + recipe.diversity * different), 6)


def _shares(asked: Mapping[str, float], there: Mapping[str, int], fused: Fused) -> dict[str, float]:
    """Shares of what is there: absent ones are said and theirs given to the others; without a recipe as they come."""
    if not asked:
        total = sum(there.values())
        return {name: count / total for name, count in sorted(there.items())}
    present = {name: share for name, share in asked.items() if there.get(name) and share}
    fused.absent += [name for name, share in asked.items() if share and not there.get(name)]
    total_share = sum(present.values())
    return {name: share / total_share for name, share in present.items()}


def _quotas(size: int, tasks: Mapping[str, float], kinds: Mapping[str, float]) -> dict[tuple[str, str], int]:
    """Whole numbers that add up to ``size``, by largest remainder."""
    exact = {(task, kind): size * a * b for task, a in tasks.items() for kind, b in kinds.items()}
    out = {cell: math.floor(value + 1e-9) for cell, value in exact.items()}
    rest = size - sum(out.values())
    for cell in sorted(exact, key=lambda c: (out[c] - exact[c], c))[: max(0, rest)]:
        out[cell] += 1
    return out


def _ticket(d: Demonstration, seed: int) -> float:
    """Smallest first is a draw by weight without replacement (Efraimidis and Spirakis, 2006)."""
    uniform = (int(_hash(f"{seed} {d.id}")[:13], 16) + 0.5) / 16**13
    return -math.log(uniform) / d.weight


def _question_key(d: Demonstration) -> str:
    media = [[m.uri, m.frames] for m in d.media]
    return _hash(repr((d.question, media, sorted(d.answers or []))))


def _asked(group: Sequence[Demonstration], recipe: RecipeConfig) -> Question:
    first = min(group, key=lambda d: (d.kind in WRONG, -(d.quality or 0.0), d.id))
    values = {name: getattr(first, name) for name in Question.model_fields}
    wrong = sorted({d.final for d in group if d.kind in WRONG and d.final is not None})
    signals: dict[str, Any] = {"kinds": dict(Counter(d.kind for d in group)), "wrong_answers": wrong}
    if first.level is not None:
        signals |= {"level": first.level, "difficulty": first.difficulty}
    reference = [step.op for step in first.steps if step.learn] if first.kind not in WRONG else []
    values["meta"] = {
        **first.meta,
        "weight": max(d.weight for d in group),
        "signals": signals,
        "reference": reference,
    }
    return Question(**values)


# -- online ---------------------------------------------------------------------------------------------------------


def online(
    experiences: Sequence[Experience], recipe: OnlineConfig, now: float, seed: int
) -> tuple[list[Experience], dict[str, Any]]:
    """Experiences worth learning from again, by priority, and what was dropped: too old, not confident, beyond its share.

    Each belongs to the first priority that fits: self_correction (a failed call and then a good one), uncertain, high_reward
    (reward at or above the mean), diverse (three different operations). Corrections stay whatever their confidence.
    """
    dropped: Counter[str] = Counter()
    piles: dict[str, list[Experience]] = defaultdict(list)
    fresh = []
    for e in experiences:
        if now - e.created_at > recipe.max_age_days * DAY:
            dropped["too_old"] += 1
        elif e.verdict.confidence < recipe.least_confidence and not corrected(e):
            dropped["not_confident"] += 1
        else:
            fresh.append(e)
    rewards = [e.trajectory.reward for e in fresh if e.trajectory.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else math.inf
    for e in sorted(fresh, key=lambda e: (-e.created_at, _hash(f"{seed} {e.id}"))):
        reward = e.trajectory.reward
        if corrected(e):
            piles["self_correction"].append(e)
        elif e.verdict.confidence < recipe.uncertain:
            piles["uncertain"].append(e)
        elif reward is not None and reward >= mean:
            piles["high_reward"].append(e)
        elif len({action.op for action in e.trajectory.actions}) >= 3:
            piles["diverse"].append(e)
        else:
            dropped["no_priority"] += 1
    chosen: list[Experience] = []
    got = {}
    cells = {name: cell for (name, _), cell in _quotas(recipe.size, recipe.shares, {"": 1.0}).items()}
    for name in {**cells, **piles}:  # a priority without a share gets nothing
        cell = cells.get(name, 0)
        taken = piles[name][:cell]
        dropped["beyond_share"] += len(piles[name]) - len(taken)
        got[name] = {"wanted": cell, "got": len(taken)}
        chosen += taken
    summary = {"size": recipe.size, "count": len(chosen), "short": recipe.size - len(chosen), "cells": got}
    return chosen, {**summary, "dropped": {cause: n for cause, n in dropped.items() if n}}


def corrected(experience: Experience) -> bool:
    """True when a call failed, a later one did not, and the episode answered."""
    states = [observation.status for observation in experience.trajectory.observations]
    return "error" in states and "ok" in states[states.index("error") :] and experience.trajectory.answer is not None


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
