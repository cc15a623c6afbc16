"""The output of refinement: demonstrations by level, and the sets that the recipes of sft, rft and online choose."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pixelis.datasets.refinement import fusion
from pixelis.datasets.refinement.difficulty import LEVELS
from pixelis.datasets.refinement.pipeline import Refinery
from pixelis.errors import BadInput, MissingFile
from pixelis.records import Demonstration, Experience
from pixelis.telemetry.events import plain

FILES = (*(f"{level}.jsonl" for level in LEVELS), "sft.jsonl", "sft_validation.jsonl", "rft.jsonl", "online.jsonl")
"""Every file that a refinement may write a set to."""


def fused(refinery: Refinery, now: float) -> tuple[dict[str, Sequence[BaseModel]], dict[str, Any]]:
    """(records by file, what is said of each set). ``now``, in seconds, decides which experiences are too old."""
    r, seed, kept = refinery.settings, refinery.config.run.seed, refinery.demonstrations
    files: dict[str, Sequence[BaseModel]] = {f"{level}.jsonl": [d for d in kept if d.level == level] for level in LEVELS}
    imitated = fusion.sft(kept, r.sft, seed)
    learnt, checked = fusion.validation(imitated.chosen, refinery.contents, r.sft.validation, seed)
    asked, chosen = fusion.rft([d for d in kept if d.id not in refinery.not_asked], r.rft, seed)
    files |= {"sft.jsonl": learnt, "sft_validation.jsonl": checked, "rft.jsonl": asked}
    said = {
        "sft": {**imitated.summary(), "validation": len(checked)},
        "rft": {**chosen.summary(), "questions": len(asked)},
    }
    if r.online.source:
        files["online.jsonl"], said["online"] = fusion.online(read_experiences(r.online.source), r.online, now, seed)
    return files, said


def examples(kept: Sequence[Demonstration], count: int) -> list[Demonstration]:
    """Demonstrations for the card: each kind and task in turn, the same ones in every run."""
    piles: dict[tuple[str, str], list[Demonstration]] = {}
    for d in sorted(kept, key=lambda d: hashlib.sha256(d.id.encode()).digest()):
        piles.setdefault((d.task, d.kind), []).append(d)
    rounds = [pile[i] for i in range(count) for pile in (piles[key] for key in sorted(piles)) if i < len(pile)]
    return rounds[:count]


def read_experiences(source: str) -> list[Experience]:
    """Experiences of a JSON-lines file; MissingFile, and BadInput naming the line."""
    path, out = Path(source), []
    if not path.is_file():
        raise MissingFile(f"no file {source}", fix="refinement.online.source names a JSON-lines file of experiences")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    out.append(Experience.model_validate_json(line))
                except ValueError as error:
                    raise BadInput(f"{source}, line {number}: {str(error).splitlines()[0]}") from None
    return out


def write_rows(path: Path, rows: Iterable[BaseModel]) -> None:
    """One JSON line a record, aside and then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as out:
        out.writelines(row.model_dump_json() + "\n" for row in rows)
    aside.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Strict JSON, aside and then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(
        json.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8", errors="replace"
    )
    aside.replace(path)
