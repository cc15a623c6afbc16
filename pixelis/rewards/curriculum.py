"""The reward curriculum (Pixelis, arXiv 2603.25091): weights that change by progress or by step.

By progress: accuracy alone; coherence joins at a high success rate, curiosity when coherence no longer
improves.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from pixelis.config import CurriculumConfig
from pixelis.config.rewards import CURRICULUM_TERMS

BOUNDARIES = ("base", "coherence", "full")
"""Names of the checkpoints at the end of phases 1 to 3."""
SUCCESS = 0.7
SLOPE_CHECKS, SLOPE = 5, 0.001
"""Checks over which the slope of coherence is fitted; below that slope it no longer improves."""
COMBINED = 0.65
"""Success rate times coherence above which phase 2 ends."""


class Curriculum:
    """Call ``advance`` once a step; ``mixture`` are the current weights."""

    def __init__(self, settings: CurriculumConfig):
        self.settings = settings
        self.step = -1
        self.phase = 0
        self.samples = 0
        self.success: deque[float] = deque(maxlen=settings.window)
        self.coherence: deque[float] = deque(maxlen=settings.window)
        self.checks: deque[float] = deque(maxlen=SLOPE_CHECKS)
        self.flat = 0
        self.history: list[tuple[int, str]] = []

    @property
    def mixture(self) -> dict[str, float]:
        s = self.settings
        if s.kind == "none":
            return {}
        weights = s.trigger[self.phase] if s.kind == "trigger" else s.steps[self.phase][1:]
        return dict(zip(CURRICULUM_TERMS, weights, strict=True))

    @property
    def name(self) -> str:
        return BOUNDARIES[self.phase] if self.phase < len(BOUNDARIES) else f"phase{self.phase + 1}"

    def advance(self, step: int, success: float | None, coherence: float | None, samples: int) -> str | None:
        """Record a step, once; returns the checkpoint's name when the phase ends with it."""
        if step <= self.step or self.settings.kind == "none":
            return None
        self.step = step
        self.samples += samples
        if success is not None:
            self.success.append(success)
        if coherence is not None:
            self.coherence.append(coherence)
        done, phases = step + 1, self.settings.steps
        if self.settings.kind == "steps":
            ends = self.phase + 1 < len(phases) and done >= phases[self.phase + 1][0]
        else:
            ends = self._triggered(done)
        if not ends:
            return None
        name = self.name
        self.history.append((done, name))
        self.phase += 1
        self.checks.clear()
        self.flat = 0
        return name

    def _triggered(self, done: int) -> bool:
        s = self.settings
        if done % s.check_every or self.phase >= len(s.trigger) - 1:
            return False
        success, coherence = _mean(self.success), _mean(self.coherence)
        if self.phase == 0:
            ready = success > SUCCESS or done > s.first_steps
            return ready and self.samples >= s.min_samples
        self.checks.append(coherence)
        full = len(self.checks) == SLOPE_CHECKS
        slope = statistics.linear_regression(range(SLOPE_CHECKS), self.checks).slope if full else math.inf
        self.flat = self.flat + 1 if slope < SLOPE else 0
        return self.flat >= s.patience or success * coherence > COMBINED or done > s.second_steps

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "phase": self.phase,
            "samples": self.samples,
            "success": list(self.success),
            "coherence": list(self.coherence),
            "looks": list(self.checks),
            "flat": self.flat,
            "history": [list(item) for item in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.phase, self.samples, self.flat = (
            int(state[k]) for k in ("step", "phase", "samples", "flat")
        )
        for values, name in (
            (self.success, "success"),
            (self.coherence, "coherence"),
            (self.checks, "looks"),
        ):
            values.clear()
            values.extend(float(v) for v in state[name])
        self.history = [(int(step), str(name)) for step, name in state["history"]]

    def metrics(self) -> dict[str, float]:
        if self.settings.kind == "none":
            return {}
        weights = {f"curriculum/weight_{name}": weight for name, weight in self.mixture.items()}
        averages = {"curriculum/success": _mean(self.success), "curriculum/coherence": _mean(self.coherence)}
        return {"curriculum/phase": float(self.phase + 1), **averages, **weights}


def _mean(values: deque[float]) -> float:
    return statistics.fmean(values) if values else 0.0
