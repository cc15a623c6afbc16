"""Ablation files: arms of a recipe, each trained and evaluated with the same seeds, against a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from pixelis.config.base import Section, leaf_keys
from pixelis.config.load import apply_override, find, load, read_yaml, split_override, validated
from pixelis.config.root import Config, absolute
from pixelis.errors import BadConfig

Metric = Literal["accuracy", "pass", "rapr", "turns", "calls"]
ArmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]
SHARED = ("data.evaluate", "evaluate.questions", "evaluate.samples", "evaluate.sets", "evaluate.max_pixels")
"""Keys that all arms must share, so that their scores can be paired."""
UNCOMPARED = ("run", "cluster", "telemetry")
"""Sections that may change without making a trial another one."""
EVALUATION = "evaluate"
"""Folder of the evaluation in that of its trial."""


class AblationConfig(Section):
    recipe: str
    """configuration that all arms start from, such as configs/nano/rft.yaml"""
    stage: Literal["sft", "rft", "ttrl", "evaluate"] = "rft"
    """job that trains a trial; evaluate: none, the arms differ in how they are evaluated"""
    dir: str
    """folder of the trials and the report; running again with it resumes"""
    seeds: list[int] = Field([42, 1337, 2024], min_length=1)
    """run.seed of the trials of each arm"""
    overrides: list[str] = Field([])
    """key=value for all arms, such as evaluate.questions=500"""
    arms: dict[ArmName, list[str]] = Field(min_length=2)
    """arms by name, each with its key=value overrides"""
    reference: str
    """arm that the others are compared with"""
    metric: Metric = "accuracy"
    """score of a question that is compared: accuracy, pass (a right episode among evaluate.samples), rapr
    (share of episodes with an executed operation), policy turns, or requested operations"""
    curves: list[str] = Field([])
    """metrics of the steps to draw; empty: the usual ones of the stage"""
    parallel: PositiveInt = 1
    """trials at once"""

    @model_validator(mode="after")
    def _consistent(self) -> AblationConfig:
        if self.reference not in self.arms:
            raise ValueError(f"reference {self.reference} is no arm; the arms are {', '.join(self.arms)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} name one twice")
        for override in [*self.overrides, *(text for texts in self.arms.values() for text in texts)]:
            if override.startswith("run."):
                raise ValueError(f"{override} belongs to the trials: use `seeds` and `dir`")
        return self


@dataclass(frozen=True)
class Trial:
    """One arm with one seed: its folder, and its configuration with that folder and seed."""

    arm: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Folder of the training run; evaluation and result are below it."""
        return Path(self.config.run.dir)


def read(path: str | Path, words: Sequence[str] = ()) -> AblationConfig:
    """Read an ablation file, or the packaged one of that name.

    ``words``: key=value, of the file or of every arm's recipe. Raises BadConfig, or MissingFile.
    """
    values = read_yaml(find(path))
    pairs = dict(map(split_override, words))
    own = pairs.keys() & AblationConfig.model_fields.keys()
    for key in own:
        apply_override(AblationConfig, values, key, pairs[key])
    overrides = [word for word in words if word.partition("=")[0] not in own]
    # `validated` refuses anything else
    if overrides and isinstance(known := values.get("overrides") or [], list):
        values["overrides"] = [*known, *overrides]
    return validated(AblationConfig, values, fix="docs/ablations.md lists the keys")


def trials(ablation: AblationConfig) -> list[Trial]:
    """All trials, seed by seed, so that an interrupted ablation has the same seeds in most arms.

    Raises BadConfig as `load` does, with the arm's name, and if scores of an arm could not be paired.
    """
    configs = {}
    for arm, overrides in ablation.arms.items():
        try:
            configs[arm] = absolute(load(ablation.recipe, [*ablation.overrides, *overrides]))
        except BadConfig as error:
            raise BadConfig(f"arm {arm}: {error.message}", fix=error.fix) from None
    reference = configs[ablation.reference]
    for arm, config in configs.items():
        if config.evaluate.direct:
            raise BadConfig(
                f"arm {arm}: evaluate.direct=true would mix answers without operations into its scores",
                fix="make an arm with toolbox.operations=[]",
            )
        for key in SHARED:
            if (value := attrgetter(key)(config)) != (expected := attrgetter(key)(reference)):
                raise BadConfig(
                    f"arm {arm}: {key}={value} differs from {expected} of {ablation.reference}",
                    fix=f"set {key} in `overrides`, so that scores can be paired",
                )
    folder = Path(ablation.dir).expanduser().absolute()
    return [
        Trial(
            arm,
            seed,
            config.changed({"run.name": arm, "run.seed": seed, "run.dir": f"{folder / arm}/seed_{seed}"}),
        )
        for seed in ablation.seeds
        for arm, config in configs.items()
    ]


def evaluation(config: Config, adapter: str | None) -> Config:
    """The configuration that evaluates the policy of a trial, in a folder of its own."""
    run = {"run.name": "held-out", "run.dir": f"{config.run.dir}/{EVALUATION}", "run.resume": False}
    return config.changed({**run, "policy.adapter": adapter})


def differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Keys in which two configurations differ, with both values; without `UNCOMPARED` sections."""
    keys = [path for path, *_ in leaf_keys(Config) if path.split(".")[0] not in UNCOMPARED]
    pairs = {key: (attrgetter(key)(before), attrgetter(key)(after)) for key in keys}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}
