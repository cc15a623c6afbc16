"""A worker process for code that may hang, exhaust memory or crash: formulas and users' reward functions.

Reads requests and writes replies, one JSON object a line: neither side unpickles the other's data.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

SPARE_S = 5.0
"""Seconds beyond its timeout that a request may take when the parent is gone and cannot kill this process."""
GROUP, EASYR1 = ("trajectories", "reward_inputs"), ("reward_input", "reward_inputs")
"""First parameters of functions that take a whole group, and of those that take EasyR1's inputs."""


class Refused(Exception):
    """The request cannot be answered; the message is the code of the cause."""


def main() -> None:
    memory = int(sys.argv[1])
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of a user's function must not mix with the replies
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in source:
        request = json.loads(line)
        # A formula can hold the interpreter forever, so that no thread here runs: only the kernel can end the
        # process then.
        signal.setitimer(signal.ITIMER_REAL, float(request["timeout_s"]) + SPARE_S)
        reply: dict[str, Any]
        try:
            reply = {"value": TASKS[request["task"]](request)}
        except Refused as refusal:
            reply = {"error": str(refusal), "message": str(refusal)}
        except MemoryError:
            reply = {"error": "out_of_memory", "message": "out of memory"}
        except BaseException as error:  # SystemExit of a user's function too
            reply = {"error": "raised", "message": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        target.write(json.dumps(reply).encode() + b"\n")
        target.flush()


# Tasks


def warm_math(request: dict[str, Any]) -> bool:
    from pixelis.rewards import formulas

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return formulas.equal(r"\sqrt{4}+x", "2+x")


def compare(request: dict[str, Any]) -> float:
    from pixelis.rewards import formulas

    truths = [truth for truth in request["truths"] if _readable(formulas, truth)]
    if not truths:
        raise Refused("truth_unparsable")
    if not _readable(formulas, request["answer"]):
        raise Refused("answer_unparsable")
    return float(any(formulas.equal(truth, request["answer"]) for truth in truths))


def _readable(formulas: Any, text: str) -> bool:
    try:
        formulas.parse(text)
    except formulas.Unreadable:
        return False
    return True


@functools.cache
def _loaded(name: str) -> Any:
    module, _, attribute = name.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), attribute)
    specification = importlib.util.spec_from_file_location(f"own_rewards_{len(sys.modules)}", module)
    if specification is None or specification.loader is None:
        raise ImportError(f"no file {module}")
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = loaded
    specification.loader.exec_module(loaded)
    return getattr(loaded, attribute)


def call_with_texts(request: dict[str, Any]) -> Any:
    return _plain(_loaded(request["name"])(*request["arguments"]))


def _function(name: str) -> tuple[Callable[..., Any], str]:
    function = _loaded(name)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function, next(iter(inspect.signature(function).parameters), "")


def check_reward(request: dict[str, Any]) -> bool:
    function, first = _function(request["name"])
    parameters = inspect.signature(function).parameters
    if first in EASYR1:
        required = [
            p
            for p in parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if len(required) > 1:
            raise TypeError(f"{request['name']} requires {required[1].name} beside {first}")
    elif len(parameters) != 3:
        raise TypeError(f"{request['name']} does not take (trajectory, question, step)")
    return first in GROUP


def check_function(request: dict[str, Any]) -> bool:
    if not callable(_loaded(request["name"])):
        raise TypeError(f"{request['name']} is no function")
    return True


def call_reward(request: dict[str, Any]) -> Any:
    from pixelis.records import Question, Trajectory

    function, first = _function(request["name"])
    trajectories = [Trajectory.model_validate(t) for t in request["trajectories"]]
    question = Question.model_validate(request["question"])
    if first in EASYR1:
        inputs = []
        for trajectory in trajectories:
            turns = trajectory.replies
            inputs.append(
                {
                    "response": "".join(turn.text for turn in turns),
                    "response_length": sum(len(turn.tokens) for turn in turns),
                    "ground_truth": (question.answers or [""])[0],
                }
            )
        value = function(inputs if first in GROUP else inputs[0])
    else:
        value = function(trajectories if first in GROUP else trajectories[0], question, request["step"])
    if inspect.isawaitable(value):

        async def result() -> Any:
            return await value

        value = asyncio.run(result())
    return _plain(value)


def _plain(value: Any) -> Any:
    """Arrays and tensors as numbers and lists, also nested."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


TASKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "start": bool,
    "warm_math": warm_math,
    "math": compare,
    "check_own": check_reward,
    "own": call_reward,
    "text": call_with_texts,
    "check_text": check_function,
}


if __name__ == "__main__":
    main()
