"""Trackers that differ only in how a run is opened: MLflow, SwanLab, Comet and trackio.

Each writes below `run.dir` unless its own environment variables name a server or a key, so a run needs no network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pixelis.config import Config

PROJECT = "pixelis"


class Calls(NamedTuple):
    """How an opened run takes (values, step), and how it ends."""

    log: Callable[[dict[str, float], int], Any]
    close: Callable[[], Any]


class OpenedRun:
    """A sink of metrics in a run of one of OPENERS. Raises ImportError if its package is missing."""

    def __init__(self, name: str, config: Config):
        self._calls = OPENERS[name](config, Path(config.run.dir).resolve())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._calls.log(dict(values), step)

    def close(self) -> None:
        """Flush and close."""
        self._calls.close()


def _mlflow(config: Config, folder: Path) -> Calls:
    import mlflow

    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    mlflow.start_run(run_name=config.run.name)
    return Calls(lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run)


def _swanlab(config: Config, folder: Path) -> Calls:
    import swanlab

    mode = os.environ.get("SWANLAB_MODE") or ("cloud" if "SWANLAB_API_KEY" in os.environ else "offline")
    swanlab.init(project=PROJECT, experiment_name=config.run.name, logdir=str(folder / "swanlab"), mode=mode)
    return Calls(lambda values, step: swanlab.log(values, step=step), swanlab.finish)


def _comet(config: Config, folder: Path) -> Calls:
    import comet_ml

    if "COMET_API_KEY" in os.environ:
        experiment: Any = comet_ml.Experiment(project_name=PROJECT, auto_metric_logging=False)
    else:
        experiment = comet_ml.OfflineExperiment(
            project_name=PROJECT, offline_directory=str(folder / "comet"), auto_metric_logging=False
        )
    experiment.set_name(config.run.name)
    return Calls(lambda values, step: experiment.log_metrics(values, step=step), experiment.end)


def _trackio(config: Config, folder: Path) -> Calls:
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
    import trackio

    trackio.init(project=PROJECT, name=config.run.name, embed=False)
    return Calls(lambda values, step: trackio.log(values, step=step), trackio.finish)


OPENERS: dict[str, Callable[[Config, Path], Calls]] = {
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "comet": _comet,
    "trackio": _trackio,
}
"""Tracker in `config.telemetry` -> opens its run."""
