"""The notation of short answers: one cleaning step for every scorer, and numbers, times and ratios with units."""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

MAX_CHARS = 200
"""Longer texts are no short answers: numbers are not read from them."""
Number = Fraction | Decimal
"""A Decimal was written with a decimal point and may be rounded, a Fraction is exact."""

# Cleaning

_PLAIN = re.compile(r"[\w ]*[^\W_]", re.ASCII)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ", "0123456789+-()n")
_RAISED = re.compile(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+")
_LOWERED = re.compile(f"[{''.join(map(chr, _SUBSCRIPTS))}]+")
_VULGAR_FRACTION = re.compile("(\\d?)([¼-¾⅐-⅞↉])")
_PUNCTUATION = str.maketrans("−–—‐‑。、“”„‘’【】⁄∶×⋅∗", '-----.,"""\'\'[]/:×·*')
_COMPATIBLE = ("<wide>", "<narrow>", "<font>", "<noBreak>")
"""Decompositions of Unicode that keep the meaning."""
_EMPHASIS = re.compile(r"(?<![\w*`])(\*\*|__|\*|`+)(?=\S)((?:(?!\1).)*?\S)\1(?![\w*`])", re.DOTALL)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|textnormal|mathrm|mathbf|mathsf|mbox|boxed|fbox)\s*\{([^{}]*)\}"
)
_BETWEEN_BOXES = re.compile(r"(?:[\s$.,;{}()\[\]\\]|q?quad|text|and|or)*")
_DELIMITED = re.compile(r"(?<!\\)\$(?=\S)([^$]*[^\s\\$])\$|(?<!\\)\$\s([^$]+)\s\$|^\$([^$]+)\$$")
_SPACE = re.compile(r"(?<!\\)\\[,;:!> ()\[\]]|\\q?quad|~|\s|\$\$")
_DEGREES = re.compile(r"\^?\s?\{?\s?\\circ\s?\}?|\^°|\^\{°\}")
_SEPARATOR = r"(?:\{,\}(?:\\!)?|,\\!|\\[,!])"
_GROUPED = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_SEPARATOR}\s*\d{{3}})+(?!\d)", re.ASCII)


def clean(text: str) -> str:
    r"""Normalise an answer, truth, option or vote for comparison.

    Removes Markdown's emphasis, LaTeX delimiters, ``\text{}``, quotation marks, final full stops and doubled
    blanks; replaces characters of other widths and fonts, raised digits by ``^{2}``, ``½`` by ``1/2``; keeps
    the last ``\boxed{}`` and those next to it.
    """
    if _PLAIN.fullmatch(text):
        return " ".join(text.split())
    text = text if text.isascii() else _plain_characters(text)
    if "\\boxed" in text:
        text = _last_boxes(text)
    if len(text) <= 10 * MAX_CHARS:
        text = _without_markup(text)
    text = " ".join(text.split())
    return text.rstrip(" .") or text


def _last_boxes(text: str) -> str:
    r"""The last ``\boxed{}`` and those next to it; one cut short ends with the text."""
    from pixelis.dialogue.dialects.base import BOXED, boxed  # a worker starts without it

    boxes = boxed(text)
    if (cut := BOXED.search(text, boxes[-1][1] if boxes else 0)) is not None:
        return text[cut.end() :]
    contents: list[str] = []
    for (start, end), following in zip(boxes, [*boxes[1:], None], strict=True):
        contents.append(text[start:end])
        if following and not _BETWEEN_BOXES.fullmatch(text[end + 1 : following[0]].rpartition("\\boxed")[0]):
            contents = []
    return ", ".join(contents) if boxes else text


def _plain_characters(text: str) -> str:
    text = _RAISED.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _VULGAR_FRACTION.sub(
        lambda match: (match[1] and match[1] + " ") + unicodedata.normalize("NFKC", match[2]), text
    )
    text = _LOWERED.sub(lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)
    return unicodedata.normalize(
        "NFC", "".join(c if c.isascii() else _plain_character(c) for c in text)
    ).translate(_PUNCTUATION)


def _plain_character(character: str) -> str:
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind in _COMPATIBLE:
        return unicodedata.normalize("NFKC", character)
    return str(unicodedata.decimal(character, character))


@functools.lru_cache(maxsize=1024)
def _without_markup(text: str) -> str:
    text = _GROUPED.sub(lambda number: re.sub(rf"{_SEPARATOR}\s*", ",", number[0]), text.strip())
    if "\\\\" in text and not re.search("matrix|array|cases|align", text):
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)  # escaped twice
    previous = None
    while text != previous:
        previous = text
        text = _EMPHASIS.sub(r"\2", text).strip()
        text = _DELIMITED.sub(lambda match: match[1] or match[2] or match[3], _SPACE.sub(" ", text)).strip()
        text = _WRAPPER.sub(r"\1", text).strip().rstrip(" .") or text
        if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'" and text.count(text[0]) == 2:
            text = text[1:-1]
    text = re.sub(r"\\(?:left|right)(?![a-z])", "", text).replace("\\%", "%").replace("\\$", "$")
    return _DEGREES.sub("°", text)


def canonical(text: str) -> str:
    return clean(text).casefold()


_STATED = re.compile(r"\banswer\b\s*(?:is|:|=)\s*(?::\s*)?(.+?)(?=\.(?:\s|$)|$|\n)", re.IGNORECASE)


def stated(text: str) -> str | None:
    """The last answer stated as ``The answer is 7.`` or ``Answer: 7``; None without one."""
    answers = _STATED.findall(text)
    return answers[-1].strip() if answers else None


def unboxed(text: str) -> str:
    r"""The content of a text that is one ``\boxed{}``, else the text."""
    match = re.fullmatch(r"[\s$]*\\boxed\s*\{(.*)\}[\s$]*", text, re.DOTALL)
    return match[1].strip() if match and _last_boxes(text) == match[1] else text


# Numbers

_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|\d+)"
_DECIMAL = re.compile(rf"([-+]?) ?({_DIGITS}(?:\.\d*)?|\.\d+)", re.ASCII)
_SCIENTIFIC = re.compile(
    r"([-+]?) ?(?:(\d+(?:\.\d*)?|\.\d+) ?(?:[eE](?=[-+]?\d)|(?:×|x|\*|·|\\times|\\cdot) ?(?=10 ?\^)))?"
    r"(?:10 ?\^ ?)?(?:\{ ?([-+]?\d{1,3}) ?\}|\(([-+]?\d{1,3})\)|([-+]?\d{1,3}))",
    re.ASCII,
)
_FRACTION = re.compile(r"([-+]?) ?(?:(\d+) +)?(\d+) ?/ ?(\d+)", re.ASCII)
_LATEX_FRACTION = re.compile(
    r"([-+]?) ?(\d*) ?\\[dtc]?frac ?(?:\{ ?(\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))", re.ASCII
)
_MULTIPLE = re.compile(
    rf"(?<![\d.,])({_DIGITS})(?:\.(\d+))? ?(thousand|million|billion|trillion)\b", re.ASCII | re.IGNORECASE
)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen"
    " fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
WORDS = {word: n for n, word in enumerate(_ONES.split())} | {
    word: 20 + 10 * n for n, word in enumerate(_TENS.split())
}
_RATIO = re.compile(r"\d+(?:\.\d+)?(?: ?: ?\d+(?:\.\d+)?)+", re.ASCII)
_TIME = re.compile(
    r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))? ?(?:([ap])\.? ?m\.?)?|(\d{1,2}) ?(?:([ap])\.? ?m\.?|o'clock)",
    re.IGNORECASE,
)
_UNIT = re.compile(r"(.*?(?:[\d.})]|π|\\[a-z]+(?= ))) ?([^\d.\s{})\\][^\d{}\\]*(?:\^\{?[23]\}?)?)", re.DOTALL)
_COMMA = re.compile(r" ?, ?(?:and )?| and ")

_NAMES = {
    "%": "% percent percentage pct",
    "°": "° deg degree degrees circ",
    "°C": "°c celsius",
    "°F": "°f fahrenheit",
    "$": "$ dollar dollars usd us$",
    "€": "€ euro euros eur",
    "£": "£ pound_sterling gbp",
    "¥": "¥ yen yuan rmb cny jpy",
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
_POWERS = {"": "", "^2": "^2", "^{2}": "^2", "^3": "^3", "^{3}": "^3"}
_POWER_WORDS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3", "cu": "^3"}


@dataclass(frozen=True)
class Quantity:
    """A number or list, a ``ratio`` of parts or a ``time`` (hours, minutes, seconds; ``unit`` am, pm or empty)."""

    values: tuple[Number, ...]
    unit: str = ""
    kind: str = "number"

    def equals(self, other: Quantity) -> bool:
        """Whether the numbers and units are equal. A missing unit fits any; 50 % also equals 0.5."""
        if {self.kind, other.kind} == {"ratio", "time"} and not (self.unit or other.unit):
            return replace(self, kind="ratio").equals(replace(other, kind="ratio"))
        if self.kind == other.kind == "time" and bool(self.unit) != bool(other.unit):
            half, plain = (self, other) if self.unit else (other, self)
            hour = half.values[0] % 12 + (12 if half.unit == "pm" else 0)
            return plain.values in (half.values, (hour, *half.values[1:]))
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.kind == other.kind == "ratio":
            a, b = self.values, other.values
            if len(a) != len(b) or not any(a) or not any(b):
                return a == b
            first, second = [Fraction(x) for x in a], [Fraction(x) for x in b]
            return all(x * sum(second) == y * sum(first) for x, y in zip(first, second, strict=True))
        if self.kind != other.kind:
            ratio, single = (self, other) if other.kind == "number" else (other, self)
            if len(ratio.values) != 2 or len(single.values) != 1 or ratio.unit or not ratio.values[1]:
                return False
            # 3:4 is 3/4, but 3:1 is not 3
            is_fraction = Fraction(single.values[0]).denominator > 1
            return is_fraction and near(
                Fraction(ratio.values[0]) / Fraction(ratio.values[1]), single.values[0]
            )
        if _all_near(self.values, other.values):
            return True
        if "%" not in (self.unit, other.unit) or self.unit == other.unit:
            return False
        percent, number = (self, other) if self.unit == "%" else (other, self)
        return _all_near(tuple(value / 100 for value in percent.values), number.values)

    def in_order(self) -> Quantity:
        """A list of numbers from the smallest to the largest; ratios and times as they are."""
        return replace(self, values=tuple(sorted(self.values))) if self.kind == "number" else self


def near(a: Number, b: Number) -> bool:
    """Whether two numbers are equal, or one is the other rounded to >= 4 significant digits (decimals: 6)."""
    if Fraction(a) == Fraction(b):
        return True
    if isinstance(a, Decimal) and isinstance(b, Decimal):
        rounded, value = sorted((a, b), key=_last_place, reverse=True)
        digits = 6
    elif isinstance(a, Decimal) or isinstance(b, Decimal):
        rounded, value = (a, b) if isinstance(a, Decimal) else (b, a)  # type: ignore[assignment]
        digits = 4
    else:
        return False
    enough = len(rounded.as_tuple().digits) >= digits
    return enough and 2 * abs(Fraction(rounded) - Fraction(value)) <= Fraction(10) ** _last_place(rounded)


def _last_place(value: Decimal) -> int:
    return int(value.as_tuple().exponent)


def _all_near(a: tuple[Number, ...], b: tuple[Number, ...]) -> bool:
    return len(a) == len(b) and all(map(near, a, b))


def quantity(text: str) -> Quantity | None:
    """A text read as a number, ratio, time or list of numbers; None for other text."""
    text = clean(text)
    return _quantity(text) if 0 < len(text) <= MAX_CHARS else None


@functools.lru_cache(maxsize=4096)
def _quantity(text: str) -> Quantity | None:
    if not any(c.isdigit() for c in text):
        tens, _, ones = text.lower().replace(" ", "-").partition("-")  # twenty-one
        if tens not in WORDS or (ones and (WORDS[tens] < 20 or not 0 < WORDS.get(ones, 0) < 10)):
            return None
        return Quantity((Fraction(WORDS[tens] + WORDS.get(ones, 0)),))
    text = _MULTIPLE.sub(_written_out, text)
    if (value := _number(text)) is not None:
        return Quantity((value,))
    if time := _TIME.fullmatch(text):
        hour, half = int(time[1] or time[5]), (time[4] or time[6] or "").lower()
        if hour > 24 or (half and not 1 <= hour <= 12):
            return None
        parts = (Fraction(hour), Fraction(time[2] or 0), *([Fraction(time[3])] if time[3] else []))
        return Quantity(parts, f"{half}m" if half else "", "time")
    if _RATIO.fullmatch(text):
        return Quantity(tuple(_number(part.strip()) or Fraction(0) for part in text.split(":")), kind="ratio")
    if (single := _with_unit(text)) is not None:
        return single
    # A list with one unit, which not every number needs to have.
    if not all(texts := _COMMA.split(text)):
        return None
    read = [
        Quantity((value,)) if (value := _number(part)) is not None else _with_unit(part) for part in texts
    ]
    items = [item for item in read if item is not None]
    units = {item.unit for item in items} - {""}
    if len(items) < len(texts) or len(units) > 1:
        return None
    return Quantity(tuple(item.values[0] for item in items), "".join(units))


def decimal_comma(text: str) -> Quantity | None:
    """A number such as ``0,5`` or ``12,75``; None for other text and for ``1,2``."""
    match = re.fullmatch(r"([-+]?0),(\d+)|([-+]?\d+),(\d\d|\d{4,})|([-+]?\d{4,}),(\d)", clean(text), re.ASCII)
    return None if match is None else Quantity((Decimal(match[0].replace(",", ".")),))


def _written_out(match: re.Match[str]) -> str:
    zeros = _ZEROS[match[3].lower()]
    decimals = (match[2] or "").ljust(zeros, "0")
    digits = (re.sub("[, ]", "", match[1]) + decimals[:zeros]).lstrip("0") or "0"
    return digits + ("." + decimals[zeros:] if decimals[zeros:] else "")


def _with_unit(text: str) -> Quantity | None:
    sign = text[0] if text[0] in "-+" else ""
    if (symbol := text[len(sign) : len(sign) + 1]) in "$€£¥":
        value = _number(sign + text[len(sign) + 1 :].strip())
        return None if value is None else Quantity((value,), UNITS[symbol])
    number, unit = split_unit(text)
    value = _number(number) if unit else None
    return None if value is None else Quantity((value,), unit)


def split_unit(text: str) -> tuple[str, str]:
    """The text before a unit, and the unit as ``UNITS`` names it; the text and "" without a unit."""
    if (parts := _UNIT.fullmatch(text)) is None:
        return text, ""
    tail = parts[2].strip().removesuffix(".")
    if len(tail) == 1 and tail.isupper() and tail != "L":  # 5A is a code
        return text, ""
    match = re.fullmatch(r"(.*?)\s*(\^\{?[23]\}?)?", tail.casefold(), re.DOTALL)
    assert match is not None
    words, power = match[1].split(), _POWERS[match[2] or ""]
    named = [_POWER_WORDS[word] for word in words if word in _POWER_WORDS]
    unit = UNITS.get("".join(word for word in words if word not in _POWER_WORDS))
    if unit is None or len(named) + bool(power) > 1:
        return text, ""
    return parts[1].strip(), unit + (power or "".join(named))


def _number(text: str) -> Number | None:
    if match := _DECIMAL.fullmatch(text):
        digits = match[1] + re.sub("[, ]", "", match[2])
        return Decimal(digits) if "." in digits.rstrip(".") else Fraction(digits.rstrip("."))
    if match := _FRACTION.fullmatch(text):
        sign, whole, above, below = match.groups()
    elif match := _LATEX_FRACTION.fullmatch(text):
        sign, whole, above, below = match[1], match[2], match[3] or match[4], match[5] or match[6]
    else:
        match = _SCIENTIFIC.fullmatch(text)
        if match is None or (match[2] is None and "^" not in text):
            return None
        return Decimal(f"{match[1]}{match[2] or 1}e{match[3] or match[4] or match[5]}")
    if int(below) == 0:
        return None
    value = int(whole or 0) + Fraction(int(above), int(below))
    return -value if sign == "-" else value
