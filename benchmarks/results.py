"""Reproduces the figures of docs/results.md that two cores can measure in two to three hours; compares them
with earlier ones.

    python -m benchmarks.results                                     # or `make results` python -m
    benchmarks.results --list python -m benchmarks.results --only quickstart-42 --only trap python -m
    benchmarks.results --dir runs/results-2 --compare runs/results python -m benchmarks.results --record
    # keeps the figures that have intervals in the repository

Each run is a command of the repository, in a folder of its own with its log and `figures.json`. Runs that
measure what a policy learns need about one core and run two at once (`--at-once`); then those that need the
whole machine run alone. The same command again skips what is complete, and repeats what failed or was made by
another command, such as a smoke run. The last table has every figure with an interval; `--compare` counts how
many lie inside the intervals of another folder, or of the recorded time (benchmarks/results/two_cores.json,
the default).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, parse_args

RECORD = Path(__file__).parent / "results" / "two_cores.json"
"""Every run of the recorded time with its figures that have intervals."""
PYTHON = f"{shlex.quote(sys.executable)} -m"


@dataclass(frozen=True)
class Run:
    """A command and the file with its results below ``{dir}``; without one, they are the last line that it
    prints.

    ``{rft}`` is the checkpoint of the run `quickstart-42`. ``minutes``: an estimate for two cores.
    ``shares``: nothing of it is timed, so that other runs may use the machine meanwhile.
    """

    command: str
    minutes: int
    file: str = ""
    shares: bool = False


def quickstart(seed: int) -> Run:
    """The README's quickstart with another seed."""
    command = (
        f"{PYTHON} pixelis.jobs.quickstart configs/nano/quickstart.yaml run.seed={seed} run.dir={{dir}}/run"
    )
    return Run(command, 8, "run/summary.json")


RUNS = {
    **{f"quickstart-{seed}": quickstart(seed) for seed in (42, 1337, 2024)},
    "trap": Run(
        f"{PYTHON} benchmarks.learning_trap --rewards pixel_reasoner pixelis --dir {{dir}}/run",
        53,
        "run/trap.json",
        shares=True,
    ),
    "curriculum": Run(
        f"{PYTHON} benchmarks.curriculum --dir {{dir}}/run", 18, "run/curriculum.json", shares=True
    ),
    "conversation": Run(f"{PYTHON} benchmarks.conversation --seeds 42 --dir {{dir}}/run", 4, shares=True),
    "ablation": Run(
        (
            f"{PYTHON} pixelis.jobs.ablate configs/ablations/test_time.yaml policy.adapter={{rft}} "
            "dir={dir}/run"
        ),
        11,
        "run/report.json",
        shares=True,
    ),
    "capabilities": Run(
        f"{PYTHON} benchmarks.capabilities --count 60 --dir {{dir}}/run --policy base= --policy rft={{rft}}",
        10,
        "run/capabilities.json",
        shares=True,
    ),
    "votes": Run(
        f"{PYTHON} benchmarks.vote_learning --adapter {{rft}} --arms service labels --dir {{dir}}/run",
        6,
        shares=True,
    ),
    "robustness": Run(
        f"{PYTHON} benchmarks.robustness --adapter {{rft}} --shares 30 --dir {{dir}}/run",
        20,
        "run/robustness.json",
        shares=True,
    ),
    "operations": Run(f"{PYTHON} benchmarks.operations quality speed", 5),
    "heldout": Run(f"{PYTHON} benchmarks.operations heldout", 2),
    "tracking": Run(f"{PYTHON} benchmarks.operations tracking", 6),
    "step": Run(f"{PYTHON} benchmarks.grpo_step --clock cpu", 6),
    "packing": Run(f"{PYTHON} benchmarks.packing", 3),
    "pictures": Run(f"{PYTHON} benchmarks.one_copy", 1),
    "memory": Run(f"{PYTHON} benchmarks.memory", 12),
    "overlap": Run(f"{PYTHON} benchmarks.async_overlap", 6),
    "service": Run(f"{PYTHON} benchmarks.service --adapter {{rft}} --part overhead --part load", 6),
    "soak-service": Run(
        f"{PYTHON} benchmarks.soak --part service --minutes 15 --trees 1 --adapter {{rft}} --dir {{dir}}/run",
        18,
    ),
    "soak-training": Run(f"{PYTHON} benchmarks.soak --part training --steps 600 --dir {{dir}}/run", 3),
}
CENTRES = ("median", "accuracy", "mean", "value", "difference", "estimate")
"""Names under which results hold the figure to which an interval belongs: the first that lies in it."""


def figures(value: Any, path: str = "") -> Iterator[tuple[str, float, tuple[float, float] | None]]:
    """The numbers in a JSON value with their paths, and their intervals: `ci95`, or `low` and `high`, beside
    the number.
    """
    if isinstance(value, dict):
        interval = value.get("ci95") or [value.get("low"), value.get("high")]
        known = len(interval) == 2 and all(isinstance(bound, int | float) for bound in interval)
        numbers = [name for name in CENTRES if isinstance(value.get(name), int | float)]
        centre = next((name for name in numbers if known and interval[0] <= value[name] <= interval[1]), None)
        if centre is not None:
            yield path, float(value[centre]), (float(interval[0]), float(interval[1]))
            value = {key: item for key, item in value.items() if key not in (centre, "ci95", "low", "high")}
        for key, item in value.items():
            yield from figures(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list):
        named = all(isinstance(item, dict) and "name" in item for item in value)
        for number, item in enumerate(value[:20]):
            yield from figures(item, f"{path}/{item['name'] if named else number}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value), None


def execute(name: str, template: str, run: Run, folder: Path) -> dict[str, Any] | None:
    """Run the command, or read what the same one gave before; returns its record, None if it failed."""
    own = folder / name
    record = own / "figures.json"
    if record.is_file():
        known: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if shlex.split(known["command"])[1:] == shlex.split(template)[1:]:  # wherever the interpreter is
            return known
    own.mkdir(parents=True, exist_ok=True)
    command = template.format(dir=own, rft=_checkpoint(folder) if "{rft}" in template else "")
    print(f"[{name}] about {run.minutes} min: {command}", file=sys.stderr, flush=True)
    started = time.monotonic()
    with (own / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.run(
            shlex.split(command), stdout=subprocess.PIPE, stderr=log, text=True, check=False
        )
        log.write(process.stdout)
    if process.returncode:
        print(
            f"[{name}] failed with exit code {process.returncode}: see {own / 'log.txt'}",
            file=sys.stderr,
            flush=True,
        )
        return None
    source = (
        (own / run.file).read_text(encoding="utf-8") if run.file else process.stdout.strip().splitlines()[-1]
    )
    rows = [
        {"path": path, "value": value, "interval": interval}
        for path, value, interval in figures(json.loads(source))
    ]
    result = {
        "command": template,
        "machine": machine(),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "figures": rows,
    }
    record.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def _checkpoint(folder: Path) -> str:
    """The last checkpoint of RFT in the first quickstart."""
    checkpoints = sorted((folder / "quickstart-42" / "run").glob("**/rft/checkpoints/step_*"))
    if not checkpoints:
        raise SystemExit(f"no checkpoint of rft in {folder / 'quickstart-42'}: run quickstart-42 first")
    return str(checkpoints[-1])


def inside(new: dict[str, Any], old: dict[str, Any]) -> list[tuple[str, float, float, tuple[float, float]]]:
    """Path, earlier value, value and earlier interval of the figures that have one in ``old``."""
    values = {row["path"]: row["value"] for row in new["figures"]}
    return [
        (row["path"], row["value"], values[row["path"]], tuple(row["interval"]))
        for row in old["figures"]
        if row["interval"] and row["path"] in values
    ]


def main() -> None:
    """Run what is left, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/results"))
    parser.add_argument("--only", choices=RUNS, action="append", help="run only this; may be repeated")
    parser.add_argument("--at-once", type=int, default=2, help="runs at once that may share the machine")
    parser.add_argument(
        "--compare", type=Path, default=RECORD, help="folder of an earlier time, or file of --record"
    )
    parser.add_argument(
        "--record", action="store_true", help=f"write the figures to {RECORD.name} if no run failed"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    args = parse_args(parser, only=["packing"])
    names = args.only or list(RUNS)
    if args.list:
        print("\n".join(f"{name:16} {RUNS[name].minutes:3} min  {RUNS[name].command}" for name in names))
        return
    if args.record and args.smoke:
        parser.error("--record: the figures of a smoke run mean nothing")
    if args.compare != RECORD and not args.compare.exists():
        parser.error(f"--compare: there is no {args.compare}")
    folder = args.dir.absolute()
    started, more = time.monotonic(), " --smoke" if args.smoke else ""

    def run(name: str) -> dict[str, Any] | None:
        return execute(name, RUNS[name].command + more, RUNS[name], folder)

    first = names[:1]  # quickstart-42 has the checkpoint of the others
    results = {name: run(name) for name in first}
    shared = [name for name in names if RUNS[name].shares and name not in first]
    with ThreadPoolExecutor(args.at_once) as pool:
        results |= dict(zip(shared, pool.map(run, shared), strict=True))
    results |= {name: run(name) for name in names if name not in results}
    print(f"\n| run | figure | value | interval |\n|---|---|---|---|\n{_rows(results)}")
    failed = [name for name, result in results.items() if result is None]
    total = sum(result["minutes"] for result in results.values() if result is not None)
    minutes = (time.monotonic() - started) / 60
    print(f"\n{machine()}; {total:.0f} minutes together, {minutes:.0f} this time")
    if failed:
        print(f"failed: {', '.join(failed)}")
    earlier = recorded(args.compare)
    if earlier:
        _print_comparison(results, earlier, args.compare)
    if failed:
        raise SystemExit(1)
    if args.record:
        runs = recorded(RECORD) | {name: kept(result) for name, result in results.items() if result}
        RECORD.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """What the repository keeps of a run: no paths of the machine, and only figures with intervals."""
    rows = [row for row in result["figures"] if row["interval"]]
    short = [
        {
            "path": row["path"],
            "value": round(row["value"], 5),
            "interval": [round(b, 5) for b in row["interval"]],
        }
        for row in rows
    ]
    return {"machine": result["machine"], "minutes": result["minutes"], "figures": short}


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """The runs of an earlier time by name: of a folder, or of a file that --record wrote."""
    if path.is_dir():
        return {
            file.parent.name: json.loads(file.read_text(encoding="utf-8"))
            for file in path.glob("*/figures.json")
        }
    runs: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return runs


def _rows(results: dict[str, dict[str, Any] | None]) -> str:
    lines = []
    for name, result in results.items():
        for row in (result or {"figures": []})["figures"]:
            if row["interval"]:
                low, high = row["interval"]
                lines.append(f"| {name} | {row['path']} | {row['value']:.3f} | [{low:.3f}, {high:.3f}] |")
    return "\n".join(lines)


def _print_comparison(
    results: dict[str, dict[str, Any] | None], earlier: dict[str, dict[str, Any]], path: Path
) -> None:
    compared = []
    for name, result in results.items():
        if result is not None and name in earlier:
            rows = inside(result, earlier[name])
            compared += [
                (f"{name}: {figure}", before, now, interval) for figure, before, now, interval in rows
            ]
    if not compared:
        return
    outside = [row for row in compared if not row[3][0] <= row[2] <= row[3][1]]
    print(f"\n{len(compared) - len(outside)} of {len(compared)} figures lie inside the intervals of {path}")
    for figure, before, now, (low, high) in outside:
        print(f"  outside: {figure} {now:.3f}, before {before:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
