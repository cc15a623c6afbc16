"""Logs results of a run as Weights & Biases artifacts, with their lineage as metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pixelis.policy import checkpoint
from pixelis.telemetry import lineage
from pixelis.telemetry.metrics import Tracker

if TYPE_CHECKING:
    from pixelis.config import Config


def log_results(config: Config) -> None:
    """With telemetry.wandb, log every result in ``run.dir`` that has a lineage file, and the newest checkpoint.

    A failing tracker gives a warning, never an error.
    """
    if not config.telemetry.wandb:
        return
    folder = Path(config.run.dir)
    results = [file.with_name(file.name.removesuffix(f".{lineage.NAME}")) for file in sorted(folder.glob(f"*.{lineage.NAME}"))]
    latest = checkpoint.latest(folder)
    with Tracker(config, only=("wandb",)) as tracker:
        for path in (*results, *([latest] if latest is not None else [])):
            if path.exists() and (known := lineage.read(path)) is not None:
                tracker.artifact(f"{known.kind}-{config.run.name}", known.kind, path, known.model_dump(mode="json"))
