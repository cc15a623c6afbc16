"""The SFT curriculum: mixtures of simple, medium and hard demonstrations, driven by evaluations.

It advances when the policy performs well, and rolls a stage back that lowered the performance. Source: the
SFT curriculum of Pixelis, arXiv 2603.25091.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pixelis import config

LEVELS = ("simple", "medium", "hard")
Event = Literal["advance", "rollback"]
Mixture = tuple[float, float, float]

WINDOW = 3
"""Evaluations in the mean performance."""
BACKOFF = 2.0
"""Factor by which each roll-back extends the interval between checks."""


class Curriculum:
    def __init__(self, settings: config.SftCurriculumConfig):
        self.settings = settings
        self.state: dict[str, Any] = {
            "stage": 0,
            "entered": 0,  # step at which the stage started
            "looked": 0,  # step of the last check for an advance
            "interval": settings.interval,
            "rests_until": 0,  # step before which nothing is checked, after a rollback
            "cooldown": 0,  # remaining evaluations without a check
            "streak": 0,  # consecutive checks above the threshold
            "before": None,  # mean performance at the start of the stage, until it is compared
            "recent": [],  # performance of the last evaluations of this stage
            "rollbacks": 0,
            "history": [],  # [step, event, stage after it]
        }

    @property
    def stage(self) -> config.StageConfig:
        return self.settings.stages[self.state["stage"]]

    @property
    def mixture(self) -> Mixture:
        return self.stage.mixture

    def evaluated(self, step: int, loss: float, accuracy: float | None = None) -> Event | None:
        """Process an evaluation after ``step`` steps; its accuracy or else 1 / (1 + loss) counts."""
        s, state = self.settings, self.state
        performance = accuracy if accuracy is not None else 1 / (1 + loss)
        state["recent"] = [*state["recent"], performance][-WINDOW:]
        before, state["before"] = state["before"], None
        if before is not None and performance - before < -s.drop:
            self._enter(step, state["stage"] - 1, "rollback")
            state["rollbacks"] += 1
            state["interval"] = math.ceil(state["interval"] * BACKOFF)
            state["rests_until"] = step + s.wait
            return "rollback"
        if state["cooldown"]:
            state["cooldown"] -= 1
            return None
        if step < state["rests_until"] or step - state["looked"] < state["interval"]:
            return None
        state["looked"] = step
        mean = math.fsum(state["recent"]) / len(state["recent"])
        state["streak"] = state["streak"] + 1 if mean >= s.threshold else 0
        stage = self.stage
        expired = stage.max_steps and step - state["entered"] >= stage.max_steps
        # A criterion that was not measured is not met.
        met = [accuracy is not None and accuracy >= stage.accuracy] if stage.accuracy is not None else []
        met += [loss <= stage.loss] if stage.loss is not None else []
        ends = state["streak"] >= s.patience or expired or (met and all(met))
        if state["stage"] + 1 == len(s.stages) or not ends:
            return None
        self._enter(step, state["stage"] + 1, "advance")
        state["before"], state["cooldown"] = mean, s.cooldown
        return "advance"

    def _enter(self, step: int, stage: int, event: Event) -> None:
        self.state |= {
            "stage": stage,
            "entered": step,
            "looked": step,
            "streak": 0,
            "cooldown": 0,
            "before": None,
            "recent": [],
        }
        self.state["history"] = [*self.state["history"], [step, event, stage]]

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.state,
            "recent": list(self.state["recent"]),
            "history": [list(row) for row in self.state["history"]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; the stage is limited to those of the configuration."""
        self.state |= dict(state)
        last = len(self.settings.stages) - 1
        if self.state["stage"] > last:
            # A different stage, so that there is nothing to compare
            self.state |= {"stage": last, "before": None}

    def metrics(self, event: Event | None = None) -> dict[str, float]:
        return {
            "curriculum/stage": float(self.state["stage"]),
            "curriculum/event": {"advance": 1.0, "rollback": -1.0}.get(event or "", 0.0),
            **{
                f"curriculum/mixture_{level}": share
                for level, share in zip(LEVELS, self.mixture, strict=True)
            },
            "curriculum/rollbacks": float(self.state["rollbacks"]),
            "curriculum/interval": float(self.state["interval"]),
        }
