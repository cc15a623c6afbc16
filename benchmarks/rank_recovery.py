"""How much of a full fine-tune do adapters of ranks found by singular values recover?

    python -m benchmarks.rank_recovery [--steps 100] [--seeds 42 1337 2024] [--dir runs/rank_recovery]

The embedded model learns from demonstrations that look closer before they answer, in five arms: not at all (base), with all
parameters, with adapters whose ranks `jobs.ranks` found in what the second changed, with as many adapter parameters in one
rank for all layers, and with rank 1. Same demonstrations, same steps. Each is measured by its loss on held-out demonstrations and
by the accuracy of greedy episodes on held-out questions, operations executed. Recovery is the share of the full fine-tune's gain
over the base.

In one process, without Ray: the learner's own step and checkpoint, the embedded engine and the agent's loop. Finished arms are
taken from DIR, so it may be stopped and started again.
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

from benchmarks.harness import machine, parse_args
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


def settings(folder: Path, seed: int, *overrides: str) -> Config:
    """A nano configuration in its own folder; demonstrations that all look closer."""
    shared = [f"run.dir={folder}", f"run.seed={seed}", "data.direct_share=0", "telemetry.progress=false", "learner.keep=1"]
    return absolute(load("configs/nano/base.yaml", [*shared, "learner.schedule=cosine", *overrides]))


def samples(player: Player, source: str, count: int, seed: int) -> list[TrainSample]:
    """Demonstrations as the learner takes them."""
    out = []
    for row in read_demonstrations(source, count, seed, 0.0):
        trajectory, views = player.play(row)
        tokens, mask = np.asarray(trajectory.token_ids(), np.int64), np.asarray(trajectory.loss_mask(), bool)
        out.append(TrainSample(tokens, mask, np.zeros(len(tokens), np.float32), 1.0, views))
    return out


def learn(config: Config, data: Sequence[TrainSample], held_out: Sequence[TrainSample], steps: int) -> dict[str, float]:
    """Train an arm for ``steps`` (0: the base), write its checkpoint; its loss per token of the held-out demonstrations."""
    trainer = Trainer(config.policy, config.learner, total_steps=max(1, steps), seed=config.run.seed)
    began, size = time.perf_counter(), len(data) // max(1, steps)
    for step in range(steps):
        trainer.update(data[step * size : (step + 1) * size], "sft")
    seconds = time.perf_counter() - began
    trained = sum(p.numel() for p in trainer.zero.parameters.values())
    trainer.save(config.run.dir)
    said = trainer.log_probs(held_out)
    trainer.close()
    loss = -float(np.concatenate(said).mean())
    return {"loss": loss, "parameters": trained if steps else 0, "train_seconds": seconds}


async def accuracy(config: Config, player: Player, questions: Sequence[Question]) -> dict[str, float]:
    """Share of greedy episodes whose answer is the truth, and of those that looked closer."""
    engine = HfEngine(resolve(config.policy.model), config.policy, EngineConfig(max_num_seqs=64), config.run.seed)
    latest = checkpoint.latest(config.run.dir)
    assert latest is not None
    await engine.load(1, load_adapter(latest))
    limits, greedy = Limits.of(config.dialogue, test=True), SamplingParams(temperature=0.0)

    async def one(question: Question) -> tuple[bool, bool]:
        media = {item.id: open_media(item, config.toolbox) for item in question.media}
        images, views = first_look(media, config.dialogue, player.spec.multiple)
        session = await engine.open()
        tools = Direct(player, media)
        episode = await run_episode(session, player.renderer, question, images, views, tools, limits, greedy, "g", 1)
        found = episode.trajectory
        return (found.answer or "").strip() in (question.answers or []), found.operations_ok > 0

    found = await asyncio.gather(*(one(question) for question in questions))
    await engine.aclose()
    return {"accuracy": statistics.fmean(right for right, _ in found), "looked": statistics.fmean(looked for _, looked in found)}


def arm(config: Config, name: str, data: Sequence[TrainSample], held_out: Sequence[TrainSample], asked: int, steps: int) -> Any:
    """One arm, from its folder when it is done."""
    done = Path(config.run.dir) / "result.json"
    if not done.is_file():
        player = Player(config, str(resolve(config.policy.model)))
        found: dict[str, Any] = learn(config, data, held_out, 0 if name == "base" else steps)
        questions = list(read_questions("cards:?split=test&seed=7", limit=asked, epochs=1))
        found |= asyncio.run(accuracy(config, player, questions))
        done.write_text(json.dumps(found), encoding="utf-8")
    found = json.loads(done.read_text(encoding="utf-8"))
    print(f"  {name:8} {found['loss']:7.4f} {found['accuracy']:9.3f} {found['parameters']:11,}", flush=True)
    return found


def experiment(root: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """All arms of one seed."""
    steps, asked = args.steps, args.questions
    plain = settings(root, seed)
    player = Player(plain, str(resolve("nano")))
    data = samples(player, "cards:?split=train", steps * args.batch, seed)
    held_out = samples(player, "cards:?split=validation&seed=11", args.held_out, 11)
    print(f"seed {seed}: {'arm':8} {'loss':>7} {'accuracy':>9} {'parameters':>11}", flush=True)
    full = settings(root / "full", seed, "policy.full=true", f"learner.lr={FULL_LR}")
    out = {
        name: arm(c, name, data, held_out, asked, steps) for name, c in (("base", settings(root / "base", seed)), ("full", full))
    }
    path, file = ranks.run(settings(root / "found", seed, f"ranks.tuned={root / 'full'}"))
    found, lora = list(file.layer_ranks.values()), plain.policy.lora
    sides = sum(sum(row["shape"]) for row in file.layer_metadata.values())
    uniform = max(1, round(file.total_parameters / sides))
    kept = file.analysis_metadata["energy_retained"]
    print(
        f"  ranks {min(found)} to {max(found)} (median {statistics.median(found):g}), {kept:.1%} of the energy; uniform {uniform}"
    )
    chosen = {"ranks": [f"policy.lora.ranks={path}"]}
    for name, rank in (("uniform", uniform), ("one", 1)):
        chosen[name] = [f"policy.lora.rank={rank}", f"policy.lora.alpha={rank * lora.alpha // lora.rank}"]
    for name, overrides in chosen.items():
        out[name] = arm(settings(root / name, seed, f"learner.lr={LORA_LR}", *overrides), name, data, held_out, asked, steps)
    return out


def recovery(arms: dict[str, Any], name: str, key: str) -> float:
    """Share of the full fine-tune's gain over the base that an arm has; above 1 it has more."""
    base, full = arms["base"][key], arms["full"][key]
    return (arms[name][key] - base) / (full - base) if full != base else float("nan")


def main() -> None:
    """Entry point of `python -m benchmarks.rank_recovery`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--held-out", type=int, default=128, help="demonstrations that the loss is measured on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--dir", type=Path, default=Path("runs/rank_recovery"))
    args = parse_args(parser, steps=2, batch=2, questions=2, held_out=4, seeds=[42])
    root = args.dir.absolute()
    print(f"{machine()}; {args.steps} steps of {args.batch} demonstrations\n")
    results = {seed: experiment(root / str(seed), seed, args) for seed in args.seeds}
    print(f"\nrecovery of the full fine-tune's gain, mean of {len(results)} seeds (goal {GOAL:.0%}):")
    for name in ARMS[2:]:
        for key in ("loss", "accuracy"):
            each = [recovery(arms, name, key) for arms in results.values()]
            shown = " ".join(f"{value:.3f}" for value in each)
            print(f"  {name:8} {key:9} {statistics.fmean(each):7.3f}   ({shown})")
    (root / "rank_recovery.json").write_text(json.dumps({"machine": machine(), "results": results}), encoding="utf-8")


if __name__ == "__main__":
    main()
