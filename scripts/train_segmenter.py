"""Train the packaged segmenter and export it: `python scripts/train_segmenter.py --help`.

The committed weights were trained with

- the encoder of npm's nsfwjs 4.4.0 (MIT; MobileNetV2 with its ImageNet weights), which stays as it is;
- cut-outs of Debian 12's tuxpaint-stamps-default 2022.06.04 (GPL-2);
- 60 photographs of COCO128 (those with even positions; annotations CC BY 4.0) and 44 of VOC 2007 with their masks, 498 of VOC
  2007 as backgrounds (photographs from Flickr).

None of these is part of this repository.
Exporting needs `pip install onnx`. Every view follows from the seed and the number of the step, and the schedule from the
number of steps: constant, then linear to zero over the last sixth. An interrupted run resumes from its last checkpoint; a run
may be given more steps as long as its rate is constant. One step takes about a fifth of a second of one core.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import segmenter_data as data
import torch
from PIL import Image
from segmenter_model import Decoder, Segmenter, load_encoder
from torch.nn import functional as F

from pixelis.operations.mobilenet import prompt

VIEWS, PROMPTS = 4, 2
NATURAL = 0.45
"""Share of the views that are photographs as they are."""
RATE, DECAY_FROM, WARM_UP = 2e-3, 0.84, 50
AVERAGE = 0.995
SAVE_EVERY = 50
OTHERS, SCORE = 0.1, 0.5
"""Weight of the masks that are not the best of the three, and of the score's loss."""


class Views:
    """The views of each step."""

    def __init__(self, args: argparse.Namespace):
        photographs = data.coco_objects(args.coco) + data.voc_objects(args.voc)
        self.photographs, self.side, self.seed = photographs, args.side, args.seed
        self.cutouts = data.stamps(args.stamps) + data.cut_out(photographs)
        self.backgrounds = [view.picture for view in photographs]
        for path in sorted((args.voc / "JPEGImages").glob("*.jpg")):
            self.backgrounds.append(np.asarray(Image.open(path).convert("RGB")))

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pictures [VIEWS, 3, S, S] in -1..1, prompts [VIEWS * PROMPTS, 3, S/4, S/4], masks [VIEWS * PROMPTS, 1, S/2, S/2]."""
        rng = np.random.default_rng([self.seed, step])
        pictures: list[np.ndarray] = []
        prompts: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        while len(pictures) < VIEWS:
            if rng.random() < NATURAL:
                view = data.crop(self.photographs[rng.integers(len(self.photographs))], self.side, rng)
            else:
                view = data.composite(self.cutouts, self.backgrounds, self.side, rng)
            if view is None:
                continue
            pictures.append(view.picture)
            for _ in range(PROMPTS):
                mask = view.masks[rng.integers(len(view.masks))]
                prompts.append(prompt(self.side, *data.sample_prompt(mask, rng)))
                masks.append(mask)
        picture = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
        target = F.avg_pool2d(torch.from_numpy(np.stack(masks)).float()[:, None], 2)
        return picture, torch.from_numpy(np.stack(prompts)), target


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
    """The learning rate of a step."""
    decay = (steps - step) / max(1.0, (1 - DECAY_FROM) * steps)
    return RATE * min(1.0, (step + 1) / WARM_UP, decay)


def train(args: argparse.Namespace) -> Segmenter:
    """Train the decoder up to ``args.steps``; returns the averaged weights behind the encoder."""
    torch.manual_seed(args.seed)
    encoder, decoder = load_encoder(args.nsfwjs), Decoder()
    average = copy.deepcopy(decoder).eval()
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=RATE, weight_decay=0.02)
    checkpoint, step = args.out / "checkpoint.pt", 0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        decoder.load_state_dict(state["decoder"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    views, start, totals = Views(args), time.process_time(), []
    decoder.train()
    for step in range(step, args.steps):  # noqa: B020
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args.steps)
        picture, prompts, target = views.batch(step)
        with torch.no_grad():
            features = encoder(picture)
        repeated = [x.repeat_interleave(PROMPTS, 0) for x in (picture, *features)]
        logits, scores = decoder(repeated[0], repeated[1:], prompts)
        loss, iou, expected = loss_of(logits, scores, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        keep = min(AVERAGE, (step + 1) / (step + 10))
        with torch.no_grad():
            for mean, value in zip(average.state_dict().values(), decoder.state_dict().values(), strict=True):
                mean.lerp_(value, 1 - keep) if mean.is_floating_point() else mean.copy_(value)
        chosen = iou.gather(1, expected.argmax(1, keepdim=True)).mean()
        totals.append((float(loss.detach()), float(chosen), float(iou.max(1).values.mean())))
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            state = {"decoder": decoder.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, checkpoint)
            means = " ".join(f"{value:.3f}" for value in np.mean(totals, 0))
            print(f"{step + 1}: loss, IoU, best IoU {means}; {time.process_time() - start:.0f} s of CPU", flush=True)
            totals = []
    return Segmenter(encoder, average).eval()


def export(model: Segmenter, path: Path, side: int) -> None:
    """Write one ONNX graph for pictures of ``side``."""
    inputs = torch.zeros(1, side, side, 3), torch.zeros(1, 3, side // 4, side // 4)
    names, results = ["picture", "prompt"], ["probabilities", "scores"]
    torch.onnx.export(model, inputs, str(path), dynamo=False, opset_version=17, input_names=names, output_names=results)


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nsfwjs", type=Path, required=True, help="the unpacked npm package")
    parser.add_argument("--stamps", type=Path, required=True, help="usr/share/tuxpaint/stamps of the unpacked Debian package")
    parser.add_argument("--coco", type=Path, required=True, help="COCO128 with polygons: images/train2017, labels/train2017")
    parser.add_argument("--voc", type=Path, required=True, help="VOC2007: JPEGImages, SegmentationObject")
    parser.add_argument("--out", type=Path, default=Path("runs/segmenter"))
    parser.add_argument("--steps", type=int, default=5600)
    parser.add_argument("--side", type=int, default=160, help="pixels of a view's side in training")
    parser.add_argument("--export-side", type=int, default=256, help="pixels of a side that the exported graph takes")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    export(train(args), args.out / "mobilenet.onnx", args.export_side)


if __name__ == "__main__":
    main()
