"""A user's reward that goes wrong in six ways, 5 % each, by a rule that a test can compute too."""

from __future__ import annotations

import hashlib
import math
import os
import time

FAULTS = {
    "hang": "timeout",
    "crash": "crashed",
    "raise": "raised",
    "nan": "not_finite",
    "inf": "not_finite",
    "length": "wrong_type",
}
"""Kind of fault -> the cause that must be counted for it."""


def kind(trajectory_id):
    """Which fault this rollout meets, or `fine`."""
    draw = int(hashlib.sha256(trajectory_id.encode()).hexdigest()[:8], 16) / 2**32
    return next((k for i, k in enumerate(FAULTS) if draw < 0.05 * (i + 1)), "fine")


def misbehaves(trajectory, question, step):
    met = kind(trajectory.id)
    if met == "hang":
        time.sleep(600)
    if met == "crash":
        os._exit(3)
    if met == "raise":
        raise RuntimeError("users write bugs")
    odd = {"nan": math.nan, "inf": math.inf, "length": [1.0, 2.0]}
    return odd.get(met, float(int(hashlib.sha256(trajectory.id.encode()).hexdigest()[8], 16) % 2))
