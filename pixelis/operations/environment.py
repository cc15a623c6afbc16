"""Environments: tools with a state, beside the pure operations.

An environment lives in one toolbox process for one episode; a call may change the state, earn a reward or end
the episode.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

import numpy as np
from pydantic import ValidationError

from pixelis.config import ToolboxConfig
from pixelis.config.references import load_reference
from pixelis.errors import (
    BadConfig,
    BadInput,
    InfraFailure,
    MissingDependency,
    PixelisError,
    first_problem,
    install_extra,
)
from pixelis.operations.function import function_operation
from pixelis.operations.operation import Operation
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.operations.video import Clip
from pixelis.records import Action, Function, ImageView, Observation, Question

PARENT = "environment"
"""Parent of the views of an environment, which no operation can cut a region from."""
_ADAPTED = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<kind>mcp|gym|openenv)(?P<rest>[:+].+)", re.DOTALL)
SHARE = 0.75
"""Part of toolbox.timeout_s that a server may take: after all of it the toolbox ends, with all its episodes."""


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


@dataclass(frozen=True)
class Entry:
    """``KIND:...`` or ``KIND+https://...`` in ``toolbox.environments``: an environment of another system.

    ``timeout_s``: for each answer of a server. ``limits``: bytes and pixels of a picture.
    """

    kind: str
    rest: str
    timeout_s: float
    limits: tuple[int, int]

    @classmethod
    def of(cls, kind: str, rest: str, settings: ToolboxConfig) -> Entry:
        limits = settings.max_image_bytes, settings.max_image_pixels
        return cls(kind, rest, SHARE * settings.timeout_s, limits)

    def __str__(self) -> str:
        return f"toolbox.environments: {self.kind}{self.rest}"

    def environment(self) -> type[Environment]:
        """The class, from the adapter of its kind. Raises BadConfig, MissingDependency and InfraFailure."""
        try:
            adapter = importlib.import_module(f"pixelis.operations.{self.kind}_environment")
        except ImportError as error:
            fix = install_extra(self.kind)
            raise MissingDependency(f"{self} needs the package {error.name}", fix=fix) from None
        return adapter.adapt(self)

    def url(self) -> SplitResult:
        """The address of a server: ``https``, or ``http`` on this machine. Raises BadConfig."""
        url = urlsplit(self.rest.removeprefix("+"))
        host = url.hostname or ""
        if url.scheme not in ("http", "https") or not host:
            raise BadConfig(f"{self} has no URL", fix="write +https://HOST/PATH after its first word")
        if url.scheme == "http" and host not in ("localhost", "127.0.0.1", "::1"):
            raise BadConfig(f"{self} is not encrypted", fix="use https: http is for this machine alone")
        return url

    def action(self, name: str, description: str, parameters: dict[str, Any]) -> type[Operation]:
        """An action with a JSON schema of its arguments. Raises BadConfig for what a policy cannot call."""
        try:
            function = Function(name=name, description=description, parameters=parameters)
        except ValidationError as error:
            problem = first_problem(error).message
            raise BadConfig(f"{self}: {name[:80]!r}: {problem}", fix="correct the server") from None
        return function_operation(function)

    @contextmanager
    def connection(self) -> Iterator[None]:
        """What fails in the block is a server that is lost or late: InfraFailure ``environment_...``."""
        try:
            yield
        except PixelisError:
            raise
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            is_late = isinstance(error, TimeoutError)
            problem = f"no answer in {self.timeout_s:g} s" if is_late else f"{type(error).__name__}: {error}"
            raise InfraFailure(
                f"{self}: {problem}",
                code="environment_timeout" if is_late else "environment_lost",
                fix="run the server by itself, and see what it writes in the log of the toolbox",
            ) from error


def select_environments(settings: ToolboxConfig) -> dict[str, type[Environment]]:
    """The environments of ``toolbox.environments`` by their names. Raises BadConfig, and what adapters raise."""
    key, selected = "toolbox.environments", dict[str, type[Environment]]()
    for reference in settings.environments:
        if (adapted := _ADAPTED.fullmatch(reference)) is not None:
            kind = Entry.of(adapted["kind"], adapted["rest"], settings).environment()
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
