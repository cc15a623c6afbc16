"""Train the packaged segmenter further and export it: `python scripts/train_segmenter.py --help`.

The committed weights were trained with 7,600 steps of this script from those before (`weights/README.md`),
with

- 848 of ECSSD's photographs (Shi et al. 2016) and their masks;
- 178 photographs of COCO (annotations CC BY 4.0), as lightly-ai/coco128_yolo and lizhogn/tiny_coco_dataset
  have them;
- 166 frames of 20 clips of DAVIS 2016 (Perazzi et al. 2016);
- 920 photographs of Clothing Co-Parsing (Yang et al. 2014, Apache-2.0);
- cut-outs of Debian 12's tuxpaint-stamps-default 2022.06.04 (GPL-2).

None of these is part of this repository. Pictures that look like one of the ``--exclude`` folders are left
out; one of twelve is held back, and the run reports its IoU there. A seventh of the views are around a box
that holds no object or cuts one: the score is trained to say so, and in a box that holds nothing the masks to
be empty. Training and exporting need `pip install onnx`. Every view follows from the seed and the number of
the step, and the schedule from the number of steps: constant, then linear to zero. An interrupted run resumes
from its last checkpoint; a run may be given another number of steps as long as its rate is constant. One step
takes a quarter of a second of one core, half a second at the full side.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import segmenter_data as data
import torch
from segmenter_model import Segmenter, load
from torch.nn import functional as F

from pixelis.operations.mobilenet import WEIGHTS, prompt

LABELS = Path("instance_segmentation", "labels", "val2017")
VIEWS, PROMPTS = 4, 2
NATURAL = 0.78
"""Share of the views that are photographs as they are; the others are composites."""
SHARES = 0.42, 0.36, 0.1, 0.12
"""Of the sources among the photographs, in the order of ``Views``."""
FRAMINGS = {"whole": 0.34, "point": 0.22, "box": 0.3, "wrong": 0.14}
"""Shares of how photographs are cropped: see ``segmenter_data.crop`` and ``wrong_box``."""
COMPOSITE = 1.6
"""Side of a composite from which a part is taken, against that of a view."""
RATE, ENCODER_RATE, WARM_UP = 8e-4, 1.5e-4, 100
DECAY_FROM, FINE_FROM = 0.55, 0.55
"""Shares of the steps after which the rate decays and after which views have the side of the exported
graph.
"""
AVERAGE = 0.998
SAVE_EVERY, CHECK_EVERY, CHECKS = 50, 1000, 160
HELD_BACK = 12
"""One of so many photographs trains nothing: on these the run reports its IoU, on so many views."""
OTHERS, SCORE, EMPTY = 0.1, 0.5, 0.3
"""Weight of the masks that are not the best of the three, of the score's loss, and of the masks of boxes that
hold nothing.
"""


@dataclass(frozen=True)
class Batch:
    """Pictures [VIEWS, 3, S, S] in -1..1 and, for each of N = VIEWS * PROMPTS prompts, what it asks for.

    Prompts [N, 3, S/4, S/4]; masks [N, 1, S/2, S/2]; where a mask counts for the score, the same shape;
    weights of the masks [N].
    """

    picture: torch.Tensor
    prompts: torch.Tensor
    target: torch.Tensor
    within: torch.Tensor
    weights: torch.Tensor


class Views:
    """The views of each step."""

    def __init__(self, args: argparse.Namespace):
        groups = {
            "ecssd": data.masked_photographs(args.ecssd / "images", args.ecssd / "ground_truth_mask"),
            "coco": data.coco_objects(args.coco / "images" / "val2017", args.coco / LABELS)
            + data.coco_instances(
                args.tiny / "train2017", args.tiny / "annotations" / "instances_train2017.json"
            )
            + data.coco_instances(
                args.tiny / "val2017", args.tiny / "annotations" / "instances_val2017.json"
            ),
            "davis": data.video_frames(args.davis, 8),
            "ccp": data.clothed_people(args.ccp),
        }
        self.seed, self.groups, self.backgrounds = args.seed, list[list[data.View]](), list[np.ndarray]()
        self.held_back: list[list[data.View]] = []
        self.cutouts = data.stamps(args.stamps)
        for name, views in groups.items():
            group = data.unseen(views, args.exclude)
            objects = sum(len(view.masks) for view in group)
            print(f"{name}: {len(group)} of {len(views)} photographs, {objects} objects", flush=True)
            # Consecutive frames and photographs are alike: what is held back is the last of a group.
            count = len(group) // HELD_BACK
            self.held_back.append(group[-count:])
            self.groups.append(group[:-count])
            self.backgrounds += [view.picture for view in self.groups[-1]]
            if name in ("ecssd", "coco"):
                self.cutouts += data.cut_out(self.groups[-1])

    def batch(self, step: int, side: int) -> Batch:
        """The views and prompts of a step."""
        rng = np.random.default_rng([self.seed, step])
        pictures: list[np.ndarray] = []
        prompts: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        within: list[np.ndarray] = []
        weights: list[float] = []
        while len(pictures) < VIEWS:
            framing = str(rng.choice(list(FRAMINGS), p=list(FRAMINGS.values())))
            view = self._view(side, framing, rng)
            if view is None:
                continue
            pictures.append(view.picture)
            for number in range(PROMPTS):
                if framing == "wrong":
                    box, nothing = view.masks[0], len(view.masks) == 1
                    prompts.append(prompt(side, *data.sample_prompt(box, True, rng)))
                    masks.append(np.zeros_like(box) if nothing else view.masks[1])
                    within.append(box)
                    # What the network should outline in a box that cuts an object is open; that it is not the
                    # object is not.
                    weights.append(EMPTY if nothing else 0.0)
                    continue
                mask = view.masks[rng.integers(len(view.masks)) if number else 0]
                by_box = rng.random() < ((0.5 if number else 1.0) if framing == "box" else 0.2)
                prompts.append(prompt(side, *data.sample_prompt(mask, by_box, rng)))
                masks.append(mask)
                within.append(np.ones_like(mask))
                weights.append(1.0)
        return _batch(pictures, prompts, masks, within, weights)

    def _view(self, side: int, framing: str, rng: np.random.Generator) -> data.View | None:
        if rng.random() < NATURAL:
            group = self.groups[rng.choice(len(SHARES), p=SHARES)]
            view: data.View | None = group[rng.integers(len(group))]
        elif framing in ("whole", "point"):
            return data.composite(self.cutouts, self.backgrounds, side, rng)
        else:
            view = data.composite(self.cutouts, self.backgrounds, int(COMPOSITE * side), rng)
        if view is None:
            return None
        return data.wrong_box(view, side, rng) if framing == "wrong" else data.crop(view, side, framing, rng)

    def checks(self, side: int) -> list[tuple[str, Batch]]:
        """Views of photographs that were held back, one prompt each: by point in the whole picture, by box,
        and wrong boxes.
        """
        result = []
        for number in range(CHECKS):
            rng = np.random.default_rng([self.seed, 7, number])
            group, framing = self.held_back[number % 2], ("whole", "box", "box", "wrong")[number // 2 % 4]
            view = None
            while view is None:
                whole = group[rng.integers(len(group))]
                view = (
                    data.wrong_box(whole, side, rng)
                    if framing == "wrong"
                    else data.crop(whole, side, framing, rng)
                )
            mask = view.masks[0]
            asked = prompt(side, *data.sample_prompt(mask, framing != "whole", rng))
            if framing == "wrong":
                target = view.masks[1] if len(view.masks) > 1 else np.zeros_like(mask)
                result.append((framing, _batch([view.picture], [asked], [target], [mask], [1.0])))
            else:
                result.append((framing, _batch([view.picture], [asked], [mask], [np.ones_like(mask)], [1.0])))
        return result


def _batch(
    pictures: list[np.ndarray],
    prompts: list[np.ndarray],
    masks: list[np.ndarray],
    within: list[np.ndarray],
    weights: list[float],
) -> Batch:
    picture = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
    halves = [
        F.avg_pool2d(torch.from_numpy(np.stack(stack)).float()[:, None], 2) for stack in (masks, within)
    ]
    picture = picture.contiguous(memory_format=torch.channels_last)
    return Batch(picture, torch.from_numpy(np.stack(prompts)), halves[0], halves[1], torch.tensor(weights))


def loss_of(
    logits: torch.Tensor, scores: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, the IoU of each mask [N, MASKS] and the expected IoU."""
    target = batch.target.expand_as(logits)
    probabilities = torch.sigmoid(logits)
    cross = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean((2, 3))
    both = (probabilities * target).sum((2, 3))
    all_ = (probabilities + target - probabilities * target).sum((2, 3))
    each = cross + (1 - (both + 1) / (all_ + 1))
    best = each.min(1).values
    with torch.no_grad():
        hard, true = (logits > 0) & (batch.within > 0.5), target > 0.5
        iou = (hard & true).sum((2, 3)).float() / (hard | true).sum((2, 3)).clamp(min=1)
    expected = torch.sigmoid(scores)
    mask_loss = (batch.weights * ((1 - OTHERS) * best + OTHERS * each.mean(1))).mean()
    return mask_loss + SCORE * (expected - iou).square().mean(), iou, expected


def forward(model: Segmenter, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and scores of the prompts of a batch, each picture encoded once."""
    with torch.autocast("cpu", torch.bfloat16):
        features = model.encoder(batch.picture)
        times = len(batch.prompts) // len(batch.picture)
        repeated = [x.repeat_interleave(times, 0) for x in (batch.picture, *features)]
        logits, scores = model.decoder(repeated[0], repeated[1:], batch.prompts)
    return logits.float(), scores.float()


@torch.no_grad()
def check(model: Segmenter, checks: list[tuple[str, Batch]]) -> str:
    """The mean IoU of the masks with the best score, and the score, of each kind of prompt."""
    values: dict[str, list[tuple[float, float]]] = {}
    for kind, batch in checks:
        _, iou, expected = loss_of(*forward(model, batch), batch)
        best = int(expected[0].argmax())
        values.setdefault(kind, []).append((float(iou[0, best]), float(expected[0, best])))
    return "; ".join(
        f"{kind}: IoU {np.mean(v, 0)[0]:.3f}, score {np.mean(v, 0)[1]:.3f}" for kind, v in values.items()
    )


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the highest."""
    decay = (steps - step) / max(1.0, (1 - DECAY_FROM) * steps)
    return min(1.0, (step + 1) / WARM_UP, decay)


def train(args: argparse.Namespace) -> Segmenter:
    """Train up to ``args.steps``; returns the averaged weights."""
    torch.manual_seed(args.seed)
    model = load(args.start).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.encoder.parameters(), "highest": ENCODER_RATE},
            {"params": model.decoder.parameters(), "highest": RATE},
        ],
        weight_decay=0.02,
    )
    checkpoint, step = args.out / "checkpoint.pt", 0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    views, start, totals = Views(args), time.process_time(), []
    checks = views.checks(args.export_side)
    print(f"held back: {check(average, checks)}", flush=True)
    for step in range(step, args.steps):  # noqa: B020
        for group in optimizer.param_groups:
            group["lr"] = group["highest"] * rate_at(step, args.steps)
        batch = views.batch(step, args.side if step < FINE_FROM * args.steps else args.export_side)
        loss, iou, expected = loss_of(*forward(model, batch), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        keep = min(AVERAGE, (step + 1) / (step + 10))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1 - keep)
        right = batch.weights == 1
        chosen = iou.gather(1, expected.argmax(1, keepdim=True))[right].mean()
        totals.append((float(loss.detach()), float(chosen), float(iou.max(1).values[right].mean())))
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            state = {
                "model": model.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state | {"step": step + 1}, checkpoint)
            means = " ".join(f"{value:.3f}" for value in np.mean(totals, 0))
            print(
                f"{step + 1}: loss, IoU, best IoU {means}; {time.process_time() - start:.0f} s of CPU",
                flush=True,
            )
            totals = []
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == args.steps:
            print(f"held back: {check(average, checks)}", flush=True)
    return average.to(memory_format=torch.contiguous_format)


def export(model: Segmenter, path: Path, side: int) -> None:
    """Write one ONNX graph for pictures of ``side``."""
    inputs = torch.zeros(1, side, side, 3), torch.zeros(1, 3, side // 4, side // 4)
    names, results = ["picture", "prompt"], ["probabilities", "scores"]
    torch.onnx.export(
        model, inputs, str(path), dynamo=False, opset_version=17, input_names=names, output_names=results
    )


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--start", type=Path, default=WEIGHTS, help="the exported graph whose weights are trained further"
    )
    parser.add_argument("--ecssd", type=Path, required=True, help="ECSSD: images, ground_truth_mask")
    parser.add_argument(
        "--coco",
        type=Path,
        required=True,
        help="lightly-ai/coco128_yolo: images/val2017, instance_segmentation",
    )
    parser.add_argument(
        "--tiny", type=Path, required=True, help="lizhogn/tiny_coco_dataset: train2017, val2017, annotations"
    )
    parser.add_argument(
        "--davis", type=Path, required=True, help="DAVIS 2016: JPEGImages/480p, Annotations/480p"
    )
    parser.add_argument(
        "--ccp", type=Path, required=True, help="Clothing Co-Parsing: photos, annotations/pixel-level"
    )
    parser.add_argument(
        "--stamps", type=Path, required=True, help="usr/share/tuxpaint/stamps of the unpacked Debian package"
    )
    parser.add_argument(
        "--exclude",
        type=Path,
        nargs="+",
        required=True,
        help="folders of pictures that must not be trained on",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/segmenter"))
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--side", type=int, default=192, help="pixels of a view's side until the rate decays")
    parser.add_argument(
        "--export-side", type=int, default=256, help="pixels of a side that the exported graph takes"
    )
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    export(train(args), args.out / "mobilenet.onnx", args.export_side)


if __name__ == "__main__":
    main()
