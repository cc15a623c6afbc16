"""Compares LaTeX formulas with latex2sympy and math-verify, in a worker process: it may hang or take much memory."""

from __future__ import annotations

import functools
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from sympy.core.relational import Relational

from pixelis.rewards.notation import near

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\d*\.\d+|\d(?:\.\d+)?E[-+]?\d+)")
_DIGITS = 40


class Unreadable(Exception):
    """A formula that cannot be parsed as a whole, or that has no value."""


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Any:
    """The formula as sympy reads it, decimals as exact fractions. Raises Unreadable."""
    if _DECIMAL.fullmatch(text):
        value = Fraction(text)
        return sympy.Rational(value.numerator, value.denominator)
    try:
        is_real = re.search(r"(?<![\\A-Za-z])i(?![A-Za-z])", text) is None
        formula = latex2sympy(
            normalize_latex(text, _NORMALIZATION), is_real=is_real, normalization_config=None
        )
        formula = formula.xreplace({x: sympy.Rational(str(x)) for x in formula.atoms(sympy.Float)})
        if formula.has(sympy.nan, sympy.zoo):
            raise Unreadable
    except MemoryError:
        raise
    except Exception:
        raise Unreadable from None
    return formula


def equal(a: str, b: str) -> bool:
    """Whether two formulas are equal; a decimal equals the number that it rounds."""
    first, second = parse(a), parse(b)
    if _is_number(first) and _is_number(second):
        x, y = (sympy.N(number, _DIGITS) for number in (first, second))
        if not (x.is_finite and y.is_finite):
            return bool(first == second)
        if abs(x - y) <= sympy.Float(10, _DIGITS) ** (10 - _DIGITS) * max(abs(x), abs(y)):
            return True
        if not (x.is_real and y.is_real):
            return False
        pairs = ((a, x), (b, y))
        return near(*(Decimal(s) if _DECIMAL.fullmatch(s) else Fraction(str(value)) for s, value in pairs))
    relations = [isinstance(x, Relational | sympy.And) for x in (first, second)]
    if all(relations):  # each part of a chain such as 1 < x < 2 needs an equal
        parts, others = (x.args if isinstance(x, sympy.And) else (x,) for x in (first, second))
        return len(parts) == len(others) and all(any(_equal_relation(x, y) for y in others) for x in parts)
    # X < 2 is the interval (-oo, 2)
    if any(relations) and not any(isinstance(x, sympy.Set) for x in (first, second)):
        return False
    precision: dict[str, Any] = {
        "float_rounding": _DIGITS,
        "numeric_precision": _DIGITS,
        "timeout_seconds": None,
    }
    pairs = ((first, second), (second, first))
    return any(math_verify.verify(gold, target, **precision, raise_on_error=True) for gold, target in pairs)


def _is_number(formula: Any) -> bool:
    return isinstance(formula, sympy.Expr) and not formula.free_symbols and bool(formula.is_number)


_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _equal_relation(a: Relational, b: Relational) -> bool:
    """Whether equations or inequalities differ by a factor only."""
    left, right = a.lhs - a.rhs, b.lhs - b.rhs
    if not left.free_symbols:
        return bool(a.rel_op == b.rel_op and a.lhs == b.lhs and a.rhs == b.rhs)
    factor = sympy.simplify(left / right) if right != 0 else sympy.S.Zero
    if factor.free_symbols or factor.is_zero is not False:
        return False
    if a.rel_op in _FLIPPED:
        return bool(b.rel_op == (a.rel_op if factor.is_positive else _FLIPPED[a.rel_op]))
    return bool(a.rel_op == b.rel_op)
