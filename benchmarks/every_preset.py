"""Every algorithm preset and every reward preset on the embedded model: three steps each, with all terms
logged.

    python -m benchmarks.every_preset [--dir runs/presets] [--adapter runs/nano/sft/checkpoints/step_00000150]

Algorithms and rewards run in pairs, so that each occurs at least once. Fails when a run makes no step, logs a
value that is not finite, or does not log a reward term that has a weight. Presets with a judge run without
it: rules decide about digits.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

from benchmarks.harness import parse_args
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.config.presets.algorithms import ALGORITHMS
from pixelis.config.presets.rewards import REWARD_PRESETS
from pixelis.jobs import rft
from pixelis.jobs.driver import driver, run_folder
from pixelis.telemetry import events

STEPS = 3


def config_of(folder: Path, algorithm: str, preset: str, adapter: str | None) -> Config:
    """Return the configuration of one pair's run."""
    overrides = [
        f"run.dir={folder}",
        f"rft.algorithm={algorithm}",
        f"rewards.preset={preset}",
        "rewards.judge.required=false",
        f"rft.steps={STEPS}",
        "rft.prompts_per_step=4",
        "rft.minibatches=2",
        "telemetry.progress=false",
        *([f"policy.adapter={adapter}"] if adapter else []),
    ]
    return absolute(load("configs/nano/base.yaml", overrides))


def problems(config: Config) -> str:
    """Describe what is wrong with the run's log; empty when nothing is."""
    rows = events.read(config.run.dir, "step/policy")
    if len(rows) != STEPS:
        return f"{len(rows)} of {STEPS} steps"
    infinite = [
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    weighted = [name for name, weight in config.rewards.weights.model_dump().items() if weight]
    logged = set().union(*rows)
    missing = [name for name in weighted if f"reward/{name}" not in logged]
    return ", ".join(
        [*(f"{name} is not finite" for name in infinite), *(f"no reward/{name}" for name in missing)]
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/presets"))
    parser.add_argument("--adapter", default=None)
    parser.add_argument("--pairs", type=int, default=max(len(ALGORITHMS), len(REWARD_PRESETS)))
    args = parse_args(parser, pairs=1)
    pairs = itertools.islice(
        zip(itertools.cycle(ALGORITHMS), itertools.cycle(REWARD_PRESETS), strict=False), args.pairs
    )
    failed = []
    with driver("every_preset"):
        for algorithm, preset in pairs:
            config = config_of(args.dir.absolute() / f"{algorithm}-{preset}", algorithm, preset, args.adapter)
            with run_folder(config), placement.placed(config, initial=config.policy.adapter) as actors:
                rft.run(config, actors)
            problem = problems(config)
            failed += [algorithm] if problem else []
            last = events.read(config.run.dir, "step/policy")[-1]
            terms = " ".join(
                f"{k.removeprefix('reward/')}={v:.3g}" for k, v in last.items() if k.startswith("reward/")
            )
            print(
                f"{algorithm:22} {preset:18} {problem or 'ok':10} kl {last.get('policy/kl', 0.0):.2g} "
                "clipped "
                f"{last.get('policy/clipped', 0.0):.2g} {terms}",
                flush=True,
            )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
