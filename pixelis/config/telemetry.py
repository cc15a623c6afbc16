"""Configuration of logs, trackers and saved trajectories."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from pixelis.config.base import Section


class TelemetryConfig(Section):
    trackers: list[Literal["wandb", "tensorboard", "mlflow", "swanlab", "comet", "trackio"]] = Field(
        [],
        description="where to log metrics too; without a key or address in the environment below run.dir, offline",
    )
    rollouts: int = Field(2, ge=0, description="groups of each step written to run.dir/rollouts.jsonl")
    trajectories: int = Field(
        4, ge=0, description="episodes of each evaluation written with pictures to run.dir/trajectories"
    )
    traces: str | None = Field(
        None,
        description=(
            "destination of a service's OpenTelemetry traces: `file` (run.dir/traces) or the URL "
            "of an OTLP collector"
        ),
    )
    trace_share: float = Field(
        1.0, ge=0, le=1, description="share of the requests without a `traceparent` that are traced"
    )
    logs: bool = Field(
        False,
        description=(
            "write the log of a service and a line for each request to run.dir/logs, as JSON lines "
            "with trace ids"
        ),
    )
    progress: bool = Field(True, description="show the progress of the job")

    @field_validator("traces")
    @classmethod
    def _destination(cls, value: str | None) -> str | None:
        if value is not None and value != "file" and not value.startswith(("http://", "https://")):
            raise ValueError("give `file` or a URL that begins with http:// or https://")
        return value
