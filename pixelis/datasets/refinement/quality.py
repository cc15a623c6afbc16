"""How good a demonstration is: rules that drop it, a score 0..1 without a model, and a language model's 1..5 where one is named.

Stages and weights after Pixelis, arXiv 2603.25091; what each part of the score measures on our records is said at its function.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from pixelis.datasets.refinement.actions import WRONG, actions, signature
from pixelis.datasets.synthesis import checking
from pixelis.errors import DataFailure
from pixelis.records import Demonstration, Question, SampleKind
from pixelis.rewards.scorers import SCORERS, Services, canonical, case_of, letter

LENGTH = (2, 20)
QUESTION = (10, 500)
WEIGHTS = {
    "completeness": 0.20,
    "coherence": 0.25,
    "correctness": 0.25,
    "efficiency": 0.15,
    "complexity": 0.10,
    "consistency": 0.05,
}
TYPE_WEIGHTS: dict[SampleKind, float] = {"trap_perceptual": 1.5, "trap_logical": 1.5, "self_correction": 1.2}
"""Sampling weight of a kind; 1 for the others."""
ENOUGH_OPERATIONS, ENOUGH_KINDS = 4, 3
_WORD = re.compile(r"[^\W_]{3,}")

Score = Callable[[Question, str | None], float]
"""How right an answer to a question is, 0..1; DataFailure when that cannot be known."""


def scorer(services: Services) -> Score:
    """Scores answers by the scorer each question names."""

    return lambda question, answer: checking.score(question, answer, services)


def fault(
    demonstration: Demonstration,
    operations: Container[str],
    length: tuple[int, int] = LENGTH,
    question: tuple[int, int] = QUESTION,
    provenance: bool = True,
) -> str | None:
    """Why a rule drops it, None to keep it.

    ``question_length``, ``missing_field``, ``unknown_scorer``, ``unknown_op``, ``length`` or ``no_provenance``. ``operations``
    are the names on offer; length counts thoughts and operations.
    """
    if not question[0] <= len(demonstration.question.strip()) <= question[1]:
        return "question_length"
    if not (demonstration.id and demonstration.task and (demonstration.final or "").strip() and demonstration.answers):
        return "missing_field"
    if demonstration.scorer not in SCORERS:
        return "unknown_scorer"
    if any(step.op not in operations for step in demonstration.steps if step.learn):
        return "unknown_op"
    if not length[0] <= len(actions(demonstration)) <= length[1]:
        return "length"
    made = demonstration.provenance
    if provenance and not (made is not None and made.source and made.original_id and made.method):
        return "no_provenance"
    return None


# -- the score without a model --------------------------------------------------------------------------------------


def heuristic(demonstration: Demonstration, score: Score) -> float:
    """Quality 0..1: the weighted sum of ``components``."""
    parts = components(demonstration, score)
    return round(sum(weight * parts[name] for name, weight in WEIGHTS.items()), 6)


def components(demonstration: Demonstration, score: Score) -> dict[str, float]:
    """The six parts by name, each 0..1."""
    return {
        "completeness": completeness(demonstration),
        "coherence": coherence(demonstration),
        "correctness": correctness(demonstration, score),
        "efficiency": efficiency(demonstration),
        "complexity": complexity(demonstration),
        "consistency": consistency(demonstration),
    }


def completeness(d: Demonstration) -> float:
    """Mean of: share of turns with a thought, share of calls with an observation, an answer, a truth, a known origin."""
    thought = _mean([bool(turn.think and turn.think.strip()) for turn in d.turns])
    observed = _mean([step.observation is not None for step in d.steps], empty=1.0)
    return _mean([thought, observed, bool(d.final and d.final.strip()), bool(d.answers), d.provenance is not None])


def coherence(d: Demonstration) -> float:
    """Mean over turns of: the target was there by then, and the thought takes up a word of what precedes or of the call.

    What precedes is the question and the text of earlier observations and thoughts. A turn without a thought is judged by its
    target alone.
    """
    known = {media.id for media in d.media}
    words = _words(d.question)
    values = []
    for turn in d.turns:
        parts = []
        if turn.op is not None and turn.target is not None:
            parts.append(turn.target in known or turn.target.split(".")[0] in known)
        if turn.think and turn.think.strip():
            said = _words(turn.think)
            call = _words(f"{turn.op or ''} {turn.arguments}".replace("_", " ")) | _words(turn.answer or "")
            parts.append(
                bool(said & (words | call)) or _numbers(turn.think) & _numbers(f"{turn.arguments} {turn.answer}") != set()
            )
            words |= said
        if parts:
            values.append(_mean(parts))
        if turn.observation is not None and turn.observation.status == "ok":
            known |= {str(turn.observation.id)} | {image.id for image in turn.observation.images}
            words |= _words(turn.observation.text)
    return _mean(values, empty=0.0)


def correctness(d: Demonstration, score: Score) -> float:
    """Mean of: the answer is right (wrong, where the kind is wrong on purpose), and share of calls to learn that succeeded.

    An answer that cannot be scored counts as not right.
    """
    try:
        value = score(d, d.final)
        kept = checking.counts_as_wrong(d, value) if d.kind in WRONG else checking.counts_as_right(d, value)
    except DataFailure:
        kept = False
    succeeded = [s.observation is not None and s.observation.status == "ok" for s in d.steps if s.learn]
    return _mean([kept, _mean(succeeded, empty=1.0)])


def efficiency(d: Demonstration) -> float:
    """Share of the calls to learn that are not an exact repetition and did not fail; 1 for none."""
    calls = [s for s in d.steps if s.learn]
    seen = Counter(signature(s) for s in calls)
    failed = {signature(s) for s in calls if s.observation is not None and s.observation.status != "ok"}
    return sum(name not in failed for name in seen) / len(calls) if calls else 1.0


def complexity(d: Demonstration) -> float:
    """Half for four operations, half for three different ones, less in proportion."""
    names = [s.op for s in d.steps]
    return 0.5 * min(1.0, len(names) / ENOUGH_OPERATIONS) + 0.5 * min(1.0, len(set(names)) / ENOUGH_KINDS)


def consistency(d: Demonstration) -> float:
    """1 when the answer's words stand in the last thought or in an observation, 0 when they do not; 0.5 without such text.

    The letter of an option stands for its text.
    """
    read = [s.observation.text for s in d.steps if s.observation is not None and s.observation.status == "ok"]
    text = canonical(" ".join([d.turns[-1].think or "", *read]))
    if not text:
        return 0.5
    meant, options = d.final or "", case_of(d, None, ()).options
    if options and (chosen := letter(meant, options)):
        meant = options[ord(chosen) - ord("A")]
    said = _tokens(meant)
    return float(bool(said) and said <= _tokens(text))


def _words(text: str) -> set[str]:
    return {word.rstrip("s") for word in _WORD.findall(text.casefold())}


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", text))


def _tokens(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", canonical(text)))


def _mean(values: Sequence[float | bool], empty: float = 0.0) -> float:
    return sum(map(float, values)) / len(values) if values else empty


# -- what quality decides -------------------------------------------------------------------------------------------


def weight(kind: SampleKind, quality: float, types: Mapping[SampleKind, float] = TYPE_WEIGHTS) -> float:
    """Sampling weight: that of the kind times the square root of quality; above 0 for any quality."""
    return round(types.get(kind, 1.0) * max(quality, 1e-4) ** 0.5, 6)
