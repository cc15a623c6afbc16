"""Whether two short texts are the same mathematics.

Each text is read as a whole: as a quantity, equation, list or formula, else as text. Formulas, the leaves of
the comparison, are compared by math-verify in a worker process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from pixelis.rewards.notation import (
    MAX_CHARS,
    UNITS,
    Quantity,
    clean,
    decimal_comma,
    quantity,
    split_unit,
    stated,
)

MAX_FORMULA_CHARS = 2000
"""Longer texts are compared as text."""
MAX_ITEMS = 50
"""Longer lists are compared as text."""
Formulas = Callable[[str, str], bool]

_OPENING, _CLOSING = "([{", ")]}"
_SEPARATORS = re.compile(r" ?; ?| ?,? (?:and|or)\b ?|(?<=[\d)}\]]) ?(?:and|or) ?(?=[\d({\[\\])| ?, ?|  +")
_GROUP = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_RELATION = re.compile(r"\\(?:leq?|geq?|neq?|lt|gt|in|approx)(?![a-z])|[<>]=?|!=|≤|≥|≠|∈|≈")
_MARK = re.compile(r"[^\w\s.'\"?]|[\d_π]")
"""What makes a text more than words: text is no algebra."""
_SOLUTIONS = re.compile(rf"{_RELATION.pattern}|\\pm|±")
"""Marks of a formula that stands for several values or an interval."""
_EQUALS = re.compile(r"(?<![<>!=])=+|\\in(?![a-z])|∈")
_APPROXIMATES = re.compile(r"\\approx(?![a-z])|≈")
_NAME = re.compile(r"[A-Za-zα-ωΑ-Ω\\'|:/, (){}∠△]+(?:_(?:\w|\{\w+\})[A-Za-z\\'|:/, (){}]*)*")
_ORDER = re.compile(r"[A-Z](?:(?: ?(?:[,;→]|-+>|\\to|\\rightarrow) ?| )?[A-Z])+")
"""Letters in order, such as ``BADC``, ``B, A, D, C`` or ``B → A → D → C``."""
_SPAN = re.compile(r"\d+(?:\.\d+)?(?: ?[-/] ?\d+(?:\.\d+)?)+")


def equal(a: str, b: str, formulas: Formulas) -> bool:
    a, b = _core(a), _core(b)
    if a.casefold() == b.casefold():
        return bool(a)
    if _ORDER.fullmatch(a) and _ORDER.fullmatch(b):
        return re.findall("[A-Z]", a) == re.findall("[A-Z]", b)
    if max(len(a), len(b)) > MAX_FORMULA_CHARS:
        return False
    first, second = quantity(a), quantity(b)
    if first is not None and second is not None:
        if first.in_order().equals(second.in_order()):
            return True
        (pair, written), single = ((second, b), first) if len(first.values) == 1 else ((first, a), second)
        number = decimal_comma(written) if len(pair.values) == 2 else None
        return number is not None and number.equals(single)
    if not (_MARK.search(a) or _MARK.search(b)):
        return False
    if _SPAN.fullmatch(a) and _SPAN.fullmatch(b):  # dates and ranges, not differences
        return first is None and second is None and re.sub(" ", "", a) == re.sub(" ", "", b)
    (name, sides), (other_name, other_sides) = _sides(a), _sides(b)
    if (name or other_name) and (name or not _EQUALS.search(a)) and (other_name or not _EQUALS.search(b)):
        # Any name fits a text without one; functions may name other arguments.
        names = {re.sub(r"[ {}]|\([^()]*\)$", "", x) for x in (name, other_name) if x}
        return len(names) == 1 and all(equal(x, y, formulas) for x in sides for y in other_sides)
    if (words := _same_words(a, b)) is not None:
        return words
    (kind, items), (other_kind, others) = _items(a), _items(b)
    one_formula = (len(items) > 1) != (len(others) > 1) and _SOLUTIONS.search(b if len(items) > 1 else a)
    if (len(items) > 1 or len(others) > 1) and not one_formula:
        return _same_collection(kind, items, other_kind, others, formulas)
    (a, unit), (b, other_unit) = _formula(a), _formula(b)
    return bool(a and b) and (not unit or not other_unit or unit == other_unit) and formulas(a, b)


def _core(text: str) -> str:
    """The clean text without words such as ``The answer is`` before and ``is the solution`` behind."""
    text = clean(text)
    if " " in text and len(text) <= MAX_FORMULA_CHARS:
        text = clean(stated(text) or text)
        text = clean(_TRAILING.sub("", _LEADING.sub("", text))) or text
        if (statement := _STATEMENT.match(text)) and not _OPERATIVE.search(statement[0].casefold()):
            text = clean(text[statement.end() :])
    text = re.sub(r"^(?:minus|negative) (?=[\d\\])", "-", text)
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text


def readable(text: str) -> bool:
    text = _core(text)
    return (
        quantity(text) is not None
        or len(_items(text)[1]) > 1
        or any(_sides(text)[0])
        or bool(_formula(text)[0])
    )


# Equations


def _sides(text: str) -> tuple[str, list[str]]:
    """The name and the right-hand sides of ``x = 2 + 3 = 5``; "" and the text itself without a name."""
    exact, *_ = _APPROXIMATES.split(text, maxsplit=1)
    text = (
        _APPROXIMATES.sub("=", text) if not exact.strip() or _NAME.fullmatch(exact.strip()) else exact.strip()
    )
    name, *sides = _EQUALS.split(text)
    name = name.strip()
    if not sides or not all(side.strip() for side in sides) or len(name) > 60 or not _NAME.fullmatch(name):
        return "", [text]
    if any(_EQUALS.search(item) for item in _split(text)[1:]):  # x = 2, y = 3
        return "", [text]
    return name, [side.strip() for side in sides]


# Collections


def _items(text: str) -> tuple[str, list[str]]:
    """Brackets such as ``[)`` and items of a collection; "" and the text itself for other text."""
    inner = text.replace("\\{", "{").replace("\\}", "}")
    kind = ""
    if (
        len(inner) > 2
        and inner[0] in _OPENING
        and inner[-1] in _CLOSING
        and _closes_at(inner) == len(inner) - 1
    ):
        kind, inner = inner[0] + inner[-1], inner[1:-1].strip()
        if kind == "{}" and not text.startswith("\\"):
            kind = ""  # a group of LaTeX
    items = _split(inner)
    if len(items) > MAX_ITEMS or not all(items) or kind not in ("", "{}", "()", "[]", "[)", "(]"):
        return "", [text]
    return (kind, items) if len(items) > 1 or kind == "{}" else ("", [text])


def _closes_at(text: str) -> int:
    """Where the bracket closes that opens the text, or -1."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return i
    return -1


def _split(text: str) -> list[str]:
    """Items between separators outside brackets; ``10,000`` stays whole if blanks follow other commas."""
    spaced, depths, depth = bool(re.search(r"[,;] ", text)), [], 0
    for character in text:
        depth -= character in _CLOSING
        depths.append(depth)
        depth += character in _OPENING
    if depth:
        return [text]
    outside = [match for match in _SEPARATORS.finditer(text) if not depths[match.start()]]
    strong = [match for match in outside if ";" in match[0]]  # 1, 2; 3, 4
    items, start = [], 0
    for match in strong or outside:
        if spaced and _GROUP.match(text, match.start()):
            continue
        items.append(text[start : match.start()])
        start = match.end()
    return [item.strip() for item in [*items, text[start:]]]


def _same_collection(
    kind: str, a: Sequence[str], other_kind: str, b: Sequence[str], formulas: Formulas
) -> bool:
    """Compare sets and bare lists of numbers in any order, others in order."""

    def contained(items: Sequence[str], others: Sequence[str]) -> bool:
        return all(any(equal(x, y, formulas) for y in others) for x in items)

    kinds = {kind, other_kind}
    # Two brackets of each kind are intervals
    if len(kinds - {""}) > 1 and (kinds != {"()", "[]"} or len(a) == 2):
        return False
    if "" in kinds and kinds & {"[)", "(]"}:
        return False
    if kinds == {"{}"} or (kinds <= {"", "{}"} and all(item.startswith(("(", "[")) for item in [*a, *b])):
        return contained(a, b) and contained(b, a)
    units = [{split_unit(item)[1] for item in items} - {""} for items in (a, b)]
    if len(a) != len(b) or (max(map(len, units)) > 1 and units[0] != units[1]):  # 5 feet, 6 inches
        return False
    names = [[_sides(item)[0] for item in items] for items in (a, b)]
    one_named, other_named = (len(set(row)) == len(row) > 1 and all(row) for row in names)
    words = not (kind or other_kind or all(map(readable, a)))
    if words or kinds - {"", "{}"} or one_named != other_named:
        return all(equal(x, y, formulas) for x, y in zip(a, b, strict=True))
    left = list(b)
    for item in a:
        match = next((other for other in left if equal(item, other, formulas)), None)
        if match is None:
            return False
        left.remove(match)
    return True


# Words

_BETWEEN_TOKENS = re.compile(r"[\s;()\"!?]+|,(?!\d{3}(?!\d))|\.(?=\s|$)")
_FORMULA_MARK = re.compile(r"[\\^_=*<>|√π∞×÷·±{}∪∩∈≤≥≠]|(?<=[\d)])!")
_FILLER = re.compile(
    r"a|about|an|and|answer|approx|approximately|are|around|because|correct|equals|final|find|get|gives|hence|i|is|it|it's|its|of|our|out"
    r"|result|roughly|see|so|solution|that|the|there|therefore|this|thus|total|value|was|we|were|which"
)
"""Words that say nothing of what the number counts."""
_OPERATIVE = re.compile(
    r"\b(?:at|below|above|under|over|between|cubed|divided|double|dozen|each|either|except|exceeds|excluding|from|half|hundred|least|less"
    r"|fewer|greater|minus|more|most|negative|neither|never|no|none|nor|not|or|other|per|plus|quarter|root|squared|than|thirds?|times"
    r"|triple|twice|unless|until|up|wrong|without|(?:square|cube|power) of)\b|n't\b"
)
"""Words that make another number of the one beside them."""


def _same_words(a: str, b: str) -> bool | None:
    """Whether two texts have the same numbers and words; None if one is a formula or neither has a word.

    If each has one number, the words of one must include the other's, but ``at least 7`` equals only itself.
    Several numbers need the same words in the same order.
    """
    written = [word.lower() for text in (a, b) for word in re.findall(r"(?<![\\\w(/*+^])[^\W\d_]{2,}", text)]
    has_word = "°" in a + b or any(word not in _NO_WORDS for word in written)
    if not has_word or any(map(_FORMULA_MARK.search, (a, b))):
        return None
    tokens = [_tokens(text) for text in (a, b)]
    numbers = [[token for token in row if isinstance(token, Quantity)] for row in tokens]
    words = [[token for token in row if isinstance(token, str)] for row in tokens]
    if not all(numbers):
        return False
    if not all(x.equals(y) for x, y in zip(*numbers, strict=False)):
        return False
    if len(numbers[0]) == len(numbers[1]) == 1 and not any(
        _OPERATIVE.search(text.casefold()) for text in (a, b)
    ):
        return set(words[0]) <= set(words[1]) or set(words[1]) <= set(words[0])
    return len(tokens[0]) == len(tokens[1]) and all(
        x.equals(y) if isinstance(x, Quantity) and isinstance(y, Quantity) else x == y
        for x, y in zip(*tokens, strict=True)
    )


def _tokens(text: str) -> list[Quantity | str]:
    """Numbers, and the words beside them in one spelling; units are words."""
    tokens: list[Quantity | str] = []
    for word in filter(None, _BETWEEN_TOKENS.split(text.replace("°", " ° "))):
        if (value := quantity(word)) is not None:
            tokens += (
                [replace(value, unit=""), value.unit] if value.unit and value.kind == "number" else [value]
            )
        elif not _FILLER.fullmatch(word := word.casefold()):
            tokens.append(re.sub(r"(?<=\w{2}[^s])s$", "", UNITS.get(word, word)))
    return tokens


# Formulas

_FUNCTION = "sqrt|pi|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp|theta|alpha|beta"
_INFINITY = "infinity|inf|oo"
_FUNCTIONS = frozenset(f"{_FUNCTION}|{_INFINITY}".split("|"))
_NO_WORDS = _FUNCTIONS | {"and", "or"}
_CHARACTERS = {
    "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "∛": r"\sqrt[3] ",
    "∞": r"\infty ", "∅": r"\emptyset ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ",
    "φ": r"\phi ", "ω": r"\omega ", "°": r"^{\circ}", "<=": r"\leq ", ">=": r"\geq ", "!=": r"\neq ", "**": "^",
}  # fmt: skip
_REPLACED = re.compile("|".join(map(re.escape, sorted(_CHARACTERS, key=len, reverse=True))))
_FORMULA = re.compile(r"[\w\s\\^+\-*/<>=!|.,;:&'%(){}\[\]]*", re.ASCII)
_SEQUENCE = re.compile(
    r"[A-Za-z]+(?: ?([-=]*>|-|/|<|\\to|\\rightarrow) ?[A-Za-z]+)(?: ?\1 ?[A-Za-z]+)+|[A-Za-z]+ ?[-=]+> "
    r"?[A-Za-z]+"
)
"""An order such as ``A-C-B``, which subtraction would not keep."""
_LONGER_FILLER = "|".join(word for word in _FILLER.pattern.split("|") if len(word) > 1)
_LEADING = re.compile(rf"^(?:(?:{_LONGER_FILLER})\b[\s,:]*)+", re.IGNORECASE)
_TRAILING = re.compile(rf"(?:[\s,.]+(?:{_LONGER_FILLER})\b)+$", re.IGNORECASE)
_STATEMENT = re.compile(r"[A-Za-z' ,]*[A-Za-z]{2,}(?: (?:is|are|equals?)|:)[: ]+(?=[^A-Za-z]|[A-Za-z]\b)")
_MIXED = re.compile(r"(?<![\d.}^_])(\d+) ?\\[dtc]?frac ?\{(\d+)\} ?\{(\d+)\}")


def _formula(text: str) -> tuple[str, str]:
    """A text as LaTeX that math-verify can parse, and its unit; "" for plain text."""
    if not text or _SEQUENCE.fullmatch(text):
        return "", ""
    rest, unit = split_unit(text) if len(text) <= MAX_CHARS else (text, "")
    if unit and (unit == "°" or not re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", rest)):
        text = rest
    else:
        unit = ""
    if (
        (number := quantity(text)) is not None
        and number.kind == "number"
        and len(number.values) == 1
        and not number.unit
    ):
        return str(number.values[0]), unit
    text = _REPLACED.sub(lambda match: _CHARACTERS[match[0]], text)
    words = re.findall(
        r"(?<![\\A-Za-z_])[A-Za-z]{2,}", re.sub(r"\\(?:begin|end) ?\{[a-z]*\}(?: ?\{[a-z|]*\})?", "", text)
    )
    operator = re.search(r"[\\^_+*/=<>|!]|(?<=\S) ?-|^-", text) or _FUNCTIONS & set(words)
    if any(word not in _FUNCTIONS and (len(word) > 3 or not operator) for word in words):
        return "", ""
    if not operator and not re.fullmatch(r"\d+(?:\.\d+)? ?[A-Za-z]|\(.*\)", text):
        return "", ""
    codes = re.search(r"[A-Za-z]\d", re.sub(r"\\?[A-Za-z]{2,}", "", text))
    if codes or not _FORMULA.fullmatch(text) or re.search(r"(?<![\d_])\d+ \d", text):
        return "", ""
    # Functions, roots and powers as LaTeX writes them.
    text = re.sub(rf"(?<![\\A-Za-z])({_FUNCTION})(?![A-Za-z])", r"\\\1", text)
    text = re.sub(rf"(?<![\\A-Za-z])(?:{_INFINITY})(?![A-Za-z])", r"\\infty", text)
    text = re.sub(r"\\sqrt ?(\[\d+\])? ?(\d+(?:\.\d+)?|[A-Za-z])(?![A-Za-z])", r"\\sqrt\1{\2}", text)
    text = re.sub(r"\^ ?(-? ?\d+(?:\.\d+)?)", r"^{\1}", text)
    for opening in ("\\sqrt", "^"):
        text = _braced(text, opening)
    return _MIXED.sub(r"(\1+\\frac{\2}{\3})", text), unit


def _braced(text: str, command: str) -> str:
    start = 0
    while (place := text.find(command, start)) >= 0:
        start = place + len(command)
        index = re.compile(r" ?(?:\[\d+\])? ?").match(text, start)
        opened = index.end() if index else start
        if text[opened : opened + 1] == "(" and (length := _closes_at(text[opened:])) > 0:
            text = f"{text[:opened]}{{{text[opened + 1 : opened + length]}}}{text[opened + length + 1 :]}"
    return text
