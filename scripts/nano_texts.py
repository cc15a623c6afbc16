"""Lessons about text that pretrain `mini` to copy and to look up what operations write.

A lesson is a question and a text in the form of an observation, with random content: "What does the text say?"
about a line of a reading, a value by its name, the end of a track, the part of the picture that holds a point.
No lesson contains a tool call, an answer tag or a thought.

At first the model only repeats random tokens, a few and then more. Without this it does not learn within a
hundred thousand lessons to copy a word that it has never seen.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn import functional

from pixelis.nano.tokenizer import SPECIAL
from pixelis.operations.colours import NAMES
from pixelis.operations.track_object import WAYS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS, LENGTH = 16, 200
"""Rows of a batch, and tokens up to which a row gets lessons. One lesson may be a little longer."""
SHORT, LONG = 4, 40
"""Most tokens of a repetition at first and at last."""
REPETITIONS = 0.15
"""Share of the rows that are repetitions after the first phase."""
Turn = tuple[str, str]
"""What the user and the assistant say."""

ACROSS, DOWN = ("left", "middle", "right"), ("upper", "middle", "lower")
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiouy"


@dataclass
class TextBatch:
    """Rows of lessons, padded on the right."""

    ids: Int64[Tensor, "B L"]
    weights: Float32[Tensor, "B L"]
    """1 for the tokens that the assistant says, else 0."""


class Texts:
    """Batches by number, the first ``repeating`` of them repetitions. A number always gives the same batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, repeating: int = 0):
        self.tokenizer, self.seed, self.repeating = tokenizer, seed, repeating
        self.vocabulary = np.arange(len(SPECIAL), len(tokenizer))
        self.pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def batch(self, number: int, rows: int = ROWS, length: int = LENGTH) -> TextBatch:
        made = list[tuple[list[int], list[float]]]()
        for place in range(rows):
            rng = np.random.default_rng([78, self.seed, number, place])
            ids, weights = list[int](), list[float]()
            repeats = number < self.repeating or (length > 1 and rng.random() < REPETITIONS)
            while True:
                turns = [self._repetition(rng, number)] if repeats else self._lesson(rng)
                more, counted = self._dialogue(turns, bool(ids))
                if ids and len(ids) + len(more) > length:
                    break
                ids += more
                weights += counted
            made.append((ids, weights))
        size = max(len(ids) for ids, _ in made)
        batch = TextBatch(torch.full((rows, size), self.pad), torch.zeros(rows, size))
        for place, (ids, weights) in enumerate(made):
            batch.ids[place, : len(ids)] = torch.tensor(ids)
            batch.weights[place, : len(ids)] = torch.tensor(weights)
        return batch

    def _dialogue(
        self, turns: Sequence[tuple[list[int], list[int]]], goes_on: bool
    ) -> tuple[list[int], list[float]]:
        """The tokens of questions and answers, and their weights."""
        ids, weights = list[int](), list[float]()
        for question, answer in turns:
            start = self._encode("\n<|im_start|>user\n" if ids or goes_on else "<|im_start|>user\n")
            prompt = [*start, *question, *self._encode("<|im_end|>\n<|im_start|>assistant\n")]
            said = [*answer, *self._encode("<|im_end|>")]
            ids += prompt + said
            weights += [0.0] * len(prompt) + [1.0] * len(said)
        return ids, weights

    def _lesson(self, rng: np.random.Generator) -> list[tuple[list[int], list[int]]]:
        return [(self._encode(question), self._encode(answer)) for question, answer in lesson(rng)]

    def _repetition(self, rng: np.random.Generator, number: int) -> tuple[list[int], list[int]]:
        """Random tokens, or the bytes of unknown words, to repeat."""
        most = SHORT + int((LONG - SHORT) * min(1.0, number / max(1, self.repeating)))
        size = int(rng.integers(2, most + 1))
        if rng.random() < 0.5:
            tokens = [int(token) for token in rng.choice(self.vocabulary, size)]
        else:
            tokens = self._encode(_phrase(rng, 1 + size // 8))[:size]
        return [*self._encode("Repeat: "), *tokens], tokens

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def text_loss(model: PreTrainedModel, batch: TextBatch) -> Tensor:
    """The mean cross entropy of what the assistant says."""
    logits, targets = _answers(model, batch)
    return functional.cross_entropy(logits.float(), targets)


@torch.no_grad()
def evaluate_texts(model: PreTrainedModel, texts: Texts, count: int) -> float:
    """The share of ``count`` unseen lessons whose answers greedy decoding would give."""
    batch = texts.batch(2**31, count, 1)
    logits, targets = _answers(model, batch)
    right = torch.ones(batch.ids.shape, dtype=torch.bool, device=targets.device)
    right[:, 1:][batch.weights[:, 1:] > 0] = logits.argmax(-1) == targets
    return float(right.all(1).float().mean())


def _answers(model: PreTrainedModel, batch: TextBatch) -> tuple[Float32[Tensor, "n v"], Int64[Tensor, " n"]]:
    """Logits and targets at the tokens that the assistant says."""
    ids, language = batch.ids.to(model.device), model.model.language_model
    positions = torch.arange(ids.shape[1], device=ids.device).expand(3, len(ids), -1)
    hidden = language(
        inputs_embeds=language.embed_tokens(ids), position_ids=positions, use_cache=False
    ).last_hidden_state
    said = batch.weights[:, 1:].to(ids.device) > 0
    return model.lm_head(hidden[:, :-1][said]), ids[:, 1:][said]


def lesson(rng: np.random.Generator) -> list[Turn]:
    """One or two exchanges about a random text."""
    kinds, shares = zip(*LESSONS.items(), strict=True)
    kind = kinds[int(rng.choice(len(kinds), p=np.asarray(shares) / sum(shares)))]
    text, pairs = kind(rng)
    order = rng.permutation(len(pairs))[: 2 if rng.random() < 0.5 else 1]
    turns = list[Turn]()
    for place, number in enumerate(order):
        questions, answer = pairs[int(number)]
        question = _pick(rng, questions)
        if place == 0 and text:
            parts = (question, text) if rng.random() < 0.6 else (text, question)
            question = "\n".join(parts)
        turns.append((question, answer))
    return turns


Lesson = tuple[str, Sequence[tuple[tuple[str, ...], str]]]
"""A text, and for each answer the questions that ask for it."""


def copying(rng: np.random.Generator) -> Lesson:
    """Words, numbers and codes to repeat."""
    text = _phrase(rng, int(rng.integers(1, 5))) if rng.random() < 0.7 else _code(rng)
    x, y = (int(v) for v in rng.integers(0, 1001, 2))
    point = f"[{x}, {y}]"
    box = ", ".join(str(v) for v in _box(rng))
    return "", [
        ((f"Repeat: {text}", f'Say "{text}".', f"Repeat after me: {text}", f"Write {text}"), text),
        ((f"Point at {point}.", f"Which point is {point}?", f"The object at {point}: where?"), f"[{x},{y}]"),
        ((f"Show the box [{box}].", f"Box [{box}]: where?"), f"[{box.replace(', ', ',')}]"),
    ]


def reading(rng: np.random.Generator) -> Lesson:
    """Lines of text with their boxes; what one of them says."""
    count = int(rng.choice((1, 1, 1, 2, 3, 4)))
    lines = list[tuple[tuple[int, ...], str]]()
    for _ in range(count):
        lines.append((_box(rng), _phrase(rng, int(rng.choice((1, 1, 2, 3))))))
    lines.sort(key=lambda line: line[0][1])
    text = "\n".join(f"{','.join(map(str, box))} {words}" for box, words in lines)
    pairs = [(("What does the first line say?", "Read the first line."), lines[0][1])]
    if count == 1:
        where = _part(lines[0][0])
        asked = ("What does the text say?", "Read the text.", "What is written here?")
        about = f"What is written in the {where}?", f"What does the text in the {where} say?"
        return text, [((*asked, *about, f"Read the text in the {where}."), lines[0][1])]
    pairs.append((("What does the last line say?", "Read the last line."), lines[-1][1]))
    parts = [_part(box) for box, _ in lines]
    for part, (_, words) in zip(parts, lines, strict=True):
        if parts.count(part) == 1:
            pairs.append(((f"What is written in the {part}?", f"Read the text in the {part}."), words))
    return text, pairs


def outline(rng: np.random.Generator) -> Lesson:
    """A segmented object: its id, its share of the picture, its box."""
    code, box, share = _id(rng), _box(rng), _percent(rng)
    text = (
        f"object {code}\nbox [{', '.join(map(str, box))}] of img0\narea {share} % of the whole image "
        f"({int(10 ** rng.uniform(1.5, 5))} px)\nscore 0.{int(rng.integers(30, 99))} "
        "(mobilenet, a small network: approximate)"
    )
    if rng.random() < 0.15:
        text += "; unsure: check the outline, give a box, or zoom in"
    return text, [
        (("Which object is it?", "Name the object.", "What is the name of the object?"), code),
        (
            (
                "How many percent of the picture does it cover?",
                "What share does the object cover, in percent?",
            ),
            share,
        ),
        (("Where is the object?", "Where is it?"), _part(box)),
        (("Show its box.", "Which box?"), f"[{','.join(map(str, box))}]"),
    ]


def properties(rng: np.random.Generator) -> Lesson:
    """Measured values of an object, by name."""
    group = int(rng.integers(3))
    head = f"object {_id(rng)} of img0\n"

    def number(low: float, high: float, digits: int = 3) -> str:
        return f"{rng.uniform(low, high):.{digits}g}"

    def rgb() -> str:
        return " ".join(str(int(v)) for v in rng.integers(0, 256, 3))

    if group == 0:
        name, light, hue = _pick(rng, NAMES), number(0, 1), number(0, 360)
        near = f", near {_pick(rng, NAMES)}" if rng.random() < 0.15 else ""
        text = (
            f"color: name {name}{near}, dominant {rgb()} RGB 0..255, dominant share {number(0.3, 1)}, mean {rgb()} "
            f"RGB 0..255, brightness {light}, saturation {number(0, 1)}, hue {hue} deg"
        )
        return head + text, [
            (("What colour is it?", "Which colour is the object?", "Name the colour of the object."), name),
            (("What is its brightness?", "How bright is it? Say the brightness."), light),
            (("What is its hue?", "Say the hue."), hue),
        ]
    if group == 1:
        size = _pick(rng, ("tiny", "small", "medium", "large"))
        width, height = (int(side) for side in rng.integers(5, 700, 2))
        text = (
            f"size: area pixels {int(10 ** rng.uniform(1.5, 5))} px^2, relative size {number(0, 0.5)}, bbox width "
            f"{width} px, bbox height {height} px, diagonal {number(9, 900)} px, equivalent diameter "
            f"{number(9, 900)} px, category {size}"
        )
        return head + text, [
            (
                ("Is it tiny, small, medium or large?", "How large is it?", "Name the size of the object."),
                size,
            ),
            (("What is its width?", "Say the width."), str(width)),
            (("What is its height?", "Say the height."), str(height)),
        ]
    corners = str(int(rng.integers(0, 10)))
    text = (
        f"shape: aspect ratio {number(0.2, 4)}, rotated aspect ratio {number(0.2, 4)}, rotated length "
        f"{number(9, 900)} px, rotated width {number(9, 900)} px, perimeter {number(9, 999)} px, circularity "
        f"{number(0, 1)}, solidity {number(0.3, 1)}, eccentricity {number(0, 1)}, orientation {number(0, 180)} "
        f"deg, corners {corners}, holes {int(rng.integers(0, 3))}"
    )
    return head + text, [
        (("How many corners has the shape?", "How many corners does the object have?"), corners)
    ]


def tracking(rng: np.random.Generator) -> Lesson:
    """The path of an object: its direction, whether it is lost, where it ends."""
    lost, still = rng.random() < 0.5, rng.random() < 0.2
    angle = (45 * rng.integers(8) + rng.uniform(-22, 22) + 180) % 360 - 180
    way = WAYS[round(angle / 45) % 8]
    start, width, height = rng.integers(100, 800, 2), *rng.integers(40, 200, 2)
    reach = 0.0 if still else rng.uniform(150, 700)
    last, first_frame = int(rng.integers(7, 36)), 0
    count = min(last + 1, 12 if rng.random() < 0.25 else int(rng.integers(2, 7)))
    places = list[str]()
    box: tuple[int, ...] = ()
    for share in np.linspace(0, 1, count):
        x = start[0] + share * reach * np.cos(np.radians(angle))
        y = start[1] + share * reach * np.sin(np.radians(angle))
        x0, y0, x1, y1 = (int(v) for v in np.clip((x, y, x + width, y + height), 0, 1000))
        box = x0, y0, min(1000, x1 + 1), min(1000, y1 + 1)
        places.append(f"{round(share * last)}: [{', '.join(map(str, box))}]")
    pixels, speed = round(reach / 2), reach / 2 / max(1, last)
    motion = "stationary" if still else f"direction {way}, {angle:.0f} deg (0 right, 90 down)"
    text = (
        f"track {_id(rng)}: {'lost' if lost else 'completed'}, frames {first_frame} to {last} of vid0 "
        f"({last / 12.5:.2f} s).\nBox by frame: {'; '.join(places)}.\nMotion in px of the full frame: path "
        f"{pixels}, displacement {pixels}, average {speed:.1f} per frame ({speed * 12.5:.0f} per second), maximum "
        f"{speed * rng.uniform(1, 1.5):.1f} per frame; {motion}."
    )
    if lost:
        text += f"\nThe object was not seen after frame {last}."
    pairs = [
        (
            ("Is the object still in view at the end?", "Does it stay in view to the end?"),
            "no" if lost else "yes",
        ),
        (("Where is it at the end?", "Where does it end?"), _part(box)),
        (("Does it move?", "Does the object move?"), "no" if still else "yes"),
    ]
    if not still:
        choice = ": left, right, up or down?" if " " not in way else "?"
        asked = f"Where does it go{choice}", f"Which way does the object move{choice}"
        pairs += [(asked, way), (asked, way)]
    return text, pairs


def places(rng: np.random.Generator) -> Lesson:
    """In which part of the picture a point or a box is, and which number is larger."""
    x, y = (int(v) for v in rng.integers(0, 1001, 2))
    box = _box(rng)
    a, b = (int(v) for v in rng.choice(1001, 2, replace=False))
    quarter = f"{'upper' if y < 500 else 'lower'} {'left' if x < 500 else 'right'}"
    return "", [
        ((f"Where is [{x}, {y}]?", f"In which part is the point [{x}, {y}]?"), _part((x, y, x, y))),
        ((f"Is [{x}, {y}] in the upper left, upper right, lower left or lower right?",), quarter),
        ((f"Where is the box [{', '.join(map(str, box))}]?",), _part(box)),
        ((f"Which is larger, {a} or {b}?", f"Which number is larger: {a} or {b}?"), str(max(a, b))),
    ]


LESSONS: dict[Callable[[np.random.Generator], Lesson], float] = {
    copying: 0.2,
    reading: 0.22,
    outline: 0.16,
    properties: 0.18,
    tracking: 0.2,
    places: 0.04,
}


def _part(box: tuple[int, ...]) -> str:
    """The ninth of the picture that holds the middle of a box, as `naming.position`."""
    x, y = (box[0] + box[2]) / 2000, (box[1] + box[3]) / 2000
    across, down = ACROSS[min(2, int(3 * x))], DOWN[min(2, int(3 * y))]
    if across == down == "middle":
        return "centre"
    return f"{down} {across}" if across != "middle" else f"{down} middle"


def _box(rng: np.random.Generator) -> tuple[int, ...]:
    x0, y0 = (int(v) for v in rng.integers(0, 960, 2))
    return x0, y0, int(rng.integers(x0 + 10, 1001)), int(rng.integers(y0 + 10, 1001))


def _percent(rng: np.random.Generator) -> str:
    value = 10 ** rng.uniform(-0.5, 1.7)
    return f"{value:.0f}" if value >= 9.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def _id(rng: np.random.Generator) -> str:
    return "".join(_pick(rng, "0123456789abcdef") for _ in range(8))


def _code(rng: np.random.Generator) -> str:
    letters = string.ascii_letters + string.digits + "-./:&#'"
    return "".join(_pick(rng, letters) for _ in range(int(rng.integers(2, 11))))


def _phrase(rng: np.random.Generator, count: int) -> str:
    return " ".join(_word(rng) for _ in range(count))


def _word(rng: np.random.Generator) -> str:
    """A number, a code, or letters that can be pronounced, or cannot."""
    kind = rng.random()
    if kind < 0.15:
        return f"{rng.uniform(1, 999):.2f}" if rng.random() < 0.4 else str(int(10 ** rng.uniform(0, 4)))
    if kind < 0.22:
        return _code(rng)
    size = int(rng.integers(2, 11))
    if kind < 0.5:
        word = "".join(_pick(rng, string.ascii_lowercase) for _ in range(size))
    else:
        word = "".join(_pick(rng, VOWELS if i % 2 else CONSONANTS) for i in range(size))
    return (word.title(), word.title(), word.upper(), word)[int(rng.integers(4))]


def _pick(rng: np.random.Generator, options: tuple[str, ...] | str) -> str:
    return options[int(rng.integers(len(options)))]
