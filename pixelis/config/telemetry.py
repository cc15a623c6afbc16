"""Configuration of logs, trackers and saved trajectories."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class TelemetryConfig(Section):
    wandb: bool = Field(False, description="log to Weights & Biases (works offline)")
    tensorboard: bool = Field(False, description="log to TensorBoard")
    mlflow: bool = Field(False, description="log to MLflow: run.dir/mlflow.db, or the server of MLFLOW_TRACKING_URI")
    swanlab: bool = Field(False, description="log to SwanLab: offline in run.dir/swanlab, with SWANLAB_API_KEY to its cloud")
    comet: bool = Field(False, description="log to Comet: offline in run.dir/comet, with COMET_API_KEY to its cloud")
    trackio: bool = Field(False, description="log to trackio in run.dir/trackio")
    rollouts: int = Field(2, ge=0, description="groups of each step written to run.dir/rollouts.jsonl")
    trajectories: int = Field(
        4, ge=0, description="episodes of each evaluation during rft written with pictures to run.dir/trajectories; 0: none"
    )
    progress: bool = Field(True, description="show the progress of the job")
