"""Configuration of the run: its name, folder, seed and resumption."""

from __future__ import annotations

from pydantic import field_validator

from pixelis.config.base import Section, check_file_name


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
