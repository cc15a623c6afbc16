"""Groups equivalent answers to a question before voting, without truths. Judges are not asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pixelis.errors import DataFailure
from pixelis.records import Question
from pixelis.rewards import mathematics
from pixelis.rewards.notation import canonical, quantity
from pixelis.rewards.scorers import Case, Services, case_of, find_scorer, letter

MATHS = frozenset({"math", "math_judge", "pixel_reasoner"})

Same = Callable[[str, str], bool]


def same_text(a: str, b: str) -> bool:
    """Whether two texts or quantities are equal; used where no scorer is known."""
    if canonical(a) == canonical(b):
        return True
    first, second = quantity(a), quantity(b)
    return first is not None and second is not None and first.equals(second)


class Equality:
    def __init__(self, question: Question, scorer: str, services: Services):
        self.question, self.scorer, self.services = question, scorer, services
        self.options = case_of(question, None, ()).options
        self.readable: dict[str, bool] = {}

    def __call__(self, a: str, b: str) -> bool:
        if canonical(a) == canonical(b):
            return True
        if self.scorer == "mc_letter" or (self.scorer in ("judge", "math_judge") and self.options):
            first, second = letter(a, self.options), letter(b, self.options)
            if first or second:
                return first == second
        if self.scorer == "judge":
            return same_text(a, b)
        if self.scorer in MATHS:
            return mathematics.equal(a, b, self._equal_formulas)
        try:
            return (
                find_scorer(self.scorer)(
                    Case(a, (b,), self.question.conversation, self.options), self.services
                )
                >= 1.0
            )
        except DataFailure:  # the scorer reads no such answer
            return False

    def _equal_formulas(self, a: str, b: str) -> bool:
        # Cached, so that a formula that hangs hangs once, not once for every other answer.
        for formula in (a, b):
            if formula not in self.readable:
                self.readable[formula] = self.services.readable(formula)
        return self.readable[a] and self.readable[b] and self.services.math(a, [b]) > 0


def classes(answers: Iterable[str | None], same: Same = same_text) -> list[str | None]:
    """The class of each answer, its first member's canonical text; None for a blank answer."""
    names: dict[str, str] = {}
    first: dict[str, str] = {}
    result: list[str | None] = []
    for answer in answers:
        text = canonical(answer) if answer is not None else ""
        if not text or answer is None:
            result.append(None)
            continue
        if text not in names:
            names[text] = next((name for name, member in first.items() if same(answer, member)), text)
            first.setdefault(names[text], answer)
        result.append(names[text])
    return result


def spellings(answers: Sequence[str | None], names: Sequence[str | None]) -> dict[str, str]:
    """The answer that came first in each class."""
    result: dict[str, str] = {}
    for answer, name in zip(answers, names, strict=True):
        if answer is not None and name is not None:
            result.setdefault(name, answer)
    return result
