"""A worker process for what may hang, exhaust memory or crash: compares formulas, runs users' reward functions.

``python -m pixelis.rewards.worker PARENT_PID MEMORY_BYTES`` reads requests and writes replies on standard input and output,
each a frame of 4 bytes of length followed by JSON. Only plain JSON crosses, so neither side can make the other run what it sends.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
import re
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct(">I")
SPARE_S = 5.0
"""CPU seconds beyond its limit that a request may burn when nobody is left to kill this process."""


class Refused(Exception):
    """A request that has no answer; the message is the cause."""


def main() -> None:
    """Answer requests until the input ends."""
    parent, memory = int(sys.argv[1]), int(sys.argv[2])
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a user's function prints must not end up among the frames
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    send(target, {"ready": True})
    while (request := receive(source)) is not None:
        # A formula can hold the interpreter for ever, and then no thread of ours runs: only the kernel can end it.
        signal.setitimer(signal.ITIMER_PROF, float(request["limit_s"]) + SPARE_S)
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(target, reply)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request: ``value``, or ``error`` with its ``message``."""
    try:
        return {"value": DUTIES[request["do"]](request)}
    except Refused as refusal:
        return {"error": str(refusal), "message": str(refusal)}
    except MemoryError:
        return {"error": "out_of_memory", "message": "out of memory"}
    except BaseException as error:  # a user's function may exit, too
        return {"error": "raised", "message": f"{type(error).__name__}: {error}"[:500]}


def send(target: Any, message: dict[str, Any]) -> None:
    """Write one frame."""
    body = json.dumps(message).encode()
    target.write(HEADER.pack(len(body)) + body)
    target.flush()


def receive(source: Any) -> dict[str, Any] | None:
    """Read one frame; None at the end of the input."""
    head = source.read(HEADER.size)
    return json.loads(source.read(*HEADER.unpack(head))) if len(head) == HEADER.size else None


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


# -- duties ---------------------------------------------------------------------------------------------------------


def _warm_math(request: dict[str, Any]) -> bool:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return bool(math_verify.verify(_formula("$\\frac{1}{2}$"), _formula("0.5"), timeout_seconds=None))


def _formula(text: str) -> list[Any]:
    """What math-verify reads in a text; one without LaTeX marks is read as prose with a number, or as a bare formula."""
    from math_verify import parse

    texts = [text]
    if not any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")):
        letters = re.sub(r"\\[A-Za-z]+", " ", text)
        bare = re.search(r"[A-Za-z(\[{]", letters) and not re.search(r"[A-Za-z]{3}", letters)
        texts = [f"${text}$", text] if bare else [text, f"${text}$"]
    return next((found for t in texts if (found := parse(t, parsing_timeout=None, raise_on_error=True))), [])


def _math(request: dict[str, Any]) -> float:
    """1.0 when the answer equals a truth, by math-verify both ways, as its comparison is not symmetric."""
    from math_verify import verify

    said = _formula(request["answer"])
    wanted = [formula for truth in request["truths"] if (formula := _formula(truth))]
    if not wanted:
        raise Refused("truth_unparsable")
    failure = None
    for truth in wanted if said else []:
        for gold, target in ((truth, said), (said, truth)):
            try:
                if verify(gold, target, timeout_seconds=None, raise_on_error=True):
                    return 1.0
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    return 0.0


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function


def _takes_group(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "trajectories"


def _check_own(request: dict[str, Any]) -> bool:
    """True when the function takes all rollouts of a group at once: its first parameter is called ``trajectories``."""
    function = _function(request["name"])
    if len(inspect.signature(function).parameters) != 3:
        raise TypeError(f"{request['name']} does not take (trajectory, question, step)")
    return _takes_group(function)


def _own(request: dict[str, Any]) -> Any:
    from pixelis.records import Question, Trajectory

    function = _function(request["name"])
    trajectories = [Trajectory.model_validate(t) for t in request["trajectories"]]
    question = Question.model_validate(request["question"])
    given = trajectories if _takes_group(function) else trajectories[0]
    value = function(given, question, request["step"])
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    if hasattr(value, "tolist"):
        value = value.tolist()  # arrays and tensors
    return value


async def _awaited(value: Any) -> Any:
    return await value


DUTIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "warm_math": _warm_math,
    "math": _math,
    "check_own": _check_own,
    "own": _own,
}
"""What a child can be asked to do."""


if __name__ == "__main__":
    main()
