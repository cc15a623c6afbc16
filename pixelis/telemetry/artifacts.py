"""Results of a run as Weights & Biases artifacts; the plain lineage files beside them are there in any case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pixelis.policy import checkpoint
from pixelis.telemetry import lineage
from pixelis.telemetry.metrics import Tracker

if TYPE_CHECKING:
    from pixelis.config import Config


def log_results(config: Config) -> None:
    """Log what lies in ``run.dir`` with a lineage of its own, and the newest checkpoint, when telemetry.wandb is on.

    Offline without a key. A tracker that fails is said, never raised.
    """
    if not config.telemetry.wandb:
        return
    folder = Path(config.run.dir)
    results = [file.with_name(file.name.removesuffix(f".{lineage.NAME}")) for file in sorted(folder.glob(f"*.{lineage.NAME}"))]
    latest = checkpoint.latest(folder)
    with Tracker(config) as tracker:
        for path in (*results, *([latest] if latest is not None else [])):
            if path.exists() and (found := lineage.read(path)) is not None:
                tracker.artifact(f"{found.kind}-{config.run.name}", found.kind, path, found.model_dump(mode="json"))
