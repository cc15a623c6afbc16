"""Streams questions by Ray Data: a separate process reads a bounded number ahead of the consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from pixelis.config import DataConfig
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.questions import read_questions, require_text
from pixelis.records import Question

ROWS = 8
"""Questions passed to Ray Data at a time, which joins them into blocks."""
BLOCK_BYTES = 1 << 14
"""Size of a block: some dozens of questions, so that the first ones arrive early."""
AHEAD_BYTES = 1 << 20
"""Size of the questions that are read ahead, in the object store."""
SCHEMA = pa.schema([("question", pa.string()), ("bad", pa.list_(pa.string()))])
"""A question as JSON, or the fields of a bad row."""


class Questions(Datasource):
    """A source as one endless task that yields blocks; Ray Data lets it run no further ahead than its buffers.

    There is one task because the order depends on seed and number only. A question is a kilobyte of text, and one process reads
    far more of them than a cluster answers.
    """

    def __init__(self, data: DataConfig, seed: int, start: int = 0):
        super().__init__()
        self.data, self.seed, self.start = data, seed, start

    def get_name(self) -> str:
        """The name on Ray's dashboard."""
        return "Questions"

    def estimate_inmemory_data_size(self) -> int | None:
        """None: the source is endless."""
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """The one task."""
        data, seed, start = self.data, self.seed, self.start
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(lambda: _blocks(data, seed, start), metadata, schema=SCHEMA)]


def question_stream(
    data: DataConfig, seed: int, start: int = 0, on_bad_row: Callable[[BadRow], None] | None = None
) -> Iterator[Question]:
    """The questions of ``data.train`` from number ``start`` on, in the order of ``read_questions``, endlessly.

    ``on_bad_row`` is called once for each row that cannot be used. Raises what ``read_questions`` raises.
    """
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = BLOCK_BYTES
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(object_store_memory=AHEAD_BYTES)
    with ray.data.DataContext.current(context):
        read = ray.data.read_datasource(Questions(data, seed, start), override_num_blocks=1, num_cpus=0)
    for block in read.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for text, bad in zip(block["question"].to_pylist(), block["bad"].to_pylist(), strict=True):
            if bad is None:
                yield Question.model_validate_json(text)
            elif on_bad_row is not None:
                on_bad_row(BadRow(*bad))


def _blocks(data: DataConfig, seed: int, start: int) -> Iterable[pa.Table]:
    rows: list[dict[str, Any]] = []
    questions = read_questions(
        data.train,
        seed=seed,
        start=start,
        limit=data.limit,
        max_bad_rows=data.max_bad_rows,
        shuffle_rows=data.shuffle_rows,
        on_bad_row=lambda row: rows.append({"question": None, "bad": [*row]}),
    )
    for question in questions:
        text = require_text(question, data.train).model_dump_json(exclude={"annotations"})
        rows.append({"question": text, "bad": None})
        if len(rows) >= ROWS:
            yield pa.Table.from_pylist(rows, schema=SCHEMA)
            rows.clear()
