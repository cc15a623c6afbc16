"""What measuring causal use costs: an evaluation with a tenth of its questions measured / one without.

    python -m benchmarks.looking --adapter CHECKPOINT [--questions 500] [--repeats 5]

Evaluations of the same questions alternate on one generator of the embedded model. Prints the ratio of their
times, and causal use by kind of sham on all questions (docs/looking.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.harness import compare, machine, parse_args
from pixelis.actors import placement
from pixelis.config import absolute, load
from pixelis.jobs import evaluate
from pixelis.jobs.driver import driver, run_folder
from pixelis.jobs.evaluation_arms import Arm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", help="a policy that looks; default: the base model, which does not")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    args = parse_args(parser, questions=10, repeats=2)
    with driver("looking"), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def measurement(count: int) -> Callable[[], Arm]:
            """An evaluation on actors of its own, which rest meanwhile."""
            keys = [f"run.dir={folder}/{count}", f"evaluate.questions={args.questions}"]
            keys += [f"evaluate.causal_use={count}", "telemetry.progress=false", "cluster.cpus=32"]
            config = absolute(load("configs/nano/evaluate.yaml", keys))
            stack.enter_context(run_folder(config))
            actors = stack.enter_context(placement.placed(config, learner=False, initial=args.adapter))
            return lambda: evaluate.measure(config, actors, "looking", 0)

        ratio = compare(measurement(args.questions // 10), measurement(0), args.repeats)
        result = measurement(args.questions)().summary
        row = {"ratio": dataclasses.asdict(ratio), "accuracy": result["accuracy"]}
        print(json.dumps({**row, "looking": result.get("looking"), "machine": machine()}))


if __name__ == "__main__":
    main()
