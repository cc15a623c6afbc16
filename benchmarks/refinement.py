"""Memory and time of refinement by the number of its rows, in one process.

    python -m benchmarks.refinement [--rows 20000 60000]

Rows are demonstrations of pictures of their own that have been executed before, so that what is measured is
refinement itself: rules, quality, duplicates, difficulty, gates, recipes of a thousand rows. The memory of a
row is the difference of two runs divided by that of their rows. Goal: a million rows take less than 2 GB.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Report, parse_args

RUN = """
import json, resource, sys, time
from pixelis.config import load
from pixelis.jobs import refine
started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
summary = refine.run(load(None, sys.argv[1:]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"kept": summary["kept"], "seconds": time.monotonic() - started, "peak": 1024 * peak}))
"""
GATES = ("per_task", "sizes")
TASKS = ("object_counting", "text_extraction", "detail_perception", "geometric_comparison")


def rows(count: int) -> Iterator[dict]:
    """Demonstrations with two zooms and their observations."""
    for i in range(count):
        box = [0.1 + i % 50 / 100, 0.1, 0.7, 0.2 + i % 70 / 100]
        inner = [0.2, 0.1 + i % 40 / 100, 0.6 + i % 30 / 100, 0.9]
        calls = []
        for n, target in ((1, "img0"), (2, "obs1")):
            image = {
                "id": f"obs{n}",
                "parent": target,
                "box": box,
                "source_size": [512, 384],
                "view_size": [504, 392],
            }
            observation = {
                "status": "ok",
                "id": f"obs{n}",
                "text": "the view",
                "images": [image],
                "data": {"zoom_level": 2.0},
            }
            thought = (
                f"I look at part {n} of picture {i}, where sign {i * 7919 % 100_003} should be, to "
                f"read its number {i}"
            )
            arguments = {"box": box if n == 1 else inner}
            calls.append(
                {
                    "think": thought,
                    "op": "zoom_in",
                    "target": target,
                    "arguments": arguments,
                    "observation": observation,
                }
            )
        yield {
            "id": f"row-{i:07}",
            "question": (
                f"Which number is on sign {i * 7919 % 100_003} of the {i % 97} signs beside the road {i}?"
            ),
            "media": [
                {"id": "img0", "uri": f"data:image/png;base64,{base64.b64encode(str(i).encode()).decode()}"}
            ],
            "answers": [str(i)],
            "task": TASKS[i % len(TASKS)],
            "kind": "golden",
            "provenance": {"source": "benchmark", "original_id": str(i), "method": "script"},
            "turns": [*calls, {"think": f"The sign shows {i}", "answer": str(i)}],
        }


def measure(count: int, folder: Path) -> dict[str, float]:
    """The result of a run on ``count`` rows, in a process of its own."""
    source = folder / "rows.jsonl"
    with source.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows(count))
    overrides = [
        f"data.demonstrations={source}",
        f"run.dir={folder / 'run'}",
        "policy.model=nano",
        "telemetry.progress=false",
    ]
    overrides += ["refinement.duplicates.pictures=bytes"]
    overrides += ["refinement.sft.size=1000", "refinement.rft.size=1000"]
    overrides += [f"refinement.gates.{name}=0" for name in GATES]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", RUN, *overrides]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """Entry point of `python -m benchmarks.refinement`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs=2, default=[20_000, 60_000], help="rows of the two runs")
    args = parse_args(parser, rows=[40, 80])
    report, results = Report("refinement"), []
    for count in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(count, Path(folder)))
    (few, many), (first, second) = args.rows, results
    of_a_row = (second["peak"] - first["peak"]) / (many - few)
    report.row(
        "memory of a row, bytes", of_a_row, "<= 2000", f"peak {second['peak'] / 1e9:.2f} GB for {many} rows"
    )
    report.row(
        "rows a second",
        (many - few) / (second["seconds"] - first["seconds"]),
        "",
        f"{second['kept']:.0f} kept",
    )
    report.close()


if __name__ == "__main__":
    main()
