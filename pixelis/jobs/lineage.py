"""Trace the inputs of a data set, a checkpoint or a result back to their sources and verify every hash.

usage: pixelis lineage RESULT [--mermaid] [--help]

RESULT is a file or folder: a data set, a run, a checkpoint or a rank file. Exits with 1 if an input has changed, is missing or
depends on itself.
"""

from __future__ import annotations

import sys

from pixelis.errors import BadConfig
from pixelis.jobs.command import run_command
from pixelis.telemetry import lineage


def main() -> None:
    """Entry point of `python -m pixelis.jobs.lineage`."""
    run_command("lineage", __doc__, _run)


def _run(words: list[str]) -> None:
    flags = {word for word in words if word.startswith("-")}
    results = [word for word in words if not word.startswith("-")]
    if len(results) != 1 or flags - {"--mermaid"}:
        raise BadConfig("expected one result and optionally --mermaid", fix="pixelis lineage runs/nano/sft")
    node = lineage.trace(results[0])
    print(lineage.mermaid(node) if "--mermaid" in flags else "\n".join(lineage.tree(node)))
    if broken := node.broken:
        print(f"pixelis lineage: {len(broken)} of {len(list(node.walk()))} have changed or are missing", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
