"""Long runs that show what a short test cannot: leaks, and what kills under traffic cost.

    python -m benchmarks.soak --part service --adapter CHECKPOINT --minutes 60
    python -m benchmarks.soak --part training --steps 2000

`service`: a service in its own processes gets mixed traffic (questions with pictures, chat completions,
streams, feedback, reads of experiences) at `--share` of the capacity that was just measured, while one of its
processes is killed every minute, and all of them at once three times. Afterwards every acknowledged
experience and feedback must be stored, the audit log and the databases whole. `training`: memory, objects and
open files of a training run.

DIR/service/soak.json has every request, kill and sample. Exits with 1 if a promise was broken, and says
which.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import soak_service, soak_training
from benchmarks.harness import Report, parse_args

PARTS = {"service": soak_service.run, "training": soak_training.run}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/soak"), help="folder of the runs; its parts must not exist yet"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the configuration; may be repeated",
    )
    service = parser.add_argument_group("service")
    service.add_argument("--adapter", help="checkpoint of `sft` or `rft`")
    service.add_argument("--minutes", type=float, default=60.0)
    service.add_argument("--share", type=float, default=0.8, help="rate as a share of the capacity")
    service.add_argument(
        "--capacity-s", type=float, default=60.0, help="seconds in which the capacity is measured"
    )
    service.add_argument("--kill-every-s", type=float, default=60.0)
    service.add_argument("--trees", type=int, default=3, help="kills of the whole process tree")
    service.add_argument(
        "--victim", choices=soak_service.VICTIMS, action="append", help="kill only this; may be repeated"
    )
    service.add_argument("--seed", type=int, default=5)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=2000)
    training.add_argument("--sample-s", type=float, default=5.0, help="seconds between samples")
    quick = ["evolution.canary.enabled=false", "engine.workers=1", "serve.replicas=1"]
    smoke = {
        "minutes": 0.3,
        "capacity_s": 3.0,
        "kill_every_s": 6.0,
        "trees": 0,
        "victim": ["generator", "memory shard"],
    }
    args = parse_args(parser, steps=6, sample_s=0.5, **smoke)
    if args.smoke:
        args.override = [*quick, *args.override]
    parts = args.part or list(PARTS)
    if "service" in parts and not args.adapter:
        parser.error("--part service needs --adapter CHECKPOINT")
    report = Report("soak")
    broken = [f"{part}: {text}" for part in parts for text in PARTS[part](args, report)]
    report.close()
    if broken:
        raise SystemExit(f"broken promises: {'; '.join(broken)}")


if __name__ == "__main__":
    sys.exit(main())
