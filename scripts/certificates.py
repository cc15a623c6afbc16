"""The table of docs/models.md from certificates.

python scripts/certificates.py runs/adopt/*/certificate.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = (
    "model type",
    "family",
    "engine",
    "forward pass",
    "packing",
    "LoRA gradients",
    "engine's log-probs",
    "passed",
)


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a certificate's line."""
    checks = {check["name"]: check for check in row["checks"]}
    differences = (
        checks[name]["difference"] for name in ("forward pass", "packing", "LoRA gradients", "engine")
    )
    measured = [check for check in checks.values() if check["state"] != "not checked"]
    count = f"{len(measured) - len(row['failed'])} of {len(measured)}"
    engine = row["engine"] if row["dtype"] == "float32" else f"{row['engine']}, {row['dtype']}"
    numbers = ("" if value is None else f"{value:.0e}" for value in differences)
    failed = f"; not {', '.join(row['failed'])}" if row["failed"] else ""
    return [f"`{row['model_type']}`", f"`{row['family']}`", engine, *numbers, count + failed]


def table(rows: Iterable[dict[str, Any]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table(json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]))
