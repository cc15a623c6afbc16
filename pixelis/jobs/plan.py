"""Checks of `--dry-run` across the parts of a job: placement on its machines, the engine, the rewards.

The machines are those of `cluster.nodes`, by default this one. Nothing is started.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pixelis.actors.reservations import Need, describe
from pixelis.config import Config
from pixelis.engines.vllm_files import processor_files
from pixelis.errors import BadConfig, PixelisError
from pixelis.families.spec import load_spec
from pixelis.policy.estimate import Finding
from pixelis.policy.model_path import resolve
from pixelis.rewards.services import Services


@dataclass
class Node:
    """A machine while a job is placed on it: free resources, and the number of parts by role."""

    cpus: float
    gpus: float
    parts: Counter[str] = field(default_factory=Counter)

    def fits(self, need: Need, parts: int = 1) -> bool:
        slack = 1e-2  # processes that reserve nothing still take a thousandth of a CPU
        return (
            parts * need.total("CPU") <= self.cpus + slack and parts * need.total("GPU") <= self.gpus + 1e-6
        )

    def place(self, need: Need, parts: int = 1) -> None:
        self.cpus -= parts * need.total("CPU")
        self.gpus -= parts * need.total("GPU")
        self.parts[need.role] += parts


def check(config: Config, needs: Sequence[Need]) -> list[Finding]:
    """Whether the parts of a job find room, and whether vLLM serves the model if there are generators."""
    findings = _placement(config, needs)
    if config.engine.name == "vllm" and any(need.role.startswith("generator") for need in needs):
        try:
            spec = load_spec(resolve(config.policy.model), family=config.policy.family)
            processor_files(spec, spec.multiple**2)
        except BadConfig as error:
            findings.append(Finding("error", "engine", f"{error.message} ({error.fix})"))
        except PixelisError:  # a missing model, which the check of the inputs reports
            pass
    return findings


def _placement(config: Config, parts: Sequence[Need]) -> list[Finding]:
    where = config.cluster.nodes
    cpus = where.cpus or config.cluster.cpus or float(max(4, os.cpu_count() or 4))
    gpus = float(torch.cuda.device_count()) if where.gpus is None else where.gpus
    nodes = [Node(cpus, gpus) for _ in range(where.count)]
    machines = f"{where.count} x ({cpus:g} CPUs, {gpus:g} GPUs)"
    total = " + ".join(f"{p.count} x {p.role} {p.total('GPU'):g}" for p in parts if p.total("GPU"))
    out, homeless = list[Finding](), list[Finding]()
    if total:
        out.append(Finding("ok", "GPUs", f"{total} = {sum(p.count * p.total('GPU') for p in parts):g}"))
    # Learners first, as the job reserves them, then the largest parts.
    for part in sorted(parts, key=lambda p: (p.role != "learner", -p.total("GPU"), -p.total("CPU"))):
        if not (missing := _place(part, nodes)):
            continue
        each = f"{describe(part.bundles)}{' on one machine' if len(part.bundles) > 1 else ''}"
        message = f"{missing} of {part.count} x {part.role} find no room on {machines}: each needs {each}"
        # Where the machines are not named, the job may be meant for others.
        named = where.gpus is not None or not part.total("GPU")
        message += "" if named else "; name the machines of the job with cluster.nodes"
        is_error = named and not config.cluster.autoscaling
        homeless.append(Finding("error" if is_error else "note", "placement", message))
    if homeless:
        return [*out, *homeless]
    layouts = Counter(", ".join(f"{n} x {role}" for role, n in sorted(node.parts.items())) for node in nodes)
    text = "; ".join(f"on {n}: {layout or 'nothing'}" for layout, n in layouts.items())
    return [*out, Finding("ok", "placement", f"{machines}: {text}")]


def _place(part: Need, nodes: list[Node]) -> int:
    """Place the parts of a need; returns how many find no room. Learners share a machine with room for all."""
    if part.role == "learner":
        for node in nodes:
            if node.fits(part, part.count):
                node.place(part, part.count)
                return 0
    for placed in range(part.count):
        free = next((node for node in nodes if node.fits(part)), None)
        if free is None:
            return part.count - placed
        free.place(part)
    return 0


def rewards(config: Config) -> list[Finding]:
    judge, services = config.rewards.judge, Services(config.rewards)
    try:
        services.check()
    except PixelisError as error:
        return [Finding("error", "rewards", f"{error.message} ({error.fix})")]
    finally:
        services.close()
    ready = Finding("ok", "rewards", f"judge {judge.model} at {judge.url}, which is not asked now")
    return [ready] if judge.url else []
