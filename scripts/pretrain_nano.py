"""Pretrain the base of `nano` or of `mini`: `python scripts/pretrain_nano.py [--model mini --samples 40000]`.

`nano` starts with random weights. `mini` starts as `nano`, widened (`nano_widening.py`), and learns to look up and copy
text (`nano_texts.py`). The bases were trained with photographs from these packages of Debian 12, in addition to those
of the cards data: opencv-doc 4.6.0, plasma-workspace-wallpapers 5.27.5, gnome-backgrounds 43.1, mate-backgrounds 1.26.0,
ukui-wallpapers 20.04.3, lxqt-themes 1.2.0, stellarium-data 0.22.2. The photographs are not part of this repository. To
use them, run `apt-get download PACKAGE` and `dpkg -x PACKAGE*.deb FOLDER/PACKAGE`, then pass `--photos FOLDER`.
Without `--photos` only the training photographs of the cards data are used, and the result generalises less.

The schedule depends on the number of lessons, never on time, and every lesson follows from the seed. An
interrupted run resumes from its last checkpoint. A GPU is used if there is one.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from nano_backgrounds import own_backgrounds, photo_backgrounds
from nano_lessons import Batch, Lessons, Views
from nano_losses import Heads, evaluate, lesson_loss
from nano_texts import Texts, evaluate_texts, text_loss
from nano_widening import widen
from transformers import Qwen3VLForConditionalGeneration

from pixelis.datasets import cards
from pixelis.errors import BadInput, MissingFile
from pixelis.families import NANO
from pixelis.families.vision import batch_windows
from pixelis.nano.architecture import MINI_SIZES, SIZES, build, save
from pixelis.nano.tokenizer import BINS, build_tokenizer
from pixelis.policy.model_path import resolve

VISION_SHARE = 0.2
"""Share of the lessons in which only the vision tower is trained, through the auxiliary heads; the texts of `mini` are
repetitions meanwhile.
"""
VISION_RATE, RATE, LAST_RATE = 1.5e-3, 1.5e-3, 0.03
BATCH, LARGE_BATCH, LARGE_FROM = 16, 32, 0.6
MINI_BATCH = 8
"""Lessons beside a batch of texts: enough to keep what `nano` sees."""
TEXT_WEIGHT = 3.0
"""Weight of the loss of a batch of texts, one of which `mini` gets beside each batch of lessons."""
SAVE_EVERY = 8_000
AVERAGE = 0.999


def plan_of(samples: int, small: int = BATCH, large: int = LARGE_BATCH) -> list[tuple[int, int]]:
    """Return (first lesson, lessons) of each batch: small batches first, larger ones for the last two
    fifths.
    """
    plan, done = [], 0
    while done < samples:
        size = min(small if done < LARGE_FROM * samples else large, samples - done)
        plan.append((done, size))
        done += size
    return plan


def rate_at(done: int, samples: int) -> float:
    """Return the learning rate after `done` lessons: constant for vision, then a cosine, each after 2,000
    warm-up lessons.
    """
    switch = VISION_SHARE * samples
    if done < switch:
        return VISION_RATE * min(1.0, (done + 1) / 2000)
    progress = (done - switch) / max(1.0, samples - switch)
    warmup = min(1.0, (done - switch + 1) / 2000)
    return RATE * warmup * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


class Pretraining:
    """The state of a run: model, heads, averaged weights, optimizer and the number of lessons done."""

    def __init__(self, out: Path, seed: int, samples: int, mini: bool):
        self.out, self.seed, self.samples, self.mini = out, seed, samples, mini
        self.plan = plan_of(samples, *((MINI_BATCH, 2 * MINI_BATCH) if mini else (BATCH, LARGE_BATCH)))
        self.tokenizer = build_tokenizer(mini=mini)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build(self.tokenizer, NANO, seed, **(MINI_SIZES if mini else SIZES)).to(self.device)
        self.heads = Heads(self.model.config.text_config.hidden_size).to(self.device)
        self.average = copy.deepcopy(self.model).eval()
        for model in (self.model, self.average):
            batch_windows(model)
        self.parameters = [*self.model.parameters(), *self.heads.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=VISION_RATE, betas=(0.9, 0.95), weight_decay=0.02, fused=True
        )
        self.bins = torch.tensor([self.tokenizer(str(v))["input_ids"][0] for v in BINS], device=self.device)
        self.texts: Texts | None = None
        if mini:  # it sees as `nano` does, and keeps it
            small = Qwen3VLForConditionalGeneration.from_pretrained(resolve("nano"))
            for one in (self.model, self.average):
                widen(small, one, build_tokenizer(), self.tokenizer)
                one.model.visual.requires_grad_(False)
            repeating = sum(first < VISION_SHARE * samples for first, _ in self.plan)
            self.texts = Texts(self.tokenizer, seed, repeating)
        self.step = self.done = 0
        self.cpu_seconds = 0.0

    @property
    def _checkpoint(self) -> Path:
        return self.out / "unfinished.pt"

    def save(self) -> None:
        """Write a checkpoint atomically."""
        parts = ("model", "heads", "average", "optimizer")
        state = {name: getattr(self, name).state_dict() for name in parts}
        state |= {
            "step": self.step,
            "done": self.done,
            "seed": self.seed,
            "samples": self.samples,
            "cpu": self.cpu_seconds,
        }
        torch.save(state, self._checkpoint.with_suffix(".tmp"))
        os.replace(self._checkpoint.with_suffix(".tmp"), self._checkpoint)

    def resume(self) -> bool:
        """Load the checkpoint if there is one. BadInput if it has another seed or number of samples."""
        if not self._checkpoint.exists():
            return False
        state = torch.load(self._checkpoint, map_location=self.device, weights_only=True)
        if (state["seed"], state["samples"]) != (self.seed, self.samples):
            raise BadInput(
                f"{self._checkpoint} was written with --seed {state['seed']} --samples {state['samples']}: "
                "use the same values or another --out, or delete the file"
            )
        for name in ("model", "heads", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.done, self.cpu_seconds = state["step"], state["done"], state["cpu"]
        return True

    def train_step(self, batch: Batch, size: int) -> dict[str, float]:
        """Take one optimizer step; return the parts of the loss."""
        start = time.process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.done, self.samples)
        on_device = Batch(**{name: value.to(self.device) for name, value in vars(batch).items()})
        if self.texts is None:
            language = self.done >= VISION_SHARE * self.samples
            loss, parts = lesson_loss(self.model, self.heads, on_device, self.bins, language)
        else:
            text = text_loss(self.model, self.texts.batch(self.step))
            loss, parts = lesson_loss(self.model, None, on_device, self.bins)
            loss, parts = loss + TEXT_WEIGHT * text, {"text": float(text.detach())} | parts
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.done = self.step + 1, self.done + size
        decay = min(AVERAGE, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            weights = [p.detach() for p in self.model.parameters()]
            torch._foreach_lerp_(list(self.average.parameters()), weights, 1 - decay)
        self.cpu_seconds += time.process_time() - start
        return parts

    def evaluate(self, split: str, count: int = 300) -> dict[str, float]:
        """The scores of the averaged weights: perception on a split, and answers about unseen texts."""
        scores = evaluate(self.average, self.tokenizer, split, count)
        if self.texts is not None:
            scores["text"] = evaluate_texts(self.average, self.texts, count)
        return scores

    def finish(self, command: str, backgrounds: int) -> dict[str, float]:
        """Evaluate the averaged weights on the test split; write the model folder with its README."""
        dtype = torch.bfloat16 if self.mini else torch.float32
        self.average.to(dtype).float()  # the scores are those of the weights in the file
        scores = self.evaluate("test", 500)
        save(self.average.to("cpu", dtype), self.tokenizer, self.out)
        digest = hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()
        (self.out / "README.md").write_text(
            README.format(
                command=command,
                name="mini" if self.mini else "nano",
                seed=self.seed,
                samples=self.samples,
                backgrounds=backgrounds,
                sha=digest,
                cpu=round(self.cpu_seconds),
                device=self.device.type,
                torch=torch.__version__,
                **{k: f"{v:.3f}" for k, v in scores.items()},
            )
            + (TEXT_SCORE.format(text=scores["text"]) if self.mini else "")
        )
        self._checkpoint.unlink(missing_ok=True)
        return scores


README = """# The base of pixelis-{name}

A tiny Qwen3-VL trained to perceive: it points at a named frame and reads a digit. It has seen no tool call and no answer tag.

- command: `{command}`
- seed {seed}, {samples} lessons, {backgrounds} backgrounds (photographs and variants), device {device}, torch {torch},
  {cpu} CPU-seconds of training
- 500 pictures with unseen digits on unseen photographs: reads {read} of well centred crops, points at the digit in {point}
  (within one grid step on both axes: {near}), reads the crop that it pointed at in {both}
- sha256 of model.safetensors: {sha}

This folder contains weights, no photographs. `scripts/pretrain_nano.py` names the packages of the photographs.
"""
TEXT_SCORE = """
It also copies and looks up text in the form of observations: {text:.3f} of 500 answers are right to the letter.
"""


def main() -> None:
    """Pretrain and write the base."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("nano", "mini"), default="nano")
    parser.add_argument("--out", type=Path, help="folder of the model, by default runs/MODEL_base")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=200_000, help="number of lessons")
    parser.add_argument("--photos", type=Path, help="folder with additional photographs")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads for training; another process renders lessons"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the settings and stop")
    args = parser.parse_args()
    if args.samples < 1 or args.threads < 1:
        raise BadInput("--samples and --threads must be at least 1")
    if args.photos is not None and not args.photos.is_dir():
        raise MissingFile(f"--photos {args.photos} is not a folder")
    args.out = args.out or Path(f"runs/{args.model}_base")
    if args.dry_run:
        print(json.dumps({"out": str(args.out), "seed": args.seed, "samples": args.samples}))
        return
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Pretraining(args.out, args.seed, args.samples, args.model == "mini")
    backgrounds = own_backgrounds(args.seed) + (
        photo_backgrounds(args.photos, args.seed) if args.photos else []
    )
    resumed = run.resume()
    print(
        (
            f"{len(backgrounds)} backgrounds, {sum(p.numel() for p in run.model.parameters()):,} parameters, "
            f"{run.device}"
        )
        + (f", resumed after {run.done:,} lessons" if resumed else ""),
        flush=True,
    )
    progress = Progress(run)
    for batch, size in remaining_batches(run, backgrounds):
        progress.update(run.train_step(batch, size), size)
        if run.done // SAVE_EVERY > (run.done - size) // SAVE_EVERY:
            run.save()
        if run.done // (5 * SAVE_EVERY) > (run.done - size) // (5 * SAVE_EVERY):
            print_scores("validation", run.evaluate("validation"))
    command = (
        f"python scripts/pretrain_nano.py --model {args.model} --seed {args.seed} --samples {args.samples}"
    )
    print_scores("test", run.finish(command + (" --photos FOLDER" if args.photos else ""), len(backgrounds)))
    print("written to", args.out, flush=True)


def remaining_batches(run: Pretraining, backgrounds: list[cards.Background]) -> Iterator[tuple[Batch, int]]:
    """Yield the batches after the last checkpoint with their sizes; another process renders them."""
    easy = 0 if run.mini else round(0.8 * VISION_SHARE * run.samples)
    lessons = Lessons(Views(backgrounds), run.tokenizer, run.plan, run.seed, easy)
    loader = torch.utils.data.DataLoader(
        lessons, batch_size=None, sampler=range(run.step, len(run.plan)), num_workers=1, prefetch_factor=8
    )
    for (_, size), batch in zip(run.plan[run.step :], loader, strict=True):
        yield batch, size


def print_scores(split: str, scores: dict[str, float]) -> None:
    """Print the scores of an evaluation in one line."""
    print(split, " ".join(f"{name} {value:.3f}" for name, value in scores.items()), flush=True)


class Progress:
    """Prints progress, speed, remaining time and the smoothed parts of the loss every 2,000 lessons."""

    def __init__(self, run: Pretraining):
        self.run, self.start, self.first = run, time.time(), run.done
        self.smoothed: dict[str, float] = {}

    def update(self, parts: dict[str, float], size: int) -> None:
        """Add the losses of a batch of ``size`` lessons."""
        run = self.run
        for name, value in parts.items():
            self.smoothed[name] = (
                value if name not in self.smoothed else 0.98 * self.smoothed[name] + 0.02 * value
            )
        if run.done // 2000 > (run.done - size) // 2000:
            speed = (run.done - self.first) / max(1e-9, time.time() - self.start)
            left = (run.samples - run.done) / max(1e-9, speed)
            losses = " ".join(f"{name} {value:.3f}" for name, value in self.smoothed.items())
            print(
                f"{run.done:,}/{run.samples:,} lessons, {speed:.0f}/s, {left / 60:.0f} min left | {losses}",
                flush=True,
            )


if __name__ == "__main__":
    main()
