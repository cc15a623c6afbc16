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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pixelis.records import Question, Trajectory

SPARE_S = 5.0
"""Seconds beyond its timeout that a request may take when the parent is gone and cannot kill this process."""
Signature = Literal["pixelis", "easyr1", "trl", "verl"]
GROUP = ("trajectories", "reward_inputs", "completions")
"""Parameters of functions that take a whole group."""


class Refused(Exception):
    """The request cannot be answered; the message is the code of the cause."""


def main() -> None:
    """Answer requests until the input ends."""
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
    """1.0 when the answer equals a truth."""
    from pixelis.rewards import formulas

    truths = [truth for truth in request["truths"] if _readable(formulas, truth)]
    if not truths:
        raise Refused("truth_unparsable")
    if not _readable(formulas, request["answer"]):
        raise Refused("answer_unparsable")
    return float(any(formulas.equal(truth, request["answer"]) for truth in truths))


def compare_as_system(request: dict[str, Any]) -> float:
    from pixelis.rewards.system_scorers import SYSTEM_SCORERS

    return float(SYSTEM_SCORERS[request["name"]](request["reply"], request["truths"]))


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


def _function(name: str) -> tuple[Callable[..., Any], Signature, bool]:
    """The user's function, the system whose arguments it takes, and whether it takes a whole group."""
    function = _loaded(name)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    parameters = inspect.signature(function).parameters
    takes_group = any(parameter in GROUP for parameter in parameters)
    if "completions" in parameters:
        return function, "trl", takes_group
    if {"solution_str", "ground_truth"} <= set(parameters):
        return function, "verl", takes_group
    if next(iter(parameters), "") in ("reward_input", "reward_inputs"):
        return function, "easyr1", takes_group
    return function, "pixelis", takes_group


def check_reward(request: dict[str, Any]) -> bool:
    """True when the function takes a whole group."""
    function, signature, takes_group = _function(request["name"])
    parameters = inspect.signature(function).parameters
    if signature == "easyr1":
        required = [
            p
            for p in parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if len(required) > 1:
            raise TypeError(f"{request['name']} requires {required[1].name} beside {required[0].name}")
    elif signature == "pixelis" and len(parameters) != 3:
        raise TypeError(f"{request['name']} does not take (trajectory, question, step)")
    return takes_group


def check_function(request: dict[str, Any]) -> bool:
    if not callable(_loaded(request["name"])):
        raise TypeError(f"{request['name']} is no function")
    return True


def call_reward(request: dict[str, Any]) -> Any:
    """The value of a user's reward function for a trajectory or a whole group."""
    from pixelis.records import Question, Trajectory

    function, signature, takes_group = _function(request["name"])
    trajectories = [Trajectory.model_validate(t) for t in request["trajectories"]]
    question = Question.model_validate(request["question"])
    if signature == "pixelis":
        value = function(trajectories if takes_group else trajectories[0], question, request["step"])
    elif signature == "trl":
        value = function(**_accepted(function, _trl_columns(trajectories, question)))
    elif signature == "verl":
        value = function(**_accepted(function, _verl_arguments(trajectories[0], question)))
        if isinstance(value, dict) and "score" in value:
            value = {**value, "overall": value["score"]}
    else:
        inputs = [_easyr1_input(trajectory, question) for trajectory in trajectories]
        value = function(inputs if takes_group else inputs[0])
    if inspect.isawaitable(value):

        async def result() -> Any:
            return await value

        value = asyncio.run(result())
    return _plain(value)


def _easyr1_input(trajectory: Trajectory, question: Question) -> dict[str, Any]:
    return {
        "response": _reply(trajectory),
        "response_length": sum(len(turn.tokens) for turn in trajectory.replies),
        "ground_truth": (question.answers or [""])[0],
    }


def _trl_columns(trajectories: Sequence[Trajectory], question: Question) -> dict[str, list[Any]]:
    """Arguments of TRL's reward functions: one item a completion; the truth in each usual column."""
    truth, count = (question.answers or [""])[0], len(trajectories)
    columns = {**question.meta, **dict.fromkeys(("solution", "ground_truth", "answer"), truth)}
    return {
        **{name: [value] * count for name, value in columns.items()},
        "prompts": [[{"role": "user", "content": question.question}]] * count,
        "completions": [[{"role": "assistant", "content": _reply(t)}] for t in trajectories],
        "completion_ids": [[token for turn in t.replies for token in turn.tokens] for t in trajectories],
    }


def _verl_arguments(trajectory: Trajectory, question: Question) -> dict[str, Any]:
    """Arguments of verl's ``custom_reward_function``."""
    return {
        "data_source": question.meta.get("data_source", question.task),
        "solution_str": _reply(trajectory),
        "ground_truth": (question.answers or [""])[0],
        "extra_info": {"question": question.question, **question.meta},
    }


def _reply(trajectory: Trajectory) -> str:
    from pixelis.rewards.formats import completion

    return completion(trajectory)


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the function takes by name; all of them for one with ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


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
    "system": compare_as_system,
    "check_own": check_reward,
    "own": call_reward,
    "text": call_with_texts,
    "check_text": check_function,
}


if __name__ == "__main__":
    main()
