"""Configuration of the teachers of on-policy distillation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from pixelis.config.base import Section
from pixelis.config.references import EMBEDDED, is_hub_id

STUDENT = "policy"
"""The teacher that has the student's own, current weights."""
VERSION = re.compile(r"version:(\d+)")
ADDRESS = re.compile(r"https?://.+")


class TeacherConfig(Section):
    model: str | None = None
    """teacher that scores the tokens of the rollouts: `policy` (the student's own weights), `version:N` of the
    run, a run, checkpoint or PEFT folder of the same base model, or another model with the same tokenizer: its
    folder or name, or the address `http://HOST/v1` of `vllm serve MODEL --enable-scale-out`; null: none"""
    by_task: dict[str, str] = Field({})
    """other teachers for the questions of a task (Question.task)"""
    weight: PositiveFloat = 1.0
    """weight of the advantage, log p_teacher - log p_behaviour of each token"""
    rewards: bool = True
    """add the teacher's advantage to that of the rewards; false: only the teacher teaches, and no reward is
    needed"""
    context: Literal["none", "evidence", "answer", "feedback"] = "none"
    """what the teacher sees and the student does not: the look of the best right rollout of the group, else
    the box in meta.expected_calls; the true answer; a user's words in meta.feedback"""
    gpus: NonNegativeFloat = 0.0
    """GPUs that another model as teacher reserves, each in a process of its own; teachers of the same base
    model run in the learners"""
    cpus: NonNegativeFloat = 1.0
    """CPUs that it, or the client of a server, reserves"""
    api_key_env: str = "PIXELIS_TEACHER_API_KEY"
    """environment variable with the API key of servers; empty: no key is sent"""
    timeout_s: PositiveFloat = 120.0
    """timeout in seconds of a request to a server, which is repeated twice"""
    concurrency: PositiveInt = 16
    """concurrent requests to each server"""

    @property
    def names(self) -> list[str]:
        """All teachers, in an order that every process shares."""
        return sorted({*self.by_task.values(), *([self.model] if self.model else [])})

    @property
    def models(self) -> list[str]:
        """The teachers with another base model than the student, and the servers."""
        return [
            name for name in self.names if name != STUDENT and not VERSION.fullmatch(name) and _is_model(name)
        ]

    def of_task(self, task: str) -> str | None:
        return self.by_task.get(task, self.model)

    @property
    def labelled(self) -> bool:
        """Whether teachers see the truth, or what it decides."""
        return bool(self.names) and self.context in ("evidence", "answer")

    @model_validator(mode="after")
    def _consistent(self) -> TeacherConfig:
        if not self.names and (not self.rewards or self.context != "none"):
            raise ValueError("no teacher: set model or by_task")
        if STUDENT in self.names and self.context == "none":
            raise ValueError(
                "the teacher `policy` agrees with itself unless it sees more: set context, or another model"
            )
        return self


def _is_model(name: str) -> bool:
    """Whether a name is of a model rather than of a run or a checkpoint."""
    is_address = ADDRESS.fullmatch(name) is not None
    return is_address or name in EMBEDDED or is_hub_id(name) or (Path(name) / "config.json").is_file()
