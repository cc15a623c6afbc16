"""The vote: turns k answers to one prompt and compatible experiences from memory into a verdict.

Equivalent answers are grouped first (TTRL, arXiv 2504.16084). An experience votes only on the same question
about a copy of the picture, and only for callers of its own key. If experiences change the samples' winner,
nothing is learnt. Feedback removes an experience's vote but never casts one, so poisoned feedback can only
reduce what is learnt.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pixelis.config import Config, EvolutionConfig, VotingConfig
from pixelis.operations.image import are_copies
from pixelis.records import Action, Experience, Feedback, Neighbour, Question, Trajectory, Verdict, Vote
from pixelis.rewards.equality import Equality, Same, classes, same_text, spellings
from pixelis.rewards.scorers import box_iou, canonical
from pixelis.rewards.services import shared_services

TIE = "tie"
NO_ANSWER = "no_answer"
INSUFFICIENT = "insufficient_votes"
ABSTAINED = "abstained"
OVERRULED = "overruled"
COLD_START = "cold_start"
REWARDED = "rewarded"
TOLD = "told"
TRAJECTORY = "trajectory"
CLOSED = frozenset({TIE, NO_ANSWER, INSUFFICIENT, ABSTAINED, OVERRULED, COLD_START, REWARDED, TOLD})
"""Reasons of verdicts that pass no gate and never vote as experiences: their answer is accidental, or a client's
reward or words speak for it."""
DECAY_HOURS = 24.0
"""Age at which the vote of an experience weighs 1/e."""
MIN_VOTES = 3
"""Fewer votes are no evidence of agreement: one sample always agrees with itself."""
CONFIDENT = 0.5
"""Strategy ``confidence``: the confidence of a heaviest vote below this weight is halved."""
UNANIMOUS = 1.2
"""Factor of an ensemble's confidence when all its strategies agree."""


def agrees(answer: str | None, label: str) -> bool:
    return answer is not None and same_text(answer, label)


def contradicts(feedback: Feedback, label: str) -> bool:
    """True when feedback calls this answer wrong or gives another."""
    other_answer = feedback.answer is not None and not agrees(feedback.answer, label)
    return other_answer if feedback.correct is None else not feedback.correct


# Voters


def self_confidence(trajectory: Trajectory) -> float:
    """Geometric mean of the token probabilities of the policy's last turn; 0 without log-probs."""
    log_probs = trajectory.replies[-1].log_probs if trajectory.replies else []
    if not log_probs:
        return 0.0
    mean = math.fsum(log_probs) / len(log_probs)
    return 0.0 if math.isnan(mean) else math.exp(min(mean, 0.0))


def compatible(question: Question, neighbour: Neighbour, config: EvolutionConfig) -> bool:
    """True when the experience may vote: same question, same picture, elected and not called wrong since."""
    experience = neighbour.experience
    return (
        neighbour.similarity >= config.neighbours.min_similarity
        and _content(experience.question) == _content(question)
        and all(
            are_copies(a.details, b.details)
            for a, b in zip(experience.question.media, question.media, strict=True)
        )
        and bool((experience.verdict.answer or "").strip())
        and experience.verdict.reason not in CLOSED
        and experience.status not in ("failed", "archived")
        and not called_wrong(experience)
    )


def entitled(
    neighbours: Sequence[Neighbour], caller: str | None, min_users: int, same: Same
) -> list[Neighbour]:
    """Those that may vote for ``caller`` (the owner of its experiences): its own, and agreeing ones of its key.

    Other users' experiences vote for an answer that at least ``min_users`` of them got: one user alone decides
    nobody else's answer, and another key never does.
    """
    near = [n for n in neighbours if _key_of(n.experience.user) == _key_of(caller)]
    names = classes([n.experience.verdict.answer for n in near], same)
    pairs = [(n.experience.user, name) for n, name in zip(near, names, strict=True)]
    others = Counter(name for user, name in set(pairs) if user != caller)
    return [
        n for n, (user, name) in zip(near, pairs, strict=True) if user == caller or others[name] >= min_users
    ]


def _key_of(owner: str | None) -> str:
    """The part of an owner that names the API key; empty without one."""
    return (owner or "").rpartition(".")[0]


def called_wrong(experience: Experience) -> bool:
    """True when the last feedback calls the answer wrong or gives another."""
    for feedback in reversed(experience.feedback):
        if feedback.correct is not None:
            return not feedback.correct
        if feedback.answer is not None and experience.verdict.answer is not None:
            return not agrees(feedback.answer, experience.verdict.answer)
    return False


def neighbour_weight(neighbour: Neighbour, config: EvolutionConfig, now: float) -> float:
    """Confidence x success x exp(-age / DECAY_HOURS) x priority x similarity (Pixelis' temporal ensemble).

    success = 0.5 + 0.5 rate after the first retrieval, 1 before; priority = 0.5 + 0.5 min(priority, 2) / 2.
    """
    experience = neighbour.experience
    success = (
        0.5 + 0.5 * min(experience.successes / experience.retrievals, 1.0) if experience.retrievals else 1.0
    )
    age_hours = max(now - experience.created_at, 0.0) / 3600
    decay = math.exp(-age_hours / DECAY_HOURS)
    priority = 0.5 + 0.5 * min(experience.priority, 2.0) / 2
    return _unit(experience.verdict.confidence) * success * decay * priority * _unit(neighbour.similarity)


# Strategies


class Ballot(NamedTuple):
    key: str | None
    weight: float


@dataclass(frozen=True, slots=True)
class Elected:
    """The best classes of answers, more than one when tied."""

    best: tuple[str, ...]
    confidence: float

    @property
    def key(self) -> str | None:
        return self.best[0] if self.best else None


Strategy = Callable[[Sequence[Ballot]], Elected]
NO_ELECTION = Elected((), 0.0)


def by_majority(votes: Sequence[Ballot]) -> Elected:
    """The most common answer; confidence is its share of all votes."""
    counts = Counter(v.key for v in votes if v.key is not None)
    return Elected(_best(counts), max(counts.values()) / len(votes)) if counts else NO_ELECTION


def by_weight(votes: Sequence[Ballot]) -> Elected:
    """The answer of the largest weight; confidence is its share x ``agreement_factor``, the lower one when tied."""
    weights, total = _weights(votes), math.fsum(v.weight for v in votes)
    if not weights:
        return NO_ELECTION
    best = _best(weights)
    counts = Counter(v.key for v in votes)
    share = min(counts[key] for key in best) / len(votes)
    return Elected(best, _unit(weights[best[0]] / total) * agreement_factor(share) if total else 0.0)


def by_confidence(votes: Sequence[Ballot]) -> Elected:
    """The answer of the heaviest vote; confidence is its weight, halved below .5."""
    heaviest: dict[str, float] = {}
    for v in votes:
        if v.key is not None:
            heaviest[v.key] = max(heaviest.get(v.key, 0.0), v.weight)
    if not heaviest:
        return NO_ELECTION
    weight = max(heaviest.values())
    return Elected(_best(heaviest), _unit(weight if weight >= CONFIDENT else weight / 2))


def by_ensemble(votes: Sequence[Ballot]) -> Elected:
    """The answer that most of three strategies elect, ties aside; mean confidence, x 1.2 when all agree."""
    results = [strategy(votes) for strategy in SINGLE.values()]
    clear = Counter(e.best[0] for e in results if len(e.best) == 1)
    mean = math.fsum(e.confidence for e in results) / len(results)
    if not clear:
        return Elected(results[0].best, mean)
    best = _best(clear)
    return Elected(best, min(mean * UNANIMOUS, 1.0) if clear[best[0]] == len(results) else mean)


def by_trajectory(votes: Sequence[Ballot]) -> Elected:
    """The answer of the largest weight; confidence is that weight / number of votes."""
    weights = _weights(votes)
    if not weights:
        return NO_ELECTION
    best = _best(weights)
    return Elected(best, _unit(weights[best[0]] / len(votes)))


SINGLE: dict[str, Strategy] = {"majority": by_majority, "weighted": by_weight, "confidence": by_confidence}
STRATEGIES: dict[str, Strategy] = {**SINGLE, "ensemble": by_ensemble, TRAJECTORY: by_trajectory}


def agreement_factor(share: float) -> float:
    """Pixelis' factor, without its jump at .3: .5 at 0, .6 at .3, .8 at .7, 1 at 1, linear in between."""
    if share > 0.7:
        return min(0.8 + 0.2 * (share - 0.7) / 0.3, 1.0)
    if share < 0.3:
        return 0.5 + 0.1 * max(share, 0.0) / 0.3
    return 0.6 + 0.2 * (share - 0.3) / 0.4


def probability(confidence: float, calibration: tuple[float, float] | None) -> float:
    """Confidence as the probability of a right answer (Platt scaling, 1999)."""
    if calibration is None:
        return confidence
    slope, intercept = calibration
    # The logistic function, which cannot overflow
    return 0.5 * (1 + math.tanh((slope * confidence + intercept) / 2))


# Verdicts


def vote(
    trajectories: Sequence[Trajectory],
    neighbours: Sequence[Neighbour],
    config: EvolutionConfig,
    question: Question,
    now: float,
    same: Same = same_text,
    caller: str | None = None,
) -> Verdict:
    """The verdict of a request's samples and of the compatible experiences that may vote for its ``caller``.

    No update is made of a verdict with a reason: ``tie`` (the first of the tied answers),
    ``insufficient_votes`` (the first of fewer than MIN_VOTES, at half confidence), ``abstained`` (less than
    the share ``abstain``; no answer), ``overruled`` (the samples alone would not have elected the winner).
    """
    unweighted = config.vote.strategy in ("majority", TRAJECTORY)
    samples = [_sample_vote(t, unweighted) for t in trajectories]
    alike = [n for n in neighbours if compatible(question, n, config)]
    voting = entitled(alike, caller, config.neighbours.min_users, same)
    experiences = [
        Vote(
            answer=n.experience.verdict.answer,
            weight=1.0 if config.vote.strategy == "majority" else neighbour_weight(n, config, now),
            source="neighbour",
            id=n.experience.id,
            confidence=_unit(n.experience.verdict.confidence),
            similarity=n.similarity,
        )
        for n in voting
    ]
    votes = [*samples, *experiences]
    names = classes([v.answer for v in votes], same)
    if config.vote.strategy == TRAJECTORY:
        # Weight each vote by the mean similarity of its operations to those of all votes for its answer.
        sequences = [t.actions for t in (*trajectories, *(n.experience.trajectory for n in voting))]
        for i, name in enumerate(names):
            equal = [j for j, other in enumerate(names) if other == name]
            similar = [action_similarity(sequences[i], sequences[j]) for j in equal]
            votes[i].weight *= math.fsum(similar) / len(similar)
    verdict = _verdict(votes, names, config.vote)
    verdict.neighbours = len(neighbours)
    if experiences and not verdict.reason:
        winner = next(name for v, name in zip(votes, names, strict=True) if v.elected)
        alone = STRATEGIES[config.vote.strategy](_ballots(samples, names[: len(samples)])).best
        if winner not in alone:
            verdict.reason = OVERRULED
    return verdict


def direct(trajectories: Sequence[Trajectory]) -> Verdict:
    """The answer of the first sample that reached one; reason ``cold_start``: memory is too small for a vote."""
    first = next((t for t in trajectories if classes([t.answer])[0] is not None), trajectories[0])
    own = _sample_vote(first, unweighted=False)
    (key,) = classes([own.answer])
    own.elected = key is not None
    return Verdict(
        answer=None if key is None else own.answer,
        confidence=0.0 if key is None else own.weight,
        strategy="direct",
        votes=[own],
        reason=COLD_START,
        self_answer=trajectories[0].answer,
        answer_weights={} if key is None else {key: own.weight},
    )


def elect(question: Question, samples: Sequence[Trajectory], config: Config) -> tuple[Verdict, Trajectory]:
    """The verdict of a question's samples alone, by the question's scorer, and the sample that won."""
    same = Equality(
        question, config.rewards.scorer_of(question.task, question.scorer), shared_services(config.rewards)
    )
    verdict = vote(samples, [], config.evolution, question, time.time(), same)
    return verdict, winning(samples, verdict)


def winning(samples: Sequence[Trajectory], verdict: Verdict) -> Trajectory:
    """The first sample with the verdict's answer, or the first of all."""
    elected = {v.id for v in verdict.votes if v.elected}
    return next((t for t in samples if t.id in elected), samples[0])


def majority(answers: Sequence[str | None], same: Same = same_text) -> Verdict:
    """The unweighted vote of answers without trajectories: the label of TTRL."""
    votes = [Vote(answer=answer) for answer in answers]
    return _verdict(votes, classes(answers, same), VotingConfig(strategy="majority"))


def _sample_vote(trajectory: Trajectory, unweighted: bool) -> Vote:
    confidence = self_confidence(trajectory)
    weight = 1.0 if unweighted else confidence
    return Vote(answer=trajectory.answer, weight=weight, id=trajectory.id, confidence=confidence)


def _ballots(votes: Sequence[Vote], names: Sequence[str | None]) -> list[Ballot]:
    return [Ballot(name, v.weight) for v, name in zip(votes, names, strict=True)]


def _verdict(votes: list[Vote], names: Sequence[str | None], config: VotingConfig) -> Verdict:
    ballots = _ballots(votes, names)
    elected = STRATEGIES[config.strategy](ballots)
    spelling = spellings([v.answer for v in votes], names)
    verdict = Verdict(
        answer=None,
        confidence=0.0,
        strategy=config.strategy,
        votes=votes,
        self_answer=votes[0].answer if votes and votes[0].source == "sample" else None,
        answer_weights=_weights(ballots),
    )
    if config.strategy == "ensemble":
        keys = {name: strategy(ballots).key for name, strategy in SINGLE.items()}
        verdict.strategies = {name: None if key is None else spelling[key] for name, key in keys.items()}
    if elected.key is None:
        verdict.reason = NO_ANSWER
        return verdict
    cast = [i for i, name in enumerate(names) if name is not None]
    share = sum(name == elected.key for name in names) / len(votes)
    if len(cast) < MIN_VOTES:
        winner, first = names[cast[0]], votes[cast[0]]
        own = names.count(winner) / len(votes) if config.strategy == "majority" else first.weight
        verdict.answer, verdict.confidence, verdict.reason = first.answer, _unit(own) / 2, INSUFFICIENT
    elif (elected.confidence if config.strategy == TRAJECTORY else share) < config.abstain:
        verdict.reason = ABSTAINED
        return verdict
    else:
        winner = elected.key
        verdict.answer = spelling[winner]
        verdict.confidence = probability(_unit(elected.confidence), config.calibration)
        verdict.reason = TIE if len(elected.best) > 1 else ""
    for v, name in zip(votes, names, strict=True):
        v.elected = name == winner
    return verdict


# Similarity of operations


def action_similarity(a: Sequence[Action], b: Sequence[Action]) -> float:
    """Value of the best alignment of two sequences / the longer length, 0..1 (Pixelis, arXiv 2603.25091).

    A pair of the same operation is worth one half, and another half for equal arguments; of boxes, their IoU.
    """
    if not a or not b:
        return float(not a and not b)
    best = [0.0] * (len(b) + 1)
    for left in a:
        row = [0.0]
        for j, right in enumerate(b):
            row.append(max(best[j + 1], row[j], best[j] + _pair(left, right)))
        best = row
    return best[-1] / max(len(a), len(b))


def _pair(a: Action, b: Action) -> float:
    if a.op != b.op:
        return 0.0
    if a.target != b.target:
        return 0.5
    values = []
    for key in sorted(a.arguments.keys() | b.arguments.keys()):
        left: Any = a.arguments.get(key)
        right: Any = b.arguments.get(key)
        values.append(box_iou(left, right) if _is_box(left) and _is_box(right) else float(left == right))
    return 0.5 + 0.5 * (sum(values) / len(values) if values else 1.0)


def _is_box(value: Any) -> bool:
    is_row = isinstance(value, list | tuple) and len(value) == 4
    if not is_row or not all(isinstance(v, int | float) for v in value):
        return False
    return bool(value[0] < value[2] and value[1] < value[3])


def _content(question: Question) -> tuple[str, list[str], tuple[str, ...]]:
    options = question.meta.get("options") or ()
    values = options.values() if isinstance(options, dict) else options
    kinds: list[str] = [media.kind for media in question.media]
    return canonical(question.conversation), kinds, tuple(canonical(str(option)) for option in values)


def _weights(votes: Sequence[Ballot]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for v in votes:
        if v.key is not None:
            parts.setdefault(v.key, []).append(v.weight)
    return {key: math.fsum(values) for key, values in parts.items()}


def _best(weights: Mapping[str, float]) -> tuple[str, ...]:
    largest = max(weights.values())
    return tuple(key for key, weight in weights.items() if math.isclose(weight, largest, rel_tol=1e-9))


def _unit(value: float) -> float:
    """Clamped to 0..1; NaN becomes 0."""
    return min(max(value, 0.0), 1.0) if not math.isnan(value) else 0.0
