"""Executes operations on a question's media while a demonstration is built; needs no model."""

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
from pixelis.operations.video import Clip
from pixelis.records import (
    Action,
    Coordinates,
    Demonstration,
    ImageView,
    Observation,
    Provenance,
    Question,
    SampleKind,
    Step,
)

MULTIPLE = 28
"""Sides of views in pixels, as Qwen2.5-VL's; training replays demonstrations with its model's own."""

CACHED_QUESTIONS = 4
"""Number of questions whose media stay decoded: mistakes are made soon after their golden demonstration."""


class Executor:
    """Settings of operations and views; opens a `Session` for a question.

    ``coordinates``: the scale in the text of observations. BadConfig, MissingDependency or MissingFile for
    operations that cannot run here.
    """

    def __init__(
        self,
        toolbox: ToolboxConfig | None = None,
        dialogue: DialogueConfig | None = None,
        multiple: int = MULTIPLE,
        coordinates: Coordinates = "thousand",
    ):
        self.toolbox, self.dialogue = toolbox or ToolboxConfig(), dialogue or DialogueConfig()
        self.multiple, self.coordinates = multiple, coordinates
        self._recent: OrderedDict[str, Session] = OrderedDict()
        self.operations = {operation.name: operation for operation in select(self.toolbox.operations)}
        for operation in self.operations.values():
            operation.ready(self.toolbox)

    def open(self, question: Question) -> Session:
        """A session with the question's media decoded; BadImage or DataFailure when decoding fails."""
        key = "".join(item.model_dump_json() for item in question.media)
        session = Session(self, question, self._recent.pop(key, None))
        self._recent[key] = session
        if len(self._recent) > CACHED_QUESTIONS:
            self._recent.popitem(last=False)
        return session.restarted()


class Session:
    """One question's media, the turns taken so far (``steps``) and their results.

    ``images`` describe the uint8 [h, w, 3] ``views``: those of the question, then those of operations.
    """

    def __init__(self, executor: Executor, question: Question, source: Session | None = None):
        self.executor, self.question = executor, question
        self.media: Mapping[str, np.ndarray | Clip]
        self.images: list[ImageView]
        self._cache: dict[str, tuple[Observation, list[np.ndarray]]]
        if source is None:
            self.media = {item.id: open_media(item, executor.toolbox) for item in question.media}
            self._first = first_look(self.media, executor.dialogue, executor.multiple)
            self._cache = {}
        else:
            self.media, self._first, self._cache = source.media, source._first, source._cache
        self.images, self.views = list(self._first[0]), list(self._first[1])
        self.objects: dict[str, dict[str, Any]] = {}
        self.steps: list[Step] = []
        self.successes = 0

    def restarted(self) -> Session:
        """A session of the same question without turns, which shares media and results."""
        return Session(self.executor, self.question, self)

    @property
    def calls(self) -> list[Step]:
        return [step for step in self.steps if step.op is not None]

    @property
    def target(self) -> str:
        return default_target(self.media)

    def view(self, name: str) -> np.ndarray:
        return self.views[[image.id for image in self.images].index(name)]

    def execute(
        self, op: str, target: str | None = None, *, allow_error: bool = False, **arguments: Any
    ) -> Observation:
        """Execute an operation without a turn; coordinates are 0..1 of ``target``.

        DataFailure with the operation's code for a refused call, unless ``allow_error``.
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
        self.objects.update({entry["id"]: entry for entry in observation.data.get("objects", [])})
        return observation

    def _executed(self, action: Action) -> tuple[Observation, list[np.ndarray]]:
        """The result of a call; operations are pure, so calls about the question's own media are cached."""
        own = action.target in self.media or any(image.id == action.target for image in self._first[0])
        object_id = action.arguments.get("object")
        e, key = self.executor, action.model_dump_json()
        is_cached = own and (object_id is None or object_id in self.objects)
        if not is_cached or key not in self._cache:
            world = (self.media, self.images, self.objects)
            scene = Scene.of(e.dialogue, e.toolbox, e.multiple, e.coordinates, *world)
            result = execute(action, scene, e.operations)
            if not is_cached:
                return result
            self._cache[key] = result
        observation, shown = self._cache[key]
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
        arguments = {
            key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()
        }
        observation = self.execute(op, target, allow_error=allow_error, **arguments)
        self.steps.append(
            Step(
                think=think,
                op=op,
                target=target or self.target,
                arguments=arguments,
                learn=learn,
                observation=observation,
            )
        )
        return observation

    def answer(self, think: str | None, text: str) -> Step:
        step = Step(think=think, answer=text)
        self.steps.append(step)
        return step

    def replay(self, steps: Sequence[Step], rename: Mapping[str, str] | None = None) -> dict[str, str]:
        """Execute the turns of another demonstration of this question as further turns of this session.

        Returns the new name of each id (``obs1``, ``obj1``), in addition to ``rename``.
        """
        names = dict(rename or {})
        successes = self.successes
        for step in steps:
            if step.op is None:
                self.steps.append(step.model_copy(update={"think": renamed(step.think, names)}))
                continue
            arguments = {key: renamed(value, names) for key, value in step.arguments.items()}
            target = renamed(step.target, names)
            refused = step.observation is not None and not step.succeeded
            think = renamed(step.think, names)
            new = self.call(think, step.op, target, learn=step.learn, allow_error=refused, **arguments)
            old = step.observation
            if new.status == "ok":
                # Without a stored observation the demonstration starts with the first of these turns
                earlier = f"obs{self.successes - successes}"
                names[old.id if old is not None and old.id else earlier] = str(new.id)
            if old is not None and old.status == "ok" and new.status == "ok":
                objects = zip(old.data.get("objects", []), new.data.get("objects", []), strict=False)
                names.update({before["id"]: after["id"] for before, after in objects})
        return names

    def demonstration(self, **fields: Any) -> Demonstration:
        return Demonstration.of(self.question, turns=list(self.steps), **fields)


def altered_demonstration(
    golden: Demonstration, kind: SampleKind, turns: list[Step], **injected: Any
) -> Demonstration:
    """A demonstration of another kind made from a golden one; the provenance says what was ``injected``."""
    source = golden.provenance or Provenance(source="", original_id=golden.id, method="templates")
    provenance = source.model_copy(update={"parent": golden.id, "injected": {"kind": kind, **injected}})
    id = f"{golden.id}-{kind}"
    return Demonstration.of(golden, turns=turns, id=id, kind=kind, provenance=provenance)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A text with whole words such as ``obs1`` replaced at once; other values unchanged."""
    if not isinstance(value, str):
        return value
    return re.sub(r"\w+", lambda match: names.get(match[0], match[0]), value)


def sample_id(*parts: Any) -> str:
    """``cota_`` and twelve hexadecimal digits of a hash of the parts."""
    text = "\x1f".join(map(str, parts))
    return f"cota_{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:12]}"
