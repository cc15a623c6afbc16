"""The output of refinement: demonstrations by level, and the sets for sft and rft."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pixelis.datasets.refinement import fusion
from pixelis.datasets.refinement.difficulty import LEVELS
from pixelis.datasets.refinement.pipeline import Pipeline
from pixelis.files import replacing
from pixelis.records import Demonstration

FILES = (
    *(f"{level}.jsonl" for level in LEVELS),
    "sft.jsonl",
    "sft_validation.jsonl",
    "rft.jsonl",
)


def build(pipeline: Pipeline) -> tuple[dict[str, Sequence[BaseModel]], dict[str, Any]]:
    """(records by file, statistics by set)."""
    s, seed, demonstrations = pipeline.settings, pipeline.config.run.seed, pipeline.demonstrations
    numbers: dict[str, list[int]] = {level: [] for level in LEVELS}
    for i, d in enumerate(demonstrations):
        numbers[d.level or ""].append(i)
    files: dict[str, Sequence[BaseModel]] = {
        f"{level}.jsonl": demonstrations.select(numbers[level]) for level in LEVELS
    }
    sft = fusion.sft(demonstrations, s.sft, seed)
    training, validation = fusion.validation(sft.demonstrations, pipeline.contents, s.sft.validation, seed)
    questions, rft = fusion.rft(
        demonstrations.where(lambda d: d.id not in pipeline.excluded_from_rft), s.rft, seed
    )
    files |= {"sft.jsonl": training, "sft_validation.jsonl": validation, "rft.jsonl": questions}
    statistics = {
        "sft": {**sft.summary(), "validation": len(validation)},
        "rft": {**rft.summary(), "questions": len(questions)},
    }
    return files, statistics


def examples(demonstrations: Sequence[Demonstration], count: int) -> list[Demonstration]:
    """Demonstrations for the data card: each kind and task in turn, the same ones in every run."""
    piles: dict[tuple[str, str], list[tuple[bytes, int]]] = defaultdict(list)
    for i, d in enumerate(demonstrations):
        piles[d.task, d.kind].append((hashlib.sha256(d.id.encode()).digest(), i))
    first = [sorted(piles[key])[:count] for key in sorted(piles)]
    chosen = [pile[i][1] for i in range(count) for pile in first if i < len(pile)]
    return [demonstrations[i] for i in chosen[:count]]


def write_rows(path: Path, rows: Iterable[BaseModel]) -> None:
    with replacing(path) as file:
        file.writelines(row.model_dump_json().encode() + b"\n" for row in rows)
