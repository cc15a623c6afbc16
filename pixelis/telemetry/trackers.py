"""Trackers of `config.telemetry`, through `accelerate.tracking`.

A tracker that fails is dropped with one warning, and the run continues without it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.errors import MissingDependency
from pixelis.policy import checkpoint
from pixelis.telemetry import lineage
from pixelis.telemetry.events import as_number

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from pixelis.config import Config

log = logging.getLogger("pixelis.telemetry")

PROJECT = "pixelis"
PACKAGES = {
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "comet": "comet_ml",
    "trackio": "trackio",
}
"""Tracker in `config.telemetry.trackers` -> the package that it requires."""
ARTIFACT_BYTES = 2**30
"""Size up to which the files of a result are uploaded, not only its metadata."""


def require_trackers(config: Config) -> None:
    for name, package in PACKAGES.items():
        if name in config.telemetry.trackers and importlib.util.find_spec(package) is None:
            raise _not_installed(name)


def log_results(config: Config) -> None:
    """With the tracker wandb, log the newest checkpoint and every result with a lineage file."""
    if "wandb" not in config.telemetry.trackers:
        return
    folder = Path(config.run.dir)
    results = [
        file.with_name(file.name.removesuffix(f".{lineage.NAME}"))
        for file in sorted(folder.glob(f"*.{lineage.NAME}"))
    ]
    latest = checkpoint.latest(folder)
    with Tracker(config, only=("wandb",)) as tracker:
        for path in (*results, *([latest] if latest is not None else [])):
            if path.exists() and (known := lineage.read(path)) is not None:
                tracker.artifact(
                    f"{known.kind}-{config.run.name}", known.kind, path, known.model_dump(mode="json")
                )


class Tracker:
    """Sends a process's metrics to the trackers of `config.telemetry`, of those in ``only``.

    ``resumed``: step that the run continues from; TensorBoard hides what later steps logged before.
    """

    def __init__(self, config: Config, resumed: int | None = None, only: Container[str] = PACKAGES):
        self._trackers: dict[str, GeneralTracker] = {}
        for name in PACKAGES:
            if name in only and name in config.telemetry.trackers:
                try:
                    self._trackers[name] = _start(name, config, resumed)
                except ImportError as error:
                    self._drop(name, _not_installed(name) if error.name == PACKAGES[name] else error)
                except Exception as error:  # a tracker may fail in any way and must not end the run
                    self._drop(name, error)

    @property
    def names(self) -> list[str]:
        return list(self._trackers)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {key: number for key, value in values.items() if (number := as_number(value)) is not None}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(numbers, step=step)
            except Exception as error:
                self._drop(name, error)

    def artifact(self, name: str, kind: str, path: Path, metadata: Mapping[str, Any]) -> None:
        """Log the files of a result to W&B, or above ARTIFACT_BYTES only its metadata."""
        if "wandb" not in self._trackers:
            return
        try:
            import wandb

            artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), type=kind, metadata=dict(metadata))
            files = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]
            if sum(file.stat().st_size for file in files) <= ARTIFACT_BYTES:
                for file in files:
                    artifact.add_file(
                        str(file), name=file.name if path.is_file() else file.relative_to(path).as_posix()
                    )
            self._trackers["wandb"].tracker.log_artifact(artifact)
        except Exception as error:
            self._drop("wandb", error)

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.finish()
            except Exception as error:
                self._drop(name, error)
        self._trackers.clear()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _drop(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        log.warning(
            "tracker %s failed and is off for the rest of this run: %s: %s", name, type(error).__name__, error
        )


def _not_installed(name: str) -> MissingDependency:
    package = PACKAGES[name]
    return MissingDependency(
        f"{package} is not installed", fix=f"pip install {package}, or take {name} out of telemetry.trackers"
    )


def _start(name: str, config: Config, resumed: int | None) -> GeneralTracker:
    """Start a tracker, below ``run.dir`` unless its own environment says otherwise."""
    from accelerate import PartialState, tracking

    PartialState()  # accelerate's logger requires it
    folder = Path(config.run.dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    run = config.run.name
    if name == "wandb":
        return _start_wandb(config, folder)
    if name == "tensorboard":
        tracker = tracking.TensorBoardTracker(
            name, folder, purge_step=None if resumed is None else resumed + 1
        )
    elif name == "mlflow":
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        tracker = tracking.MLflowTracker(PROJECT, run_name=run)
    elif name == "swanlab":
        mode = os.environ.get("SWANLAB_MODE") or ("cloud" if "SWANLAB_API_KEY" in os.environ else "offline")
        tracker = tracking.SwanLabTracker(PROJECT, experiment_name=run, logdir=str(folder / name), mode=mode)
    elif name == "comet":
        import comet_ml

        settings = comet_ml.ExperimentConfig(
            name=run, offline_directory=str(folder / name), auto_metric_logging=False
        )
        tracker = tracking.CometMLTracker(
            PROJECT, online="COMET_API_KEY" in os.environ, experiment_config=settings
        )
    else:
        os.environ.setdefault("TRACKIO_DIR", str(folder / name))
        tracker = tracking.TrackioTracker(PROJECT, name=run, embed=False)
    tracker.start()
    return tracker


def _start_wandb(config: Config, folder: Path) -> GeneralTracker:
    """Start W&B, offline without an API key or a network. With a key it resumes its run."""
    import wandb
    from accelerate.tracking import WandBTracker

    settings = {
        "name": config.run.name,
        "id": hashlib.sha256(f"{folder}:{config.run.name}:{config.run.seed}".encode()).hexdigest()[:16],
        "dir": str(folder),
        "config": config.model_dump(mode="json"),
        "settings": wandb.Settings(init_timeout=30, silent=True, console="off"),
    }
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    tracker = WandBTracker(project, mode=mode, resume="allow" if mode == "online" else None, **settings)
    try:
        tracker.start()
    except wandb.Error as error:
        if mode != "online":
            raise
        log.warning("cannot reach Weights & Biases, writing offline instead: %s", str(error).splitlines()[0])
        tracker = WandBTracker(project, mode="offline", **settings)
        tracker.start()
    return tracker
