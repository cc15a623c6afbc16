"""Losses and evaluation of the base of pixelis-nano.

Auxiliary heads, which are discarded afterwards, predict the colour and place of the card at every image token
of an overview, and the digit of a crop. Without them the tiny model stays at chance for tens of thousands of
lessons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from nano_lessons import TARGET, Batch, Views
from torch import Tensor, nn
from torch.nn import functional

from pixelis.datasets import cards
from pixelis.families.positions import mrope_positions
from pixelis.families.vision import patchify
from pixelis.nano.tokenizer import BINS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Heads(nn.Module):
    """Auxiliary heads: colour (or none) and place from an image token, digit from a crop's tokens and from
    their mean.
    """

    def __init__(self, width: int):
        super().__init__()
        self.colour = nn.Linear(width, len(cards.COLOURS) + 1)
        self.place = nn.Linear(width, 2 * len(BINS))
        self.digit = nn.Linear(width, 10)
        self.digit_by_token = nn.Linear(width * (cards.VIEW // cards.VIEW_MULTIPLE) ** 2, 10)


def lesson_loss(
    model: PreTrainedModel,
    heads: Heads | None,
    batch: Batch,
    bins: Int64[Tensor, 51],
    language: bool = True,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one batch and its parts by name.

    Without `language` only the vision tower and the heads are trained, without heads only the language model.

    bins: token ids of the coordinates.
    """
    vision = _vision_features(model, list(batch.views.cpu().numpy()))
    if heads is None:
        parts = _language_loss(model, batch, bins, vision)
        return torch.stack([*parts.values()]).sum(), {
            name: float(part.detach()) for name, part in parts.items()
        }
    features = vision.pooler_output.view(len(batch.views), -1, model.config.text_config.hidden_size)
    parts = dict[str, Tensor]()
    overview, mark = features[batch.overviews], batch.marks
    row, token = mark[:, 0].long(), mark[:, 1].long()
    colour = torch.zeros(overview.shape[:2], dtype=torch.int64, device=overview.device)
    colour[row, token] = mark[:, 2].long() + 1
    # Most image tokens show no card, so they have a smaller weight.
    balance = torch.tensor([0.3] + [1.0] * len(cards.COLOURS), device=overview.device)
    parts["colour"] = functional.cross_entropy(
        heads.colour(overview).flatten(0, 1), colour.flatten(), weight=balance
    )
    parts["place"] = (
        0.5
        * _soft_cross_entropy(heads.place(overview[row, token]).view(-1, 2, len(BINS)), mark[:, 3:]).mean()
    )
    crop = features[batch.crops]
    by_mean, by_token = heads.digit(crop.mean(1)), heads.digit_by_token(crop.flatten(1))
    parts["digit"] = 0.5 * functional.cross_entropy(by_mean, batch.digits)
    parts["digit"] = parts["digit"] + 0.5 * functional.cross_entropy(by_token, batch.digits)
    loss = parts["colour"] + parts["place"] + parts["digit"]
    if language:
        language_parts = _language_loss(model, batch, bins, vision)
        loss = loss + sum(language_parts.values())
        parts |= language_parts
    return loss, {name: float(value.detach()) for name, value in parts.items()}


def _language_loss(
    model: PreTrainedModel, batch: Batch, bins: Int64[Tensor, 51], vision: object
) -> dict[str, Tensor]:
    """Return the losses of coordinates (`point`), of other answer tokens (`read`) and of the remaining tokens
    (`rest`).
    """
    hidden = hidden_states(model, batch.ids, batch.positions, vision)[:, :-1]
    targets, weights, places = batch.ids[:, 1:], batch.weights[:, 1:], batch.places[:, 1:]
    counted = weights > 0
    targets, weights, places = targets[counted], weights[counted], places[counted]
    log_probs = functional.log_softmax(model.lm_head(hidden[counted]).float(), dim=-1)
    losses = -log_probs.gather(1, targets[:, None])[:, 0] * weights
    pointing = places >= 0
    soft = _soft_targets(places[pointing])
    count = len(batch.ids)
    return {
        "point": -(soft * log_probs[pointing][:, bins]).sum() / count,
        "read": losses[~pointing & (weights == TARGET)].sum() / count,
        "rest": losses[~pointing & (weights != TARGET)].sum() / count,
    }


def _vision_features(model: PreTrainedModel, views: Sequence[np.ndarray]) -> Any:
    """Return the output of the vision tower, 16 tokens for each view."""
    config = model.config.vision_config
    pixels, grid = patchify(views, config.patch_size, config.spatial_merge_size, config.temporal_patch_size)
    return model.model.visual(pixels.to(model.device), grid_thw=grid.to(model.device))


def hidden_states(
    model: PreTrainedModel, ids: Int64[Tensor, "B L"], positions: Int64[Tensor, "3 B L"], vision: Any
) -> Float32[Tensor, "B L d"]:
    """Return the last hidden states, with the vision tower's output at image tokens (Qwen3-VL and
    Qwen2.5-VL).
    """
    language = model.model.language_model
    is_image = ids == model.config.image_token_id
    embeddings = language.embed_tokens(ids).masked_scatter(is_image[..., None], vision.pooler_output)
    deepstack = {}
    if getattr(vision, "deepstack_features", None):
        deepstack = {"visual_pos_masks": is_image, "deepstack_visual_embeds": vision.deepstack_features}
    return language(
        inputs_embeds=embeddings, position_ids=positions, use_cache=False, **deepstack
    ).last_hidden_state


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: str, count: int = 300, seed: int = 1
) -> dict[str, float]:
    """Return the perception scores of the base on `count` pictures of a split, each a share of the pictures.

    read: digits read from well centred crops. point: boxes that contain the whole digit. near: boxes within
    one grid step on both axes. both: digits read from the crop that the model itself pointed at, the upper
    bound for an agent built on it.
    """
    model.eval()
    world = Views(cards.world(split).backgrounds)
    scenes = [cards.scene_of(split, seed, index) for index in range(count)]
    boxes, point, near = [], 0, 0
    questions = [f"Where is the {scene.target.colour} frame?" for scene in scenes]
    for scene, text in zip(
        scenes, answer(model, tokenizer, [world.overview(s) for s in scenes], questions, 10), strict=True
    ):
        box = _parse_box(text)
        boxes.append(box)
        if box is not None:
            point += _contains_digit(scene.target, box)
            near += (
                max(abs(a - b) for a, b in zip(box[:2], cards.zoom_box(scene.target)[:2], strict=True))
                < 1.5 * cards.GRID
            )
    questions = ["Which digit is this?"] * count
    centred = answer(
        model, tokenizer, [world.crop(s, cards.zoom_box(s.target)) for s in scenes], questions, 1
    )
    crops = [world.crop(s, box) if box else world.overview(s) for s, box in zip(scenes, boxes, strict=True)]
    own = answer(model, tokenizer, crops, questions, 1)
    digits = [str(scene.target.digit) for scene in scenes]
    return {
        "read": sum(a == b for a, b in zip(centred, digits, strict=True)) / count,
        "point": point / count,
        "near": near / count,
        "both": sum(a == b for a, b in zip(own, digits, strict=True)) / count,
    }


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    views: list[np.ndarray],
    questions: list[str],
    tokens: int,
) -> list[str]:
    """Return the greedy answers, of a fixed number of tokens, to one question about each view."""
    side = cards.VIEW // cards.VIEW_MULTIPLE
    image = "<|vision_start|>" + "<|image_pad|>" * (side * side) + "<|vision_end|>"
    answers: list[str] = []
    for start in range(0, len(views), 100):
        chunk = [
            tokenizer(f"<|im_start|>user\n{image}{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
            for text in questions[start : start + 100]
        ]
        ids = torch.tensor(chunk, device=model.device)
        vision = _vision_features(model, views[start : start + 100])
        prompt = ids.shape[1]
        for _ in range(tokens):
            grids = [(1, 2 * side, 2 * side)]
            places, _ = mrope_positions(ids[0].cpu().numpy(), grids, model.config.image_token_id, merge=2)
            positions = torch.from_numpy(places).to(model.device)[:, None].expand(3, len(ids), -1)
            logits = model.lm_head(hidden_states(model, ids, positions, vision)[:, -1])
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        answers += tokenizer.batch_decode(ids[:, prompt:])
    return answers


def _contains_digit(card: cards.Card, box: Sequence[float]) -> bool:
    """Return whether the box contains the middle 24 pixels of the card, where its digit is."""
    x, y = card.left + cards.CARD / 2, card.top + cards.CARD / 2
    x1, y1, x2, y2 = (v * cards.PICTURE for v in box)
    return x1 <= x - 12 and x2 >= x + 12 and y1 <= y - 12 and y2 >= y + 12


def _parse_box(text: str) -> tuple[float, ...] | None:
    numbers = text.partition("[")[2].partition("]")[0].split(",")
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers):
        return None
    box = tuple(int(number) / 1000 for number in numbers)
    return box if max(box) <= 1 and box[2] - box[0] >= 0.02 and box[3] - box[1] >= 0.02 else None


def _soft_targets(places: Float32[Tensor, "*n"], width: float = 0.8) -> Float32[Tensor, "*n 51"]:
    """Return Gaussian targets over the 51 grid values around places in grid steps, so that a near miss costs
    little.
    """
    steps = torch.arange(len(BINS), device=places.device, dtype=torch.float32)
    return torch.softmax(-((steps - places[..., None]) ** 2) / (2 * width * width), dim=-1)


def _soft_cross_entropy(
    logits: Float32[Tensor, "*n 51"], places: Float32[Tensor, "*n"]
) -> Float32[Tensor, "*n"]:
    return -(_soft_targets(places) * functional.log_softmax(logits, dim=-1)).sum(-1)
