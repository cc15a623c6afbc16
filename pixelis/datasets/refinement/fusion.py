"""Recipes: the demonstrations and questions that a set takes (Pixelis, arXiv 2603.25091).

A recipe divides its size between groups of tasks and of kinds. No cell exceeds its share of the available
demonstrations, and unfilled shares are reported.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pixelis.config.refinement import RecipeConfig, RftRecipeConfig
from pixelis.datasets.refinement.actions import WRONG_KINDS, category, kind_group
from pixelis.datasets.refinement.quality import weight
from pixelis.datasets.synthesis.quota_scheduler import apportion
from pixelis.records import Demonstration, Question, SampleKind

Weights = Mapping[SampleKind, float]
SFT_WEIGHTS: Weights = {"self_correction": 1.2}
RFT_WEIGHTS: Weights = {
    "outcome_negative": 2.0,
    "trap_perceptual": 3.0,
    "trap_logical": 3.0,
    "self_correction": 1.2,
}
"""Sampling weights by kind; 1 for the others."""
RFT_DIVERSITY = 0.1
"""Additional weight in rft for the share of different operations."""


@dataclass
class Selection:
    """The demonstrations that a recipe selects; ``targets`` and ``counts`` are by ``task/kind``.

    ``absent``: groups with a share but no demonstrations. ``excluded``: counts by cause.
    """

    demonstrations: list[Demonstration]
    size: int
    targets: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    excluded: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "count": len(self.demonstrations),
            "short": self.size - len(self.demonstrations),
            "cells": {
                cell: {"wanted": target, "got": self.counts.get(cell, 0)}
                for cell, target in self.targets.items()
            },
            "absent": self.absent,
            "left_out": {cause: count for cause, count in self.excluded.items() if count},
        }


def sft(demonstrations: Sequence[Demonstration], recipe: RecipeConfig, seed: int) -> Selection:
    """Demonstrations to imitate, with their weights; none of a wrong kind, whatever the recipe says."""
    kinds = {kind: share for kind, share in recipe.kinds.items() if kind != "trap"}
    return select(demonstrations, recipe.model_copy(update={"kinds": kinds}), seed, excluded=WRONG_KINDS)


def validation(
    demonstrations: Sequence[Demonstration], media: Mapping[str, Sequence[str]], share: float, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """(training set, validation set), the latter about ``share`` of the pictures with all demonstrations.

    ``media``: content hashes by id. The first picture decides, else the question.
    """
    sets: tuple[list[Demonstration], list[Demonstration]] = ([], [])
    for d in demonstrations:
        key = media[d.id][0] if media[d.id] else d.question
        sets[int(_hash(f"{seed} validation {key}")[:8], 16) < share * 16**8].append(d)
    return sets


def rft(
    demonstrations: Sequence[Demonstration], recipe: RecipeConfig, seed: int
) -> tuple[list[Question], Selection]:
    """The questions of the selected demonstrations, each once; policies never see the signals in ``meta``.

    ``weight``: the largest sampling weight. ``signals``: kinds, wrong answers, level and difficulty.
    ``reference_operations``: those of the best right demonstration.
    """
    selection = select(demonstrations, recipe, seed)
    by_question: dict[str, list[Demonstration]] = defaultdict(list)
    for d in selection.demonstrations:
        media = [[m.uri, m.frames, m.spans] for m in d.media]
        by_question[_hash(repr((d.conversation, media, sorted(d.answers or []))))].append(d)
    questions = []
    for group in by_question.values():
        best = min(group, key=lambda d: (d.kind in WRONG_KINDS, -(d.quality or 0.0), d.id))
        wrong = sorted({d.final for d in group if d.kind in WRONG_KINDS and d.final is not None})
        signals: dict[str, Any] = {"kinds": dict(Counter(d.kind for d in group)), "wrong_answers": wrong}
        if best.level is not None:
            signals |= {"level": best.level, "difficulty": best.difficulty}
        reference = [step.op for step in best.steps if step.learn] if best.kind not in WRONG_KINDS else []
        own = {"weight": max(d.weight for d in group), "signals": signals, "reference_operations": reference}
        questions.append(Question.of(best, meta={**best.meta, **own}))
    return questions, selection


def select(
    demonstrations: Sequence[Demonstration],
    recipe: RecipeConfig,
    seed: int,
    excluded: Container[SampleKind] = (),
) -> Selection:
    """At most the recipe's size and its share of each cell, drawn by weight without replacement."""
    selection = Selection([], recipe.size)
    cells: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    tasks_of, kinds_of = Counter[str](), Counter[str]()
    for i, d in enumerate(demonstrations):
        if d.kind in excluded:
            selection.excluded["wrong_on_purpose"] += 1
        else:
            cell = category(d.task), kind_group(d.kind)
            tasks_of[cell[0]] += 1
            kinds_of[cell[1]] += 1
            # Sorting by this is a draw by weight without replacement (Efraimidis and Spirakis, 2006).
            uniform = (int(_hash(f"{seed} {d.id}")[:13], 16) + 0.5) / 16**13
            cells[cell].append((-math.log(uniform) / sampling_weight(d, recipe), i))
    tasks, kinds = _shares(recipe.tasks, tasks_of, selection), _shares(recipe.kinds, kinds_of, selection)
    shares = {(task, kind): a * b for task, a in tasks.items() for kind, b in kinds.items()}
    usable = tasks_of.total()
    targets = apportion(min(recipe.size, usable), list(shares.values()))
    selected: list[Demonstration] = []
    for (task, kind), target in zip(shares, targets, strict=True):
        members = sorted(cells.get((task, kind), []))
        name = f"{task}/{kind}"
        selection.targets[name], selection.counts[name] = target, min(target, len(members))
        for _, i in members[:target]:
            d = demonstrations[i]
            selected.append(d.model_copy(update={"weight": sampling_weight(d, recipe)}))
    selection.excluded["beyond_share"] = usable - len(selected)
    selection.demonstrations = sorted(selected, key=lambda d: _hash(f"{seed} order {d.id}"))
    return selection


def sampling_weight(d: Demonstration, recipe: RecipeConfig) -> float:
    """The kind's times quality ** 0.5; in rft times 1 + RFT_DIVERSITY x share of different operations too."""
    names, quality = [step.op for step in d.steps], 1.0 if d.quality is None else d.quality
    if not isinstance(recipe, RftRecipeConfig):
        return weight(d.kind, quality, SFT_WEIGHTS)
    different = len(set(names)) / len(names) if names else 0.0
    return round(weight(d.kind, quality, RFT_WEIGHTS) * (1 + RFT_DIVERSITY * different), 6)


def _shares(
    recipe: Mapping[str, float], available: Mapping[str, int], selection: Selection
) -> dict[str, float]:
    """The recipe's shares, with absent groups' given to the others; else the available shares."""
    if not recipe:
        total = sum(available.values())
        return {name: count / total for name, count in sorted(available.items())}
    present = {name: share for name, share in recipe.items() if available.get(name) and share}
    selection.absent += [name for name, share in recipe.items() if share and not available.get(name)]
    total_share = sum(present.values())
    return {name: share / total_share for name, share in present.items()}


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
