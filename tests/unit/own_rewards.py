"""Users' reward functions for tests: good ones, and each way to go wrong."""

import asyncio
import math
import os
import time


def columns(trajectory, question, step):
    """Looks at everything a user may look at."""
    print("users print")
    return question.meta["bonus"] * len(trajectory.answer or "") + step


async def patient(trajectory, question, step):
    await asyncio.sleep(0.01)
    return float(trajectory.answer == question.answers[0])


def ranked(trajectories, question, step):
    """Sees the whole group."""
    order = sorted(t.answer or "" for t in trajectories)
    return [order.index(t.answer or "") / len(order) for t in trajectories]


def too_few(trajectories, question, step):
    return [1.0] * (len(trajectories) - 1)


def mostly(trajectories, question, step):
    return [math.nan if t.answer == "bad" else 1.0 for t in trajectories]


def two_arguments(trajectory, question):
    return 0.0


def by_answer(trajectory, question, step):
    """Goes wrong in the way that the answer names."""
    kind = (trajectory.answer or "").split()[0]
    if kind == "hang":
        time.sleep(60)
    if kind == "crash":
        os._exit(3)
    if kind == "exit":
        raise SystemExit(0)
    if kind == "raise":
        raise RuntimeError("users write bugs")
    return {"nan": math.nan, "inf": math.inf, "length": [1.0, 2.0], "text": "1.0", "none": None}.get(
        kind, 1.0
    )
