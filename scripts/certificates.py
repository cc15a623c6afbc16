"""The table of docs/models.md from certificates, a line for each model type.

python scripts/certificates.py runs/adopt/*/certificate.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("model type", "family", "forward pass", "packing", "LoRA gradients", "`hf`", "`vllm`", "failed")


def cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of a model type's line; rows: its certificates, one an engine."""
    by_engine = {row["engine"]: {check["name"]: check for check in row["checks"]} for row in rows}
    first = next(iter(by_engine.values()))
    measured = [first[name] for name in ("forward pass", "packing", "LoRA gradients")]
    measured += [by_engine.get(engine, {}).get("engine", {}) for engine in ("hf", "vllm")]
    differences = (check.get("difference") for check in measured)
    failed = ", ".join(f"{name} ({row['engine']})" for row in rows for name in row["failed"])
    numbers = ["" if value is None else f"{value:.0e}" for value in differences]
    return [f"`{rows[0]['model_type']}`", f"`{rows[0]['family']}`", *numbers, failed]


def table(rows: Sequence[dict[str, Any]]) -> str:
    models = dict.fromkeys((row["family"] == "generic", row["model_type"]) for row in rows)
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [cells([row for row in rows if row["model_type"] == name]) for _, name in sorted(models)]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


if __name__ == "__main__":
    print(table([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]))
