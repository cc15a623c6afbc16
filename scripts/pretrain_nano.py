"""Make the base of pixelis-nano from nothing: `python scripts/pretrain_nano.py`.

The committed base was made with more real photographs than the card world ships, taken from these packages of Debian 12 (their
pictures are not part of this repository; `apt-get download PACKAGE`, `dpkg -x PACKAGE*.deb FOLDER/PACKAGE`, then
`--photos FOLDER`): opencv-doc 4.6.0, plasma-workspace-wallpapers 5.27.5, gnome-backgrounds 43.1, mate-backgrounds 1.26.0,
ukui-wallpapers 20.04.3, lxqt-themes 1.2.0, stellarium-data 0.22.2.
Without `--photos` only the training photographs of the card world are used; the result generalises less.

The course is set by the number of lessons, never by the clock, and every lesson follows from the seed. An interrupted run goes on
where it last saved. A GPU is used when there is one.
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
from nano_lessons import Batch, Heads, Lessons, Views, examine, lesson_loss, own_plates, photo_plates

from pixelis.datasets import cards
from pixelis.errors import BadInput, MissingFile
from pixelis.nano.architecture import build, save
from pixelis.nano.tokenizer import BINS, build_tokenizer
from pixelis.policy.vision import batch_equal_windows

VISION_SHARE = 0.2
"""Part of the lessons in which only the vision tower learns, through the throw-away heads."""
VISION_RATE, RATE, LAST_RATE = 1.5e-3, 1.5e-3, 0.03
BATCH, LARGE_BATCH, LARGE_FROM = 16, 32, 0.6
SAVE_EVERY = 8_000
AVERAGE = 0.999


def plan_of(samples: int) -> list[tuple[int, int]]:
    """(first lesson, lessons) of each batch: small batches first, larger ones for the last two fifths."""
    plan, done = [], 0
    while done < samples:
        size = min(BATCH if done < LARGE_FROM * samples else LARGE_BATCH, samples - done)
        plan.append((done, size))
        done += size
    return plan


def rate_at(done: int, samples: int) -> float:
    """Learning rate after `done` of `samples` lessons: constant for vision, then one cosine; both rise over 2,000 lessons."""
    switch = VISION_SHARE * samples
    if done < switch:
        return VISION_RATE * min(1.0, (done + 1) / 2000)
    part = (done - switch) / max(1.0, samples - switch)
    rise = min(1.0, (done - switch + 1) / 2000)
    return RATE * rise * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * part)))


class Course:
    """Everything that a resumed run needs: model, heads, averaged weights, optimizer, lessons done."""

    def __init__(self, out: Path, seed: int, samples: int):
        self.out, self.seed, self.samples = out, seed, samples
        self.tokenizer = build_tokenizer()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build(self.tokenizer, seed=seed).to(self.device)
        self.heads = Heads(self.model.config.text_config.hidden_size).to(self.device)
        self.average = copy.deepcopy(self.model).eval()
        for model in (self.model, self.average):
            batch_equal_windows(model)
        self.parameters = [*self.model.parameters(), *self.heads.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=VISION_RATE, betas=(0.9, 0.95), weight_decay=0.02, fused=True)
        self.bins = torch.tensor([self.tokenizer(str(v))["input_ids"][0] for v in BINS], device=self.device)
        self.step = self.done = 0
        self.cpu_seconds = 0.0

    @property
    def _file(self) -> Path:
        return self.out / "unfinished.pt"

    def save(self) -> None:
        """Write everything aside, then rename: an interruption never leaves half a file."""
        parts = ("model", "heads", "average", "optimizer")
        state = {name: getattr(self, name).state_dict() for name in parts}
        state |= {"step": self.step, "done": self.done, "seed": self.seed, "samples": self.samples, "cpu": self.cpu_seconds}
        torch.save(state, self._file.with_suffix(".tmp"))
        os.replace(self._file.with_suffix(".tmp"), self._file)

    def resume(self) -> bool:
        """Go on from the last save; raises BadInput when it belongs to another course."""
        if not self._file.exists():
            return False
        state = torch.load(self._file, map_location=self.device, weights_only=True)
        if (state["seed"], state["samples"]) != (self.seed, self.samples):
            raise BadInput(
                f"{self._file} was made with seed {state['seed']} and {state['samples']} samples: "
                "give the same, or another --out, or delete the file"
            )
        for name in ("model", "heads", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.done, self.cpu_seconds = state["step"], state["done"], state["cpu"]
        return True

    def learn(self, batch: Batch, size: int) -> dict[str, float]:
        """One optimizer step; returns the parts of the loss."""
        began = time.process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.done, self.samples)
        on_device = Batch(**{name: value.to(self.device) for name, value in vars(batch).items()})
        language = self.done >= VISION_SHARE * self.samples
        loss, parts = lesson_loss(self.model, self.heads, on_device, self.bins, language)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.done = self.step + 1, self.done + size
        keep = min(AVERAGE, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            new = [p.detach() for p in self.model.parameters()]
            torch._foreach_lerp_(list(self.average.parameters()), new, 1 - keep)
        self.cpu_seconds += time.process_time() - began
        return parts

    def finish(self, command: str, photos: int) -> dict[str, float]:
        """Examine the averaged weights on the test split, write the checkpoint folder and its README."""
        figures = examine(self.average, self.tokenizer, "test", 500)
        save(self.average.to("cpu"), self.tokenizer, self.out)
        digest = hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()
        (self.out / "README.md").write_text(
            README.format(
                command=command,
                seed=self.seed,
                samples=self.samples,
                photos=photos,
                sha=digest,
                cpu=round(self.cpu_seconds),
                device=self.device.type,
                torch=torch.__version__,
                **{k: f"{v:.3f}" for k, v in figures.items()},
            )
        )
        self._file.unlink(missing_ok=True)
        return figures


README = """# The base of pixelis-nano

A tiny Qwen3-VL that was taught to perceive: it points at a named frame and reads a digit. It knows no tool call and no
answer tag.

- made by: `{command}`
- seed {seed}, {samples} lessons, {photos} grounds (photographs and their variants), device {device}, torch {torch},
  {cpu} CPU-seconds of training
- 500 pictures with unseen digits on unseen photographs: reads {read} of well centred crops, points well in {point}
  (within one grid step on both axes: {near}), reads the crop it pointed at in {both}
- sha256 of model.safetensors: {sha}

No photograph is part of this folder, only weights. The packages whose photographs were used are named in
`scripts/pretrain_nano.py`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/nano_base"), help="checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=200_000, help="lessons in the course")
    parser.add_argument("--photos", type=Path, help="folder with more photographs")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the training process (a second process draws)")
    parser.add_argument("--dry-run", action="store_true", help="print the course and stop")
    args = parser.parse_args()
    if args.samples < 1 or args.threads < 1:
        raise BadInput("--samples and --threads must be at least 1")
    if args.photos is not None and not args.photos.is_dir():
        raise MissingFile(f"--photos {args.photos} is no folder")
    plan = plan_of(args.samples)
    if args.dry_run:
        print(json.dumps({"out": str(args.out), "seed": args.seed, "samples": args.samples, "steps": len(plan)}))
        return
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    course = Course(args.out, args.seed, args.samples)
    plates = own_plates(args.seed) + (photo_plates(args.photos, args.seed) if args.photos else [])
    resumed = course.resume()
    print(
        f"{len(plates)} grounds, {sum(p.numel() for p in course.model.parameters()):,} parameters, {course.device}"
        + (f", resumed after {course.done:,} lessons" if resumed else ""),
        flush=True,
    )
    for batch, size in lessons_from(course, plates, plan):
        report(course, course.learn(batch, size), size)
        if course.done // SAVE_EVERY > (course.done - size) // SAVE_EVERY:
            course.save()
        if course.done // (5 * SAVE_EVERY) > (course.done - size) // (5 * SAVE_EVERY):
            show("validation", examine(course.average, course.tokenizer, "validation"))
    command = f"python scripts/pretrain_nano.py --seed {args.seed} --samples {args.samples}"
    figures = course.finish(command + (" --photos FOLDER" if args.photos else ""), len(plates))
    show("test", figures)
    print("written to", args.out, flush=True)


def lessons_from(course: Course, plates: list[cards.Background], plan: list[tuple[int, int]]) -> Iterator[tuple[Batch, int]]:
    """The batches that are still to be learned, drawn by one other process."""
    easy = round(0.8 * VISION_SHARE * course.samples)
    lessons = Lessons(Views(plates), course.tokenizer, plan, course.seed, easy)
    loader = torch.utils.data.DataLoader(
        lessons, batch_size=None, sampler=range(course.step, len(plan)), num_workers=1, prefetch_factor=8
    )
    for (_, size), batch in zip(plan[course.step :], loader, strict=True):
        yield batch, size


def show(name: str, figures: dict[str, float]) -> None:
    print(name, " ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True)


_clock = {"began": 0.0, "from": 0}
_smooth: dict[str, float] = {}


def report(course: Course, parts: dict[str, float], size: int) -> None:
    """A line every 2,000 lessons: how far, how fast, how long still, and the smoothed parts of the loss."""
    if not _clock["began"]:
        _clock.update({"began": time.time(), "from": course.done})
    for name, value in parts.items():
        _smooth[name] = value if name not in _smooth else 0.98 * _smooth[name] + 0.02 * value
    if course.done // 2000 > (course.done - size) // 2000:
        speed = (course.done - _clock["from"]) / max(1e-9, time.time() - _clock["began"])
        left = (course.samples - course.done) / max(1e-9, speed)
        losses = " ".join(f"{name} {value:.3f}" for name, value in _smooth.items())
        print(f"{course.done:,}/{course.samples:,} lessons, {speed:.0f}/s, {left / 60:.0f} min left | {losses}", flush=True)


if __name__ == "__main__":
    main()
