r"""The notation of short answers: LaTeX wrappers, numbers with units, ratios and lists, read without evaluating anything.

Formulas beyond these are compared by math-verify in a worker process.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction

MAX_CHARS = 200
"""Longer texts are no short answers and are not read."""
TOLERANCE = Fraction(2, 1_000_000)
"""Relative difference up to which two numbers are equal unless both are whole: six digits, as math-verify rounds."""

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathsf|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_DELIMITED = re.compile(r"\$\$(.+)\$\$|\$(.*[^\\$])\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_SPACE = re.compile(r"\\[,;:!> ]|~|\s")

_SEPARATOR = r"(?:\{,\}(?:\\!)?|,\\!|\\[,!])"
_GROUPED = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)", re.ASCII)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"([-+]?\s*(?:{_DIGITS}(?:\.\d*)?|\.\d+))(?:[eE]([-+]?\d{{1,3}}))?", re.ASCII)
_FRACTION = re.compile(r"([-+]?)\s*(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)", re.ASCII)
_LATEX_FRACTION = re.compile(r"([-+]?)\s*(\d*)\s*\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", re.ASCII)
_MULTIPLE = re.compile(rf"(?<![\d.,])({_DIGITS})(?:\.(\d+))?\s*(thousand|million|billion|trillion)\b", re.ASCII | re.IGNORECASE)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_RATIO = re.compile(r"(\d+(?:\.\d+)?)\s*:\s*(\d+(?:\.\d+)?)", re.ASCII)
_COMMA = re.compile(r" ?, ?(?:and )?| and ")
_UNIT = re.compile(r"(.*?[\d.}])\s*([^\d.\s{}][^\d{}]*(?:\^\{?[23]\}?)?)", re.DOTALL)

_NAMES = {
    "%": "% percent",
    "°": "° deg degree degrees circ",
    "°C": "°c celsius",
    "°F": "°f fahrenheit",
    "$": "$ dollar dollars usd us$",
    "€": "€ euro euros eur",
    "£": "£ pound_sterling gbp",
    "¢": "¢ cent cents",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "dm": "dm decimeter decimeters decimetre decimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "l": "l liter liters litre litres",
    "ms": "ms millisecond milliseconds",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years",
    "km/h": "km/h kph kmh kilometersperhour kilometresperhour",
    "mi/h": "mph mi/h milesperhour",
    "m/s": "m/s meterspersecond metrespersecond",
    "unit": "unit units",
}
UNITS = {alias: unit for unit, aliases in _NAMES.items() for alias in aliases.split()}
"""Units by their names in lower case."""
_POWERS = {"": "", "^2": "^2", "^{2}": "^2", "²": "^2", "^3": "^3", "^{3}": "^3", "³": "^3"}
_POWER_WORDS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3", "cu": "^3"}


@dataclass(frozen=True)
class Quantity:
    """A number, or a list of them, and its unit; ``unit`` is empty when none is written."""

    values: tuple[Fraction, ...]
    unit: str = ""

    def equals(self, other: Quantity) -> bool:
        """True for the same numbers in the same unit. A missing unit fits any; a percentage is also the number it stands for."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if _close(self.values, other.values):
            return True
        if "%" not in (self.unit, other.unit) or self.unit == other.unit:
            return False
        percent, number = (self, other) if self.unit == "%" else (other, self)
        return _close(tuple(value / 100 for value in percent.values), number.values)

    def in_order(self) -> Quantity:
        """The numbers from the smallest to the largest."""
        return replace(self, values=tuple(sorted(self.values)))


def _close(a: tuple[Fraction, ...], b: tuple[Fraction, ...]) -> bool:
    return len(a) == len(b) and all(map(_near, a, b))


def _near(a: Fraction, b: Fraction) -> bool:
    if a == b or (a.denominator == 1 and b.denominator == 1):
        return a == b
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))


def unwrap(text: str) -> str:
    r"""The text without LaTeX delimiters, ``\text{}`` and the like, and with plain minus, dollar, percent and space signs."""
    text = unicodedata.normalize("NFC", text).strip()
    if len(text) > MAX_CHARS:
        return text
    text = _GROUPED.sub(lambda number: re.sub(_SEPARATOR, ",", number[0]), text.replace("\u2212", "-"))
    if (match := _DELIMITED.fullmatch(text)) and not match[0].endswith("\\$"):
        text = next(group for group in match.groups() if group is not None)
    previous = None
    while text != previous:
        previous, text = text, _WRAPPER.sub(r"\1", text)
    text = text.replace("\\left", "").replace("\\right", "").replace("\\%", "%").replace("\\$", "$")
    return " ".join(_SPACE.sub(" ", text).split())


def unboxed(text: str) -> str:
    r"""The content of a text that is one ``\boxed{}``, else the text."""
    match = re.fullmatch(r"\s*\$*\s*\\boxed\s*\{(.*)\}\s*\$*\s*", text, re.DOTALL)
    if match is None:
        return text
    depth = 0
    for character in match[1]:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:  # two boxes
            return text
    return match[1].strip()


def written_out(text: str) -> str:
    """The text with numbers such as ``5.2 million`` as digits."""
    return _MULTIPLE.sub(_digits, text) if len(text) <= MAX_CHARS else text


def _digits(match: re.Match[str]) -> str:
    zeros = _ZEROS[match[3].lower()]
    decimals = (match[2] or "").ljust(zeros, "0")
    digits = (match[1].replace(",", "") + decimals[:zeros]).lstrip("0") or "0"
    return digits + ("." + decimals[zeros:] if decimals[zeros:] else "")


def quantity(text: str) -> Quantity | None:
    """The number, ratio or list of numbers that a text is, with its unit; None for any other text."""
    text = written_out(unwrap(text))
    if not text or len(text) > MAX_CHARS or not any(c.isdigit() for c in text):
        return None
    if ratio := _RATIO.fullmatch(text):
        return _ratio(ratio)
    if (value := _number(text)) is not None:
        return Quantity((value,))
    return _with_unit(text) or _list(_COMMA.split(text))


def _list(texts: list[str]) -> Quantity | None:
    """Numbers with one unit, which need not be written at each."""
    if not all(texts):
        return None
    items = [_with_unit(text) if (value := _number(text)) is None else Quantity((value,)) for text in texts]
    units = {item.unit for item in items if item is not None} - {""}
    if None in items or len(units) > 1:
        return None
    return Quantity(tuple(item.values[0] for item in items if item is not None), "".join(units))


def list_in_brackets(text: str) -> Quantity | None:
    """The numbers of ``(3, 4)`` or ``[3, 4]``, which is a point or an interval: equal to the same numbers without brackets."""
    match = re.fullmatch(r"[(\[](.+)[)\]]", unwrap(text))
    return quantity(match[1]) if match else None


def _with_unit(text: str) -> Quantity | None:
    sign = text[0] if text[0] in "-+" else ""
    if (symbol := text[len(sign) : len(sign) + 1]) in "$€£":
        value = _number(sign + text[len(sign) + 1 :].strip())
        return None if value is None else Quantity((value,), UNITS[symbol])
    if (match := _UNIT.fullmatch(text)) is None:
        return None
    value, unit = _number(match[1].strip().removesuffix("^").strip()), _unit(match[2])
    if value is None:  # 45^\circ
        value = _number(re.sub(r"\s*\^?\{?$", "", match[1]).strip())
    return None if value is None or unit is None else Quantity((value,), unit)


def _unit(text: str) -> str | None:
    text = text.strip().removesuffix(".").replace("\\circ", "°").replace("^°", "°").replace("^{°}", "°").casefold()
    match = re.fullmatch(r"(.*?)\s*(\^\{?[23]\}?|[²³])?", text, re.DOTALL)
    assert match is not None
    words, power = match[1].split(), _POWERS[match[2] or ""]
    named = [_POWER_WORDS[word] for word in words if word in _POWER_WORDS]
    rest = "".join(word for word in words if word not in _POWER_WORDS)
    unit = UNITS.get(rest)
    if unit is None or len(named) + bool(power) > 1:
        return None
    return unit + (power or "".join(named))


def _number(text: str) -> Fraction | None:
    if match := _DECIMAL.fullmatch(text):
        return Fraction(re.sub(r"[,\s]", "", match[1])) * Fraction(10) ** int(match[2] or 0)
    if match := _FRACTION.fullmatch(text):
        sign, whole, above, below = match.groups()
    elif match := _LATEX_FRACTION.fullmatch(text):
        sign, whole, above, below = match[1], match[2], match[3] or match[4], match[5] or match[6]
    else:
        return None
    if int(below) == 0:
        return None
    value = int(whole or 0) + Fraction(int(above), int(below))
    return -value if sign == "-" else value


def _ratio(match: re.Match[str]) -> Quantity | None:
    first, second = Fraction(match[1]), Fraction(match[2])
    return Quantity((first / second,)) if second else None
