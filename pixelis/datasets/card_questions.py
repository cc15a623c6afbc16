"""Questions and demonstrations about pictures and clips of the card world."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from pixelis.datasets.cards import (
    CLIP_SECONDS,
    DIGIT,
    FRAME,
    PICTURE,
    Card,
    Scene,
    check_split,
    draws,
    picture_uri,
    scene_of,
    zoom_box,
)
from pixelis.datasets.corruptions import Corruption, corruption_of
from pixelis.datasets.source_options import parse_options, share_option, whole_option
from pixelis.dialogue.privileged import EVIDENCE
from pixelis.errors import BadInput
from pixelis.records import Demonstration, Question


def read(source: str, seed: int | None, start: int, count: int, epochs: int | None) -> Iterator[Question]:
    options = _options(source, "shift", "corruption", "severity")
    sizes = options.get("sizes", "")
    split, seed = options.get("split", "train"), whole_option(source, options, "seed", seed or 0)
    corruption, shift = corruption_of(source, options), options.get("shift", "")
    shares = _shares(source, options, "follow_up", "clips", "crops")
    for epoch in itertools.count(start // count) if epochs is None else range(start // count, epochs):
        for number in range(max(0, start - epoch * count), count):
            row = question_row(split, seed, number, shift, corruption=corruption, sizes=sizes, **shares)
            yield Question.model_validate(row)


def read_demonstrations(source: str, count: int, seed: int, direct_share: float) -> list[Demonstration]:
    options = _options(source, "aim", "hints", "corrected")
    shares = _shares(source, options, "aim", "hints", "corrected", "follow_up", "clips", "crops")
    split, seed = options.get("split", "train"), whole_option(source, options, "seed", seed)
    rows = demonstration_rows(split, count, seed, direct_share, sizes=options.get("sizes", ""), **shares)
    return [Demonstration.model_validate(row) for row in rows]


def _options(source: str, *own: str) -> dict[str, str]:
    return parse_options(source, ("split", "seed", "sizes", "follow_up", "clips", "crops", *own))[1]


def _shares(source: str, options: dict[str, str], *names: str) -> dict[str, float]:
    return {name: share_option(source, options, name) for name in names}


def _check_shares(**shares: float) -> None:
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise BadInput(f"{name} is {value}: it must lie between 0 and 1")


def demonstration_rows(
    split: str,
    count: int,
    seed: int,
    direct_share: float,
    aim: float = 0.0,
    follow_up: float = 0.0,
    clips: float = 0.0,
    crops: float = 0.0,
    sizes: str = "",
    hints: float = 0.0,
    corrected: float = 0.0,
) -> Iterator[dict]:
    """Rows with ``turns``: select the frame of a clip, zoom in, answer; ``direct_share`` answer at once.

    Boxes miss the card's centre by up to a grid step plus ``aim``: far misses teach zooming without locating.
    In a share of ``hints`` the user says where to look, as to a teacher (`rft.teacher.context=evidence`), and
    the assistant looks there. The share ``corrected`` of the questions about pictures follows a wrong answer
    and a user's correction; these rows always look.
    """
    _check_shares(aim=aim, direct_share=direct_share, hints=hints, corrected=corrected)
    for index in range(count):
        row = question_row(split, seed, index, follow_up=follow_up, clips=clips, crops=crops, sizes=sizes)
        row["turns"] = [{"answer": row["answers"][0]}]
        is_corrected = "history" not in row and "second" not in row["meta"]
        is_corrected &= draws(split, seed, index, 11).random() < corrected
        if is_corrected:
            _correct(row, scene_of(split, seed, index, sizes=sizes))
        rng = draws(split, seed, index, 2)
        is_single = len(row["media"]) == 1 and "second" not in row["meta"]
        hint_rng = draws(split, seed, index, 9)
        is_hinted = hint_rng.random() < hints and is_single and not is_corrected
        looks = rng.random() >= direct_share or is_hinted or is_corrected
        if looks and not row["meta"].get("seen"):
            card = scene_of(split, seed, index, sizes=sizes).target
            move_x, move_y = (rng.uniform(-0.008, 0.008, 2) + aim * rng.uniform(-1, 1, 2)).tolist()
            box = list(zoom_box(card, (move_x, move_y)))
            # The base model has learnt these words: adapters below lm_head can make it say them with
            # confidence.
            think = f"The {card.colour} frame is here"
            calls = [{"think": think, "op": "zoom_in", "target": "img0", "box": box}]
            if "second" in row["meta"]:
                frames, calls[0]["target"] = [row["meta"]["second"]], "obs1"
                select = {"think": "Find the picture", "op": "select_frames", "target": "vid0"}
                calls.insert(0, {**select, "frames": frames})
            row["turns"] = calls + row["turns"]
            if is_hinted:
                _hint(row, box, with_crop=bool(hint_rng.random() < 0.5))
        yield row


def _hint(row: dict[str, Any], box: list[float], with_crop: bool) -> None:
    """Add to the question where to look: the call that follows and its crop, or the digit's box alone."""
    where = box if with_crop else row["meta"]["expected_calls"][0]["box"]
    call = {"name": "zoom_in", "arguments": {"bbox_2d": [round(1000 * at) for at in where]}}
    text = EVIDENCE.format(json.dumps(call, separators=(",", ":")))
    row["question"] += text
    if with_crop:
        crop = ",".join(str(round(at * PICTURE)) for at in box)
        row["media"].append({"id": "img1", "uri": f"{row['media'][0]['uri']}&crop={crop}"})
        row["question"] = f"<image>{row['question']}<image>"


def question_row(
    split: str,
    seed: int,
    index: int,
    shift: str = "",
    follow_up: float = 0.0,
    clips: float = 0.0,
    corruption: Corruption | None = None,
    crops: float = 0.0,
    sizes: str = "",
) -> dict:
    """One question about the picture of this number, as a plain row.

    Shares: ``follow_up`` are the second question of a conversation; of these, the history of ``crops`` shows
    a crop, half of them of the card in question (``meta.seen``); ``clips`` are about one second of a clip.
    ``sizes`` are factors of the card's size; ``meta.category`` names the one drawn. ``corruption`` does not
    change the id, so that scores can be paired.
    """
    check_split(split)
    _check_shares(follow_up=follow_up, clips=clips, crops=crops)
    if draws(split, seed, index, 5).random() < clips:
        return _clip_row(split, seed, index, shift, corruption, sizes)
    scene = scene_of(split, seed, index, shift, sizes=sizes)
    card = scene.target
    uri = picture_uri(split, seed, index, shift, corruption=corruption, sizes=sizes)
    row = {
        "id": f"cards-{split}-{seed}-{index}" + _suffix(card, shift, sizes),
        "question": f"Which digit is in the {card.colour} frame?",
        "media": [{"id": "img0", "uri": uri}],
        "answers": [str(card.digit)],
        "split": split,
        "meta": _meta(card, shift, sizes, [_zoom(card, "img0")]),
    }
    if draws(split, seed, index, 3).random() < follow_up:
        first = {"question": f"Is there a {card.colour} frame?", "answer": "yes", "media": ["img0"]}
        row |= {"history": [first], "question": "Which digit is in it?"}
        rng = draws(split, seed, index, 8)
        if rng.random() < crops:
            _show_crop(row, scene, bool(rng.random() < 0.5))
    return row


def _correct(row: dict[str, Any], scene: Scene) -> None:
    """Make the row's question the second turn, after the digit of another card, or the next one."""
    truth = scene.target.digit
    others = [card.digit for card in scene.cards if card.digit != truth]
    wrong = others[0] if others else (truth + 1) % 10
    row["history"] = [{"question": row["question"], "answer": str(wrong), "media": ["img0"]}]
    row["question"] = f"No, it is a {truth}.\n{row['question']}"


def _show_crop(row: dict[str, Any], scene: Scene, seen: bool) -> None:
    card, *others = scene.cards
    shown = card if seen or not others else others[0]
    box = ",".join(str(round(at * PICTURE)) for at in zoom_box(shown))
    row["media"].append({"id": "img1", "uri": f"{row['media'][0]['uri']}&crop={box}"})
    row["history"] = [
        {"question": f"Is there a {shown.colour} frame?", "answer": "yes", "media": ["img0", "img1"]}
    ]
    if shown is card:
        row["meta"] |= {"seen": True, "expected_calls": []}
    else:
        row["question"] = f"Which digit is in the {card.colour} frame?"


def _clip_row(
    split: str, seed: int, index: int, shift: str, corruption: Corruption | None, sizes: str
) -> dict:
    """A question about one second of a clip, never the middle one, which one frame would show first.

    No single operation answers it: selected frames are too small to read, and only shown frames can be zoomed
    into.
    """
    seconds = [second for second in range(CLIP_SECONDS) if second != CLIP_SECONDS // 2]
    second = seconds[int(draws(split, seed, index, 6).integers(len(seconds)))]
    card = scene_of(split, seed, index, shift, second, sizes).target
    select = {"op": "select_frames", "media": "vid0", "frames": [second]}
    looks = [(shift, number, corruption, sizes) for number in range(CLIP_SECONDS)]
    frames = [picture_uri(split, seed, index, *look) for look in looks]
    return {
        "id": f"cards-{split}-{seed}-{index}-clip" + _suffix(card, shift, sizes),
        "question": f"Which digit is in the {card.colour} frame at second {second}?",
        "media": [{"id": "vid0", "kind": "video", "frames": frames, "fps": 1.0}],
        "answers": [str(card.digit)],
        "split": split,
        "meta": {
            **_meta(card, shift, sizes, [select, {**_zoom(card, "vid0"), "frame": second}]),
            "second": second,
        },
    }


def _suffix(card: Card, shift: str, sizes: str) -> str:
    return (f"-{shift}" if shift else "") + (f"-size{card.size}" if sizes else "")


def _meta(card: Card, shift: str, sizes: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    meta = {"colour": card.colour, "box": list(card.box), "shift": shift, "expected_calls": calls}
    return {**meta, "category": f"size {card.size}"} if sizes else meta


def _zoom(card: Card, media: str) -> dict[str, Any]:
    left, top = card.left + FRAME * card.size, card.top + FRAME * card.size
    box = [edge / PICTURE for edge in (left, top, left + DIGIT * card.size, top + DIGIT * card.size)]
    return {"op": "zoom_in", "media": media, "box": box}
