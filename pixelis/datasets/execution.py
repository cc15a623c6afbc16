"""Settings of Ray Data that all streams share."""

from __future__ import annotations

import time
from typing import Any

import ray.data
from ray.data import DataContext, ExecutionResources

PAUSE_S = 0.02
"""Pause after a step of Ray Data's scheduling loop in which nothing happened, not even a wait."""
SPIN_S = 0.01
"""A longer step has waited."""


class Pause:
    """Pauses the scheduling loop of an execution that makes no progress (a Ray Data execution callback).

    Without it, the loop takes a whole core while the consumer is slower than the tasks: it waits for results, which are ready but
    may not be read yet.
    """

    def __init__(self) -> None:
        self.progress, self.ended = 0, 0.0

    def before_execution_starts(self, executor: Any) -> None:
        """Do nothing."""

    def on_execution_step(self, executor: Any) -> None:
        """Let others work if no task was started, no result read or taken, and the step did not wait."""
        metrics = [operator.metrics for operator in executor._topology]
        progress = sum(m.num_tasks_submitted + m.num_task_outputs_generated + m.num_outputs_taken for m in metrics)
        if progress == self.progress and time.perf_counter() - self.ended < SPIN_S:
            time.sleep(PAUSE_S)
        self.progress, self.ended = progress, time.perf_counter()

    def after_execution_succeeds(self, executor: Any) -> None:
        """Do nothing."""

    def after_execution_fails(self, executor: Any, error: Exception) -> None:
        """Do nothing."""


def stream_context(ahead_bytes: int | None = None) -> DataContext:
    """A context for datasets whose rows keep their order, without output on the terminal.

    ahead_bytes: of results in the object store that the consumer has not taken yet.
    """
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    if ahead_bytes is not None:
        context.execution_options.resource_limits = ExecutionResources.for_limits(object_store_memory=ahead_bytes)
    context.custom_execution_callback_classes = [Pause]
    return context
