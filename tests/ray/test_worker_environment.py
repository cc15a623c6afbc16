"""Variables of a driver reach the workers of a joined cluster; secrets among them are in no log and no table
of Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from pixelis.actors.cluster import worker_variables
from pixelis.config import load

NAMES = (
    "NCCL_DEBUG",
    "WANDB_PROJECT",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_URI",
    "PIXELIS_JUDGE_API_KEY",
    "UNRELATED_TOKEN",
)
DRIVER = f"""
import json, os, sys
import ray
from pixelis.actors.cluster import connect
from pixelis.config import load

connect(load(None, ["cluster.address=" + sys.argv[1]]))


@ray.remote(num_cpus=0)
def environment():
    return {{name: os.environ.get(name) for name in {NAMES}}}


print(json.dumps(ray.get(environment.remote())))
"""


def test_secrets_are_told_apart_by_their_names_and_values() -> None:
    config = load(None, ["rewards.judge.api_key_env=JUDGE"])
    environment = {
        "NCCL_IB_HCA": "mlx5",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "k",
        "HF_TOKEN": "t",
        "JUDGE": "j",
        "HOME": "/",
    }
    environment |= {
        "MLFLOW_TRACKING_URI": "http://tracker:5000",
        "MLFLOW_S3_ENDPOINT_URL": "https://me:pass@store",
    }
    public, secret = worker_variables(config, environment)
    assert set(public) == {"NCCL_IB_HCA", "WANDB_MODE", "MLFLOW_TRACKING_URI"}
    assert set(secret) == {"WANDB_API_KEY", "HF_TOKEN", "JUDGE", "MLFLOW_S3_ENDPOINT_URL"}


@pytest.mark.slow
def test_variables_of_a_submitted_job_are_not_given_again(ray_cluster: None) -> None:
    """Ray refuses a driver that repeats a variable of `ray job submit --runtime-env-json`."""
    given = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "WANDB_API_KEY": "k"}
    submitted = {"runtime_env": {"env_vars": given}, "metadata": {}}  # as the job manager tells the driver
    env = {
        **os.environ,
        **given,
        "WANDB_PROJECT": "zoom",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(submitted),
    }
    command = [sys.executable, "-c", DRIVER, ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert (values["NCCL_DEBUG"], values["WANDB_PROJECT"], values["WANDB_API_KEY"]) == ("INFO", "zoom", "k")


@pytest.mark.slow
def test_a_worker_on_a_joined_cluster_has_the_drivers_variables_and_ray_logs_no_secret(
    ray_cluster: None,
) -> None:
    key = secrets.token_hex(16)
    given = {
        "NCCL_DEBUG": "WARN",
        "WANDB_PROJECT": "zoom",
        "WANDB_API_KEY": key,
        "PIXELIS_JUDGE_API_KEY": key,
    }
    given |= {"MLFLOW_TRACKING_URI": f"http://me:{key}@tracker", "UNRELATED_TOKEN": key}
    command = [sys.executable, "-c", DRIVER, ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {**given, "UNRELATED_TOKEN": None}
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    files = [file for file in session.rglob("*") if file.is_file()]
    assert any(b"WANDB_PROJECT" in file.read_bytes() for file in files), (
        "Ray logs the variables of a runtime environment"
    )
    assert not [file for file in files if key.encode() in file.read_bytes()]
