"""Environments: tools with a state, beside the pure operations.

An environment lives in one toolbox process for one episode; a call may change the state, earn a reward or end
the episode.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pixelis.config import ToolboxConfig
from pixelis.config.references import load_reference
from pixelis.errors import BadConfig, BadInput, MissingDependency, install_extra
from pixelis.operations.environment_entry import Entry
from pixelis.operations.operation import Operation
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Observation, Question

PARENT = "environment"
"""Parent of the views of an environment, which no operation can cut a region from."""
_ADAPTED = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<kind>mcp|gym|openenv)(?P<rest>[:+].+)", re.DOTALL)
"""An entry for an environment of another system: its first word names the adapter and the extra it needs."""


class EnvironmentAction(Operation):
    """Base class of the actions of an environment: a name, a description and ``Arguments``; no ``run``."""

    targeted = False


@dataclass(slots=True)
class EnvironmentResult:
    """Text for the policy, ``images`` uint8 [h, w, 3] of any size, and a reward.

    ``done`` ends the episode. ``data``: plain values for own rewards and evaluation.
    """

    text: str = ""
    images: list[np.ndarray] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    data: dict[str, Any] = field(default_factory=dict)


class Environment:
    """Base class of environments; an object is one episode, constructed without arguments.

    ``name``: what rows call it (``env_name``). ``actions``: what the policy may call. ``is_default``: as the
    only environment of a run, it is that of the questions that name no environment and no operations.
    """

    name: ClassVar[str]
    actions: ClassVar[tuple[type[Operation], ...]]
    is_default: ClassVar[bool] = False

    def reset(
        self, question: Question, media: Mapping[str, np.ndarray | Clip], seed: int
    ) -> EnvironmentResult:
        """Start the episode; its text and images are shown below the question.

        ``media``: the question's pictures (read-only uint8 [H, W, 3], full resolution) and clips by id.
        ``seed`` is the same for all episodes of a question, which are compared with each other.
        """
        raise NotImplementedError

    def execute(self, action: Action) -> EnvironmentResult:
        """Carry out a call with valid arguments.

        Raise OperationError for a call that is not possible now: the policy reads it. Any other error ends
        the episode without a reward.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free what the episode holds, when it has ended in whatever way. Must not wait."""


def select_environments(settings: ToolboxConfig) -> dict[str, type[Environment]]:
    """The environments of ``toolbox.environments`` by their names. Raises BadConfig, and what adapters raise."""
    key, selected = "toolbox.environments", dict[str, type[Environment]]()
    for reference in settings.environments:
        if (adapted := _ADAPTED.fullmatch(reference)) is not None:
            kind = _adapt(Entry.of(adapted["kind"], adapted["rest"], settings), adapted["kind"])
            if adapted["name"]:
                kind = type(kind.__name__, (kind,), {"name": adapted["name"]})
        else:
            kind = load_reference(reference, key)
        if not (isinstance(kind, type) and issubclass(kind, Environment)):
            raise BadConfig(
                f"{key}: {reference} is no Environment", fix="derive it from pixelis.operations.Environment"
            )
        if missing := [name for name in ("name", "actions") if not getattr(kind, name, None)]:
            raise BadConfig(f"{key}: {reference} lacks {', '.join(missing)}", fix="see docs/operations.md")
        if kind.name in selected:
            raise BadConfig(
                f"{key}: two environments are called {kind.name!r}",
                fix="keep one of them, or write NAME= before an entry of another system",
            )
        selected[kind.name] = kind
    return selected


def _adapt(entry: Entry, kind: str) -> Any:
    try:
        adapter = importlib.import_module(f"pixelis.operations.{kind}_environment")
    except ImportError as error:
        message = f"{entry.source} needs the package {error.name}"
        raise MissingDependency(message, fix=install_extra(kind)) from None
    return adapter.adapt(entry)


def environment_of(
    question: Question, environments: Mapping[str, type[Environment]]
) -> type[Environment] | None:
    """The environment of a question, if it has one. Raises BadInput ``unknown_environment``."""
    if question.environment is None:
        first = next(iter(environments.values()), None)
        is_implied = len(environments) == 1 and first is not None and first.is_default
        return first if is_implied and question.tools is None else None
    if question.environment not in environments:
        raise BadInput(
            f"question {question.id} needs the environment {question.environment[:40]!r}, known are "
            f"{', '.join(environments) or 'none'}",
            code="unknown_environment",
            fix="name its class in toolbox.environments",
        )
    return environments[question.environment]


def start(
    kind: type[Environment], question: Question, media: Mapping[str, np.ndarray | Clip], run_seed: int
) -> tuple[Environment, EnvironmentResult]:
    """A new environment for an episode, and what it shows first; episodes of one question start alike."""
    environment = kind()
    seed = int.from_bytes(hashlib.blake2b(f"{run_seed} {question.id}".encode(), digest_size=4).digest())
    try:
        return environment, environment.reset(question, media, seed)
    except BaseException:
        environment.close()
        raise


def observe(
    result: EnvironmentResult, budget: PixelBudget, multiple: int
) -> tuple[Observation, list[np.ndarray]]:
    """A result as an observation without ids, and its views resized to ``budget``, uint8 [h, w, 3]."""
    views = [fit(np.asarray(image), budget, multiple) for image in result.images]
    images = [
        ImageView(
            id="",
            parent=PARENT,
            source_size=(image.shape[1], image.shape[0]),
            view_size=(view.shape[1], view.shape[0]),
        )
        for image, view in zip(result.images, views, strict=True)
    ]
    data = {**result.data, "reward": float(result.reward), "done": bool(result.done)}
    return Observation(status="ok", text=result.text, images=images, data=data), views
