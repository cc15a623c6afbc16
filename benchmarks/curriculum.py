"""SFT with a curriculum of difficulty levels against the same demonstrations mixed, for the same number of
steps.

    python -m benchmarks.curriculum [--seeds 42 1337 2024] [--dir runs/curriculum] [--steps 160] [--data-only]

Demonstrations of three levels are made by executing operations on pictures of the embedded data: simple ones
need no operation, medium ones one zoom, hard ones two. The embedded model is trained with
configs/nano/sft_curriculum.yaml and with the same configuration without its curriculum. Prints the accuracy
on held-out questions by level, with 95 % intervals, and the paired difference. Writes the curves to
DIR/curriculum.html and all results to DIR/curriculum.json. Runs that are already finished in DIR are not
repeated, so an interrupted benchmark can be restarted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import keep_arguments, machine, parse_args
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.datasets import packaged
from pixelis.datasets.curriculum import LEVELS
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.errors import DataFailure
from pixelis.evaluation.statistics import bootstrap_mean, paired_bootstrap
from pixelis.jobs import evaluate, sft
from pixelis.jobs.driver import driver, run_folder
from pixelis.policy import checkpoint
from pixelis.records import Group
from pixelis.rewards.scorers import exact
from pixelis.telemetry import events
from pixelis.telemetry.html.render import render, write_page

CONFIG = "configs/nano/sft_curriculum.yaml"
SPLITS = ("train", "validation", "test")
ARMS = {"curriculum": [], "mixed": ["sft.curriculum.enabled=false"]}
CURVES = (
    "evaluate/accuracy",
    "evaluate/loss",
    *(f"evaluate/accuracy_{level}" for level in LEVELS),
    "curriculum/stage",
)


def make_demonstrations(path: Path, split: str, count: int, config: Config) -> None:
    """Write demonstrations from ``count`` questions of a split; skip samples whose answer the execution
    contradicts.
    """
    if path.exists():
        return
    executor = Executor(config.toolbox, config.dialogue, multiple=16)
    partial = path.with_suffix(".part")
    with partial.open("w", encoding="utf-8") as out:
        for number, question in enumerate(
            packaged.read(f"packaged:digits?split={split}&count={count}&seed=0")
        ):
            try:
                sample = TASKS["detail_perception"].make(
                    question, np.random.default_rng([0, number]), executor, style="terse"
                )
            except DataFailure:
                continue
            sample.meta["level"] = sample.level
            out.write(sample.model_dump_json(exclude={"annotations"}) + "\n")
    partial.rename(path)


def config_of(folder: Path, data: Path, seed: int, *overrides: str) -> Config:
    """Return the recipe with its own folder, seed and data."""
    files = {"data.demonstrations": "train", "sft.validation": "validation", "data.evaluate": "validation"}
    paths = [f"{key}={data / name}.jsonl" for key, name in files.items()]
    return absolute(load(CONFIG, [f"run.dir={folder}", f"run.seed={seed}", *paths, *overrides]))


def correct_by_level(groups: list[Group]) -> dict[str, dict[str, float]]:
    """Return level -> question id -> 1.0 for a correct answer, else 0.0."""
    correct: dict[str, dict[str, float]] = {level: {} for level in LEVELS}
    for group in groups:
        (episode,) = group.trajectories
        correct[group.question.meta["level"]][group.question.id] = float(
            exact(episode.answer, group.question.answers or [])
        )
    return correct


def train(folder: Path, data: Path, seed: int, *overrides: str) -> dict[str, Any]:
    """Train and test one run; return held-out results by level and question, and the training curves."""
    path = folder / "result.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    held_out = (data / "test.jsonl").read_text(encoding="utf-8").splitlines()
    config, start = config_of(folder, data, seed, *overrides), time.monotonic()
    adapter = checkpoint.latest(folder)
    if adapter is None or checkpoint.step_of(adapter) < config.sft.steps:
        adapter = sft.run(config)
    seconds = time.monotonic() - start
    test = [
        f"data.evaluate={data / 'test.jsonl'}",
        f"evaluate.questions={len(held_out)}",
        f"policy.adapter={adapter}",
    ]
    test_config = config_of(folder / "test", data, seed, *overrides, *test)
    with (
        run_folder(test_config),
        placement.placed(test_config, learner=False, initial=str(adapter)) as actors,
    ):
        arm = evaluate.measure(test_config, actors, "test", 0)
    rows = events.read(folder, "step/sft")
    curves = {
        name: [[row["step"], row[name]] for row in rows if row.get(name) is not None] for name in CURVES
    }
    changes = [[row["step"], row["curriculum/event"]] for row in rows if row.get("curriculum/event")]
    counts = {level: sum(row.get(f"curriculum/count_{level}", 0) for row in rows) for level in LEVELS}
    correct = correct_by_level(arm.groups)
    result = {
        "correct": correct,
        "rapr": arm.summary["rapr"],
        "curves": curves,
        "events": changes,
        "drawn": counts,
    }
    path.write_text(json.dumps({**result, "seconds": seconds}), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def by_question(runs: list[dict[str, Any]], level: str | None) -> dict[str, float]:
    """Return question id -> share of seeds that answer it correctly, for one level or for all."""
    levels = [level] if level else LEVELS
    ids = [question for name in levels for question in runs[0]["correct"][name]]
    by_seed = [{q: v for name in levels for q, v in run["correct"][name].items()} for run in runs]
    return {question: statistics.mean(correct[question] for correct in by_seed) for question in ids}


def compare(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the accuracy of each arm by level with its interval, and the difference over the same
    questions.
    """
    table: dict[str, Any] = {}
    for level in (*LEVELS, None):
        scores = {arm: by_question(runs, level) for arm, runs in results.items()}
        row: dict[str, Any] = {
            arm: {
                "accuracy": statistics.mean(s.values()),
                "ci95": bootstrap_mean(list(s.values())),
                "n": len(s),
            }
            for arm, s in scores.items()
        }
        if len(scores) > 1:
            row["difference"] = paired_bootstrap(scores["curriculum"], scores["mixed"])
        table[level or "all"] = row
    return table


def report(folder: Path, results: dict[str, list[dict[str, Any]]], seeds: list[int], steps: int) -> None:
    """Print the table; write the JSON file and the page with the mean curves."""
    table = compare(results)
    count = table["all"]["curriculum"]["n"]
    print(
        f"\n{machine()}; {steps} steps of 16 demonstrations, seeds {seeds}, {count} held-out questions, "
        "greedy\n"
    )
    print(f"{'level':8} {'curriculum':>26} {'mixed':>26} {'difference':>28}")
    for level, row in table.items():
        cells = [(row[arm]["accuracy"], *row[arm]["ci95"]) for arm in results]
        cells += [(row["difference"]["mean"], *row["difference"]["ci95"])] if "difference" in row else []
        print(
            f"{level:8} " + " ".join(f"{mean:+12.3f} [{low:+.3f}, {high:+.3f}]" for mean, low, high in cells)
        )
    for arm, runs in results.items():
        accuracies = " ".join(f"{statistics.mean(by_question([run], None).values()):.3f}" for run in runs)
        seconds = " ".join(f"{run['seconds']:.0f}" for run in runs)
        print(
            f"{arm}: accuracy by seed {accuracies}; seconds {seconds}; stage events of the first seed "
            f"{runs[0]['events']}"
        )
    curves = {
        f"{name}, mean of {len(seeds)} seeds": {
            arm: mean_curve([run["curves"][name] for run in runs]) for arm, runs in results.items()
        }
        for name in CURVES
    }
    shares = [heading for heading in curves if "accuracy" in heading]
    write_page(
        folder / "curriculum.html", render("curves.html", title="Curriculum", curves=curves, shares=shares)
    )
    content = {"machine": machine(), "seeds": seeds, "steps": steps, "table": table, "results": results}
    (folder / "curriculum.json").write_text(json.dumps(content), encoding="utf-8")
    print(f"\n{folder / 'curriculum.html'}\n{folder / 'curriculum.json'}")


def mean_curve(runs: list[list[list[float]]]) -> list[tuple[float, float]]:
    """Return the mean over seeds of curves with the same steps."""
    return [(points[0][0], statistics.mean(y for _, y in points)) for points in zip(*runs, strict=True)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--dir", type=Path, default=Path("runs/curriculum"))
    parser.add_argument(
        "--sizes", type=int, nargs=3, default=[3000, 48, 450], help=f"demonstrations of {', '.join(SPLITS)}"
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--data-only", action="store_true", help="make the demonstrations and stop")
    args = parse_args(parser, seeds=[42], steps=2, sizes=[60, 6, 6], arms=["curriculum"])
    folder = args.dir.absolute()
    keep_arguments(folder, args, "seeds", "arms", "data_only")
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    with driver("curriculum"):
        for split, count in zip(SPLITS, args.sizes, strict=True):
            make_demonstrations(data / f"{split}.jsonl", split, count, load(CONFIG))
        if args.data_only:
            return
        results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in args.arms}
        for seed in args.seeds:
            for arm in args.arms:
                run = train(folder / f"{arm}-{seed}", data, seed, f"sft.steps={args.steps}", *ARMS[arm])
                results[arm].append(run)
        report(folder, results, args.seeds, args.steps)


if __name__ == "__main__":
    main()
