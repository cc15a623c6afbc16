"""What the drivers of all jobs share: the folder of a run with its lock and lineage, and how a job ends."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import RayError

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.config import Config, PolicyConfig, from_command_line
from pixelis.config.base import merge
from pixelis.config.references import EMBEDDED
from pixelis.errors import BadConfig, PixelisError
from pixelis.families.spec import load_spec
from pixelis.files import disk_failures
from pixelis.jobs.dry_run import read_first
from pixelis.jobs.run_lock import owned
from pixelis.operations import select
from pixelis.policy import ranks
from pixelis.policy.adapters import load_adapter
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.telemetry import lineage
from pixelis.telemetry.trackers import log_results, require_trackers

PACKAGES = ("pixelis", "torch", "ray", "transformers", "deepspeed", "peft", "vllm")


class Stopped(KeyboardInterrupt):
    """The user or the cluster stopped the job; the run folder has a checkpoint if a step was made."""


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise the PixelisError in an error of Ray."""
    try:
        yield
    except RayError as error:
        cause = unwrap_ray_error(error)
        if cause is None:
            raise
        raise cause from None


@contextmanager
def driver(name: str) -> Iterator[None]:
    """Context of a job's main: a typed error ends it with a message and code 1 or 2, a stop with 130."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs that ignore SIGINT
        signal.signal(number, stop)
    try:
        with typed_errors():
            yield
    except PixelisError as cause:
        print(f"pixelis {name}: {cause}", file=sys.stderr)
        raise SystemExit(2 if cause.code == "bad_config" else 1) from None
    except KeyboardInterrupt:
        print(f"pixelis {name}: stopped", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def job(
    name: str, doc: str | None, check: Callable[[Config], None] | None = None, model: str = "nano"
) -> Iterator[Config]:
    """`driver`, and the configuration of the command line: without a file that of configs/``model``."""
    with driver(name):
        yield from_command_line(doc or "", name, default=f"configs/{model}/{name}.yaml", check=check)


@contextmanager
def run_folder(
    config: Config,
    *questions: str,
    held_out: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
    has_policy: bool = True,
) -> Iterator[Path]:
    """Check the inputs, create and lock ``run.dir``, and write the configuration and the lineage to it.

    No row of the sources ``held_out`` may be bad. ``sources``: further inputs by role, for the lineage. Raises
    BadConfig if another process uses the folder or it has a run of another policy, and what an input raises.
    """
    inputs: dict[str, list[lineage.Source]] = _check_policy(config) if has_policy else {}
    require_trackers(config)
    for source in (rows := dict.fromkeys((*questions, *held_out))):
        read_first(config, source, held_out=source in held_out)
    inputs["questions"] = list(rows)
    for role, source in (sources or {}).items():
        lineage.local_path(source)  # raises for a missing one
        inputs[role] = [source]
    folder = make_run_dir(config)
    with owned(folder):
        with disk_failures(folder):
            if not config.run.resume:
                for name in ("checkpoints", "versions", "train", "phases", "scorers"):
                    shutil.rmtree(folder / name, ignore_errors=True)
                for name in ("events.jsonl", "rollouts.jsonl", "consumed.jsonl", "best", lineage.NAME):
                    (folder / name).unlink(missing_ok=True)
            _check_same_run(folder, config)
            (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            stop_file(config).unlink(missing_ok=True)
            lineage.record(folder, inputs=inputs, config=config, kind="run", grows=True)
        yield folder
        log_results(config)


def make_run_dir(config: Config) -> Path:
    """Create ``run.dir``. BadConfig if it is, or lies below, a file; InfraFailure for a disk that refuses."""
    folder = Path(config.run.dir)
    with disk_failures(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise BadConfig(
                f"run.dir={folder} is a file, or below one", fix="choose another run.dir"
            ) from None
    return folder


def stop_file(config: Config) -> Path:
    """File that stops the learners after their current step. Users may create it too."""
    return Path(config.run.dir) / "STOP"


def _check_policy(config: Config) -> dict[str, list[lineage.Source]]:
    """Returns the policy's files by role."""
    policy, model = config.policy, resolve(config.policy.model)
    load_spec(model, family=policy.family)
    if policy.adapter and load_adapter(policy.adapter, lazily=True).kind == "lora" and policy.full:
        raise BadConfig(
            f"policy.full trains all parameters, but {policy.adapter} is a LoRA adapter",
            fix="name a checkpoint of a run with policy.full=true, or set policy.full=false",
        )
    if policy.lora.ranks:
        ranks.read(policy.lora.ranks)
    # A user's own may be only on the cluster
    select(name for name in config.toolbox.operations if ":" not in name)
    embedded = None
    if policy.model in EMBEDDED:
        embedded = lineage.Input(source=policy.model, sha256=fingerprint(model))
    files = {"adapter": policy.adapter, "ranks": policy.lora.ranks, "deepspeed": config.learner.deepspeed}
    return {"model": [embedded or model], **{role: [Path(path)] for role, path in files.items() if path}}


def _check_same_run(folder: Path, config: Config) -> None:
    """Raise BadConfig if the folder has checkpoints of another policy; new keys have their defaults."""
    path = folder / "config.yaml"
    if not path.is_file() or not (folder / "checkpoints").is_dir():
        return
    existing = yaml.safe_load(path.read_text(encoding="utf-8")).get("policy", {})
    before = merge(PolicyConfig().model_dump(mode="json"), existing)
    now = config.policy.model_dump(mode="json")
    if different := sorted(f"policy.{key}" for key in now if before[key] != now[key]):
        raise BadConfig(
            f"{folder} has a run of another policy ({', '.join(different)} differ)",
            fix="choose another run.dir, or start over with run.resume=false",
        )


def versions() -> dict[str, str]:
    """The versions of the installed packages that decide how a run computes."""
    return {name: metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}


def hardware() -> str:
    """This machine, and the GPUs of the connected cluster."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    parts = [f"{os.cpu_count()} CPU cores ({cpu})"]
    resources = ray.cluster_resources() if ray.is_initialized() else {}
    if gpus := resources.get("GPU"):
        kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        parts.append(f"{gpus:g} GPUs ({', '.join(sorted(kinds))})")
    return ", ".join([*parts, platform.system(), f"Python {platform.python_version()}"])
