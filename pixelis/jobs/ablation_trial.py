"""One trial of an ablation: trains a policy, then evaluates it on the actors of its training.

usage: python -m pixelis.jobs.ablation_trial STAGE TRIAL.yaml

Running again continues interrupted training, and only evaluates a policy that is trained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray

from pixelis.actors import placement
from pixelis.config import Config, load
from pixelis.config.ablation import evaluation
from pixelis.files import write_json
from pixelis.jobs import evaluate, rft, sft, ttrl
from pixelis.jobs.driver import driver, run_folder

TRAINED = "trained.json"
"""File with the trained checkpoint."""


def run(stage: str, config: Config) -> None:
    """Train by ``stage`` unless that is finished, or is `evaluate`; then evaluate."""
    marker = Path(config.run.dir) / TRAINED
    if stage == "evaluate":
        evaluate.run(evaluation(config, config.policy.adapter))
        return
    if not marker.is_file():
        if stage == "sft":
            write_json(marker, {"adapter": str(sft.run(config))})
        elif train_with_rollouts(stage, config, marker):
            return
    evaluate.run(evaluation(config, json.loads(marker.read_text(encoding="utf-8"))["adapter"]))


def train_with_rollouts(stage: str, config: Config, marker: Path) -> bool:
    """Train by `rft` or `ttrl`; returns whether the policy is evaluated too (pixel budgets need own actors)."""
    checked = rft.checked(config) if stage == "rft" else ttrl.require_unlabelled(config)
    with (
        run_folder(checked, config.data.train),
        placement.placed(planned := rft.with_steps(config), initial=config.policy.adapter) as actors,
    ):
        adapter = str(rft.run(planned, actors) if stage == "rft" else ttrl.run(planned, actors)["adapter"])
        write_json(marker, {"adapter": adapter})
        if config.evaluate.max_pixels:
            return False
        evaluate.run(evaluation(config, adapter), actors, ray.get(actors.store.promoted.remote()))
        return True


def main() -> None:
    stage, path = sys.argv[1:]
    with driver(stage):
        run(stage, load(path))


if __name__ == "__main__":
    main()
