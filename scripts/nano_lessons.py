"""How the base of pixelis-nano learns to see: lessons, losses and its examination.

A lesson is a dialogue about one picture of the card world: "Where is the red frame?" is answered with a box, a crop shown
afterwards is read. No lesson contains a tool call, an answer tag or a thought: the base perceives and knows no protocol. Some
rows repeat random vocabulary, so that tokens the lessons never use are not left at their random start.

Throw-away heads make it work (without them a tiny model stays at chance for tens of thousands of lessons): from every image
token of an overview the colour and the place of the card that lies there, from the tokens of a crop its digit. Crops start tight
around the digit and widen to what a zoom shows; from wide crops alone reading takes several times longer to begin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from pixelis.datasets import cards
from pixelis.dialogue.positions import mrope_positions
from pixelis.nano.tokenizer import BINS, PIECES, SPECIAL, TAGS
from pixelis.operations.pixel_budget import fit
from pixelis.policy.vision import patchify

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
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
    *("Which digit is this?", "Read the digit.", "What number is written here?", "Which digit is in the frame?"),
    *(
        "What is the digit?",
        "Which digit is on the {c} card?",
        "Read the digit in the {c} frame.",
        "What is written in the picture?",
    ),
)
COLOUR = ("Which colour is the frame?", "What colour has the card?", "Name the colour.")
_TARGET, _PLAIN = 1.0, 0.1


@dataclass
class Batch:
    """Lessons as arrays: B rows of L tokens, V views in reading order."""

    ids: torch.Tensor
    """int64 [B, L], padded on the right."""
    positions: torch.Tensor
    """int64 [3, B, L]."""
    weights: torch.Tensor
    """float32 [B, L]: how much predicting this token counts; 0 for what the model is given."""
    places: torch.Tensor
    """float32 [B, L]: for the first two numbers of a box the exact place in grid steps, else -1."""
    views: torch.Tensor
    """uint8 [V, 64, 64, 3]."""
    overviews: torch.Tensor
    """int64: which views are overviews."""
    crops: torch.Tensor
    """int64: which views are crops."""
    digits: torch.Tensor
    """int64, one a crop."""
    marks: torch.Tensor
    """float32 [cards, 5]: number of the overview, image token, colour, column and row of the box in grid steps."""


@dataclass
class _Row:
    """One lesson while it is written."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    views: list[np.ndarray] = field(default_factory=list)

    def add(self, ids: Sequence[int], weight: float = 0.0, place: float = -1.0) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.places += [place] * len(ids)


class Views(cards.World):
    """The views of scenes as a model sees them, equal to those of the whole pictures to the last bit, and cheaper."""

    def __init__(self, backgrounds: Sequence[cards.Background]):
        super().__init__(backgrounds)
        self.reduced = [np.asarray(Image.fromarray(b.pixels).reduce(cards.GRID_PIXELS)) for b in backgrounds]

    def overview(self, scene: cards.Scene) -> np.ndarray:
        """The whole picture, `fit(picture(scene), VIEW_BUDGET, VIEW_MULTIPLE)`: uint8 [64, 64, 3]."""
        if scene.light != (1.0, 1.0, 1.0):  # its pixels are rounded before they are averaged
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
        """The view after a zoom to `box` (0..1 of the picture): uint8 [64, 64, 3]."""
        x1, y1, x2, y2 = (round(min(1.0, max(0.0, v)) * cards.PICTURE) for v in box)
        return fit(self.picture(scene, (x1, y1, x2, y2)), cards.VIEW_BUDGET, cards.VIEW_MULTIPLE)


class Lessons(torch.utils.data.Dataset):
    """Batches of lessons by number: the same number always gives the same batch.

    plan: (first lesson, lessons) of each batch; easy: number of lessons over which crops widen from tight to as loose as an
    agent's.
    """

    def __init__(
        self, world: Views, tokenizer: PreTrainedTokenizerBase, plan: Sequence[tuple[int, int]], seed: int, easy: int = 0
    ):
        self.world, self.tokenizer, self.plan, self.seed, self.easy = world, tokenizer, plan, seed, easy
        self._known: dict[str, list[int]] = {}
        self.image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.protocol = [self._encode(text)[0] for text in (*TAGS, *PIECES)]
        self.vocabulary = [i for i in range(len(tokenizer)) if i >= len(SPECIAL) and i not in tokenizer.all_special_ids]
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
        seen = 0
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
                        overviews.append(seen)
                    else:
                        crops.append(seen)
                        digits.append(payload)
                    seen += 1
            rows.append(row)
        return self._collate(rows, marks, overviews, crops, digits)

    def _lesson(self, row: _Row, rng: np.random.Generator, scene: cards.Scene, looseness: float) -> list[tuple[str, Any]]:
        """Write one lesson of three turns into `row`; returns what its views show, in order."""
        tone = _tone(rng)
        turns = [0, 1, 2] if rng.random() < 0.75 else [int(v) for v in rng.permutation(3)]
        shown: list[tuple[str, Any]] = []
        for place, turn in enumerate(turns):
            if turn == 0:
                row.views.append(tone(self.world.overview(scene)))
                self._point(row, rng, scene, first=place == 0)
                shown.append(("overview", [self._mark(card) for card in scene.cards]))
            else:
                # The first crop mostly shows the card that was asked for, the second any of them.
                card = scene.target if turn == 1 else scene.cards[int(rng.integers(len(scene.cards)))]
                row.views.append(tone(self.world.crop(scene, _crop_box(card, rng, looseness))))
                self._read(row, rng, card, first=place == 0)
                shown.append(("crop", card.digit))
        return shown

    def _point(self, row: _Row, rng: np.random.Generator, scene: cards.Scene, first: bool) -> None:
        asked = list(scene.cards) if rng.random() < 0.6 else [scene.target]
        for number, card in enumerate(asked[:2]):
            self._question(row, rng, WHERE, card.colour, first and number == 0, image=number == 0)
            (x, y), box = _exact(card), cards.zoom_box(card)
            before, after = BOXES[int(rng.integers(len(BOXES)))].format(c=card.colour, b="@").split("@")
            row.add(self._encode(before), _PLAIN)
            for step, value in enumerate(round(v * 1000) for v in box):
                row.add(self._encode(str(value)), _TARGET if step < 2 else 0.3, (x, y)[step] if step < 2 else -1.0)
                row.add(self._encode("," if step < 3 else after), _PLAIN)
            row.add(self._encode("<|im_end|>"), _PLAIN)

    def _read(self, row: _Row, rng: np.random.Generator, card: cards.Card, first: bool) -> None:
        if rng.random() < 0.1:
            self._question(row, rng, COLOUR, card.colour, first, image=True)
            row.add(self._encode(card.colour), _TARGET)
        else:
            self._question(row, rng, READ, card.colour, first, image=True)
            row.add(self._encode(str(card.digit)), _TARGET)
        row.add(self._encode("<|im_end|>"), _PLAIN)

    def _question(self, row: _Row, rng: np.random.Generator, forms: Sequence[str], colour: str, first: bool, image: bool) -> None:
        text = forms[int(rng.integers(len(forms)))].format(c=colour)
        row.add(self._encode(("" if first else "\n") + "<|im_start|>user\n"))
        before = image and rng.random() < 0.8
        if before:
            row.add(self.image)
        row.add(self._encode(text))
        if image and not before:
            row.add(self.image)
        row.add(self._encode("<|im_end|>\n<|im_start|>assistant\n"))

    def _echo(self, row: _Row, rng: np.random.Generator) -> None:
        size = int(rng.integers(3, 10))
        mixed = [self.protocol if rng.random() < 0.5 else self.vocabulary for _ in range(size)]
        said = [int(pool[int(rng.integers(len(pool)))]) for pool in mixed]
        row.add(self._encode("<|im_start|>user\nRepeat after me: "))
        row.add(said)
        row.add(self._encode("<|im_end|>\n<|im_start|>assistant\n"))
        row.add(said, 0.2)
        row.add(self._encode("<|im_end|>"), _PLAIN)

    def _mark(self, card: cards.Card) -> tuple[float, ...]:
        x1, y1, x2, y2 = card.box
        column, line = (min(int(v * self.side), self.side - 1) for v in ((x1 + x2) / 2, (y1 + y2) / 2))
        return (line * self.side + column, cards.COLOURS.index(card.colour), *_exact(card))

    def _encode(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._known[text]

    def _collate(self, rows: list[_Row], marks: list, overviews: list, crops: list, digits: list) -> Batch:
        length = max(len(row.ids) for row in rows)
        ids = np.full((len(rows), length), self.pad, np.int64)
        weights, places = np.zeros(ids.shape, np.float32), np.full(ids.shape, -1, np.float32)
        positions = np.zeros((3, *ids.shape), np.int64)
        cells = cards.VIEW // cards.VIEW_MULTIPLE * 2
        for number, row in enumerate(rows):
            size = len(row.ids)
            ids[number, :size], weights[number, :size], places[number, :size] = row.ids, row.weights, row.places
            grids = [(1, cells, cells)] * len(row.views)
            positions[:, number, :size], _ = mrope_positions(row.ids, grids, self.image_token, 2)
        read = [torch.from_numpy(a) for a in (ids, positions, weights, places)]
        views = torch.from_numpy(np.stack([view for row in rows for view in row.views]))
        numbers = [torch.tensor(values, dtype=torch.int64) for values in (overviews, crops, digits)]
        return Batch(*(*read, views, *numbers, torch.tensor(marks, dtype=torch.float32).reshape(-1, 5)))


class Heads(nn.Module):
    """The throw-away heads: colour (or none) and place from an image token, digit from a crop's tokens and from their mean."""

    def __init__(self, width: int):
        super().__init__()
        self.colour = nn.Linear(width, len(cards.COLOURS) + 1)
        self.place = nn.Linear(width, 2 * len(BINS))
        self.digit = nn.Linear(width, 10)
        self.digit_by_token = nn.Linear(width * (cards.VIEW // cards.VIEW_MULTIPLE) ** 2, 10)


def lesson_loss(
    model: PreTrainedModel, heads: Heads, batch: Batch, bins: torch.Tensor, language: bool = True
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss of one batch and its parts by name; without `language` only the vision tower and the heads learn.

    bins: token ids of the coordinates, int64 [51].
    """
    seen = _look(model, list(batch.views.cpu().numpy()))
    features = seen.pooler_output.view(len(batch.views), -1, model.config.text_config.hidden_size)
    parts: dict[str, torch.Tensor] = {}
    overview, mark = features[batch.overviews], batch.marks
    row, token = mark[:, 0].long(), mark[:, 1].long()
    colour = torch.zeros(overview.shape[:2], dtype=torch.int64, device=overview.device)
    colour[row, token] = mark[:, 2].long() + 1
    # Most tokens hold no card: they count less.
    balance = torch.tensor([0.3] + [1.0] * len(cards.COLOURS), device=overview.device)
    parts["colour"] = functional.cross_entropy(heads.colour(overview).flatten(0, 1), colour.flatten(), weight=balance)
    parts["place"] = 0.5 * _soft_cross_entropy(heads.place(overview[row, token]).view(-1, 2, len(BINS)), mark[:, 3:]).mean()
    crop = features[batch.crops]
    by_mean, by_token = heads.digit(crop.mean(1)), heads.digit_by_token(crop.flatten(1))
    parts["digit"] = 0.5 * functional.cross_entropy(by_mean, batch.digits)
    parts["digit"] = parts["digit"] + 0.5 * functional.cross_entropy(by_token, batch.digits)
    loss = parts["colour"] + parts["place"] + parts["digit"]
    if language:
        said = _language_loss(model, batch, bins, seen)
        loss = loss + sum(said.values())
        parts |= said
    return loss, {name: float(value.detach()) for name, value in parts.items()}


def _language_loss(model: PreTrainedModel, batch: Batch, bins: torch.Tensor, seen: object) -> dict[str, torch.Tensor]:
    hidden = hidden_states(model, batch.ids, batch.positions, seen)[:, :-1]
    targets, weights, places = batch.ids[:, 1:], batch.weights[:, 1:], batch.places[:, 1:]
    counted = weights > 0
    targets, weights, places = targets[counted], weights[counted], places[counted]
    scores = functional.log_softmax(model.lm_head(hidden[counted]).float(), dim=-1)
    losses = -scores.gather(1, targets[:, None])[:, 0] * weights
    pointing = places >= 0
    soft = _soft(places[pointing])
    count = len(batch.ids)
    return {
        "point": -(soft * scores[pointing][:, bins]).sum() / count,
        "read": losses[~pointing & (weights == _TARGET)].sum() / count,
        "rest": losses[~pointing & (weights != _TARGET)].sum() / count,
    }


def _look(model: PreTrainedModel, views: Sequence[np.ndarray]) -> Any:
    """What the vision tower makes of views, 16 tokens each."""
    config = model.config.vision_config
    pixels, grid = patchify(views, config.patch_size, config.spatial_merge_size, config.temporal_patch_size)
    return model.model.visual(pixels.to(model.device), grid_thw=grid.to(model.device))


def hidden_states(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, seen: Any) -> torch.Tensor:
    """Last hidden states [B, L, d] of rows of tokens with the vision tower's output filled in (Qwen3-VL and Qwen2.5-VL)."""
    language = model.model.language_model
    embeddings = language.embed_tokens(ids)
    extra = {}
    if seen is not None:
        is_image = ids == model.config.image_token_id
        embeddings = embeddings.masked_scatter(is_image[..., None], seen.pooler_output)
        if getattr(seen, "deepstack_features", None):
            extra = {"visual_pos_masks": is_image, "deepstack_visual_embeds": seen.deepstack_features}
    return language(inputs_embeds=embeddings, position_ids=positions, use_cache=False, **extra).last_hidden_state


@torch.no_grad()
def examine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: str, count: int = 300, seed: int = 1
) -> dict[str, float]:
    """How well the base sees unseen digits on unseen photographs, each a share of `count` pictures.

    read: digits read from well centred crops; point: boxes that hold the whole digit; near: boxes within one grid step on both
    axes; both: digits read from the crop that the model itself pointed at (what an agent built on it can reach).
    """
    model.eval()
    world = Views(cards.world(split).backgrounds)
    scenes = [cards.scene_of(split, seed, index) for index in range(count)]
    found, good, near = [], 0, 0
    where = [f"Where is the {scene.target.colour} frame?" for scene in scenes]
    for scene, text in zip(scenes, _answer(model, tokenizer, [world.overview(s) for s in scenes], where, 10), strict=True):
        box = _parse_box(text)
        found.append(box)
        if box is not None:
            good += _holds_digit(scene.target, box)
            near += max(abs(a - b) for a, b in zip(box[:2], cards.zoom_box(scene.target)[:2], strict=True)) < 1.5 * cards.GRID
    question = ["Which digit is this?"] * count
    gold = _answer(model, tokenizer, [world.crop(s, cards.zoom_box(s.target)) for s in scenes], question, 1)
    seen = [world.crop(s, box) if box else world.overview(s) for s, box in zip(scenes, found, strict=True)]
    own = _answer(model, tokenizer, seen, question, 1)
    digits = [str(scene.target.digit) for scene in scenes]
    return {
        "read": sum(a == b for a, b in zip(gold, digits, strict=True)) / count,
        "point": good / count,
        "near": near / count,
        "both": sum(a == b for a, b in zip(own, digits, strict=True)) / count,
    }


def _answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, views: list[np.ndarray], questions: list[str], tokens: int
) -> list[str]:
    """Greedy answers to one question about one view each."""
    side = cards.VIEW // cards.VIEW_MULTIPLE
    image = "<|vision_start|>" + "<|image_pad|>" * (side * side) + "<|vision_end|>"
    said: list[str] = []
    for start in range(0, len(views), 100):
        chunk = [
            tokenizer(f"<|im_start|>user\n{image}{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
            for text in questions[start : start + 100]
        ]
        ids = torch.tensor(chunk, device=model.device)
        seen = _look(model, views[start : start + 100])
        prompt = ids.shape[1]
        for _ in range(tokens):
            grids = [(1, 2 * side, 2 * side)]
            places, _ = mrope_positions(ids[0].cpu().numpy(), grids, model.config.image_token_id, merge=2)
            positions = torch.from_numpy(places).to(model.device)[:, None].expand(3, len(ids), -1)
            scores = model.lm_head(hidden_states(model, ids, positions, seen)[:, -1])
            ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
        said += tokenizer.batch_decode(ids[:, prompt:])
    return said


def photo_plates(folder: Path, seed: int, per_folder: int = 16) -> list[cards.Background]:
    """Photographs under a folder as grounds for lessons: each once as it is and once cut closer with other colours.

    Left out: small pictures, pictures with transparency, repeated ones, drawings on an even ground. Of one folder only
    `per_folder` are taken (a ground takes 4 MB).
    """
    plates, known = [], set()
    by_folder: dict[Path, list[Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.stat().st_size > 40_000):
        by_folder.setdefault(path.parent, []).append(path)
    chosen = [path for paths in by_folder.values() for path in paths[:: max(1, len(paths) // per_folder)][:per_folder]]
    for path in chosen:
        try:
            with Image.open(path) as image:
                if image.mode not in ("RGB", "L") or min(image.size) < 240 or max(image.size) > 4 * min(image.size):
                    continue
                image.draft("RGB", (1440, 1440))
                photograph = image.convert("RGB")
        except OSError:
            continue
        levels = np.bincount(np.asarray(photograph.convert("L").resize((64, 64))).ravel() // 16, minlength=16)
        mark = (np.asarray(photograph.resize((4, 4), Image.Resampling.BOX)) // 16).tobytes()
        if levels.max() < 0.5 * levels.sum() and mark not in known:
            known.add(mark)
            plates += [cards.Background(photograph), _variant(photograph, np.random.default_rng([len(known), seed]))]
    return plates


def own_plates(seed: int) -> list[cards.Background]:
    """The training photographs of the card world, and two variants of each."""
    plates = list(cards.world("train").backgrounds)
    for number, plate in enumerate(list(plates)):
        photograph = Image.fromarray(plate.pixels)
        plates += [_variant(photograph, np.random.default_rng([number, copy, seed])) for copy in range(2)]
    return plates


def _variant(photograph: Image.Image, rng: np.random.Generator) -> cards.Background:
    part = rng.uniform(0.35, 0.9)
    width, height = (int(side * part) for side in photograph.size)
    left, top = int(rng.integers(photograph.width - width + 1)), int(rng.integers(photograph.height - height + 1))
    pixels = np.asarray(photograph.crop((left, top, left + width, top + height)))[..., rng.permutation(3)]
    return cards.Background(Image.fromarray(_toned(pixels, rng, 0.5)))


def _tone(rng: np.random.Generator):
    """A camera's mood for one lesson: brightness, contrast and white balance of all its views."""
    if rng.random() < 0.4:
        return lambda view: view
    seed = int(rng.integers(2**31))
    return lambda view: _toned(view, np.random.default_rng(seed), 0.15)


def _toned(pixels: np.ndarray, rng: np.random.Generator, strength: float) -> np.ndarray:
    gamma, gain = math.exp(rng.uniform(-strength, strength)), math.exp(rng.uniform(-strength, strength) / 1.5)
    balance = np.exp(rng.uniform(-strength / 2, strength / 2, 3))
    level = (np.linspace(0, 1, 256)[:, None] ** gamma - 0.5) * gain + 0.5
    table = np.clip(level * balance * 255, 0, 255).astype(np.uint8)
    return np.stack([table[pixels[..., c], c] for c in range(3)], axis=-1)


def _exact(card: cards.Card) -> tuple[float, float]:
    """Left and top of the ideal zoom box in grid steps, not rounded."""
    x1, y1, x2, y2 = card.box
    last = (1 - cards.ZOOM) / cards.GRID
    x, y = (min(max(((a + b) / 2 - cards.ZOOM / 2) / cards.GRID, 0.0), last) for a, b in ((x1, x2), (y1, y2)))
    return x, y


def _crop_box(card: cards.Card, rng: np.random.Generator, looseness: float) -> tuple[float, ...]:
    """A crop around a card: looseness 0 shows little but the digit, 1 is a zoom as an agent might draw it."""
    reach = 0.004 + 0.026 * looseness
    move = rng.uniform(-reach, reach, 2)
    side = 0.05 + 0.05 * looseness
    if looseness == 1.0 and rng.random() < 0.8:
        return cards.zoom_box(card, (float(move[0]), float(move[1])))
    if looseness == 1.0:
        side = rng.uniform(0.06, 0.13)
    x1, y1, x2, y2 = card.box
    left, top = (
        min(max((a + b) / 2 + float(m) - side / 2, 0.0), 1.0 - side) for a, b, m in ((x1, x2, move[0]), (y1, y2, move[1]))
    )
    # Whole pixels and a square: two roundings could differ by one.
    left, top, size = (round(v * cards.PICTURE) for v in (left, top, side))
    return tuple(v / cards.PICTURE for v in (left, top, left + size, top + size))


def _holds_digit(card: cards.Card, box: Sequence[float]) -> bool:
    """Whether the middle 24 pixels of the card (its digit) lie inside the box."""
    x, y = card.left + cards.CARD / 2, card.top + cards.CARD / 2
    x1, y1, x2, y2 = (v * cards.PICTURE for v in box)
    return x1 <= x - 12 and x2 >= x + 12 and y1 <= y - 12 and y2 >= y + 12


def _parse_box(text: str) -> tuple[float, ...] | None:
    inside = text.partition("[")[2].partition("]")[0].split(",")
    if len(inside) != 4 or not all(part.isdigit() for part in inside):
        return None
    box = tuple(int(part) / 1000 for part in inside)
    return box if max(box) <= 1 and box[2] - box[0] >= 0.02 and box[3] - box[1] >= 0.02 else None


def _soft(places: torch.Tensor, width: float = 0.8) -> torch.Tensor:
    """Gaussian targets over the 51 grid values around places given in grid steps: missing by one step is nearly right."""
    steps = torch.arange(len(BINS), device=places.device, dtype=torch.float32)
    return torch.softmax(-((steps - places[..., None]) ** 2) / (2 * width * width), dim=-1)


def _soft_cross_entropy(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return -(_soft(places) * functional.log_softmax(scores, dim=-1)).sum(-1)
