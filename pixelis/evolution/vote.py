"""The vote: k answers to one prompt, and what memory knows of it, become one verdict with its provenance.

The samples of a request vote on its answer (TTRL, arXiv 2504.16084, majority label). An experience found in memory has a vote
only where it answers the same question about what looks like the same picture (``compatible``); it may support or doubt what the
samples say, but a label that it alone carried through teaches nothing (reason ``overruled``). Feedback may silence an experience
and never casts a vote: whoever wants to poison the stream can only make it say less.
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
"""Reasons of verdicts that never teach and, from memory, never vote: their answer is an accident."""
MIN_VOTES = 3
"""Votes below which agreement is no evidence: one sample always agrees with itself."""
CONFIDENT = 0.5
"""Weight from which a single vote counts in full (strategy ``confidence``), and confidence below which a verdict is low."""
UNANIMOUS = 1.2
"""What agreement of all strategies of an ensemble is worth."""


def agrees(answer: str | None, label: str) -> bool:
    """True when ``answer`` says the same as ``label``; the equality that rewards use, so that votes and rewards cannot differ."""
    return answer is not None and canonical(answer) == canonical(label)


# -- who votes ------------------------------------------------------------------------------------------------------


def self_confidence(trajectory: Trajectory) -> float:
    """How sure the policy was of its last turn: the geometric mean of its tokens' probabilities, 0..1; 0 without log-probs."""
    last = next((turn for turn in reversed(trajectory.turns) if turn.is_policy), None)
    if last is None or not last.log_probs:
        return 0.0
    mean = math.fsum(last.log_probs) / len(last.log_probs)
    return 0.0 if math.isnan(mean) else math.exp(min(mean, 0.0))


def compatible(question: Question, neighbour: Neighbour, config: EvolutionConfig) -> bool:
    """True when the experience may vote on this question: same text, options and kinds of media, similar enough, sound.

    Sound is a verdict with an answer that the vote elected (not cold start, tie, ...), and that nobody called wrong since.
    """
    experience = neighbour.experience
    return (
        neighbour.similarity >= config.neighbours.min_similarity
        and _asked(experience.question) == _asked(question)
        and _key(experience.verdict.answer) is not None
        and experience.verdict.reason not in CLOSED
        and experience.status not in ("failed", "archived")
        and not called_wrong(experience)
    )


def called_wrong(experience: Experience) -> bool:
    """True when the last feedback that says anything of the answer calls it wrong, or gives another."""
    for said in reversed(experience.feedback):
        if said.correct is not None:
            return not said.correct
        if said.answer is not None and experience.verdict.answer is not None:
            return not agrees(said.answer, experience.verdict.answer)
    return False


def neighbour_weight(neighbour: Neighbour, config: EvolutionConfig, now: float) -> float:
    """Weight of an experience's vote, 0..1: confidence x success x exp(-age / half life) x priority x similarity.

    Success is .5 + .5 rate once it was retrieved, else 1; priority .5 + .5 min(priority, 2) / 2. ``now`` in seconds since the
    epoch. Source: Pixelis' temporal ensemble, with similarity added, and a retrieved failure worth .5 instead of 1.
    """
    experience = neighbour.experience
    success = 0.5 + 0.5 * min(experience.successes / experience.retrievals, 1.0) if experience.retrievals else 1.0
    age_hours = max(now - experience.created_at, 0.0) / 3600
    fresh = math.exp(-age_hours / config.neighbours.decay_hours)
    priority = 0.5 + 0.5 * min(experience.priority, 2.0) / 2
    return _unit(experience.verdict.confidence) * success * fresh * priority * _unit(neighbour.similarity)


# -- strategies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elected:
    """What a strategy makes of the votes: the best canonical answers, in the order they were given, and a confidence 0..1."""

    best: tuple[str, ...]
    confidence: float

    @property
    def key(self) -> str | None:
        """The answer elected, the first of equals; None when nobody answered."""
        return self.best[0] if self.best else None

    @property
    def tie(self) -> bool:
        """True when more than one is best."""
        return len(self.best) > 1


Strategy = Callable[[Sequence[Vote]], Elected]
NOBODY = Elected((), 0.0)


def by_majority(votes: Sequence[Vote]) -> Elected:
    """The most common answer; confidence is its share of *all* votes: one without an answer counts."""
    counts = Counter(key for v in votes if (key := _key(v.answer)) is not None)
    return Elected(_best(counts), max(counts.values()) / len(votes)) if counts else NOBODY


def by_weight(votes: Sequence[Vote]) -> Elected:
    """The answer of most weight; confidence is its share of all weight x ``agreement_factor`` of its share of the votes."""
    weights, total = _weights(votes), math.fsum(v.weight for v in votes)
    if not weights:
        return NOBODY
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
        return NOBODY
    most = max(heaviest.values())
    return Elected(_best(heaviest), _unit(most if most >= CONFIDENT else most / 2))


def by_ensemble(votes: Sequence[Vote]) -> Elected:
    """What most of the three strategies elect; confidence is the mean of the three, x 1.2 (at most 1) when they all agree.

    A strategy that is tied elects nothing here: its first of equals would be an accident of order.
    """
    heard = [strategy(votes) for strategy in SINGLE.values()]
    clear = Counter(e.best[0] for e in heard if len(e.best) == 1)
    mean = math.fsum(e.confidence for e in heard) / len(heard)
    if not clear:
        return Elected(heard[0].best, mean)
    best = _best(clear)
    return Elected(best, min(mean * UNANIMOUS, 1.0) if clear[best[0]] == len(heard) else mean)


SINGLE: dict[str, Strategy] = {"majority": by_majority, "weighted": by_weight, "confidence": by_confidence}
STRATEGIES: dict[str, Strategy] = {**SINGLE, "ensemble": by_ensemble}
"""Strategies by the name in ``evolution.vote.strategy``."""


def agreement_factor(share: float) -> float:
    """What the share of votes for an answer is worth, .5..1, rising: .5 at 0, .6 at .3, .8 at .7, 1 at 1, linear between.

    Pixelis' factor but for its lowest piece: .6 + .2 a / .3 rose to .8 at .3 and fell to .6 there; .5 + .1 a / .3 meets the
    next piece and keeps the published range, so that more agreement is never worth less.
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
    """The verdict of a request's samples and the compatible of the experiences found for it.

    Every sample votes; one without an answer votes for nothing but counts. A tie reports the first of the tied, reason ``tie``.
    Fewer than ``min_votes`` answers report the first given with half its confidence, reason ``insufficient_votes``. A winner
    below the share ``abstain`` of all votes is no answer, reason ``abstained``. One that the samples alone would not have elected
    is ``overruled``. The gate lets none of these teach. ``now`` in seconds since the epoch.
    """
    even = config.vote.strategy == "majority"
    samples = [
        Vote(answer=t.answer, weight=1.0 if even else sure, id=t.id, confidence=sure)
        for t, sure in ((t, self_confidence(t)) for t in trajectories)
    ]
    known = [
        Vote(
            answer=n.experience.verdict.answer,
            weight=1.0 if even else neighbour_weight(n, config, now),
            source="neighbour",
            id=n.experience.id,
            confidence=_unit(n.experience.verdict.confidence),
            similarity=n.similarity,
        )
        for n in neighbours
        if compatible(question, n, config)
    ]
    verdict = _verdict([*samples, *known], config.vote)
    verdict.neighbours = len(neighbours)
    alone = STRATEGIES[config.vote.strategy](samples).best
    if known and not verdict.reason and canonical(verdict.answer or "") not in alone:
        verdict.reason = OVERRULED
    return verdict


def direct(trajectory: Trajectory) -> Verdict:
    """The answer of one sample without a vote, while memory is too small for one: its own confidence, reason ``cold_start``."""
    sure = self_confidence(trajectory)
    own = Vote(answer=trajectory.answer, weight=sure, id=trajectory.id, confidence=sure)
    key = _key(trajectory.answer)
    return Verdict(
        answer=None if key is None else trajectory.answer,
        confidence=0.0 if key is None else sure,
        strategy="direct",
        votes=[own],
        reason=COLD_START,
        self_answer=trajectory.answer,
        answer_weights={} if key is None else {key: sure},
    )


def majority(answers: Sequence[str | None], min_votes: int = MIN_VOTES) -> Verdict:
    """The vote of bare answers of one weight, as ``vote`` with strategy ``majority`` has it: TTRL's label."""
    return _verdict([Vote(answer=answer) for answer in answers], VotingConfig(strategy="majority", min_votes=min_votes))


def _verdict(votes: list[Vote], config: VotingConfig) -> Verdict:
    elected = STRATEGIES[config.strategy](votes)
    spelled: dict[str, str] = {}
    for v in votes:
        if v.answer is not None and (key := _key(v.answer)) is not None:
            spelled.setdefault(key, v.answer)
    verdict = Verdict(
        answer=None,
        confidence=0.0,
        strategy=config.strategy,
        votes=votes,
        self_answer=votes[0].answer if votes and votes[0].source == "sample" else None,
        answer_weights=_weights(votes),
    )
    if config.strategy == "ensemble":
        found = {name: strategy(votes).key for name, strategy in SINGLE.items()}
        verdict.strategies = {name: None if key is None else spelled[key] for name, key in found.items()}
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
        verdict.answer, verdict.confidence = spelled[elected.key], _unit(elected.confidence)
        verdict.reason = TIE if elected.tie else ""
    return verdict


def _asked(question: Question) -> tuple[str, list[str], tuple[str, ...]]:
    given = question.meta.get("options") or ()
    options = given.values() if isinstance(given, dict) else given
    return canonical(question.question), [m.kind for m in question.media], tuple(canonical(str(option)) for option in options)


def _key(answer: str | None) -> str | None:
    """What votes are counted by; None for no answer and for a blank one."""
    return (canonical(answer) or None) if answer is not None else None


def _weights(votes: Sequence[Vote]) -> dict[str, float]:
    """Weight by canonical answer, in the order of the first vote for each; the sums do not depend on the order of votes."""
    parts: dict[str, list[float]] = {}
    for v in votes:
        if (key := _key(v.answer)) is not None:
            parts.setdefault(key, []).append(v.weight)
    return {key: math.fsum(values) for key, values in parts.items()}


def _best(weights: Mapping[str, float]) -> tuple[str, ...]:
    """The keys of most weight, more than one when they are equal."""
    most = max(weights.values())
    return tuple(key for key, weight in weights.items() if math.isclose(weight, most, rel_tol=1e-9))


def _unit(value: float) -> float:
    """Within 0..1; what is not a number is 0."""
    return min(max(value, 0.0), 1.0) if not math.isnan(value) else 0.0
