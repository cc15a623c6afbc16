"""Environments: tools with a state, beside the pure operations.

An environment lives in one toolbox process for one episode; a call may change the state, earn a reward or end
the episode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pixelis.config.references import load_reference
from pixelis.errors import BadConfig, BadInput
from pixelis.operations.operation import Operation
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Observation, Question

PARENT = "environment"
"""Parent of the views of an environment, which no operation can cut a region from."""


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

    ``name``: what rows call it (``env_name``). ``actions``: what the policy may call.
    """

    name: ClassVar[str]
    actions: ClassVar[tuple[type[Operation], ...]]

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


def select_environments(names: Iterable[str]) -> dict[str, type[Environment]]:
    """The environments of these references (``package.module:Class``) by their names. Raises BadConfig."""
    key, selected = "toolbox.environments", dict[str, type[Environment]]()
    for reference in names:
        kind = load_reference(reference, key)
        if not (isinstance(kind, type) and issubclass(kind, Environment)):
            raise BadConfig(
                f"{key}: {reference} is no Environment", fix="derive it from pixelis.operations.Environment"
            )
        if missing := [name for name in ("name", "actions") if not getattr(kind, name, None)]:
            raise BadConfig(f"{key}: {reference} lacks {', '.join(missing)}", fix="see docs/operations.md")
        if kind.name in selected:
            raise BadConfig(f"{key}: two environments are called {kind.name!r}", fix="keep one of them")
        selected[kind.name] = kind
    return selected


def environment_of(
    question: Question, environments: Mapping[str, type[Environment]]
) -> type[Environment] | None:
    """The environment of a question, if it has one. Raises BadInput ``unknown_environment``."""
    if question.environment is None:
        return None
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
    return environment, environment.reset(question, media, seed)


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
