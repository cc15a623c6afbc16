"""Recovery of a full fine-tune by adapters whose ranks come from its singular values.

    python -m benchmarks.rank_recovery [--steps 100] [--seeds 42 1337 2024] [--dir runs/rank_recovery]

The embedded model is trained on demonstrations that zoom before they answer, in five arms: no training
(`base`), all parameters (`full`), adapters with the ranks that `jobs.ranks` computes from the full fine-tune
(`ranks`), the same number of adapter parameters with one rank for all layers (`uniform`), and rank 1 (`one`).
All arms have the same demonstrations and steps. Each is measured by its loss on held-out demonstrations and
by the accuracy of greedy episodes on held-out questions with executed operations. Recovery is the share of
the full fine-tune's gain over the base.

Runs in one process without Ray, with the learner's step and checkpoint, the embedded engine and the agent
loop. Arms that are already finished in DIR are not repeated, so an interrupted benchmark can be restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import LocalTools, keep_arguments, machine, parse_args
from pixelis.config import Config, EngineConfig, absolute, load
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_demonstrations, read_questions
from pixelis.dialogue.agent import Limits, run_episode
from pixelis.dialogue.session import SamplingParams
from pixelis.engines.hf import HfEngine
from pixelis.jobs import ranks
from pixelis.operations.media import first_look
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.policy.model_path import resolve
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer
from pixelis.records import Question

GOAL = 0.95
ARMS = ("base", "full", "ranks", "uniform", "one")
FULL_LR, LORA_LR = 1e-3, 2e-3


def make_config(folder: Path, seed: int, *overrides: str) -> Config:
    """Return a configuration of the embedded model with its own folder, in which every demonstration
    zooms.
    """
    shared = [
        f"run.dir={folder}",
        f"run.seed={seed}",
        "data.direct_share=0",
        "telemetry.progress=false",
        "learner.keep=1",
    ]
    return absolute(load("configs/nano/base.yaml", [*shared, "learner.schedule=cosine", *overrides]))


def samples(player: Player, source: str, count: int, seed: int) -> list[TrainSample]:
    """Return played demonstrations as samples for SFT."""
    played = []
    for row in read_demonstrations(source, count, seed, 0.0):
        trajectory, views = player.play(row)
        tokens, mask = np.asarray(trajectory.token_ids(), np.int64), np.asarray(trajectory.loss_mask(), bool)
        played.append(TrainSample(tokens, mask, np.zeros(len(tokens), np.float32), 1.0, views))
    return played


def learn(
    config: Config, data: Sequence[TrainSample], held_out: Sequence[TrainSample], steps: int
) -> dict[str, float]:
    """Train an arm for ``steps`` (0: the base) and write its checkpoint; return its held-out loss per token,
    and counts.
    """
    trainer = Trainer(config.policy, config.learner, total_steps=max(1, steps), seed=config.run.seed)
    start, size = time.perf_counter(), len(data) // max(1, steps)
    for step in range(steps):
        trainer.update(data[step * size : (step + 1) * size], "sft")
    seconds = time.perf_counter() - start
    trained = sum(p.numel() for p in trainer.model.zero.parameters.values())
    trainer.save(config.run.dir)
    loss = -float(np.concatenate(trainer.model.log_probs(held_out)).mean())
    trainer.close()
    return {"loss": loss, "parameters": trained if steps else 0, "train_seconds": seconds}


async def accuracy(config: Config, player: Player, questions: Sequence[Question]) -> dict[str, float]:
    """Return the share of greedy episodes with the correct answer, and of those with a successful
    operation.
    """
    engine = HfEngine(
        resolve(config.policy.model), config.policy, EngineConfig(max_num_seqs=64), config.run.seed
    )
    latest = checkpoint.latest(config.run.dir)
    assert latest is not None
    await engine.load(1, load_adapter(latest))
    limits, greedy = Limits.of(config.dialogue, test=True), SamplingParams(temperature=0.0)

    async def run(question: Question) -> tuple[bool, bool]:
        media = {item.id: open_media(item, config.toolbox) for item in question.media}
        images, views = first_look(media, config.dialogue, player.spec.multiple)
        session = await engine.open()
        tools = LocalTools(player, media)
        episode = await run_episode(
            session, player.renderer, question, images, views, tools, limits, greedy, "g", 1
        )
        trajectory = episode.trajectory
        return (trajectory.answer or "").strip() in (question.answers or []), trajectory.operations_ok > 0

    results = await asyncio.gather(*(run(question) for question in questions))
    await engine.aclose()
    correct, operated = zip(*results, strict=True)
    return {"accuracy": statistics.fmean(correct), "looked": statistics.fmean(operated)}


def run_arm(
    config: Config, name: str, data: Sequence[TrainSample], held_out: Sequence[TrainSample], args: Any
) -> dict[str, Any]:
    """Train and evaluate one arm, unless its result exists; print and return the result."""
    path = Path(config.run.dir) / "result.json"
    if not path.is_file():
        player = Player(config, str(resolve(config.policy.model)))
        measured: dict[str, Any] = learn(config, data, held_out, 0 if name == "base" else args.steps)
        questions = list(read_questions("cards:?split=test&seed=7", limit=args.questions, epochs=1))
        measured |= asyncio.run(accuracy(config, player, questions))
        path.write_text(json.dumps(measured), encoding="utf-8")
    result = json.loads(path.read_text(encoding="utf-8"))
    print(
        f"  {name:8} {result['loss']:7.4f} {result['accuracy']:9.3f} {result['parameters']:11,}", flush=True
    )
    return result


def run_seed(root: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run all arms of one seed."""
    config = make_config(root, seed)
    player = Player(config, str(resolve("nano")))
    data = samples(player, "cards:?split=train", args.steps * args.batch, seed)
    held_out = samples(player, "cards:?split=validation&seed=11", args.held_out, 11)
    print(f"seed {seed}: {'arm':8} {'loss':>7} {'accuracy':>9} {'parameters':>11}", flush=True)
    full = make_config(root / "full", seed, "policy.full=true", f"learner.lr={FULL_LR}")
    results = {
        "base": run_arm(make_config(root / "base", seed), "base", data, held_out, args),
        "full": run_arm(full, "full", data, held_out, args),
    }
    path, file = ranks.run(make_config(root / "found", seed, f"ranks.tuned={root / 'full'}"))
    layer_ranks, lora = list(file.layer_ranks.values()), config.policy.lora
    sides = sum(sum(row["shape"]) for row in file.layer_metadata.values())
    uniform = max(1, round(file.total_parameters / sides))
    energy = file.analysis_metadata["energy_retained"]
    extent = f"{min(layer_ranks)} to {max(layer_ranks)} (median {statistics.median(layer_ranks):g})"
    print(f"  ranks {extent}, {energy:.1%} of the energy; uniform {uniform}")
    overrides = {"ranks": [f"policy.lora.ranks={path}"]}
    for name, rank in (("uniform", uniform), ("one", 1)):
        overrides[name] = [f"policy.lora.rank={rank}", f"policy.lora.alpha={rank * lora.alpha // lora.rank}"]
    for name, values in overrides.items():
        arm_config = make_config(root / name, seed, f"learner.lr={LORA_LR}", *values)
        results[name] = run_arm(arm_config, name, data, held_out, args)
    return results


def recovery(arms: dict[str, Any], name: str, key: str) -> float:
    """Return the share of the full fine-tune's gain over the base that an arm reaches."""
    base, full = arms["base"][key], arms["full"][key]
    return (arms[name][key] - base) / (full - base) if full != base else float("nan")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--held-out", type=int, default=128, help="demonstrations for the held-out loss")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--dir", type=Path, default=Path("runs/rank_recovery"))
    args = parse_args(parser, steps=2, batch=2, questions=2, held_out=4, seeds=[42])
    root = args.dir.absolute()
    keep_arguments(root, args, "seeds")
    print(f"{machine()}; {args.steps} steps of {args.batch} demonstrations\n")
    results = {seed: run_seed(root / str(seed), seed, args) for seed in args.seeds}
    print(f"\nrecovery of the full fine-tune's gain, mean of {len(results)} seeds (goal {GOAL:.0%}):")
    for name in ARMS[2:]:
        for key in ("loss", "accuracy"):
            by_seed = [recovery(arms, name, key) for arms in results.values()]
            values = " ".join(f"{value:.3f}" for value in by_seed)
            print(f"  {name:8} {key:9} {statistics.fmean(by_seed):7.3f}   ({values})")
    (root / "rank_recovery.json").write_text(
        json.dumps({"machine": machine(), "results": results}), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
