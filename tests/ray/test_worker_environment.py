"""Variables of a driver reach workers of a joined cluster; no log or table of Ray has a secret."""

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

NAMES = "NCCL_DEBUG", "WANDB_PROJECT", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"
NAMES += "PIXELIS_JUDGE_API_KEY", "UNRELATED_TOKEN"
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
    public = {"NCCL_IB_HCA": "mlx5", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "http://tracker:5000"}
    public |= {
        "UCX_TLS": "tcp",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    secret = {"WANDB_API_KEY": "k", "HF_TOKEN": "t", "JUDGE": "j"}
    secret |= {"MLFLOW_S3_ENDPOINT_URL": "https://me:pass@store"}
    assert worker_variables(config, public | secret | {"HOME": "/"}) == (public, secret)


@pytest.mark.slow
def test_a_worker_on_a_joined_cluster_has_the_drivers_variables_and_ray_logs_no_secret(
    ray_cluster: None,
) -> None:
    """Ray refuses a driver that repeats a variable of `ray job submit --runtime-env-json`."""
    submitted = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "PIXELIS_JUDGE_API_KEY": "k"}
    as_job_manager = {"runtime_env": {"env_vars": submitted}, "metadata": {}}
    key = secrets.token_hex(16)
    own = {"WANDB_PROJECT": "zoom", "WANDB_API_KEY": key, "UNRELATED_TOKEN": key}
    own |= {"MLFLOW_TRACKING_URI": f"http://me:{key}@tracker"}
    env = {**os.environ, **submitted, **own, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(as_job_manager)}
    command = [sys.executable, "-c", DRIVER, ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    given = {name: value for name, value in (submitted | own).items() if name in NAMES}
    assert json.loads(done.stdout.splitlines()[-1]) == {**given, "UNRELATED_TOKEN": None}
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    contents = [file.read_bytes() for file in session.rglob("*") if file.is_file()]
    assert any(b"WANDB_PROJECT" in content for content in contents), "Ray logs runtime environments"
    assert not any(key.encode() in content for content in contents)
