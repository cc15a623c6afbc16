"""Experiences as Parquet: for analysis, cold storage, and to move a memory to other shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from pydantic import ValidationError

from pixelis.errors import BadInput, MissingFile
from pixelis.records import Experience

FORMAT = b"pixelis-experiences-1"
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("created_at", pyarrow.float64()),
        ("user", pyarrow.string()),
        ("status", pyarrow.string()),
        ("priority", pyarrow.float64()),
        ("retrievals", pyarrow.int64()),
        ("successes", pyarrow.int64()),
        ("policy_version", pyarrow.int64()),
        ("question", pyarrow.string()),
        ("answer", pyarrow.string()),
        ("confidence", pyarrow.float64()),
        ("experience", pyarrow.string()),
        ("vector", pyarrow.list_(pyarrow.float32())),
        ("pictures", pyarrow.map_(pyarrow.string(), pyarrow.binary())),
    ],
    metadata={b"format": FORMAT},
)
"""``experience`` is the whole record as JSON and what is read back; the columns beside it are for queries."""


@dataclass(slots=True)
class Kept:
    """An experience with its vector [d] and its pictures (PNG) by image id."""

    experience: Experience
    vector: np.ndarray | None
    pictures: dict[str, bytes]


Chunk = list[Kept]


def write(path: str | os.PathLike[str], chunks: Iterable[Chunk]) -> int:
    """Write all chunks aside and rename the file into place; returns how many experiences."""
    target, count = Path(path), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".aside")
    try:
        with open(aside, "wb") as file:
            os.chmod(aside, 0o600)
            with pyarrow.parquet.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
                for kept in chunks:
                    writer.write_table(pyarrow.Table.from_pylist([_row(k) for k in kept], schema=SCHEMA))
                    count += len(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return count


def _row(kept: Kept) -> dict[str, object]:
    x = kept.experience
    same = ("id", "created_at", "user", "status", "priority", "retrievals", "successes", "policy_version")
    return {
        **{name: getattr(x, name) for name in same},
        "question": x.question.question,
        "answer": x.verdict.answer,
        "confidence": x.verdict.confidence,
        "experience": x.model_dump_json(),
        "vector": None if kept.vector is None else np.asarray(kept.vector, np.float32),
        "pictures": list(kept.pictures.items()),
    }


def read(path: str | os.PathLike[str], rows: int = 500) -> Iterator[Chunk]:
    """Chunks of at most ``rows``; every record is validated. BadInput for a file that ``write`` did not make."""
    if not Path(path).is_file():
        raise MissingFile(f"there is no file {path}", fix="pass a Parquet file that was exported from a memory")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if (file.schema_arrow.metadata or {}).get(b"format") != FORMAT or not file.schema_arrow.equals(SCHEMA):
                raise BadInput(
                    f"{path} holds no experiences", code="bad_schema", fix="pass a file that was exported from a memory"
                )
            for batch in file.iter_batches(rows, columns=["experience", "vector", "pictures"]):
                yield [_kept(row) for row in batch.to_pylist(maps_as_pydicts="strict")]
    except (pyarrow.ArrowException, ValidationError, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}", code="bad_file", fix="export it again") from error


def _kept(row: dict) -> Kept:
    vector = None if row["vector"] is None else np.asarray(row["vector"], np.float32)
    return Kept(Experience.model_validate_json(row["experience"]), vector, row["pictures"] or {})
