"""Print what a data set, a checkpoint or a result was made from, down to the sources, and compare every hash.

usage: pixelis lineage RESULT [--mermaid] [--help]

RESULT is a file or a folder: a data set, a run, one of its checkpoints, a rank file. Exit code 1 when something in the chain has
changed, is missing or is made from itself.
"""

from __future__ import annotations

import sys

from pixelis.errors import BadConfig, PixelisError
from pixelis.telemetry import lineage


def main() -> None:
    """Entry point of `python -m pixelis.jobs.lineage`."""
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        print(__doc__.strip())
        return
    flags = {a for a in arguments if a.startswith("-")}
    results = [a for a in arguments if not a.startswith("-")]
    try:
        if len(results) != 1 or flags - {"--mermaid"}:
            raise BadConfig("one result, and --mermaid at most", fix="pixelis lineage runs/nano/sft")
        node = lineage.trace(results[0])
    except PixelisError as error:
        print(f"pixelis.jobs.lineage: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, BadConfig) else 1) from None
    print(lineage.mermaid(node) if "--mermaid" in flags else "\n".join(lineage.tree(node)))
    if broken := node.broken:
        print(f"pixelis.jobs.lineage: {len(broken)} of {len(list(node.walk()))} are not what was used", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
