"""Ray Data streams: settings that all of them share, and the tasks that read the parts of a source."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import ray.data
from ray.data import DataContext, Datasource, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

PAUSE_S = 0.01
ROWS = 8
"""Records passed to Ray Data at a time."""
BLOCK_BYTES = 1 << 17
"""Some hundred questions, so that the first ones arrive early."""
AHEAD_BYTES = 1 << 22
"""Size of the records that are read ahead, in the object store."""
READERS = 4
"""Most tasks that read at the same time."""
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
Read = Callable[[], Iterable[dict[str, Any]]]


class Change(NamedTuple):
    """A class whose instances map the texts of records to as many others, each in a process.

    workers: most processes; cpus: of each; rows: of one call.
    """

    make: type
    arguments: tuple
    workers: int
    cpus: float
    rows: int


class Pause:
    """Pauses Ray Data's scheduling loop after every step that did not wait.

    Without it the loop takes a whole core while the consumer is slower than the tasks.
    """

    def __init__(self) -> None:
        self.ended = 0.0

    def on_execution_step(self, executor: Any) -> None:
        if time.perf_counter() - self.ended < PAUSE_S:
            time.sleep(PAUSE_S)
        self.ended = time.perf_counter()

    def before_execution_starts(self, executor: Any) -> None: ...

    def after_execution_succeeds(self, executor: Any) -> None: ...

    def after_execution_fails(self, executor: Any, error: Exception) -> None: ...


def stream_context(ahead_bytes: int | None = None) -> DataContext:
    """A context for datasets in order; ``ahead_bytes`` of results may wait for the consumer."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    if ahead_bytes is not None:
        limits = ExecutionResources.for_limits(object_store_memory=ahead_bytes)
        context.execution_options.resource_limits = limits
    context.custom_execution_callback_classes = [Pause]
    return context


class Parts(Datasource):
    def __init__(self, name: str, reads: list[Read]):
        super().__init__()
        self.name, self.reads = name, reads

    def get_name(self) -> str:
        return self.name

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(functools.partial(_blocks, read), metadata, schema=SCHEMA) for read in self.reads]


def _blocks(read: Read) -> Iterator[pa.Table]:
    rows = iter(read())
    while chunk := list(itertools.islice(rows, ROWS)):
        yield pa.Table.from_pylist(chunk, schema=SCHEMA)


def execute(
    name: str, reads: list[Read], passes: int, change: Change | None = None
) -> Iterator[dict[str, Any]]:
    context = stream_context(AHEAD_BYTES)
    context.target_max_block_size = BLOCK_BYTES
    with ray.data.DataContext.current(context):
        blocks = ray.data.read_datasource(
            Parts(name, reads * passes),
            override_num_blocks=len(reads) * passes,
            concurrency=min(READERS, len(reads)),
            num_cpus=0,
        )
        if change is not None:
            blocks = blocks.map_batches(
                ChangeTexts,
                fn_constructor_args=(change,),
                batch_format="pyarrow",
                batch_size=change.rows,
                num_cpus=change.cpus,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=change.workers),
            )
    for block in blocks.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        yield from block.to_pylist()


class ChangeTexts:
    def __init__(self, change: Change):
        self.change = change.make(*change.arguments)

    def __call__(self, block: pa.Table) -> pa.Table:
        rows = block.to_pylist()
        usable = [row for row in rows if row["text"] is not None]
        for row, text in zip(usable, self.change([row["text"] for row in usable]), strict=True):
            row["text"] = text
        return pa.Table.from_pylist(rows, schema=SCHEMA)
