"""The files that start clusters are valid for Ray, KubeRay, Slurm and Docker, and name only what exists."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from memory_entries import wait_for
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts import scripts
from ray.serve.schema import ServeDeploySchema

from pixelis.config import load
from pixelis.jobs import serve as serve_job
from pixelis.jobs.cli import JOBS

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "configs/cluster"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


def check_command(words: list[str]) -> None:
    """A `pixelis JOB CONFIG key=value ...` whose job, recipe and keys exist."""
    program, job, config, *overrides = words
    assert program == "pixelis"
    assert job in JOBS
    assert (ROOT / config).is_file()
    load(config, overrides)


def test_ray_up_takes_the_cluster_file() -> None:
    config = prepare_config(read("ray_up.yaml"))
    validate_config(config)
    nodes = config["available_node_types"]
    assert nodes["gpu"]["min_workers"] == 0 < nodes["gpu"]["max_workers"] <= config["max_workers"]
    for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
        words = [word for word in shlex.split(command) if not re.match(r"\w+=", word)]
        name, arguments = scripts.cli.get_command(None, words[1]), words[2:]  # type: ignore[arg-type]
        assert words[0] == "ray"
        name.make_context(words[1], arguments)  # parses every option


@pytest.mark.parametrize(
    ("file", "kind", "cluster"),
    [("rayjob", "RayJob", "rayClusterSpec"), ("rayservice", "RayService", "rayClusterConfig")],
)
def test_kuberay_takes_the_manifest(file: str, kind: str, cluster: str) -> None:
    manifest = read(f"{file}.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", kind)
    spec = manifest["spec"][cluster]
    assert spec["rayVersion"] == ray.__version__
    (workers,) = spec["workerGroupSpecs"]
    assert workers["minReplicas"] == 0 < workers["maxReplicas"]
    for group in (spec["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted, volumes = (
            {part["name"] for part in parts} for parts in (container["volumeMounts"], pod["volumes"])
        )
        assert mounted == volumes
        assert container["workingDir"] in (ROOT / "Dockerfile").read_text()
        flags = [f"--{key}={value}" for key, value in group["rayStartParams"].items()]
        scripts.start.make_context("start", flags)
    if kind == "RayJob":
        check_command(shlex.split(manifest["spec"]["entrypoint"]))
        assert yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"]
    else:
        assert yaml.safe_load(manifest["spec"]["serveConfigV2"]) == read("serve.yaml")


def test_serve_deploy_takes_the_service() -> None:
    file = read("serve.yaml")
    schema = ServeDeploySchema.model_validate(file)
    assert [app.route_prefix for app in schema.applications] == [None, "/"]
    engines, gateways = schema.applications
    assert gateways.args.pop("engines") == engines.name
    for application in (engines, gateways):
        module, name = application.import_path.split(":")
        assert module == serve_job.__name__
        assert callable(getattr(serve_job, name))
        assert (ROOT / application.args["config"]).is_file()
        serve_job._config(application.args)


def slurm_machine(folder: Path, nodes: int, gpus: int, **tools: str) -> dict[str, str]:
    """A folder to submit from, with stand-ins for Slurm's programs; returns the environment of the script."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    for name, body in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    slurm = {"SUBMIT_DIR": str(folder), "JOB_ID": "123456", "JOB_NUM_NODES": str(nodes)}
    slurm |= {"CPUS_PER_TASK": "64", "GPUS_ON_NODE": str(gpus), "JOB_NODELIST": "node[7-8]"}
    named = {f"SLURM_{name}": value for name, value in slurm.items()}
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **named}


def test_the_slurm_script_starts_ray_on_every_node_and_removes_its_token(tmp_path: Path) -> None:
    script = CLUSTER / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    srun = 'printf "%s\\n" "$@"; stat -c "mode %a" "$RAY_AUTH_TOKEN_PATH"'
    env = slurm_machine(tmp_path, 2, 8, srun=srun, scontrol='printf "node7\\nnode8\\n"')
    job = ["rft", "configs/qwen2_5_vl_7b/cluster.yaml", "run.dir=/shared/my run"]
    done = subprocess.run(["bash", script, *job], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *command, mode = done.stdout.splitlines()
    assert mode == "mode 600"
    assert not list(tmp_path.glob(".ray-token*"))
    assert command[0] == "--cpus-per-task=64", "srun inherits it no longer"
    assert command[2:8] == ["ray", "symmetric-run", "--address", "node7:23456", "--min-nodes", "2"]
    start, entrypoint = command[8 : command.index("--")], command[command.index("--") + 1 :]
    scripts.start.make_context("start", ["--head", *start])
    assert entrypoint[:2] == ["bash", "-c"]
    check_command(["pixelis", *entrypoint[4:]])
    assert entrypoint[4:7] == job
    assert subprocess.run(["bash", script], env=env, capture_output=True, text=True).returncode == 2


def test_a_slurm_job_whose_time_is_up_stops_its_run_and_is_queued_again(tmp_path: Path) -> None:
    env = slurm_machine(
        tmp_path,
        nodes=1,
        gpus=0,
        srun='while [ "$1" != -- ]; do shift; done; shift; "$@"',  # as Ray's: it runs what stands behind --
        pixelis='trap "echo saved; exit 3" TERM; touch running; while :; do sleep .05; done',
        scontrol='[ "$1" != requeue ] && echo node7 || echo "requeued $2"',
    )
    command = ["bash", CLUSTER / "slurm.sbatch", "rft", "configs/nano/rft.yaml"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as script:
        wait_for((tmp_path / "running").exists)
        script.send_signal(signal.SIGTERM)
        output, _ = script.communicate(timeout=30)
    assert (script.returncode, output.split("\n")) == (3, ["saved", "requeued 123456", ""])
    assert not [*tmp_path.glob(".driver*"), *tmp_path.glob(".ray-token*")]


def test_the_page_names_files_and_commands_that_exist() -> None:
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:configs|tests)/[\w/.]+)`", page):
        assert (ROOT / path).is_file(), path
    named = set(re.findall(r"configs/cluster/[\w.]+", page))
    assert {f"configs/cluster/{file.name}" for file in CLUSTER.iterdir()} <= named
    commands = re.findall(r"pixelis (\w+) (configs/\S+\.yaml)((?:[ \\\n]+[\w.]+=\S+)*)", page)
    assert commands
    for job, config, overrides in commands:
        check_command(["pixelis", job, config, *re.findall(r"[\w.]+=\S+", overrides)])
