"""Train the packaged segmenter further and export it: `python scripts/train_segmenter.py --help`.

The committed weights were trained with 2,100 steps of this script from those before (`weights/README.md`), with

- 925 of ECSSD's 1,000 photographs (Shi et al. 2016) and their masks;
- 98 photographs of COCO val2017 (annotations CC BY 4.0), as lightly-ai/coco128_yolo has them;
- 181 frames of 20 clips of DAVIS 2016 (Perazzi et al. 2016);
- 1,003 photographs of Clothing Co-Parsing (Yang et al. 2014, Apache-2.0);
- cut-outs of Debian 12's tuxpaint-stamps-default 2022.06.04 (GPL-2).

None of these is part of this repository. Pictures that look like one of the ``--exclude`` folders are left out.
Training and exporting need `pip install onnx`. Every view follows from the seed and the number of the step, and the schedule
from the number of steps: constant, then linear to zero. An interrupted run resumes from its last checkpoint; a run may be given
another number of steps as long as its rate is constant. One step takes a quarter of a second of one core, half a second at the
full side.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import segmenter_data as data
import torch
from segmenter_model import Segmenter, load
from torch.nn import functional as F

from pixelis.operations.mobilenet import WEIGHTS, prompt

LABELS = Path("instance_segmentation", "labels", "val2017")
VIEWS, PROMPTS = 4, 2
NATURAL = 0.8
"""Share of the views that are photographs as they are."""
SHARES = 0.54, 0.25, 0.1, 0.11
"""Of the sources among the photographs, in the order of ``Views``."""
FRAMINGS = {"whole": 0.4, "point": 0.3, "box": 0.3}
"""Shares of how photographs are cropped: see ``segmenter_data.crop``."""
RATE, ENCODER_RATE, WARM_UP = 8e-4, 1e-4, 100
DECAY_FROM, FINE_FROM = 0.5, 0.9
"""Shares of the steps after which the rate decays and after which views have the side of the exported graph."""
AVERAGE = 0.998
SAVE_EVERY = 50
OTHERS, SCORE = 0.1, 0.5
"""Weight of the masks that are not the best of the three, and of the score's loss."""


class Views:
    """The views of each step."""

    def __init__(self, args: argparse.Namespace):
        groups = {
            "ecssd": data.masked_photographs(args.ecssd / "images", args.ecssd / "ground_truth_mask"),
            "coco": data.coco_objects(
                args.coco / "images" / "val2017", args.coco / "instance_segmentation" / "labels" / "val2017"
            ),
            "davis": data.video_frames(args.davis, 8),
            "ccp": data.clothed_people(args.ccp),
        }
        self.seed, self.groups, self.backgrounds = args.seed, list[list[data.View]](), list[np.ndarray]()
        self.cutouts = data.stamps(args.stamps)
        for name, views in groups.items():
            group = data.unseen(views, args.exclude)
            print(
                f"{name}: {len(group)} of {len(views)} photographs, {sum(len(view.masks) for view in group)} objects", flush=True
            )
            self.groups.append(group)
            self.backgrounds += [view.picture for view in group]
            if name in ("ecssd", "coco"):
                self.cutouts += data.cut_out(group)

    def batch(self, step: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pictures [VIEWS, 3, S, S] in -1..1, prompts [VIEWS * PROMPTS, 3, S/4, S/4], masks [VIEWS * PROMPTS, 1, S/2, S/2]."""
        rng = np.random.default_rng([self.seed, step])
        pictures: list[np.ndarray] = []
        prompts: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        while len(pictures) < VIEWS:
            framing = str(rng.choice(list(FRAMINGS), p=list(FRAMINGS.values())))
            if rng.random() < NATURAL:
                group = self.groups[rng.choice(len(SHARES), p=SHARES)]
                view = data.crop(group[rng.integers(len(group))], side, framing, rng)
            else:
                framing, view = "whole", data.composite(self.cutouts, self.backgrounds, side, rng)
            if view is None:
                continue
            pictures.append(view.picture)
            for number in range(PROMPTS):
                mask = view.masks[rng.integers(len(view.masks)) if number else 0]
                by_box = rng.random() < ((0.5 if number else 1.0) if framing == "box" else 0.2)
                prompts.append(prompt(side, *data.sample_prompt(mask, by_box, rng)))
                masks.append(mask)
        picture = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
        target = F.avg_pool2d(torch.from_numpy(np.stack(masks)).float()[:, None], 2)
        return picture.contiguous(memory_format=torch.channels_last), torch.from_numpy(np.stack(prompts)), target


def loss_of(logits: torch.Tensor, scores: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, the IoU of each mask [N, MASKS] and the expected IoU."""
    target = target.expand_as(logits)
    probabilities = torch.sigmoid(logits)
    cross = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean((2, 3))
    both, all_ = (probabilities * target).sum((2, 3)), (probabilities + target - probabilities * target).sum((2, 3))
    each = cross + (1 - (both + 1) / (all_ + 1))
    best = each.min(1).values
    with torch.no_grad():
        hard, true = logits > 0, target > 0.5
        iou = (hard & true).sum((2, 3)).float() / (hard | true).sum((2, 3)).clamp(min=1)
    expected = torch.sigmoid(scores)
    loss = (1 - OTHERS) * best.mean() + OTHERS * each.mean() + SCORE * (expected - iou).square().mean()
    return loss, iou, expected


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
    for step in range(step, args.steps):  # noqa: B020
        for group in optimizer.param_groups:
            group["lr"] = group["highest"] * rate_at(step, args.steps)
        picture, prompts, target = views.batch(step, args.side if step < FINE_FROM * args.steps else args.export_side)
        with torch.autocast("cpu", torch.bfloat16):
            features = model.encoder(picture)
            repeated = [x.repeat_interleave(PROMPTS, 0) for x in (picture, *features)]
            logits, scores = model.decoder(repeated[0], repeated[1:], prompts)
        loss, iou, expected = loss_of(logits.float(), scores.float(), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        keep = min(AVERAGE, (step + 1) / (step + 10))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1 - keep)
        chosen = iou.gather(1, expected.argmax(1, keepdim=True)).mean()
        totals.append((float(loss.detach()), float(chosen), float(iou.max(1).values.mean())))
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            state = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, checkpoint)
            means = " ".join(f"{value:.3f}" for value in np.mean(totals, 0))
            print(f"{step + 1}: loss, IoU, best IoU {means}; {time.process_time() - start:.0f} s of CPU", flush=True)
            totals = []
    return average.to(memory_format=torch.contiguous_format)


def export(model: Segmenter, path: Path, side: int) -> None:
    """Write one ONNX graph for pictures of ``side``."""
    inputs = torch.zeros(1, side, side, 3), torch.zeros(1, 3, side // 4, side // 4)
    names, results = ["picture", "prompt"], ["probabilities", "scores"]
    torch.onnx.export(model, inputs, str(path), dynamo=False, opset_version=17, input_names=names, output_names=results)


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=WEIGHTS, help="the exported graph whose weights are trained further")
    parser.add_argument("--ecssd", type=Path, required=True, help="ECSSD: images, ground_truth_mask")
    parser.add_argument("--coco", type=Path, required=True, help="lightly-ai/coco128_yolo: images/val2017, instance_segmentation")
    parser.add_argument("--davis", type=Path, required=True, help="DAVIS 2016: JPEGImages/480p, Annotations/480p")
    parser.add_argument("--ccp", type=Path, required=True, help="Clothing Co-Parsing: photos, annotations/pixel-level")
    parser.add_argument("--stamps", type=Path, required=True, help="usr/share/tuxpaint/stamps of the unpacked Debian package")
    parser.add_argument("--exclude", type=Path, nargs="+", required=True, help="folders of pictures that must not be trained on")
    parser.add_argument("--out", type=Path, default=Path("runs/segmenter"))
    parser.add_argument("--steps", type=int, default=2100)
    parser.add_argument("--side", type=int, default=192, help="pixels of a view's side until the rate decays")
    parser.add_argument("--export-side", type=int, default=256, help="pixels of a side that the exported graph takes")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    export(train(args), args.out / "mobilenet.onnx", args.export_side)


if __name__ == "__main__":
    main()
