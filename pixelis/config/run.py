"""Configuration of the run, and of jobs with a few keys of their own."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from pixelis.config.base import Section, Share, check_file_name


class RunConfig(Section):
    name: str = "run"
    """name of this run in logs and reports, and of the files of an evaluation"""
    dir: str = "runs/run"
    """folder of checkpoints, events and reports; running again with it resumes"""
    seed: int = 42
    """seed of data order, sampling and initialisation"""
    resume: bool = True
    """continue from the last complete checkpoint in run.dir"""

    @field_validator("name")
    @classmethod
    def _names_files(cls, name: str) -> str:
        check_file_name(name)
        return name


class QuickstartConfig(Section):
    shift: str = "warm"
    """change of the pictures in the online stream: warm, noise, rotate, invert, ..."""
    stream: PositiveInt = 800
    """number of unlabelled requests in the online stream"""


class TtrlConfig(Section):
    samples: PositiveInt = 16
    """episodes per question in the evaluations before and after, for pass@1 and the majority"""
    patience: NonNegativeInt = 0
    """end the run when the mean majority share of this many steps is no higher than that of as many steps
    before; 0: never"""
    min_gain: Share = 0.005
    """minimum rise of that share to continue"""


class RanksConfig(Section):
    tuned: str | None = None
    """policy.model after full fine-tuning: a run with policy.full, one of its checkpoints, or a Hugging Face
    folder"""
    energy: float = Field(0.9, gt=0, le=1)
    """share of the squared norm of a layer's change that its rank retains"""
    smallest: PositiveInt = 4
    """minimum rank of a layer"""
    largest: PositiveInt = 128
    """maximum rank of a layer"""
    smoothing: Share = 0.8
    """weight of the mean over layers of the same type in the rank of a layer"""

    @model_validator(mode="after")
    def _ordered(self) -> RanksConfig:
        if self.smallest > self.largest:
            raise ValueError(f"smallest {self.smallest} is above largest {self.largest}")
        return self
