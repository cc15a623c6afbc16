# ruff: noqa: E501
r"""Pairs of answers that are equal or unequal by construction."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt, pi, sqrt

WORDS = [
    "red", "blue", "green", "left", "right", "above", "below", "cat", "dog", "horse", "table", "chair",
    "window", "north", "south", "none", "both", "tea", "eat", "ate", "stop", "spot", "post",
]  # fmt: skip
UNITS = {
    "cm": "centimeters", "m": "metres", "kg": "kilograms", "min": "minutes", "h": "hours", "km": "kilometres", "ml": "millilitres",
    "g": "grams", "s": "seconds", "mm": "millimeters",
}  # fmt: skip
FULL_WIDTH = str.maketrans({c: chr(ord(c) + 0xFEE0) for c in map(chr, range(0x21, 0x7F))})
RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Pair:
    kind: str
    a: str
    b: str
    equal: bool


def dressed(random: random.Random, text: str) -> str:
    """The text as chats and papers present it."""
    forms: list[Callable[[str], str]] = [
        lambda t: t, lambda t: f"**{t}**", lambda t: f"`{t}`", lambda t: f" {t} ", lambda t: f"{t}.", lambda t: f"${t}$",
        lambda t: rf"\boxed{{{t}}}", lambda t: rf"\({t}\)", lambda t: ("The answer is " f"{t}."), lambda t: f"Answer: {t}", lambda t: f"**{t}.**",
    ]  # fmt: skip
    return random.choice([form for form in forms if "*" not in text or "*" not in form("")])(text)


def _integers(r: random.Random) -> tuple[list[str], list[str]]:
    n = r.choice([r.randint(-99, 99), r.randint(1000, 9_999_999)])
    forms = [
        str(n), f"{n:,}", f"{n}.0", str(n).translate(FULL_WIDTH), f"{2 * n}/2",
        rf"\frac{{{3 * n}}}{{3}}" if n >= 0 else str(n),
    ]  # fmt: skip
    if abs(n) >= 1000:
        forms.append(f"{n:,}".replace(",", "{,}"))
    return forms, [
        str(-n or 1), str(n + 1), f"{n}0" if n else "10", f"{n}.5", f"{n}/3" if n else "5", str(n + 10),
    ]  # fmt: skip


def _fractions(r: random.Random) -> tuple[list[str], list[str]]:
    b = r.randint(2, 30)
    a = r.randint(1, 40)
    while gcd(a, b) > 1 or b in (1, a):
        a, b = r.randint(1, 40), r.randint(2, 30)
    k = r.randint(2, 9)
    forms = [
        f"{a}/{b}", rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a * k}}}{{{b * k}}}", f"{a * k}/{b * k}",
        f"{a}/{b}".translate(FULL_WIDTH),
    ]  # fmt: skip
    forms.append(f"{a / b:.6f}" if abs(a / b) >= 0.01 else f"{a}/{b}")
    if a > b:
        forms += [f"{a // b} {a % b}/{b}", rf"{a // b}\frac{{{a % b}}}{{{b}}}"]
    return forms, [
        f"{b}/{a}", f"{a + 1}/{b}", f"{a}/{b + 1}", f"-{a}/{b}", rf"\frac{{{a}}}{{{b + 2}}}",
        f"{a / b + 0.01:.4f}", f"{a}{b}",
    ]  # fmt: skip


def _decimals(r: random.Random) -> tuple[list[str], list[str]]:
    places = r.randint(1, 4)
    text = f"{r.randint(1, 9999)}.{r.randint(1, 10**places - 1):0{places}d}"
    value = Fraction(text)
    forms = [
        text, f"{text}0", f"{value.numerator}/{value.denominator}", text.translate(FULL_WIDTH), f"+{text}",
    ]  # fmt: skip
    return forms, [
        f"-{text}", f"{text}7" if len(text) < 6 else f"1{text}", text.replace(".", ""),
        f"{float(value) * 1.001:.5f}", f"{float(value) + 10**-places:.{places}f}",
    ]  # fmt: skip


def _roots(r: random.Random) -> tuple[list[str], list[str]]:
    n = r.choice([x for x in range(2, 400) if isqrt(x) ** 2 != x])
    k = r.randint(2, 12)
    while n % (k * k) == 0:
        k += 1
    value = k * sqrt(n)
    forms = [
        rf"{k}\sqrt{{{n}}}", rf"\sqrt{{{n * k * k}}}", f"{k}√{n}", f"{k}sqrt({n})", f"√{n * k * k}", f"{k}*sqrt({n})", rf"{k}\sqrt({n})",
        r.choice([f"{value:.6f}", f"{value:.4f}"]), rf"{k}\cdot\sqrt{{{n}}}",
    ]  # fmt: skip
    wrong = [
        str(k), str(n), rf"\sqrt{{{n}}}", rf"{k}\sqrt{{{n + 1}}}", rf"{k + 1}\sqrt{{{n}}}", f"{value + 0.01:.4f}", f"{value:.0f}",
        f"-{k}√{n}", rf"{k}\sqrt[3]{{{n}}}", f"{k}{n}",
    ]  # fmt: skip
    return forms, wrong


def _powers(r: random.Random) -> tuple[list[str], list[str]]:
    base, exponent = r.randint(2, 15), r.randint(2, 4)
    value = base**exponent
    raised = str(exponent).translate(RAISED)
    forms = [
        f"{base}{raised}", f"{base}^{exponent}", f"{base}^{{{exponent}}}", str(value),
        f"{base}*{base ** (exponent - 1)}",
    ]  # fmt: skip
    return forms, [
        f"{base}{exponent}", str(base), str(base * exponent + value), f"{base + 1}{raised}", f"-{value}",
        str(value + 1),
    ]  # fmt: skip


def _powers_of_ten(r: random.Random) -> tuple[list[str], list[str]]:
    mantissa, exponent = f"{r.randint(1, 9)}.{r.randint(1, 9)}", r.choice([-30, -19, -7, -3, 4, 9, 23])
    raised = str(exponent).translate(RAISED)
    forms = [
        rf"{mantissa}\times10^{{{exponent}}}", (rf"{mantissa} \times " rf"10^{{{exponent}}}"), f"{mantissa}×10{raised}", f"{mantissa}e{exponent}",
        rf"{mantissa}\cdot 10^{{{exponent}}}", f"{mantissa} x 10^{exponent}", f"{mantissa}*10^{exponent}",
    ]  # fmt: skip
    other = f"{10 - float(mantissa):.1f}" if mantissa != "5.0" else "2.0"
    if other == mantissa:
        other = "1.7" if mantissa != "1.7" else "1.8"
    wrong = [
        rf"{other}\times10^{{{exponent}}}", rf"{mantissa}\times10^{{{exponent + 1}}}", mantissa, f"{mantissa}e{-exponent}",
        rf"-{mantissa}\times10^{{{exponent}}}", "0", rf"10^{{{exponent}}}",
    ]  # fmt: skip
    return forms, wrong


def _multiples_of_pi(r: random.Random) -> tuple[list[str], list[str]]:
    k, d = r.randint(2, 60), r.choice([1, 1, 2, 3])
    while d > 1 and k % d == 0:
        k += 1
    value = k * pi / d
    forms = (
        [f"{k}π", rf"{k}\pi", rf"{k} \pi", f"{k}pi", f"{k}*pi"]
        if d == 1
        else [rf"\frac{{{k}\pi}}{{{d}}}", f"{k}π/{d}", rf"\frac{{{k}}}{{{d}}}\pi"]
    )
    wrong = [
        str(k), r"\pi", rf"{k + 1}\pi", rf"{k}\pi^2", f"{value:.0f}", f"{value + 0.01:.4f}",
        rf"\frac{{{k}}}{{\pi}}",
    ]  # fmt: skip
    return [*forms, r.choice([f"{value:.6f}", f"{value:.4f}"])], wrong if d == 1 else wrong[1:]


def _expressions(r: random.Random) -> tuple[list[str], list[str]]:
    a, b, c = r.randint(2, 9), r.randint(2, 9), r.choice("xynt")
    forms = [
        f"{a}{c}+{b}", f"{b}+{a}{c}", f"{a}*{c} + {b}", f"{c} = {a}{c}+{b}".partition("= ")[2],
        rf"{a}\cdot {c}+{b}", f"({a}{c}+{b})",
    ]  # fmt: skip
    wrong = [
        f"{a}{c}", str(b), f"{a}{c}-{b}", f"{a + 1}{c}+{b}", f"{a}{c}+{b}+1", f"{a}{c}^2+{b}",
        f"{a}+{b}{c}" if a != b else f"{a}{c}", f"{b}",
    ]  # fmt: skip
    return forms, wrong


def _e(r: random.Random) -> tuple[list[str], list[str]]:
    a = r.randint(1, 9)
    return [f"{a} - 1/e", rf"{a} - \frac{{1}}{{e}}", rf"{a} - \frac{{1}}{{\mathrm{{e}}}}"], [
        f"{a} + 1/e", f"{a} - e", str(a), f"{a + 1} - 1/e",
    ]  # fmt: skip


def _times(r: random.Random) -> tuple[list[str], list[str]]:
    h, m = r.randint(1, 12), r.randint(0, 59)
    forms = [f"{h}:{m:02d}", f"{h:02d}:{m:02d}", f"{h}:{m:02d}".translate(FULL_WIDTH)]
    wrong = [
        f"{h % 12 + 1}:{m:02d}", f"{h}:{(m + 5) % 60:02d}", f"{h % 12 + 1}:{(m + 5) % 60:02d}", f"{h}",
        f"{h}.{m:02d}", f"{2 * h}:{2 * m % 60:02d}",
    ]  # fmt: skip
    return forms, wrong


def _clock(r: random.Random) -> tuple[list[str], list[str]]:
    h, m = r.randint(1, 12), r.randint(0, 59)
    half, other = r.choice([("am", "pm"), ("pm", "am")])
    return [f"{h}:{m:02d} {half}", f"{h}:{m:02d}{half.upper()}", f"{h}:{m:02d} {half[0]}.m."], [
        f"{h}:{m:02d} {other}",
        f"{h % 12 + 1}:{m:02d} {half}",
    ]


def _ratios(r: random.Random) -> tuple[list[str], list[str]]:
    parts = [r.randint(1, 9) for _ in range(r.choice([2, 2, 3]))]
    while len(set(parts)) < 2:
        parts[0] += 1
    k = r.randint(2, 5)
    forms = [":".join(map(str, parts)), " : ".join(map(str, parts)), ":".join(str(k * p) for p in parts)]
    if all(k * p < 10 for p in parts[1:]):
        forms.append(" : ".join(str(k * p) for p in parts))
    else:
        forms = forms[:2]
    forms += [":".join(map(str, parts)).translate(FULL_WIDTH)]
    squared = [p * p for p in parts]
    wrong = [
        ":".join(map(str, reversed(parts))), ":".join(map(str, [*parts[:-1], parts[-1] + 1])), str(parts[0]),
        ":".join(map(str, [*parts, 1])),
    ]  # fmt: skip
    if len({Fraction(s, p) for s, p in zip(squared, parts, strict=True)}) > 1:
        wrong.append(":".join(map(str, squared)))
    return forms, [w for w in wrong if w != forms[0]]


def _sets(r: random.Random) -> tuple[list[str], list[str]]:
    items = r.sample(range(-20, 60), r.randint(2, 4))
    shuffled = r.sample(items, len(items))
    forms = [
        rf"\{{{', '.join(map(str, items))}\}}",
        rf"\{{{','.join(map(str, shuffled))}\}}",
        rf"\left\{{{', '.join(map(str, shuffled))}\right\}}",
    ]
    changed = [items[0] + 61, *items[1:]]
    wrong = [
        rf"\{{{', '.join(map(str, changed))}\}}", str(items[-1]), rf"\{{{', '.join(map(str, items[1:]))}\}}",
        rf"\{{{', '.join(map(str, [*items, 99]))}\}}",
    ]  # fmt: skip
    return forms, wrong


def _points(r: random.Random) -> tuple[list[str], list[str]]:
    a, b = r.sample(range(-20, 60), 2)
    forms = [f"({a}, {b})", f"({a},{b})", f"( {a} , {b} )", rf"\left({a}, {b}\right)", f"({a}.0, {b})"]
    return forms, [
        f"({b}, {a})", f"({a}, {b + 1})", f"({a + 1}, {b})", str(a), str(b), f"({a}, {b}, 0)",
        rf"\{{{b}, {a}\}}",
    ]  # fmt: skip


def _intervals(r: random.Random) -> tuple[list[str], list[str]]:
    a = r.randint(-20, 20)
    b = a + r.randint(1, 30)
    forms = [f"[{a}, {b})", f"[{a},{b})", rf"\left[{a}, {b}\right)", rf"x \in [{a}, {b})"]
    return forms, [
        f"[{a}, {b}]", f"({a}, {b})", f"({a}, {b}]", f"[{a}, {b + 1})", f"[{a - 1}, {b})", str(a),
        f"[{b}, {a})",
    ]  # fmt: skip


def _measures(r: random.Random) -> tuple[list[str], list[str]]:
    n, (short, long) = r.randint(1, 900), r.choice(list(UNITS.items()))
    other = r.choice([u for u in UNITS if u != short])
    forms = [
        f"{n} {short}", f"{n}{short}", f"{n} {long}", rf"{n}\text{{ {short}}}", rf"{n}\,\mathrm{{{short}}}", f"**{n}** {short}", f"{n} **{short}**",
        f"**{n} {short}**", str(n).translate(FULL_WIDTH) + f" {short}",
    ]  # fmt: skip
    return forms, [
        f"{n} {other}", f"{n + 1} {short}", f"{n}{other}", f"{n}0 {short}", f"-{n} {short}",
        f"{n} {short}^2", f"{n} apples",
    ]  # fmt: skip


def _percentages(r: random.Random) -> tuple[list[str], list[str]]:
    n = r.randint(1, 99)
    forms = [f"{n}%", rf"{n}\%", f"{n} percent", f"{n} %", f"{n}％", f"**{n}%**"]
    return forms, [f"{n + 1}%", f"{n}.5%", f"-{n}%", f"{n}0%", f"{n / 1000:.4f}"]


def _letters(r: random.Random) -> tuple[list[str], list[str]]:
    a, b = r.sample("ABCDEFGH", 2)
    return [a, a.translate(FULL_WIDTH), f"({a})", rf"\text{{{a}}}", a.lower()], [
        b, b.lower(), f"({b})", a + b, f"{a}, {b}", f"{a} or {b}", f"not {a}",
    ]  # fmt: skip


def _words(r: random.Random) -> tuple[list[str], list[str]]:
    word = r.choice(WORDS)
    shuffled = "".join(r.sample(word, len(word)))
    other = r.choice([w for w in WORDS if w != word])
    wrong = [
        other, f"{word} {other}", f"not {word}", word[:-1], word + "x", f"{word}-{other}",
        *([shuffled] if shuffled != word else []),
    ]  # fmt: skip
    return [word, word.title(), word.upper(), rf"\text{{{word}}}", f'"{word}"'], wrong


def _permutations(r: random.Random) -> tuple[list[str], list[str]]:
    letters = "".join(r.sample("ABCDEFG", r.randint(3, 5)))
    others = ["".join(p) for p in itertools.permutations(letters) if "".join(p) != letters]
    other, separator = r.choice(others), r.choice(["", "", ", ", " -> ", "-", " ", ">", "→", " > "])
    return [separator.join(letters), rf"\text{{{separator.join(letters)}}}"], [
        separator.join(other),
        separator.join(letters[:-1]),
    ]


def _codes(r: random.Random) -> tuple[list[str], list[str]]:
    code = "".join(r.choice("ABEFKNPRXZ") + r.choice("23456789") for _ in range(2))[: r.randint(3, 4)]
    if r.random() < 0.3:
        code = r.choice("23456789") + "".join(r.sample("BFKNPXZ", 2))
    swapped = list(code)
    while "".join(swapped) == code:
        r.shuffle(swapped)
    return [code, code.lower(), code.translate(FULL_WIDTH)], [
        "".join(swapped), code[:-1], code + "1", code[0], "".join(c for c in code if c.isdigit()),
    ]  # fmt: skip


def _counts(r: random.Random) -> tuple[list[str], list[str]]:
    n, noun, other = (
        r.randint(2, 30),
        *r.sample(["cubes", "cars", "cards", "cats", "carts", "people", "trees", "books"], 2),
    )
    return [f"{n} {noun}", f"There are {n} {noun}", f"{n} red {noun}"], [
        f"{n} {other}", f"{n + 1} {noun}", f"not {n}", f"at least {n} {noun}", f"{n} or {n + 1}",
        f"{n} of {n + 5}",
    ]  # fmt: skip


def _equations(r: random.Random) -> tuple[list[str], list[str]]:
    n, name = r.choice([-1, 1]) * r.randint(2, 50), r.choice("xyzn")
    return [f"{name} = {n}", f"{name}={n}", str(n)], [
        f"{name} = {n + 1}", f"{name} > {n}", f"{name} = {n}.5", f"{n}{name}", f"{n} = {name} + 1",
    ]  # fmt: skip


def _lists(r: random.Random) -> tuple[list[str], list[str]]:
    items = r.sample(range(1, 90), r.randint(2, 4))
    text = ", ".join(map(str, items))
    changed = ", ".join(map(str, [*items[:-1], items[-1] + 100]))
    return [text, ",".join(map(str, items)), f"{', '.join(map(str, items[:-1]))} and {items[-1]}"], [
        changed, str(items[-1]), str(items[0]), ", ".join(map(str, items[:-1])), "".join(map(str, items)),
    ]  # fmt: skip


def _superscripts_and_fractions(r: random.Random) -> tuple[list[str], list[str]]:
    text, value = r.choice(
        [("½", "0.5"), ("¼", "0.25"), ("¾", "3/4"), ("2½", "2.5"), ("1¾", "7/4"), ("⅓", "1/3")]
    )
    return [text, value], ["12", "14", "34", "21/2", "2", "1"]


KINDS: list[Callable[[random.Random], tuple[list[str], list[str]]]] = [
    _integers, _fractions, _decimals, _roots, _powers, _powers_of_ten, _multiples_of_pi, _expressions, _e, _times, _clock, _ratios, _sets,
    _points, _intervals, _measures, _percentages, _letters, _words, _permutations, _codes, _counts, _equations, _lists,
    _superscripts_and_fractions,
]  # fmt: skip


def pairs(count: int, seed: int) -> Iterator[Pair]:
    """``count`` pairs, all kinds in turn, half of them equal."""
    generator = random.Random(seed)
    for i in range(count):
        kind = KINDS[i // 2 % len(KINDS)]
        forms, wrong = kind(generator)
        equal = i % 2 == 0
        a, b = (*generator.sample(forms, 2),) if equal else (generator.choice(forms), generator.choice(wrong))
        if generator.random() < 0.5:
            a, b = b, a
        yield Pair(kind.__name__.strip("_"), dressed(generator, a), dressed(generator, b), equal)
