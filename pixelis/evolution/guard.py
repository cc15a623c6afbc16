"""The KL guard: an adaptive weight of the KL penalty."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from pixelis.config import GuardConfig

STEP = 1.2
MIN_BETA, MAX_BETA = 1e-4, 1.0
TOLERANCE = 0.01
"""Distance from the target KL within which beta does not change."""
WINDOW = 100
MIN_MEASUREMENTS = 10
ROUNDING = 1e-9


class AdaptiveKLController:
    """Weight ``beta`` of the KL term; ``auto`` follows the mean of the last WINDOW measured KLs.

    KL in nats a token, estimator k3. Source: the adaptive penalty of PPO (arXiv 1707.06347, section 4).
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        self.beta = self._bounded(config.beta)
        self.measured: deque[float] = deque(maxlen=WINDOW)

    def _bounded(self, beta: float) -> float:
        return beta if self.config.mode == "fixed" else min(max(beta, MIN_BETA), MAX_BETA)

    @property
    def mean_kl(self) -> float | None:
        return math.fsum(self.measured) / len(self.measured) if self.measured else None

    def update(self, kl: float) -> float:
        """Add the KL of an update, unless it is not finite, and return the next beta."""
        if math.isfinite(kl):
            self.measured.append(kl)
            mean = self.mean_kl
            if self.config.mode == "auto" and mean is not None and len(self.measured) >= MIN_MEASUREMENTS:
                if mean - self.config.target > TOLERANCE + ROUNDING:
                    self.beta = self._bounded(self.beta * STEP)
                elif self.config.target - mean > TOLERANCE + ROUNDING:
                    self.beta = self._bounded(self.beta / STEP)
        return self.beta

    def state(self) -> dict[str, Any]:
        return {"beta": self.beta, "measured": list(self.measured)}

    def restore(self, state: dict[str, Any]) -> None:
        self.measured.extend(float(kl) for kl in state["measured"])
        if self.config.mode == "auto":
            self.beta = self._bounded(float(state["beta"]))
