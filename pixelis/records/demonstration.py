"""Demonstrations: questions with the turns of an assistant, for supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pixelis.records.question import Question, Record
from pixelis.records.trajectory import Action, Observation


class Verbatim(Record):
    """A turn in another system's row: the assistant's ``text`` in ``dialect``, and the user turn after it.

    ``result`` is that turn's text with its marks of ``images`` (files). ``failed``: it reports an error.
    """

    dialect: str
    text: str
    result: str | None = None
    images: list[str] = Field(default_factory=list)
    failed: bool = False


class Step(Record):
    """One assistant turn of a demonstration: an operation or the answer, after an optional thought.

    Flat in files (``{"op": "zoom_in", "box": [...]}``): unknown keys are arguments of the operation. The
    default ``target`` is the first picture or clip. ``further`` are more calls of the same turn. ``learn``
    False excludes the turn from the loss. ``observation`` is the operation's result when the demonstration
    was created. ``verbatim`` is the turn as another system wrote it; without ``op`` and ``answer`` it is an
    unreadable call, which only stays in the context.
    """

    think: str | None = None
    op: str | None = None
    target: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    further: list[Action] = Field(default_factory=list)
    answer: str | None = None
    learn: bool = True
    observation: Observation | None = None
    verbatim: Verbatim | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "op" not in values:
            return values
        flat = {key: value for key, value in values.items() if key not in cls.model_fields}
        if flat and values.get("arguments"):
            raise ValueError("give arguments either in `arguments` or beside `op`, not both")
        fields = {key: value for key, value in values.items() if key in cls.model_fields}
        return {**fields, "arguments": flat} if flat else fields

    def calls(self, target: str) -> list[Action]:
        """The calls of the turn, about ``target`` where it names none."""
        first = Action(op=self.op or "", target=self.target or target, arguments=self.arguments)
        return [first, *self.further]

    @property
    def succeeded(self) -> bool:
        return self.observation is not None and self.observation.status == "ok"

    @model_validator(mode="after")
    def _op_or_answer(self) -> Step:
        unreadable = self.verbatim is not None and not self.learn and self.op is None
        if (self.op is None) == (self.answer is None) and not unreadable:
            raise ValueError("a turn needs either an `op` or an `answer`")
        if self.further and self.op is None:
            raise ValueError("`further` calls follow an `op`")
        return self


class Provenance(Record):
    source: str
    original_id: str
    method: str
    version: str = ""
    parent: str | None = None
    injected: dict[str, Any] = Field(default_factory=dict)
    writer: str | None = None


SampleKind = Literal["golden", "outcome_negative", "trap_perceptual", "trap_logical", "self_correction"]
Level = Literal["simple", "medium", "hard"]


class Demonstration(Question):
    """A question with the turns of an assistant: a Chain-of-Thought-Action sample.

    The kinds golden and self_correction are right and may be imitated; the others are intentionally wrong.
    ``weight`` is a sampling weight, ``difficulty`` is 0.1..1, ``quality`` is 0..1.
    """

    turns: Annotated[list[Step], Field(min_length=1)]
    kind: SampleKind = "golden"
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    difficulty: float | None = None
    level: Level | None = None
    quality: float | None = None
    provenance: Provenance | None = None

    @property
    def steps(self) -> list[Step]:
        return [turn for turn in self.turns if turn.op is not None]

    @property
    def final(self) -> str | None:
        return self.turns[-1].answer
