"""Blind comparisons by people: pairs of episodes of two arms, ratings, and their statistics."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from pixelis.errors import BadInput
from pixelis.evaluation.ablation import cohen_d, holm
from pixelis.evaluation.agreement import cohen_kappa, fleiss_kappa, icc, icc_interval
from pixelis.evaluation.statistics import bootstrap_mean, paired_p, wilson
from pixelis.records import Group, Trajectory
from pixelis.records.question import Record, new_id

CHECK_SHARE = 0.05
"""Share of items that show the same episode on both sides. Only `equal` is a right preference."""
HASTY_S = 30.0
DISPUTED = 1.5
"""Standard deviation between raters above which an item needs an expert."""
RESAMPLES = 2_000

Arm = Literal["a", "b"]
ARMS: tuple[Arm, Arm] = ("a", "b")
Point = Annotated[int, Field(ge=1, le=5)]
SCALES = ("coherence", "efficiency", "thoroughness")


class SideRating(Record):
    """What a rater says of one episode: whether its answer is right, and three scales from 1 to 5."""

    correct: bool
    coherence: Point
    efficiency: Point
    thoroughness: Point


class ItemRating(Record):
    """What a rater says of a pair; ``seconds`` with the pair on the screen."""

    item: Annotated[str, Field(max_length=80)]
    left: SideRating
    right: SideRating
    preference: Literal["left", "right", "equal"]
    confidence: Point
    comment: Annotated[str, Field(max_length=5_000)] = ""
    seconds: Annotated[float, Field(ge=0)]


class RatingFile(Record):
    """The file that the page saves for a rater."""

    page: Annotated[str, Field(max_length=80)]
    rater: Annotated[str, Field(min_length=1, max_length=200)]
    ratings: Annotated[list[ItemRating], Field(max_length=10_000)]


class KeyItem(Record):
    """Arm on each side of an item. ``stratum``: the operations that either episode used."""

    question: str
    left: Arm
    right: Arm
    stratum: str

    @property
    def is_check(self) -> bool:  # both sides show the same episode
        return self.left == self.right


class RatingKey(Record):
    """Which arm is on which side: key.json beside the page, not for raters."""

    page: str = Field(default_factory=lambda: new_id("page"))
    arms: dict[Arm, str]
    seed: int
    items: dict[str, KeyItem]


@dataclass(frozen=True)
class Pair:
    item: str
    group: Group
    left: Trajectory
    right: Trajectory


def draw_pairs(
    a: Sequence[Group], b: Sequence[Group], names: tuple[str, str], count: int, seed: int
) -> tuple[RatingKey, list[Pair]]:
    """Draw up to ``count`` questions that both arms answered, evenly from all strata, and add checks.

    BadInput if the arms share no question.
    """
    rng = random.Random(seed)
    first, second = ({g.question.id: g for g in groups if g.trajectories} for groups in (a, b))
    strata: dict[str, list[str]] = defaultdict(list)
    for question in sorted(first.keys() & second.keys()):
        strata[_stratum(first[question].trajectories[0], second[question].trajectories[0])].append(question)
    if not strata:
        raise BadInput(
            "the two evaluations share no answered question", fix="evaluate both policies on the same set"
        )
    for questions in strata.values():
        rng.shuffle(questions)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*(strata[name] for name in sorted(strata))))
    drawn = list(itertools.islice((question for question in in_turn if question is not None), count))
    checks = rng.sample(drawn, max(1, round(CHECK_SHARE * len(drawn))))
    items, pairs = dict[str, KeyItem](), list[Pair]()
    for question, is_check in rng.sample(
        shown := [(q, False) for q in drawn] + [(q, True) for q in checks], len(shown)
    ):
        sides: list[Arm] = ["a", "b"]
        rng.shuffle(sides)
        left, right = (sides[0], sides[0]) if is_check else sides
        episodes = {"a": first[question].trajectories[0], "b": second[question].trajectories[0]}
        item = f"{len(pairs) + 1:03d}"
        items[item] = KeyItem(question=question, left=left, right=right, stratum=_stratum(*episodes.values()))
        pairs.append(Pair(item, first[question], episodes[left], episodes[right]))
    return RatingKey(arms={"a": names[0], "b": names[1]}, seed=seed, items=items), pairs


def _stratum(*episodes: Trajectory) -> str:
    return (
        "+".join(sorted({action.op for episode in episodes for action in episode.actions})) or "no operation"
    )


def _preference(rating: ItemRating, key: KeyItem) -> float:
    """1 for arm a, -1 for arm b, 0 for neither."""
    return 0.0 if rating.preference == "equal" else 1.0 if getattr(key, rating.preference) == "a" else -1.0


def analyse(key: RatingKey, files: Sequence[RatingFile]) -> dict[str, Any]:
    """Results of all raters: arms compared by question, agreement of the raters, quality of the ratings.

    A question counts with the mean of its raters. p values: paired permutation tests, corrected by Holm.
    Raises BadInput for ratings of another page, unknown items, a repeated rater, or fewer than two rated
    questions.
    """
    by_item = _by_item(key, files)
    rated = {item: of for item, of in by_item.items() if of and not key.items[item].is_check}
    if len(rated) < 2:
        raise BadInput(
            f"{len(rated)} questions are rated", fix="collect the ratings of at least two questions"
        )
    votes = [[_preference(r, key.items[i]) for r in of] for i, of in rated.items()]
    comparisons = [_compared("preference", [statistics.fmean(of) for of in votes])]
    for name in ("correct", *SCALES):
        means = {
            arm: [statistics.fmean(_values(name, arm, of, key.items[i])) for i, of in rated.items()]
            for arm in ARMS
        }
        row = _compared(name, [a - b for a, b in zip(means["a"], means["b"], strict=True)])
        comparisons.append(row | {arm: statistics.fmean(of) for arm, of in means.items()})
    for row, corrected in zip(comparisons, holm([row["p"] for row in comparisons]), strict=True):
        row["p_holm"] = corrected
    wins, losses, equal = (sum(of.count(vote) for of in votes) for vote in (1.0, -1.0, 0.0))
    return {
        "arms": key.arms,
        "questions": len(rated),
        "strata": dict(Counter(key.items[i].stratum for i in rated)),
        "preferred": {"a": wins, "b": losses, "equal": equal, "share_a_ci95": _share_interval(votes)},
        "comparisons": comparisons,
        "agreement": _agreement(key, files, rated),
        "raters": [
            {
                "rater": file.rater,
                "items": len(file.ratings),
                "checks_passed": sum(
                    r.preference == "equal" for r in file.ratings if key.items[r.item].is_check
                ),
                "checks": sum(key.items[r.item].is_check for r in file.ratings),
                "seconds": statistics.median(r.seconds for r in file.ratings) if file.ratings else None,
                "hasty": sum(r.seconds < HASTY_S for r in file.ratings),
            }
            for file in files
        ],
        "disputed": sorted(
            item
            for item, of in rated.items()
            if any(
                statistics.stdev(float(getattr(side, name)) for side in sides) > DISPUTED
                for sides in ([r.left for r in of], [r.right for r in of])
                for name in SCALES
                if len(sides) > 1
            )
        ),
    }


def _share_interval(votes: Sequence[Sequence[float]]) -> list[float]:
    """95 % interval of arm a's share of the decided votes.

    Wilson's if each question has one decided vote, or all are for one arm; else a bootstrap over questions,
    because several ratings of one question are not independent.
    """
    counts = [(of.count(1.0), of.count(-1.0)) for of in votes]
    decided = [(wins, losses) for wins, losses in counts if wins + losses]
    wins, losses = (sum(column) for column in zip(*decided, strict=True)) if decided else (0, 0)
    if not (wins and losses) or all(sum(row) == 1 for row in decided):
        return list(wilson(sum(won > 0 for won, _ in decided), len(decided)))
    if len(decided) < 2:
        return [0.0, 1.0]

    def share(rows: np.ndarray) -> float | None:
        return float(rows[:, 0].sum() / total) if (total := rows.sum()) else None

    interval: list[float] = _with_interval(share, counts)["ci95"]
    return interval


def _by_item(key: RatingKey, files: Sequence[RatingFile]) -> dict[str, list[ItemRating]]:
    names = [file.rater for file in files]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise BadInput(
            f"several files of {', '.join(sorted(repeated))}", fix="pass the last file of each rater"
        )
    by_item: dict[str, list[ItemRating]] = {item: [] for item in key.items}
    for file in files:
        if file.page != key.page:
            raise BadInput(
                f"{file.rater} rated the page {file.page}, not {key.page}",
                fix="pass the key and the ratings of one page",
            )
        items = [rating.item for rating in file.ratings]
        if len(set(items)) < len(items) or not set(items) <= by_item.keys():
            raise BadInput(
                f"the ratings of {file.rater} have repeated or unknown items",
                fix="pass the file as the page saved it",
            )
        for rating in file.ratings:
            by_item[rating.item].append(rating)
    return by_item


def _compared(name: str, differences: Sequence[float]) -> dict[str, Any]:
    return {
        "name": name,
        "difference": statistics.fmean(differences),
        "ci95": list(bootstrap_mean(differences)),
        "effect": cohen_d(np.asarray(differences)),
        "p": paired_p(differences),
    }


def _values(name: str, arm: Arm, ratings: Sequence[ItemRating], key: KeyItem) -> list[float]:
    return [float(getattr(rating.left if key.left == arm else rating.right, name)) for rating in ratings]


def _agreement(
    key: RatingKey, files: Sequence[RatingFile], rated: Mapping[str, Sequence[ItemRating]]
) -> dict[str, Any]:
    """Kappas and intraclass correlations with intervals, over what all rated; empty for one rater."""
    items = [item for item, of in rated.items() if len(of) == len(files)]
    if len(files) < 2 or len(items) < 2:
        return {}
    preferences = [[[_preference(r, key.items[i]) for r in rated[i]]] for i in items]
    correct = [[_values("correct", arm, rated[i], key.items[i]) for arm in ARMS] for i in items]
    agreement: dict[str, Any] = {"items": len(items)}
    for name, table in (("preference", preferences), ("correct", correct)):
        agreement[name] = {
            "fleiss_kappa": _with_interval(lambda of: fleiss_kappa(of.reshape(-1, len(files))), table),
            "cohen_kappa": _with_interval(lambda of: cohen_kappa(of.reshape(-1, len(files))), table),
        }
    for name in SCALES:
        points = [_values(name, arm, rated[i], key.items[i]) for i in items for arm in ARMS]
        agreement[name] = {"icc": {"value": icc(points), "ci95": icc_interval(points)}}
    return agreement


def _with_interval(statistic: Callable[[np.ndarray], float | None], table: Sequence[Any]) -> dict[str, Any]:
    rows, rng = np.asarray(table), np.random.default_rng(0)
    draws = (statistic(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(RESAMPLES))
    known = [value for value in draws if value is not None]
    interval = [float(end) for end in np.percentile(known, [2.5, 97.5])] if known else None
    return {"value": statistic(rows), "ci95": interval}


def describe(report: Mapping[str, Any]) -> list[str]:
    a, b = report["arms"]["a"], report["arms"]["b"]
    preferred = report["preferred"]
    low, high = preferred["share_a_ci95"]
    lines = [f"a = {a}", f"b = {b}", "", f"{report['questions']} questions, {len(report['raters'])} raters"]
    decided = preferred["a"] + preferred["b"]
    if decided:
        share = f"{preferred['a'] / decided:.3f} [{low:.3f}, {high:.3f}]"
        lines.append(
            f"preferred: a {preferred['a']}, b {preferred['b']}, equal {preferred['equal']}; a of the "
            f"decided {share}"
        )
    lines += ["", f"{'':<14}{'a':>7}{'b':>7}{'a - b':>9}  95 % interval       d      p (Holm)"]
    for row in report["comparisons"]:
        means = "".join(f"{row[arm]:7.2f}" if arm in row else f"{'':7}" for arm in ("a", "b"))
        effect = f"{row['effect']:6.2f}" if row["effect"] is not None else f"{'–':>6}"
        low, high = row["ci95"]
        lines.append(
            f"{row['name']:<14}{means}{row['difference']:+9.3f}  [{low:+.3f}, {high:+.3f}]  {effect}  "
            f"{row['p_holm']:10.2g}"
        )
    if agreement := dict(report["agreement"]):
        items = agreement.pop("items")
        lines += ["", f"agreement of {len(report['raters'])} raters on {items} questions"]
        lines += [
            f"  {name:<14}{measure} {_estimate(estimate, measure)}"
            for name, measures in agreement.items()
            for measure, estimate in measures.items()
        ]
    lines.append("")
    for rater in report["raters"]:
        lines.append(
            f"{rater['rater']}: {rater['items']} items, checks passed {rater['checks_passed']} of "
            f"{rater['checks']}, "
            f"{rater['hasty']} items in less than {HASTY_S:.0f} s"
        )
    if report["disputed"]:
        lines.append(
            f"an expert should decide the items {', '.join(report['disputed'])}: the raters disagree"
        )
    return lines


def _estimate(estimate: Mapping[str, Any], measure: str) -> str:
    if (value := estimate["value"]) is None:
        return "is undefined: the raters never vary"
    interval = " [{:.3f}, {:.3f}]".format(*estimate["ci95"]) if estimate["ci95"] else ""
    word = f", {_WORDS[sum(value >= limit for limit in _LIMITS)]}" if measure == "icc" else ""
    return f"{value:.3f}{interval}{word}"


_LIMITS = (0.4, 0.6, 0.75)
_WORDS = ("poor", "fair", "good", "excellent")
"""Of an intraclass correlation below 0.4, 0.6, 0.75 and above (Cicchetti, Psychological Assessment 1994)."""
