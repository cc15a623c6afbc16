"""Configuration of the run: its name, folder, seed and resumption."""

from __future__ import annotations

from pydantic import Field, field_validator

from pixelis.config.base import Section, check_file_name


class RunConfig(Section):
    name: str = Field(
        "run", description="name of this run in logs and reports, and of the files of an evaluation"
    )
    dir: str = Field(
        "runs/run", description="folder of checkpoints, events and reports; running again with it resumes"
    )
    seed: int = Field(42, description="seed of data order, sampling and initialisation")
    resume: bool = Field(True, description="continue from the last complete checkpoint in run.dir")

    @field_validator("name")
    @classmethod
    def _names_files(cls, name: str) -> str:
        check_file_name(name)
        return name
