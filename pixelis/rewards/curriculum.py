"""The reward curriculum: a state machine that advances by progress or by step. Source: Pixelis, arXiv 2603.25091.

By progress: first the task alone; when it goes well, coherence joins; when that improves no more, curiosity. Each boundary has a
name, under which a checkpoint is kept: `base`, `coherence` and, at the end of the run, `full` are the arms of the ablation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pixelis import config

MIXED = ("accuracy", "curiosity_dynamics", "coherence")
"""The terms whose weights the curriculum sets, in the order of its tuples."""
BOUNDARIES = ("base", "coherence", "full")
"""What the weights at the end of phase 1, 2 and 3 are called."""
LOOKS = 5
"""Evaluations that the slope of coherence is drawn through."""


class Curriculum:
    """Feed it one ``advance`` a step; ``mixture`` are the weights in force, empty for a curriculum of kind none."""

    def __init__(self, settings: config.CurriculumConfig):
        self.settings = settings
        self.step = -1
        self.phase = 0
        self.samples = 0
        self.success: deque[float] = deque(maxlen=settings.window)
        self.coherence: deque[float] = deque(maxlen=settings.window)
        self.looks: deque[float] = deque(maxlen=LOOKS)
        self.flat = 0
        self.history: list[tuple[int, str]] = []

    @property
    def mixture(self) -> dict[str, float]:
        """Weights by term name."""
        s = self.settings
        if s.kind == "none":
            return {}
        weights = s.trigger[self.phase] if s.kind == "trigger" else s.steps[self.phase][1:]
        return dict(zip(MIXED, weights, strict=True))

    @property
    def name(self) -> str:
        """What the weights of this phase are called once it ends."""
        return BOUNDARIES[self.phase] if self.phase < len(BOUNDARIES) else f"phase{self.phase + 1}"

    def advance(self, step: int, success: float | None, coherence: float | None, samples: int) -> str | None:
        """Step number ``step`` (from 0) is done: its success rate and mean coherence (None: none scored) and scored rollouts.

        Returns the name of the boundary when the phase ends here: keep a checkpoint under it. A step that was advanced before
        changes nothing.
        """
        if step <= self.step or self.settings.kind == "none":
            return None
        self.step = step
        self.samples += samples
        if success is not None:
            self.success.append(success)
        if coherence is not None:
            self.coherence.append(coherence)
        done = step + 1
        if not (self._stepped(done) if self.settings.kind == "steps" else self._triggered(done)):
            return None
        name = self.name
        self.history.append((done, name))
        self.phase += 1
        self.looks.clear()
        self.flat = 0
        return name

    def rollback(self) -> None:
        """Back to the phase before, with its weights."""
        if self.phase:
            self.phase -= 1
            self.history.pop()
            self.looks.clear()
            self.flat = 0

    def _stepped(self, done: int) -> bool:
        following = self.phase + 1
        return following < len(self.settings.steps) and done >= self.settings.steps[following][0]

    def _triggered(self, done: int) -> bool:
        s = self.settings
        if done % s.check_every or self.phase >= len(s.trigger) - 1:
            return False
        success, coherence = _mean(self.success), _mean(self.coherence)
        if self.phase == 0:
            ready = success > s.success or done > s.first_steps
            return ready and self.samples >= s.min_samples
        self.looks.append(coherence)
        slope = _slope(self.looks) if len(self.looks) == LOOKS else None
        self.flat = self.flat + 1 if slope is not None and slope < s.slope else 0
        return self.flat >= s.patience or success * coherence > s.combined or done > s.second_steps

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "step": self.step,
            "phase": self.phase,
            "samples": self.samples,
            "success": list(self.success),
            "coherence": list(self.coherence),
            "looks": list(self.looks),
            "flat": self.flat,
            "history": [list(item) for item in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.step, self.phase, self.samples, self.flat = (int(state[k]) for k in ("step", "phase", "samples", "flat"))
        for name in ("success", "coherence", "looks"):
            queue: deque[float] = getattr(self, name)
            queue.clear()
            queue.extend(float(v) for v in state[name])
        self.history = [(int(step), str(name)) for step, name in state["history"]]

    def metrics(self) -> dict[str, float]:
        """Phase (from 1), moving averages and the weights in force."""
        if self.settings.kind == "none":
            return {}
        weights = {f"curriculum/weight_{name}": weight for name, weight in self.mixture.items()}
        averages = {"curriculum/success": _mean(self.success), "curriculum/coherence": _mean(self.coherence)}
        return {"curriculum/phase": float(self.phase + 1), **averages, **weights}


def _mean(values: Sequence[float] | deque[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _slope(values: deque[float]) -> float:
    """Least-squares slope over equal distances of 1."""
    middle, mean = (len(values) - 1) / 2, _mean(values)
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
