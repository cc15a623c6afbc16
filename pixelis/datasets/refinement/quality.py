"""Quality of demonstrations: rules, and a heuristic score 0..1 without a model (Pixelis, arXiv 2603.25091)."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence

from pixelis.config.refinement import QualityConfig
from pixelis.datasets.refinement.actions import WRONG_KINDS, actions, signature
from pixelis.datasets.synthesis import checking
from pixelis.errors import DataFailure
from pixelis.records import Demonstration, Question, SampleKind
from pixelis.rewards.scorers import SCORERS, Services, canonical, case_of, letter

WEIGHTS = {
    "completeness": 0.20,
    "coherence": 0.25,
    "correctness": 0.25,
    "efficiency": 0.15,
    "complexity": 0.10,
    "consistency": 0.05,
}
FULL_OPERATIONS, FULL_DIFFERENT = 4, 3
"""Numbers of operations, and of different ones, from which on a demonstration has full complexity."""
_WORD = re.compile(r"[^\W_]{3,}")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

Score = Callable[[Question, str | None], float]
"""The score of an answer to a question, 0..1; DataFailure when it cannot be scored."""


def scorer(services: Services) -> Score:
    return lambda question, answer: checking.score(question, answer, services)


def rule_violation(
    demonstration: Demonstration,
    operations: Container[str],
    settings: QualityConfig,
) -> str | None:
    shortest, longest = settings.question
    if not shortest <= len(demonstration.question.strip()) <= longest:
        return "question_length"
    if not (
        demonstration.id
        and demonstration.task
        and (demonstration.final or "").strip()
        and demonstration.answers
    ):
        return "missing_field"
    if demonstration.scorer not in SCORERS:
        return "unknown_scorer"
    if any(step.op not in operations for step in demonstration.steps if step.learn):
        return "unknown_op"
    fewest, most = settings.length
    if not fewest <= len(actions(demonstration)) <= most:
        return "length"
    origin = demonstration.provenance
    if settings.provenance and not (origin and origin.source and origin.original_id and origin.method):
        return "no_provenance"
    return None


# Heuristic score


def heuristic(demonstration: Demonstration, score: Score) -> float:
    """Quality 0..1: the weighted sum of ``components``."""
    parts = components(demonstration, score)
    return round(sum(weight * parts[name] for name, weight in WEIGHTS.items()), 6)


def components(d: Demonstration, score: Score) -> dict[str, float]:
    """The six components by name, each 0..1; see docs/refinement.md."""
    thought = _mean([bool(turn.think and turn.think.strip()) for turn in d.turns])
    observed = _mean([step.observation is not None for step in d.steps], empty=1.0)
    learnt = [step for step in d.steps if step.learn]
    different = {signature(step) for step in learnt}
    failed = {signature(step) for step in learnt if step.observation is not None and not step.succeeded}
    names = [step.op for step in d.steps]
    return {
        "completeness": _mean(
            [thought, observed, bool((d.final or "").strip()), bool(d.answers), d.provenance is not None]
        ),
        "coherence": coherence(d),
        "correctness": correctness(d, score),
        "efficiency": len(different - failed) / len(learnt) if learnt else 1.0,
        "complexity": 0.5 * min(1.0, len(names) / FULL_OPERATIONS)
        + 0.5 * min(1.0, len(set(names)) / FULL_DIFFERENT),
        "consistency": consistency(d),
    }


def coherence(d: Demonstration) -> float:
    """Mean over turns of: the target exists by then; the thought shares a word with call, answer or context.

    The context is the question, earlier thoughts and observations.
    """
    targets, words, values = {media.id for media in d.media}, _words(d.conversation), list[float]()
    for turn in d.turns:
        parts = []
        if turn.op is not None and turn.target is not None:
            parts.append(turn.target in targets or turn.target.split(".")[0] in targets)
        if turn.think and turn.think.strip():
            thought = _words(turn.think)
            call = _words(f"{turn.op or ''} {turn.arguments}".replace("_", " ")) | _words(turn.answer or "")
            numbers = set(_NUMBER.findall(turn.think)) & set(
                _NUMBER.findall(f"{turn.arguments} {turn.answer}")
            )
            parts.append(bool(thought & (words | call) or numbers))
            words |= thought
        if parts:
            values.append(_mean(parts))
        if turn.observation is not None and turn.succeeded:
            targets |= {str(turn.observation.id)} | {image.id for image in turn.observation.images}
            words |= _words(turn.observation.text)
    return _mean(values)


def correctness(d: Demonstration, score: Score) -> float:
    """Mean of: the answer fits the kind, and the share of calls to learn that succeed."""
    try:
        value = score(d, d.final)
        fits = (
            checking.counts_as_wrong(d, value)
            if d.kind in WRONG_KINDS
            else checking.counts_as_right(d, value)
        )
    except DataFailure:
        fits = False
    return _mean([fits, _mean([step.succeeded for step in d.steps if step.learn], empty=1.0)])


def consistency(d: Demonstration) -> float:
    """1 if the last thought and the observations have the answer's or its option's words, 0.5 without any."""
    observed = [s.observation.text for s in d.steps if s.observation is not None and s.succeeded]
    text = canonical(" ".join([d.turns[-1].think or "", *observed]))
    if not text:
        return 0.5
    answer, options = d.final or "", case_of(d, None, ()).options
    if options and (signs := letter(answer, options)):
        answer = " ".join(options[ord(sign) - ord("A")] for sign in signs)
    words = _tokens(answer)
    return float(bool(words) and words <= _tokens(text))


def _words(text: str) -> set[str]:
    return {word.rstrip("s") for word in _WORD.findall(text.casefold())}


def _tokens(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", canonical(text)))


def _mean(values: Sequence[float | bool], empty: float = 0.0) -> float:
    return sum(map(float, values)) / len(values) if values else empty


def weight(
    kind: SampleKind, quality: float, types: Mapping[SampleKind, float] = checking.SAMPLE_WEIGHTS
) -> float:
    """The sampling weight of the kind times the square root of quality."""
    return round(types.get(kind, 1.0) * max(quality, 1e-4) ** 0.5, 6)
