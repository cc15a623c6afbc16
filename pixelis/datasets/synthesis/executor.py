"""Executes operations on a question's full-resolution media while a demonstration is made; no model is needed.

A `Executor` holds the settings, a `Session` the media of one question and the turns taken so far.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pixelis.config import DialogueConfig, ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import name_observation
from pixelis.dialogue.dialects import default_target
from pixelis.errors import DataFailure
from pixelis.operations import Scene, execute, select
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.video import Clip
from pixelis.records import Action, Demonstration, ImageView, Observation, Question, Step

MULTIPLE = 28
"""Sides of views are multiples of this many pixels, as Qwen2.5-VL's: a model that learns plays the demonstration with its own."""

RECENT = 4
"""Questions whose media stay decoded."""


class Executor:
    """Settings of the operations and the pixel budgets of views; opens a `Session` for a question.

    ``multiple``: sides of views come in steps of it. ``coordinates``: the scale of places in the text of observations.
    BadConfig for operations that do not exist, MissingDependency or MissingFile for ones that cannot be executed: without that
    every sample that calls one would be dropped.
    """

    def __init__(
        self,
        toolbox: ToolboxConfig | None = None,
        dialogue: DialogueConfig | None = None,
        multiple: int = MULTIPLE,
        coordinates: str = "thousand",
    ):
        self.toolbox, self.dialogue = toolbox or ToolboxConfig(), dialogue or DialogueConfig()
        self.multiple, self.coordinates = multiple, coordinates
        self._recent: OrderedDict[str, Session] = OrderedDict()
        self.operations = {operation.name: operation for operation in select(self.toolbox.operations)}
        for operation in self.operations.values():
            operation.ready(self.toolbox)

    def open(self, question: Question) -> Session:
        """A room with the question's media decoded; BadImage or DataFailure when one cannot be.

        The media of the last few questions stay decoded: a golden demonstration and the mistakes made from it are about the same.
        """
        key = "".join(item.model_dump_json() for item in question.media)
        session = Session(self, question, self._recent.pop(key, None))
        self._recent[key] = session
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return session.again()


class Session:
    """One question's media, the turns taken so far (``steps``) and what they showed (``images``, ``views``, ``objects``).

    ``images`` describe the uint8 [h, w, 3] ``views`` in the same order: at first the question's own, then what operations showed.
    """

    def __init__(self, executor: Executor, question: Question, like: Session | None = None):
        self.executor, self.question = executor, question
        self.media: Mapping[str, np.ndarray | Clip]
        self.images: list[ImageView]
        self._known: dict[str, tuple[Observation, list[np.ndarray]]]
        if like is None:
            self.media = {item.id: open_media(item, executor.toolbox) for item in question.media}
            self._first = first_look(self.media, executor.dialogue, executor.multiple)
            self._known = {}
        else:
            self.media, self._first, self._known = like.media, like._first, like._known
        self.images, self.views = list(self._first[0]), list(self._first[1])
        self.objects: dict[str, dict[str, Any]] = {}
        self.steps: list[Step] = []
        self.successes = 0

    def again(self) -> Session:
        """An empty room for the same question. Decoded media are shared; what was executed on them needs no second run."""
        return Session(self.executor, self.question, self)

    @property
    def target(self) -> str:
        """What a call without a target is about: the first picture or clip."""
        return default_target(self.media)

    def view(self, name: str) -> np.ndarray:
        """The uint8 [h, w, 3] view of an image by its id; DataFailure ``bad_target``."""
        for image, view in zip(self.images, self.views, strict=True):
            if image.id == name:
                return view
        raise DataFailure(f"{self.question.id}: no image {name}", code="bad_target")

    def execute(self, op: str, target: str | None = None, *, allow_error: bool = False, **arguments: Any) -> Observation:
        """Carry out an operation now: ``obs1``, ``obs2``, ... in order of success, its images and objects there for later calls.

        Places are 0..1 of ``target``, which is a media or observation id. DataFailure with the operation's own code when it is
        refused, unless ``allow_error``: then the observation says so and nothing else changes.
        """
        action = Action(op=op, target=target or self.target, arguments=arguments)
        observation, shown = self._executed(action)
        if observation.status != "ok":
            if not allow_error:
                code = observation.code or "operation"
                raise DataFailure(f"{self.question.id}: {op} failed: {observation.text}", code=code)
            return observation
        observation = name_observation(observation, self.successes)
        self.successes += 1
        self.images += observation.images
        self.views += shown
        self.objects.update({found["id"]: found for found in observation.data.get("objects", [])})
        return observation

    def _executed(self, action: Action) -> tuple[Observation, list[np.ndarray]]:
        """Operations are pure: a call about the question's own media that was executed before gives what it gave then."""
        own = action.target in self.media or any(image.id == action.target for image in self._first[0])
        found = action.arguments.get("object")
        if not own or (found is not None and found not in self.objects):
            return execute(action, self._scene(), self.executor.operations)
        key = action.model_dump_json()
        if key not in self._known:
            self._known[key] = execute(action, self._scene(), self.executor.operations)
        observation, shown = self._known[key]
        return observation.model_copy(deep=True), shown

    def call(
        self,
        think: str | None,
        op: str,
        target: str | None = None,
        *,
        learn: bool = True,
        allow_error: bool = False,
        **arguments: Any,
    ) -> Observation:
        """``execute`` as the next turn of the demonstration."""
        arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
        observation = self.execute(op, target, allow_error=allow_error, **arguments)
        self.steps.append(
            Step(think=think, op=op, target=target or self.target, arguments=arguments, learn=learn, observation=observation)
        )
        return observation

    def answer(self, think: str | None, text: str) -> Step:
        """The last turn: the answer."""
        step = Step(think=think, answer=text)
        self.steps.append(step)
        return step

    def replay(self, steps: Sequence[Step], rename: Mapping[str, str] | None = None) -> dict[str, str]:
        """Execute the turns of another demonstration of this question after those taken so far.

        What they refer to by id (``obs1``, ``obj1``) is renamed to what the same turn is called here; returns that renaming,
        which ``rename`` starts. Thoughts and the answer are taken over with the ids in them renamed. DataFailure as ``execute``.
        """
        names = dict(rename or {})
        before = self.successes
        for step in steps:
            if step.op is None:
                self.steps.append(step.model_copy(update={"think": renamed(step.think, names)}))
                continue
            arguments = {key: renamed(value, names) for key, value in step.arguments.items()}
            target = renamed(step.target, names)
            refused = step.observation is not None and step.observation.status != "ok"
            think = renamed(step.think, names)
            new = self.call(think, step.op, target, learn=step.learn, allow_error=refused, **arguments)
            old = step.observation
            if new.status == "ok":
                # Without a stored observation the numbering is that of a demonstration that starts with this turn.
                number = int(old.id.removeprefix("obs")) if old is not None and old.id else self.successes - before
                names[f"obs{number}"] = str(new.id)
            if old is not None and old.status == "ok" and new.status == "ok":
                then, now = old.data.get("objects", []), new.data.get("objects", [])
                names.update({a["id"]: b["id"] for a, b in zip(then, now, strict=False)})
        return names

    def demonstration(self, **fields: Any) -> Demonstration:
        """The question with the turns taken; ``fields`` (id, kind, weight, provenance, ...) over it. DataFailure without one."""
        if not self.steps or self.steps[-1].answer is None:
            raise DataFailure(f"{self.question.id}: the demonstration has no answer", code="no_answer")
        values = {name: getattr(self.question, name) for name in Question.model_fields}
        return Demonstration(**{**values, "turns": list(self.steps), **fields})

    def _scene(self) -> Scene:
        d = self.executor.dialogue
        return Scene(
            media=self.media,
            images=self.images,
            objects=self.objects,
            budget=PixelBudget(d.crop.min_pixels, d.crop.max_pixels),
            frame_budget=PixelBudget(d.frame.min_pixels, d.frame.max_pixels),
            multiple=self.executor.multiple,
            kind=self.executor.coordinates,
            settings=self.executor.toolbox,
        )


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A text with whole words such as ``obs1`` and ``obs1.0`` replaced by their new names; anything else as it is.

    Chains (obs1 -> obs2, obs2 -> obs3) are replaced at once, never twice.
    """
    if not isinstance(value, str) or not names:
        return value
    words = re.compile(r"\b(" + "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) + r")(?![\w])")
    return words.sub(lambda match: names[match[1]], value)


def sample_name(*parts: Any) -> str:
    """``cota_`` and twelve hexadecimal digits that depend on the parts alone: ids that a repeated synthesis gives again."""
    return "cota_" + hashlib.md5("\x1f".join(str(part) for part in parts).encode(), usedforsecurity=False).hexdigest()[:12]
