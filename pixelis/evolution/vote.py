"""The vote: turns k answers to one prompt and compatible experiences from memory into a verdict with its provenance.

The samples of a request vote on its answer (majority label of TTRL, arXiv 2504.16084). An experience votes only when it answers
the same question about a very similar picture (``compatible``). Experiences may support or weaken the samples' answer; an answer
that the samples alone would not have elected teaches nothing (reason ``overruled``). Feedback may remove an experience's vote and
never casts one, so that poisoned feedback can only reduce what is learnt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pixelis.config import EvolutionConfig, VotingConfig
from pixelis.records import Experience, Neighbour, Question, Trajectory, Verdict, Vote
from pixelis.rewards.scorers import canonical

TIE = "tie"
NO_ANSWER = "no_answer"
INSUFFICIENT = "insufficient_votes"
ABSTAINED = "abstained"
OVERRULED = "overruled"
COLD_START = "cold_start"
CLOSED = frozenset({TIE, NO_ANSWER, INSUFFICIENT, ABSTAINED, OVERRULED, COLD_START})
"""Reasons of verdicts with an accidental answer: they never become updates, and never vote as experiences."""
MIN_VOTES = 3
"""Fewer votes are no evidence of agreement: one sample always agrees with itself."""
CONFIDENT = 0.5
"""Strategy ``confidence``: the confidence of a heaviest vote below this weight is halved."""
UNANIMOUS = 1.2
"""Factor of an ensemble's confidence when all its strategies agree."""


def agrees(answer: str | None, label: str) -> bool:
    """True when ``answer`` equals ``label`` canonically, as rewards compare answers."""
    return answer is not None and canonical(answer) == canonical(label)


# -- voters --------------------------------------------------------------------------------------------------------


def self_confidence(trajectory: Trajectory) -> float:
    """Geometric mean of the token probabilities of the policy's last turn, 0..1; 0 without log-probs."""
    last = next((turn for turn in reversed(trajectory.turns) if turn.is_policy), None)
    if last is None or not last.log_probs:
        return 0.0
    mean = math.fsum(last.log_probs) / len(last.log_probs)
    return 0.0 if math.isnan(mean) else math.exp(min(mean, 0.0))


def compatible(question: Question, neighbour: Neighbour, config: EvolutionConfig) -> bool:
    """True when the experience may vote on this question.

    Text, options and kinds of media must be equal, the similarity sufficient, and the experience's answer elected by a vote (no
    tie, cold start, ...) and not called wrong since.
    """
    experience = neighbour.experience
    return (
        neighbour.similarity >= config.neighbours.min_similarity
        and _content(experience.question) == _content(question)
        and _key(experience.verdict.answer) is not None
        and experience.verdict.reason not in CLOSED
        and experience.status not in ("failed", "archived")
        and not called_wrong(experience)
    )


def called_wrong(experience: Experience) -> bool:
    """True when the last feedback about the answer calls it wrong or gives another answer."""
    for feedback in reversed(experience.feedback):
        if feedback.correct is not None:
            return not feedback.correct
        if feedback.answer is not None and experience.verdict.answer is not None:
            return not agrees(feedback.answer, experience.verdict.answer)
    return False


def neighbour_weight(neighbour: Neighbour, config: EvolutionConfig, now: float) -> float:
    """Weight of an experience's vote, 0..1: confidence x success x exp(-age / decay_hours) x priority x similarity.

    The success factor is .5 + .5 rate after the first retrieval, 1 before; the priority factor .5 + .5 min(priority, 2) / 2.
    ``now`` in seconds since the epoch. Source: Pixelis' temporal ensemble, with similarity added and a failed retrieval worth .5
    instead of 1.
    """
    experience = neighbour.experience
    success = 0.5 + 0.5 * min(experience.successes / experience.retrievals, 1.0) if experience.retrievals else 1.0
    age_hours = max(now - experience.created_at, 0.0) / 3600
    decay = math.exp(-age_hours / config.neighbours.decay_hours)
    priority = 0.5 + 0.5 * min(experience.priority, 2.0) / 2
    return _unit(experience.verdict.confidence) * success * decay * priority * _unit(neighbour.similarity)


# -- strategies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elected:
    """Result of a strategy: the best canonical answers, more than one when tied, in voting order; confidence 0..1."""

    best: tuple[str, ...]
    confidence: float

    @property
    def key(self) -> str | None:
        """The first of the best answers; None when nobody answered."""
        return self.best[0] if self.best else None


Strategy = Callable[[Sequence[Vote]], Elected]
NO_ELECTION = Elected((), 0.0)


def by_majority(votes: Sequence[Vote]) -> Elected:
    """The most common answer; confidence is its share of *all* votes, those without an answer included."""
    counts = Counter(key for v in votes if (key := _key(v.answer)) is not None)
    return Elected(_best(counts), max(counts.values()) / len(votes)) if counts else NO_ELECTION


def by_weight(votes: Sequence[Vote]) -> Elected:
    """The answer of the largest weight; confidence is its share of the weight x ``agreement_factor`` of its share of votes."""
    weights, total = _weights(votes), math.fsum(v.weight for v in votes)
    if not weights:
        return NO_ELECTION
    best = _best(weights)
    share = sum(_key(v.answer) == best[0] for v in votes) / len(votes)
    return Elected(best, _unit(weights[best[0]] / total) * agreement_factor(share) if total else 0.0)


def by_confidence(votes: Sequence[Vote]) -> Elected:
    """The answer of the single heaviest vote; confidence is its weight, halved when that is below .5."""
    heaviest: dict[str, float] = {}
    for v in votes:
        if (key := _key(v.answer)) is not None:
            heaviest[key] = max(heaviest.get(key, 0.0), v.weight)
    if not heaviest:
        return NO_ELECTION
    weight = max(heaviest.values())
    return Elected(_best(heaviest), _unit(weight if weight >= CONFIDENT else weight / 2))


def by_ensemble(votes: Sequence[Vote]) -> Elected:
    """The answer that most of the three strategies elect; confidence is their mean, x 1.2 (at most 1) when all agree.

    A tied strategy does not count: the first of its tied answers would be an accident of order.
    """
    results = [strategy(votes) for strategy in SINGLE.values()]
    clear = Counter(e.best[0] for e in results if len(e.best) == 1)
    mean = math.fsum(e.confidence for e in results) / len(results)
    if not clear:
        return Elected(results[0].best, mean)
    best = _best(clear)
    return Elected(best, min(mean * UNANIMOUS, 1.0) if clear[best[0]] == len(results) else mean)


SINGLE: dict[str, Strategy] = {"majority": by_majority, "weighted": by_weight, "confidence": by_confidence}
STRATEGIES: dict[str, Strategy] = {**SINGLE, "ensemble": by_ensemble}
"""Strategies by the name in ``evolution.vote.strategy``."""


def agreement_factor(share: float) -> float:
    """Factor .5..1 of the share of votes for an answer: .5 at 0, .6 at .3, .8 at .7, 1 at 1, linear in between.

    Pixelis' factor except for its first piece, .6 + .2 a / .3, which jumped from .8 down to .6 at .3: here more agreement is
    never worth less.
    """
    if share > 0.7:
        return min(0.8 + 0.2 * (share - 0.7) / 0.3, 1.0)
    if share < 0.3:
        return 0.5 + 0.1 * max(share, 0.0) / 0.3
    return 0.6 + 0.2 * (share - 0.3) / 0.4


# -- verdicts -------------------------------------------------------------------------------------------------------


def vote(
    trajectories: Sequence[Trajectory], neighbours: Sequence[Neighbour], config: EvolutionConfig, question: Question, now: float
) -> Verdict:
    """The verdict of a request's samples and the compatible ones among the experiences retrieved for it.

    A tie reports the first of the tied answers, reason ``tie``. With fewer than ``min_votes`` answers the first is reported with
    half its confidence, reason ``insufficient_votes``. A winner below the share ``abstain`` of all votes is no answer, reason
    ``abstained``. A winner that the samples alone would not have elected is ``overruled``. None of these becomes an update.
    ``now`` in seconds since the epoch.
    """
    unweighted = config.vote.strategy == "majority"
    samples = [_sample_vote(t, unweighted) for t in trajectories]
    experiences = [
        Vote(
            answer=n.experience.verdict.answer,
            weight=1.0 if unweighted else neighbour_weight(n, config, now),
            source="neighbour",
            id=n.experience.id,
            confidence=_unit(n.experience.verdict.confidence),
            similarity=n.similarity,
        )
        for n in neighbours
        if compatible(question, n, config)
    ]
    verdict = _verdict([*samples, *experiences], config.vote)
    verdict.neighbours = len(neighbours)
    alone = STRATEGIES[config.vote.strategy](samples).best
    if experiences and not verdict.reason and canonical(verdict.answer or "") not in alone:
        verdict.reason = OVERRULED
    return verdict


def direct(trajectory: Trajectory) -> Verdict:
    """The answer of one sample with its own confidence, while memory is too small for a vote; reason ``cold_start``."""
    own = _sample_vote(trajectory, unweighted=False)
    key = _key(own.answer)
    return Verdict(
        answer=None if key is None else own.answer,
        confidence=0.0 if key is None else own.weight,
        strategy="direct",
        votes=[own],
        reason=COLD_START,
        self_answer=own.answer,
        answer_weights={} if key is None else {key: own.weight},
    )


def majority(answers: Sequence[str | None], min_votes: int = MIN_VOTES) -> Verdict:
    """The unweighted vote of answers without trajectories: the label of TTRL."""
    return _verdict([Vote(answer=answer) for answer in answers], VotingConfig(strategy="majority", min_votes=min_votes))


def _sample_vote(trajectory: Trajectory, unweighted: bool) -> Vote:
    confidence = self_confidence(trajectory)
    weight = 1.0 if unweighted else confidence
    return Vote(answer=trajectory.answer, weight=weight, id=trajectory.id, confidence=confidence)


def _verdict(votes: list[Vote], config: VotingConfig) -> Verdict:
    elected = STRATEGIES[config.strategy](votes)
    spelling: dict[str, str] = {}
    for v in votes:
        if v.answer is not None and (key := _key(v.answer)) is not None:
            spelling.setdefault(key, v.answer)
    verdict = Verdict(
        answer=None,
        confidence=0.0,
        strategy=config.strategy,
        votes=votes,
        self_answer=votes[0].answer if votes and votes[0].source == "sample" else None,
        answer_weights=_weights(votes),
    )
    if config.strategy == "ensemble":
        keys = {name: strategy(votes).key for name, strategy in SINGLE.items()}
        verdict.strategies = {name: None if key is None else spelling[key] for name, key in keys.items()}
    if elected.key is None:
        verdict.reason = NO_ANSWER
        return verdict
    cast = [v for v in votes if _key(v.answer) is not None]
    share = sum(_key(v.answer) == elected.key for v in votes) / len(votes)
    if len(cast) < config.min_votes:
        first = _key(cast[0].answer)
        own = sum(_key(v.answer) == first for v in votes) / len(votes) if config.strategy == "majority" else cast[0].weight
        verdict.answer, verdict.confidence, verdict.reason = cast[0].answer, _unit(own) / 2, INSUFFICIENT
    elif share < config.abstain:
        verdict.reason = ABSTAINED
    else:
        verdict.answer, verdict.confidence = spelling[elected.key], _unit(elected.confidence)
        verdict.reason = TIE if len(elected.best) > 1 else ""
    return verdict


def _content(question: Question) -> tuple[str, list[str], tuple[str, ...]]:
    """Canonical text, kinds of media, canonical options."""
    options = question.meta.get("options") or ()
    values = options.values() if isinstance(options, dict) else options
    return canonical(question.question), [m.kind for m in question.media], tuple(canonical(str(option)) for option in values)


def _key(answer: str | None) -> str | None:
    """The canonical answer; None for no answer or a blank one."""
    return (canonical(answer) or None) if answer is not None else None


def _weights(votes: Sequence[Vote]) -> dict[str, float]:
    """Total weight by canonical answer, in voting order; independent of the order of equal answers."""
    parts: dict[str, list[float]] = {}
    for v in votes:
        if (key := _key(v.answer)) is not None:
            parts.setdefault(key, []).append(v.weight)
    return {key: math.fsum(values) for key, values in parts.items()}


def _best(weights: Mapping[str, float]) -> tuple[str, ...]:
    """The keys of the largest weight."""
    largest = max(weights.values())
    return tuple(key for key, weight in weights.items() if math.isclose(weight, largest, rel_tol=1e-9))


def _unit(value: float) -> float:
    """Clamped to 0..1; NaN becomes 0."""
    return min(max(value, 0.0), 1.0) if not math.isnan(value) else 0.0
