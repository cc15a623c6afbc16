"""A custom reward that fails in six ways, 5 % of the calls each, chosen by the trajectory's id."""

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
"""Fault -> the cause under which it is counted."""


def fault_of(trajectory_id):
    """Return the fault of this rollout, or `fine`."""
    share = int(hashlib.sha256(trajectory_id.encode()).hexdigest()[:8], 16) / 2**32
    return next((fault for i, fault in enumerate(FAULTS) if share < 0.05 * (i + 1)), "fine")


def faulty_reward(trajectory, question, step):
    """Return 0 or 1, or fail by `fault_of`."""
    fault = fault_of(trajectory.id)
    if fault == "hang":
        time.sleep(600)
    if fault == "crash":
        os._exit(3)
    if fault == "raise":
        raise RuntimeError("a bug in a custom reward")
    invalid = {"nan": math.nan, "inf": math.inf, "length": [1.0, 2.0]}
    return invalid.get(fault, float(int(hashlib.sha256(trajectory.id.encode()).hexdigest()[8], 16) % 2))
