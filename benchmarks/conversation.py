"""What are the conversation and its crops worth? Second questions that only the first one explains, with it
and without it.

    python -m benchmarks.conversation [--steps 300] [--questions 600] [--seeds 42 1337 2024] [--dir
    runs/conversation]

The embedded model is trained on demonstrations of which half are second questions ("Is there a red frame?"
"yes" "Which digit is in it?"); half of these show the crop from which the first question was answered. Prints
its accuracy on held-out second questions with their history, on the same ones without it, with it and the
crop of the card (`crop`), on single questions, and with the picture as the memory stores it, at the size that
the policy saw, without the crop and with it (`stored`, `stored_crop`). Policies that already exist in DIR are
not trained again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.harness import keep_arguments, machine, parse_args
from pixelis.actors import placement
from pixelis.config import absolute, load
from pixelis.datasets import cards
from pixelis.datasets.card_questions import question_row
from pixelis.jobs import evaluate, sft
from pixelis.jobs.driver import driver, run_folder
from pixelis.operations.pixel_budget import fit
from pixelis.policy import checkpoint

DEMONSTRATIONS = "cards:?split=train&follow_up=0.5&crops=0.5"
ARMS = ("with", "without", "crop", "single", "stored", "stored_crop")


def write_questions(folder: Path, count: int) -> dict[str, Path]:
    """Files with the same held-out pictures: second questions with and without their history and crops, and
    single questions.
    """
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    files = {arm: folder / f"{arm}.jsonl" for arm in ARMS}
    rows = {
        arm: [question_row("test", 7, n, follow_up=float(arm != "single")) for n in range(count)]
        for arm in ARMS
    }
    for n in range(count):
        del rows["without"][n]["history"]
        box = ",".join(
            str(round(at * cards.PICTURE)) for at in cards.zoom_box(cards.scene_of("test", 7, n).target)
        )
        crop = {"id": "img1", "uri": f"{cards.picture_uri('test', 7, n)}&crop={box}"}
        for row in (rows["crop"][n], rows["stored_crop"][n]):
            row["media"].append(crop)
            row["history"][0]["media"] = ["img0", "img1"]
        view = fit(cards.render(cards.picture_uri("test", 7, n)), cards.VIEW_BUDGET, cards.VIEW_MULTIPLE)
        Image.fromarray(view).save(path := folder / "pictures" / f"{n}.png")
        for row in (rows["stored"][n], rows["stored_crop"][n]):
            row["media"][0]["uri"] = str(path)
    for arm, file in files.items():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[arm]), encoding="utf-8")
    return files


def measure(folder: Path, seed: int, files: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Train a policy; print and return its accuracy on each file."""
    results = {}
    shared = [f"run.seed={seed}", "telemetry.rollouts=0"]
    training = [f"run.dir={folder / 'sft'}", f"sft.steps={args.steps}", "data.direct_share=0"]
    config = absolute(
        load("configs/nano/sft.yaml", [*shared, *training, f"data.demonstrations={DEMONSTRATIONS}"])
    )
    adapter = checkpoint.latest(folder / "sft") or sft.run(config)
    sets = "{" + ", ".join(f"{arm}: {file}" for arm, file in files.items()) + "}"
    test = [f"run.dir={folder / 'evaluate'}", f"policy.adapter={adapter}", f"evaluate.sets={sets}"]
    config = absolute(
        load("configs/nano/evaluate.yaml", [*shared, *test, f"evaluate.questions={args.questions}"])
    )
    with run_folder(config), placement.placed(config, initial=str(adapter)) as actors:
        for arm in files:
            summary = evaluate.measure(config, actors, arm, 0, source=str(files[arm])).summary
            low, high = summary["ci95"]
            results[arm] = {key: summary[key] for key in ("accuracy", "ci95", "n")}
            print(f"{seed:5} {arm:12} {summary['accuracy']:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return results


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of supervised training")
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--dir", type=Path, default=Path("runs/conversation"))
    args = parse_args(parser, steps=1, questions=4, seeds=[42])
    folder = args.dir.absolute()
    keep_arguments(folder, args, "seeds", "questions")  # questions are asked each time
    print(machine())
    with driver("conversation"):
        files = write_questions(folder, args.questions)
        results = {str(seed): measure(folder / str(seed), seed, files, args) for seed in args.seeds}
    print(json.dumps({"machine": machine(), **results}))


if __name__ == "__main__":
    main()
