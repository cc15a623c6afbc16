"""A model of an RFT step on many GPUs: how long it takes, what limits it, and how well it predicts runs that
are made here.

    python -m benchmarks.cluster_model

The model plays the rules of the Coordinator over time: questions are admitted within the staleness bound,
generators roll out as many groups at a time as they have slots, the Coordinator handles one group after the
other, a batch is the first groups to finish, and the learner trains and hands over its weights. First it is
compared with the real Coordinator on 1, 2 and 4 generators that sleep, each on a Ray node of its own. Then it
is asked for 8 to 1,024 GPUs.

Measured here: the Coordinator's time for a group. Assumed, because no GPU has run them yet (`--help` lists
the keys): tokens a second of a generator and of a single episode, the share of the peak that training
reaches, and the bandwidth of the weights. `python -m benchmarks.gpu` measures them.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import ray
from ray.cluster_utils import Cluster

from benchmarks import coordinator
from benchmarks.async_overlap import SLOTS, AlternatingScorer, TimedGenerator, group_seconds
from benchmarks.harness import Report, parse_args
from pixelis.actors.coordinator import Coordinator
from pixelis.config import parse
from pixelis.datasets.questions import read_questions

SIGMA = float(np.log(8) / 2.326)
"""Spread of a log-normal duration whose 99th percentile is 8 times the median."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step.

    group: mean of a group on a generator that rolls out `slots` groups at a time; coordinator: for each
    group, one after the other; training: of a batch; transfer: of the weights to all generators.
    """

    group: float
    slots: int
    coordinator: float
    training: float
    transfer: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and the share of the time in which generators, learner and Coordinator work."""

    step: float
    generators: float
    learner: float
    coordinator: float

    @property
    def limit(self) -> str:
        """What a step waits for: the part that is busy most, or the slowest groups if none is busy for half
        of the time.
        """
        parts = {"generators": self.generators, "learner": self.learner, "Coordinator": self.coordinator}
        name = max(parts, key=parts.__getitem__)
        return name if parts[name] > 0.5 else "the slowest groups"


def predict(
    costs: Costs,
    generators: int,
    prompts: int,
    staleness: int,
    steps: int = 12,
    durations: Sequence[float] = (),
) -> Prediction:
    """Play `steps` steps of `prompts` groups; the first quarter is not counted. durations: of the groups, if
    they are known.
    """
    rng, known = np.random.default_rng(0), iter(durations)
    free = [0.0] * (generators * costs.slots)  # when each slot is free
    finished: list[float] = []
    coordinator_free = learner_free = loaded = generating = 0.0
    ends: list[float] = []
    for step in range(steps):
        admitted = prompts * (staleness + 1 if step == 0 else 1)
        for _ in range(admitted):
            seconds = next(known) if durations else costs.group * rng.lognormal(-(SIGMA**2) / 2, SIGMA)
            coordinator_free = max(coordinator_free, loaded) + costs.coordinator
            start = max(heapq.heappop(free), coordinator_free)
            heapq.heappush(free, start + seconds)
            heapq.heappush(finished, start + seconds)
            generating += seconds
        ready = max(heapq.heappop(finished) for _ in range(prompts))
        learner_free = max(ready, learner_free) + costs.training
        loaded = learner_free + costs.transfer
        ends.append(loaded)
    first = steps // 4
    spent = ends[-1] - ends[first - 1] if first else ends[-1]
    step_s = spent / (steps - first)
    share = generating / steps / (step_s * generators * costs.slots)
    return Prediction(step_s, min(1.0, share), costs.training / step_s, prompts * costs.coordinator / step_s)


def measure(
    generators: int, group_s: float, training_s: float, prompts: int, staleness: int, steps: int
) -> float:
    """Seconds of a step of the real Coordinator with sleeping generators, each on a node of its own."""
    with tempfile.TemporaryDirectory() as folder:
        rft = {
            "steps": steps,
            "prompts_per_step": prompts,
            "group_size": 2,
            "max_off_policy_steps": staleness,
        }
        config = parse(
            {"policy": {"model": "nano"}, "run": {"dir": folder}, "rft": rft, "telemetry": {"rollouts": 0}}
        )
        place = TimedGenerator.options(resources={"generator": 1})  # type: ignore[attr-defined]
        actors = [place.remote(group_s, True, "keep") for _ in range(generators)]
        scorer = AlternatingScorer.remote()  # type: ignore[attr-defined]
        real = Coordinator.options(num_cpus=0).remote(config, actors, [scorer])  # type: ignore[attr-defined]
        ray.get(real.begin.remote(0, {}, 0))
        ends = []
        for step in range(steps):
            ray.get(real.next_batch.remote(0, 1, step))
            time.sleep(training_s)
            ray.get(real.step_done.remote(step, 0))
            ends.append(time.monotonic())
        for actor in (real, scorer, *actors):
            ray.kill(actor)
    first = steps // 4
    return (ends[-1] - ends[first - 1]) / (steps - first)


def costs_of(
    args: argparse.Namespace, generators: int, learners: int, prompts: int, coordinator_s: float
) -> Costs:
    """Seconds of a step of a model of `args.parameters` on so many GPUs, all parameters trained."""
    episode = args.turns * args.turn_tokens
    slots = min(args.slots, math.ceil((args.staleness + 1) * prompts / generators))
    group = episode / min(args.episode_tokens_per_s, args.tokens_per_s / (slots * args.group))
    # 6 operations for each parameter and token; prompts and pictures count as much again as what is
    # generated.
    operations = 6 * args.parameters * prompts * args.group * 2 * episode
    training = operations / (learners * args.peak_tflops * 1e12 * args.mfu)
    transfer = 2 * args.parameters / args.bandwidth * (1 + np.log2(max(generators, 2)) / 10)
    return Costs(group, slots, coordinator_s, training, float(transfer))


def main() -> None:
    """Entry point of `python -m benchmarks.cluster_model`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=8.3e9, help="of the policy (Qwen2.5-VL-7B)")
    parser.add_argument("--group", type=int, default=8, help="episodes of a question")
    parser.add_argument("--prompts", type=int, default=512, help="questions of a step")
    parser.add_argument("--turns", type=float, default=3, help="policy turns of an episode")
    parser.add_argument("--turn-tokens", type=float, default=300, help="generated tokens of a turn")
    parser.add_argument(
        "--tokens-per-s", type=float, default=4000, help="assumed: tokens a second of a GPU that generates"
    )
    parser.add_argument(
        "--episode-tokens-per-s", type=float, default=100, help="assumed: tokens a second of one episode"
    )
    parser.add_argument("--slots", type=int, default=16, help="groups that a GPU generates together")
    parser.add_argument("--peak-tflops", type=float, default=989, help="of a learner's GPU (H100, bfloat16)")
    parser.add_argument(
        "--mfu", type=float, default=0.35, help="assumed: share of the peak that training reaches"
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=5e9,
        help="assumed: bytes a second of the weights to the generators",
    )
    parser.add_argument("--staleness", type=int, default=1, help="rft.max_off_policy_steps")
    parser.add_argument("--gpus", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument(
        "--check-seconds", type=float, default=1.0, help="mean of a group in the comparison with real actors"
    )
    parser.add_argument("--check-steps", type=int, default=16, help="steps of the comparison")
    args = parse_args(parser, gpus=[8, 1024], check_seconds=0.05, check_steps=4)
    report, connected = Report("cluster_model"), ray.is_initialized()
    cluster = None
    if not connected:
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 200_000_000}
        )
        for _ in range(4):
            cluster.add_node(num_cpus=0, resources={"generator": 1}, object_store_memory=80_000_000)
        ray.init(cluster.address, log_to_driver=False)
    handled = (
        coordinator.measure(400, 4.0 if args.smoke else 20.0, 0.5 if args.smoke else 2.0, 600).cpu_ms / 1e3
    )
    report.row("Coordinator, ms a group", 1e3 * handled)
    if cluster is not None:
        compare(report, args, handled)
    for gpus in args.gpus:
        scale(report, args, gpus, handled)
    if cluster is not None:
        ray.shutdown()
        cluster.shutdown()
    report.close()


def compare(report: Report, args: argparse.Namespace, handled: float) -> None:
    """Rows of the model against real actors."""
    group_s, prompts, defaults = args.check_seconds, 16, parse({})
    for staleness in (0, 1):
        for generators in (1, 2, 4):
            # Training takes half as long as two generators need.
            training = 0.5 * prompts * group_s / (2 * SLOTS)
            costs = Costs(group_s, SLOTS, handled, training, 0.0)
            count = prompts * (args.check_steps + staleness)
            questions = read_questions(defaults.data.train, seed=defaults.run.seed)
            durations = [
                group_seconds(question.id, group_s, long_tail=True)
                for question in itertools.islice(questions, count)
            ]
            played = predict(costs, generators, prompts, staleness, args.check_steps, durations).step
            real = measure(generators, group_s, training, prompts, staleness, args.check_steps)
            note = f"{played:.2f} s a step, measured {real:.2f} s"
            name = f"predicted / measured, {generators} generators, staleness {staleness}"
            report.row(name, played / real, "", note)


def scale(report: Report, args: argparse.Namespace, gpus: int, handled: float) -> None:
    """Row of the fastest division of the GPUs into generators and learners."""
    best: tuple[float, int, Prediction, Costs] | None = None
    for learners in sorted({max(1, round(gpus * share)) for share in (0.125, 0.25, 0.375, 0.5)}):
        costs = costs_of(args, gpus - learners, learners, args.prompts, handled)
        found = predict(costs, gpus - learners, args.prompts, args.staleness)
        if best is None or found.step < best[0]:
            best = (found.step, learners, found, costs)
    assert best is not None
    step, learners, found, costs = best
    ideal = predict(replace(costs, coordinator=0.0), gpus - learners, args.prompts, args.staleness).step
    busy = (
        f"generators {found.generators:.0%}, learner {found.learner:.0%}, Coordinator "
        f"{found.coordinator:.0%} busy"
    )
    episodes = args.prompts * args.group / step
    note = (
        f"{learners} learn; {episodes:.0f} episodes/s; limited by {found.limit}: {busy}; without the "
        f"Coordinator {ideal:.1f} s"
    )
    report.row(f"{gpus} GPUs, seconds a step", step, "", note)


if __name__ == "__main__":
    main()
