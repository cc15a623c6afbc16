"""Checks of `--dry-run` across the parts of a job: placement on its machines, the engine, reward phases, the
judge.

The machines are those of `cluster.nodes`, by default this one. Nothing is started.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pixelis.actors.reservations import Need, describe, generator_bundles
from pixelis.config import Config
from pixelis.config.rewards import CurriculumConfig
from pixelis.dialogue.spec import ModelSpec
from pixelis.engines.vllm_files import require_served
from pixelis.errors import BadConfig, PixelisError
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
        """Whether so many parts of a need fit."""
        slack = 1e-2  # processes that reserve nothing still take a thousandth of a CPU
        return (
            parts * need.total("CPU") <= self.cpus + slack and parts * need.total("GPU") <= self.gpus + 1e-6
        )

    def place(self, need: Need, parts: int = 1) -> None:
        """Place so many parts of a need here."""
        self.cpus -= parts * need.total("CPU")
        self.gpus -= parts * need.total("GPU")
        self.parts[need.role] += parts


def check(config: Config, needs: Sequence[Need], grows: bool = False) -> list[Finding]:
    """Whether the parts of a job find room, and whether vLLM serves the model if there are generators.

    ``grows``: more generators may join. The levels are those of `estimate.Finding`.
    """
    findings = _placement(config, needs, grows)
    if config.engine.name == "vllm" and any(need.role.startswith("generator") for need in needs):
        findings += _engine(config)
    return findings


# -- placement -----------------------------------------------------------------------------------------------


def _placement(config: Config, parts: Sequence[Need], grows: bool) -> list[Finding]:
    cluster_nodes = config.cluster.nodes
    cpus = cluster_nodes.cpus or config.cluster.cpus or float(max(4, os.cpu_count() or 4))
    gpus = float(torch.cuda.device_count()) if cluster_nodes.gpus is None else cluster_nodes.gpus
    nodes = [Node(cpus, gpus) for _ in range(cluster_nodes.count)]
    machines = f"{cluster_nodes.count} x ({cpus:g} CPUs, {gpus:g} GPUs)"
    total = " + ".join(f"{p.count} x {p.role} {p.total('GPU'):g}" for p in parts if p.total("GPU"))
    out = []
    if total:
        out.append(Finding("ok", "GPUs", f"{total} = {sum(p.count * p.total('GPU') for p in parts):g}"))
    # Learners first, as the job reserves them, then the largest parts.
    for part in sorted(parts, key=lambda p: (p.role != "learner", -p.total("GPU"), -p.total("CPU"))):
        missing = _place(part, nodes)
        if missing:
            needed = f"{describe(part.bundles)}{' on one machine' if len(part.bundles) > 1 else ''}"
            message = (
                f"{missing} of {part.count} x {part.role} find no room on {machines}: each needs {needed}"
            )
            # Where the machines are not named, the job may be meant for others.
            named = cluster_nodes.gpus is not None or not part.total("GPU")
            message += "" if named else "; name the machines of the job with cluster.nodes"
            is_error = named and not config.cluster.autoscaling
            out.append(Finding("error" if is_error else "note", "placement", message))
    more = config.engine.most_workers - config.engine.workers if grows else 0
    if more and not any(f.subject == "placement" for f in out):
        late = Need("generator with its toolboxes", more, generator_bundles(config))
        missing = _place(late, nodes)
        message = f"{more - missing} of {more} generators beyond engine.workers have room on {machines}"
        waiting = (
            "the others join when nodes are added"
            if config.cluster.autoscaling or missing < more
            else "none can join"
        )
        out.append(
            Finding("note" if missing else "ok", "generators", message + (f"; {waiting}" if missing else ""))
        )
    if not any(f.subject == "placement" for f in out):
        layouts = Counter(
            ", ".join(f"{n} x {role}" for role, n in sorted(node.parts.items())) for node in nodes
        )
        text = "; ".join(f"on {n}: {layout or 'nothing'}" for layout, n in layouts.items())
        out.append(Finding("ok", "placement", f"{machines}: {text}"))
    return out


def _place(part: Need, nodes: list[Node]) -> int:
    """Place the parts of a need; returns how many find no room.

    Learners share a machine if one has room for all.
    """
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


# -- rewards -------------------------------------------------------------------------------------------------


def rewards(config: Config) -> list[Finding]:
    """When the phases of the curriculum begin, and whether the judge and own reward functions can be
    called.
    """
    return [*_curriculum(config), *_services(config)]


def _curriculum(config: Config) -> list[Finding]:
    """The steps at which the phases of the curriculum begin, against the steps of the run."""
    settings, steps = config.rewards.curriculum, config.rft.steps
    if settings.kind == "none":
        return []
    rollouts = config.rft.prompts_per_step * config.rft.group_size
    spans = (
        _triggered_spans(settings, rollouts)
        if settings.kind == "trigger"
        else [(s[0], s[0]) for s in settings.steps[1:]]
    )
    out = []
    for phase, (earliest, latest) in enumerate(spans, 2):
        when = f"at step {earliest}" if earliest == latest else f"at step {earliest} to {latest}, by progress"
        message = f"phase {phase} of {len(spans) + 1} begins {when}, of rft.steps {steps}"
        if earliest >= steps:
            key = (
                "rewards.curriculum.steps"
                if settings.kind == "steps"
                else "check_every, min_samples, first_steps, second_steps"
            )
            out.append(
                Finding(
                    "note", "curriculum", f"{message}: the run ends before; lower {key}, or raise rft.steps"
                )
            )
        elif latest >= steps:
            out.append(
                Finding("note", "curriculum", f"{message}: without enough progress the run ends before")
            )
        else:
            out.append(Finding("ok", "curriculum", message))
    return out


def _triggered_spans(settings: CurriculumConfig, rollouts: int) -> list[tuple[int, int]]:
    """(first, last) step at which phases 2 and 3 can begin; see `rewards.curriculum.Curriculum`."""

    def check_at(step: float) -> int:
        """The first check at or after a step."""
        return settings.check_every * max(1, math.ceil(step / settings.check_every))

    enough = math.ceil(settings.min_samples / rollouts)
    first = check_at(enough), check_at(max(enough, settings.first_steps + 1))
    # The slope is fitted over checks of phase 2, but a product of success and coherence can end it at the
    # first one.
    second = (
        first[0] + settings.check_every,
        max(check_at(settings.second_steps + 1), first[1] + settings.check_every),
    )
    return [first, second]


def _engine(config: Config) -> list[Finding]:
    """Whether vLLM serves the model; a missing model is reported by the checks of the inputs."""
    try:
        require_served(ModelSpec.load(resolve(config.policy.model)))
    except BadConfig as error:
        return [Finding("error", "engine", f"{error.message} ({error.fix})")]
    except PixelisError:
        return []
    return []


def _services(config: Config) -> list[Finding]:
    """Whether the judge has a url, a model and a key in the environment, and own reward functions can be
    called.
    """
    judge, services = config.rewards.judge, Services(config.rewards)
    try:
        services.check()
    except PixelisError as error:
        return [Finding("error", "rewards", f"{error.message} ({error.fix})")]
    finally:
        services.close()
    return (
        [Finding("ok", "rewards", f"judge {judge.model} at {judge.url}, which is not asked now")]
        if judge.url
        else []
    )
