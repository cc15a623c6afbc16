"""The tasks of Ray Data that read and change the records of a source."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from pixelis.datasets.changes import Change, Read
from pixelis.datasets.execution import stream_context

ROWS = 8
"""Records passed to Ray Data at a time, which joins them into blocks."""
BLOCK_BYTES = 1 << 17
"""Size of a block: some hundred questions, so that the first ones arrive early."""
AHEAD_BYTES = 1 << 22
"""Size of the records that are read ahead, in the object store."""
READERS = 4
"""Tasks that read at the same time, at most one for each part: those of the next pass would only start processes."""
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "text": pa.string(),
        "weight": pa.float64(),
        "file": pa.string(),
        "row": pa.string(),
        "problem": pa.list_(pa.string()),
        "labels": pa.string(),
    }
)
"""The columns of a row, see `stream.END`."""


class Parts(Datasource):
    """One read task for each part of a source, in order."""

    def __init__(self, name: str, reads: list[Read]):
        super().__init__()
        self.name, self.reads = name, reads

    def get_name(self) -> str:
        """The name on Ray's dashboard."""
        return self.name

    def estimate_inmemory_data_size(self) -> int | None:
        """None: unknown before reading."""
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """The tasks."""
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(functools.partial(_blocks, read), metadata, schema=SCHEMA) for read in self.reads]


def execute(name: str, reads: list[Read], passes: int, change: Change | None = None) -> Iterator[dict[str, Any]]:
    """The rows of all tasks of these passes in order."""
    context = stream_context(AHEAD_BYTES)
    context.target_max_block_size = BLOCK_BYTES
    with ray.data.DataContext.current(context):
        blocks = ray.data.read_datasource(
            Parts(name, reads * passes),
            override_num_blocks=len(reads) * passes,
            concurrency=min(READERS, len(reads)),
            ray_remote_args={"num_cpus": 0},
        )
        if change is not None:
            blocks = blocks.map_batches(
                _Changer,
                fn_constructor_args=(change,),
                batch_format="pyarrow",
                batch_size=change.rows,
                num_cpus=change.cpus,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=change.workers),
            )
    for block in blocks.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        yield from block.to_pylist()


class _Changer:
    """Changes the texts of the usable records of a block."""

    def __init__(self, change: Change):
        self.change = change.make(*change.arguments)

    def __call__(self, block: pa.Table) -> pa.Table:
        rows = block.to_pylist()
        usable = [row for row in rows if row["text"] is not None]
        for row, text in zip(usable, self.change([row["text"] for row in usable]), strict=True):
            row["text"] = text
        return pa.Table.from_pylist(rows, schema=SCHEMA)


def _blocks(read: Read) -> Iterator[pa.Table]:
    rows = iter(read())
    while chunk := list(itertools.islice(rows, ROWS)):
        yield pa.Table.from_pylist(chunk, schema=SCHEMA)
