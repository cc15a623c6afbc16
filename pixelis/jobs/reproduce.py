"""Train by a recipe, evaluate before and after, and write one file that can be compared with ours and sent in.

usage: pixelis reproduce TRAIN.yaml [key=value ...] [--dry-run]

TRAIN.yaml is a recipe such as configs/reproduce/r1_v/train_2b.yaml; evaluate_2b.yaml beside it evaluates the policy.
key=value is an override of both, such as rft.steps=50. --dry-run checks the inputs of both. The stages go to `before`,
`train` and `after` in run.dir; reproduction.json has figures, published figures, versions, hardware and hashes.
Running again repeats no finished stage and resumes an interrupted training.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pixelis.config import Config, absolute, load
from pixelis.config.ablation import differences
from pixelis.config.load import find
from pixelis.errors import BadConfig
from pixelis.files import write_json
from pixelis.jobs import evaluate, rft, ttrl
from pixelis.jobs.command import asks_for_help, file_and_overrides
from pixelis.jobs.driver import driver, hardware, versions
from pixelis.jobs.evaluation_arms import baseline_scores
from pixelis.telemetry import lineage

FIX = "name a recipe train*.yaml with an evaluate*.yaml beside it, as those of configs/reproduce"


def recipes(path: str, overrides: Sequence[str]) -> tuple[Config, Config]:
    """The configurations of a training and of the evaluation of its policy. BadConfig without an evaluation."""
    file = find(path)
    beside = file.with_name(file.name.replace("train", "evaluate", 1))
    if beside == file or not beside.is_file():
        raise BadConfig(f"{file} has no recipe of an evaluation beside it", fix=FIX)
    train, evaluation = (absolute(load(recipe, overrides)) for recipe in (file, beside))
    return train, evaluation.changed({"policy": train.policy})


def run(train: Config, evaluation: Config) -> dict[str, Any]:
    """Run the stages that are not finished; writes and returns the content of reproduction.json."""
    folder = Path(train.run.dir)
    before = evaluation.changed({"run.dir": f"{folder}/before"})
    training = train.changed({"run.dir": f"{folder}/train"})
    after = evaluation.changed({"run.dir": f"{folder}/after", "evaluate.baseline": before.run.dir})
    stages = {"before": run_stage(before, lambda: evaluate.run(before))}
    stages["train"] = run_stage(training, lambda: train_policy(training))
    after = after.changed({"policy.adapter": (adapter := stages["train"]["result"])})
    stages["after"] = run_stage(after, lambda: evaluate.run(after))
    figures = []
    for old, new in zip(stages["before"]["result"], stages["after"]["result"], strict=True):
        ids = "\n".join(sorted(baseline_scores(after.run.dir, new["name"])))
        sides = (("before", old), ("after", new))
        row = {side: {key: s[key] for key in ("accuracy", "ci95", "n")} for side, s in sides}
        hashed = hashlib.sha256(ids.encode()).hexdigest()
        figures.append({"set": new["name"], **row, "difference": new["baseline"], "ids_sha256": hashed})
    for name, stage in stages.items():
        if (record := lineage.read(folder / name)) is not None:
            stage["lineage"] = record.model_dump(mode="json", exclude_defaults=True)
    report = {
        "command": shlex.join(["pixelis", "reproduce", *sys.argv[1:]]),
        "figures": figures,
        "published": json.loads((folder / "after/evaluation.json").read_bytes()).get("published"),
        "checkpoint_sha256": lineage.digest(adapter)[0],
        "stages": stages,
    }
    write_json(folder / "reproduction.json", report)
    return report


def run_stage(config: Config, run: Callable[[], Any]) -> dict[str, Any]:
    """The result of ``run`` and its circumstances, once for a run.dir. BadConfig for one of another configuration."""
    folder = Path(config.run.dir)
    finished, saved = folder / "stage.json", folder / "config.yaml"
    if resumed := config.run.resume and saved.is_file():
        existing = load(saved)
        changed = list(differences(existing, config))
        if existing.run.seed != config.run.seed or changed:
            message = f"{folder} has another configuration ({', '.join(changed or ['run.seed'])} changed)"
            raise BadConfig(message, fix="choose another run.dir, or start over with run.resume=false")
        if finished.is_file():
            return json.loads(finished.read_text(encoding="utf-8"))
    finished.unlink(missing_ok=True)
    started = time.monotonic()
    stage = {"result": run(), "seconds": round(time.monotonic() - started, 1), "resumed": resumed}
    stage |= {"hardware": hardware(), "versions": versions()}
    write_json(finished, stage)
    return stage


def train_policy(config: Config) -> str:
    """Train by `rft` or `ttrl`; returns the last checkpoint."""
    return ttrl.start(config)["adapter"] if config.rft.algorithm == "ttrl" else str(rft.start(config))


def main() -> None:
    if asks_for_help(sys.argv[1:]):
        print((__doc__ or "").strip())
        return
    with driver("reproduce"):
        path, overrides, is_dry = file_and_overrides("reproduce", FIX)
        train, evaluation = recipes(path, overrides)
        if is_dry:
            (ttrl if train.rft.algorithm == "ttrl" else rft).check(train)
            evaluate.check(evaluation)
            return
        for row in run(train, evaluation)["figures"]:
            print(f"{row['set']}: accuracy {row['before']['accuracy']:.3f} -> {row['after']['accuracy']:.3f}")
        print(f"to compare and to send in: {train.run.dir}/reproduction.json")


if __name__ == "__main__":
    main()
