"""Parquet export and import of experiences, for analysis, cold storage and moving between shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from pydantic import ValidationError

from pixelis.errors import BadInput, MissingFile
from pixelis.files import replacing
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
"""``experience`` is the whole record as JSON; the columns before it are for queries."""


@dataclass(slots=True)
class Entry:
    """An experience, its vector [d] (None: never retrieved), and its pictures (PNG) by image id."""

    experience: Experience
    vector: np.ndarray | None = None
    pictures: dict[str, bytes] = field(default_factory=dict)


def write(path: str | os.PathLike[str], chunks: Iterable[list[Entry]]) -> int:
    """Write all chunks to a file; returns the number of experiences."""
    count = 0
    with (
        replacing(Path(path), permissions=0o600) as file,
        pyarrow.parquet.ParquetWriter(file, SCHEMA, compression="zstd") as writer,
    ):
        for entries in chunks:
            writer.write_table(pyarrow.Table.from_pylist([_row(entry) for entry in entries], schema=SCHEMA))
            count += len(entries)
    return count


def _row(entry: Entry) -> dict[str, object]:
    x = entry.experience
    copied = ("id", "created_at", "user", "status", "priority", "retrievals", "successes", "policy_version")
    return {
        **{name: getattr(x, name) for name in copied},
        "question": x.question.conversation,
        "answer": x.verdict.answer,
        "confidence": x.verdict.confidence,
        "experience": x.model_dump_json(),
        "vector": None if entry.vector is None else np.asarray(entry.vector, np.float32),
        "pictures": list(entry.pictures.items()),
    }


def read(path: str | os.PathLike[str], rows: int = 500) -> Iterator[list[Entry]]:
    """Read chunks of at most ``rows``. Raises BadInput for a file that ``write`` did not create."""
    if not Path(path).is_file():
        raise MissingFile(f"there is no file {path}", fix="pass a Parquet file exported from a memory")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if (schema.metadata or {}).get(b"format") != FORMAT or not schema.equals(SCHEMA):
                raise BadInput(
                    f"{path} contains no experiences",
                    code="bad_schema",
                    fix="pass a file exported from a memory",
                )
            for batch in file.iter_batches(rows, columns=["experience", "vector", "pictures"]):
                yield [
                    Entry(
                        Experience.model_validate_json(row["experience"]),
                        None if row["vector"] is None else np.asarray(row["vector"], np.float32),
                        row["pictures"] or {},
                    )
                    for row in batch.to_pylist(maps_as_pydicts="strict")
                ]
    except (pyarrow.ArrowException, ValidationError, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}", code="bad_file", fix="export it again") from error
