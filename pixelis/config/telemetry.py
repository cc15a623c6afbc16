"""Configuration of logs, trackers and saved trajectories."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, field_validator

from pixelis.config.base import Section, Share


class TelemetryConfig(Section):
    trackers: list[Literal["wandb", "tensorboard", "mlflow", "swanlab", "comet", "trackio"]] = Field([])
    """where metrics are logged too; offline below run.dir without a key in the environment"""
    rollouts: NonNegativeInt = 2
    """groups of each step written to run.dir/rollouts.jsonl"""
    trajectories: NonNegativeInt = 8
    """episodes of each evaluation shown with pictures, in run.dir/trajectories or the report"""
    traces: str | None = None
    """destination of a service's OpenTelemetry traces: `file` (run.dir/traces) or the URL of an OTLP
    collector"""
    trace_share: Share = 1.0
    """share of the requests without a `traceparent` that are traced"""
    logs: bool = False
    """write the log of a service and a line for each request to run.dir/logs, as JSON lines with trace ids"""
    progress: bool = True
    """show the progress of the job"""

    @field_validator("traces")
    @classmethod
    def _destination(cls, value: str | None) -> str | None:
        if value is not None and value != "file" and not value.startswith(("http://", "https://")):
            raise ValueError("give `file` or a URL that begins with http:// or https://")
        return value
