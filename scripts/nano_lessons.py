"""Lessons that pretrain the base of pixelis-nano to perceive.

A lesson is a dialogue about one picture of the cards data: "Where is the red frame?" is answered with a box,
and the digit of a crop is read. No lesson contains a tool call, an answer tag or a thought, so the base
learns no protocol. Some rows repeat random vocabulary, so that tokens that occur in no lesson do not keep
their random initial embeddings.

Crops start tight around the digit and widen to the size of a zoom. With wide crops only, the model takes
several times longer to start reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from nano_backgrounds import recolored
from PIL import Image
from torch import Tensor

from pixelis.datasets import cards
from pixelis.families.positions import mrope_positions
from pixelis.nano.tokenizer import PIECES, SPECIAL, TAGS
from pixelis.operations.pixel_budget import fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WHERE = (
    *("Where is the {c} frame?", "Find the {c} frame.", "Point at the {c} frame.", "Locate the {c} card."),
    *("Where is the {c} card?", "Which box holds the {c} frame?", "Show me the {c} frame."),
    *("Where is the digit in the {c} frame?", "Box of the {c} frame?"),
)
BOXES = (
    *("[{b}]", "[{b}]", "[{b}]", "The {c} frame is at [{b}]", "box [{b}]", "It is here: [{b}]"),
    "The box of the {c} frame is [{b}]",
)
READ = (
    *(
        "Which digit is this?",
        "Read the digit.",
        "What number is written here?",
        "Which digit is in the frame?",
    ),
    *(
        "What is the digit?",
        "Which digit is on the {c} card?",
        "Read the digit in the {c} frame.",
        "What is written in the picture?",
    ),
)
COLOUR = ("Which colour is the frame?", "What colour has the card?", "Name the colour.")
TARGET, PLAIN = 1.0, 0.1
"""Loss weights of answer tokens and of the other assistant tokens."""


@dataclass
class Batch:
    """Lessons as arrays: B rows of L tokens, V views in reading order, C crops."""

    ids: Int64[Tensor, "B L"]
    """Padded on the right."""
    positions: Int64[Tensor, "3 B L"]
    weights: Float32[Tensor, "B L"]
    """Weight of predicting this token; 0 in the prompt."""
    places: Float32[Tensor, "B L"]
    """Exact coordinate in grid steps for the first two numbers of a box, else -1."""
    views: UInt8[Tensor, "V 64 64 3"]
    overviews: Int64[Tensor, " overviews"]
    """Numbers of the views that are overviews."""
    crops: Int64[Tensor, " C"]
    """Numbers of the views that are crops."""
    digits: Int64[Tensor, " C"]
    marks: Float32[Tensor, "cards 5"]
    """Number of the overview, image token, colour, column and row of the box in grid steps."""


@dataclass
class _Row:
    """One lesson under construction."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    views: list[np.ndarray] = field(default_factory=list)

    def add(self, ids: Sequence[int], weight: float = 0.0, place: float = -1.0) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.places += [place] * len(ids)


class Views(cards.World):
    """Computes the model's views of scenes without whole pictures; bit-equal to the views of whole
    pictures.
    """

    def __init__(self, backgrounds: Sequence[cards.Background]):
        super().__init__(backgrounds)
        self.reduced = [np.asarray(Image.fromarray(b.pixels).reduce(cards.GRID_PIXELS)) for b in backgrounds]

    def overview(self, scene: cards.Scene) -> np.ndarray:
        """Return `fit(picture(scene), VIEW_BUDGET, VIEW_MULTIPLE)`: uint8 [64, 64, 3]."""
        if scene.light != (1.0, 1.0, 1.0):  # pixels are rounded before averaging
            return fit(self.picture(scene), cards.VIEW_BUDGET, cards.VIEW_MULTIPLE)
        step, side = cards.GRID_PIXELS, cards.PICTURE // cards.GRID_PIXELS
        number, left, top = self.cut(scene)
        small = self.reduced[number][top // step : top // step + side, left // step : left // step + side]
        small = (small[:, ::-1] if scene.mirrored else small).copy()
        for card in scene.cards:
            x1, y1 = card.left // step, card.top // step
            x2, y2 = -(-(card.left + cards.CARD) // step), -(-(card.top + cards.CARD) // step)
            patch = self.draw(scene, x1 * step, y1 * step, x2 * step, y2 * step)
            small[y1:y2, x1:x2] = np.asarray(Image.fromarray(patch).reduce(step))
        return fit(small, cards.VIEW_BUDGET, cards.VIEW_MULTIPLE)

    def crop(self, scene: cards.Scene, box: Sequence[float]) -> np.ndarray:
        """Return the view after a zoom to `box` (0..1 of the picture): uint8 [64, 64, 3]."""
        x1, y1, x2, y2 = (round(min(1.0, max(0.0, v)) * cards.PICTURE) for v in box)
        return fit(self.picture(scene, (x1, y1, x2, y2)), cards.VIEW_BUDGET, cards.VIEW_MULTIPLE)


class Lessons(torch.utils.data.Dataset):
    """Batches of lessons by number. A number always gives the same batch.

    plan: (first lesson, lessons) of each batch. easy: number of lessons over which crops widen from tight to
    the size of a zoom.
    """

    def __init__(
        self,
        world: Views,
        tokenizer: PreTrainedTokenizerBase,
        plan: Sequence[tuple[int, int]],
        seed: int,
        easy: int = 0,
    ):
        self.world, self.tokenizer, self.plan, self.seed, self.easy = world, tokenizer, plan, seed, easy
        self._encoded: dict[str, list[int]] = {}
        self.image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.protocol = [self._encode(text)[0] for text in (*TAGS, *PIECES)]
        self.vocabulary = [
            i for i in range(len(tokenizer)) if i >= len(SPECIAL) and i not in tokenizer.all_special_ids
        ]
        side = cards.VIEW // cards.VIEW_MULTIPLE
        self.side = side
        self.image = self._encode("<|vision_start|>" + "<|image_pad|>" * (side * side) + "<|vision_end|>")

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> Batch:
        first, count = self.plan[number]
        rows: list[_Row] = []
        marks: list[tuple[float, ...]] = []
        overviews: list[int] = []
        crops: list[int] = []
        digits: list[int] = []
        view = 0
        for lesson in range(first, first + count):
            rng = np.random.default_rng([77, self.seed, lesson])
            row = _Row()
            if lesson % 12 == 11:
                self._echo(row, rng)
            else:
                scene = cards.scene_of("train", self.seed, lesson)
                for kind, payload in self._lesson(row, rng, scene, min(1.0, lesson / max(1, self.easy))):
                    if kind == "overview":
                        marks += [(len(overviews), *mark) for mark in payload]
                        overviews.append(view)
                    else:
                        crops.append(view)
                        digits.append(payload)
                    view += 1
            rows.append(row)
        return self._collate(rows, marks, overviews, crops, digits)

    def _lesson(
        self, row: _Row, rng: np.random.Generator, scene: cards.Scene, looseness: float
    ) -> list[tuple[str, Any]]:
        """Write one lesson of three turns into `row`; return the kind and the targets of each of its
        views.
        """
        recolor = _camera(rng)
        turns = [0, 1, 2] if rng.random() < 0.75 else [int(v) for v in rng.permutation(3)]
        targets: list[tuple[str, Any]] = []
        for number, turn in enumerate(turns):
            if turn == 0:
                row.views.append(recolor(self.world.overview(scene)))
                self._point(row, rng, scene, first=number == 0)
                targets.append(("overview", [self._mark(card) for card in scene.cards]))
            else:
                # Turn 1 shows the target card, turn 2 any card.
                card = scene.target if turn == 1 else scene.cards[int(rng.integers(len(scene.cards)))]
                row.views.append(recolor(self.world.crop(scene, _crop_box(card, rng, looseness))))
                self._read(row, rng, card, first=number == 0)
                targets.append(("crop", card.digit))
        return targets

    def _point(self, row: _Row, rng: np.random.Generator, scene: cards.Scene, first: bool) -> None:
        """Add one or two questions about the box of a card."""
        candidates = list(scene.cards) if rng.random() < 0.6 else [scene.target]
        for number, card in enumerate(candidates[:2]):
            self._question(row, rng, WHERE, card.colour, first and number == 0, image=number == 0)
            (x, y), box = _exact(card), cards.zoom_box(card)
            prefix, suffix = BOXES[int(rng.integers(len(BOXES)))].format(c=card.colour, b="@").split("@")
            row.add(self._encode(prefix), PLAIN)
            for i, value in enumerate(round(v * 1000) for v in box):
                row.add(self._encode(str(value)), TARGET if i < 2 else 0.3, (x, y)[i] if i < 2 else -1.0)
                row.add(self._encode("," if i < 3 else suffix), PLAIN)
            row.add(self._encode("<|im_end|>"), PLAIN)

    def _read(self, row: _Row, rng: np.random.Generator, card: cards.Card, first: bool) -> None:
        """Add a question about the digit, or rarely the colour, of a crop."""
        if rng.random() < 0.1:
            self._question(row, rng, COLOUR, card.colour, first, image=True)
            row.add(self._encode(card.colour), TARGET)
        else:
            self._question(row, rng, READ, card.colour, first, image=True)
            row.add(self._encode(str(card.digit)), TARGET)
        row.add(self._encode("<|im_end|>"), PLAIN)

    def _question(
        self, row: _Row, rng: np.random.Generator, forms: Sequence[str], colour: str, first: bool, image: bool
    ) -> None:
        text = forms[int(rng.integers(len(forms)))].format(c=colour)
        row.add(self._encode(("" if first else "\n") + "<|im_start|>user\n"))
        image_first = image and rng.random() < 0.8
        if image_first:
            row.add(self.image)
        row.add(self._encode(text))
        if image and not image_first:
            row.add(self.image)
        row.add(self._encode("<|im_end|>\n<|im_start|>assistant\n"))

    def _echo(self, row: _Row, rng: np.random.Generator) -> None:
        """Add a request to repeat random tokens."""
        size = int(rng.integers(3, 10))
        pools = [self.protocol if rng.random() < 0.5 else self.vocabulary for _ in range(size)]
        tokens = [int(pool[int(rng.integers(len(pool)))]) for pool in pools]
        row.add(self._encode("<|im_start|>user\nRepeat after me: "))
        row.add(tokens)
        row.add(self._encode("<|im_end|>\n<|im_start|>assistant\n"))
        row.add(tokens, 0.2)
        row.add(self._encode("<|im_end|>"), PLAIN)

    def _mark(self, card: cards.Card) -> tuple[float, ...]:
        """Return the targets of the heads for a card; see `Batch.marks`."""
        x1, y1, x2, y2 = card.box
        column, line = (min(int(v * self.side), self.side - 1) for v in ((x1 + x2) / 2, (y1 + y2) / 2))
        return (line * self.side + column, cards.COLOURS.index(card.colour), *_exact(card))

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._encoded[text]

    def _collate(self, rows: list[_Row], marks: list, overviews: list, crops: list, digits: list) -> Batch:
        length = max(len(row.ids) for row in rows)
        ids = np.full((len(rows), length), self.pad, np.int64)
        weights, places = np.zeros(ids.shape, np.float32), np.full(ids.shape, -1, np.float32)
        positions = np.zeros((3, *ids.shape), np.int64)
        cells = cards.VIEW // cards.VIEW_MULTIPLE * 2
        for number, row in enumerate(rows):
            size = len(row.ids)
            ids[number, :size] = row.ids
            weights[number, :size] = row.weights
            places[number, :size] = row.places
            grids = [(1, cells, cells)] * len(row.views)
            positions[:, number, :size], _ = mrope_positions(row.ids, grids, self.image_token, 2)
        tokens = [torch.from_numpy(a) for a in (ids, positions, weights, places)]
        views = torch.from_numpy(np.stack([view for row in rows for view in row.views]))
        numbers = [torch.tensor(values, dtype=torch.int64) for values in (overviews, crops, digits)]
        return Batch(*(*tokens, views, *numbers, torch.tensor(marks, dtype=torch.float32).reshape(-1, 5)))


def _camera(rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Return the same random change of brightness, contrast and white balance for all views of a lesson, or
    none.
    """
    if rng.random() < 0.4:
        return lambda view: view
    seed = int(rng.integers(2**31))
    return lambda view: recolored(view, np.random.default_rng(seed), 0.15)


def _exact(card: cards.Card) -> tuple[float, float]:
    """Return the left and top edges of the ideal zoom box in grid steps, not rounded."""
    x1, y1, x2, y2 = card.box
    last = (1 - cards.ZOOM) / cards.GRID
    x, y = (min(max(((a + b) / 2 - cards.ZOOM / 2) / cards.GRID, 0.0), last) for a, b in ((x1, x2), (y1, y2)))
    return x, y


def _crop_box(card: cards.Card, rng: np.random.Generator, looseness: float) -> tuple[float, ...]:
    """Return a crop around a card: looseness 0 shows little but the digit, 1 is like an agent's zoom."""
    max_shift = 0.004 + 0.026 * looseness
    shift = rng.uniform(-max_shift, max_shift, 2)
    side = 0.05 + 0.05 * looseness
    if looseness == 1.0 and rng.random() < 0.8:
        return cards.zoom_box(card, (float(shift[0]), float(shift[1])))
    if looseness == 1.0:
        side = rng.uniform(0.06, 0.13)
    x1, y1, x2, y2 = card.box
    left, top = (
        min(max((a + b) / 2 + float(s) - side / 2, 0.0), 1.0 - side)
        for a, b, s in ((x1, x2, shift[0]), (y1, y2, shift[1]))
    )
    # Round the side once: rounding both edges could give a rectangle that is not square.
    left, top, size = (round(v * cards.PICTURE) for v in (left, top, side))
    return tuple(v / cards.PICTURE for v in (left, top, left + size, top + size))
