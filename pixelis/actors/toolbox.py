"""The Toolbox actor: opens media and runs pixel operations in a process with limits on time and memory.

A SIGALRM timer ends the process when a call takes too long, even if it never releases the GIL; RLIMIT_DATA
turns exhausted memory into an error. `toolbox_pool` handles the death of the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray

from pixelis.actors.cluster import freeze_gc, use_reserved_gpus
from pixelis.config import Config
from pixelis.datasets.media import open_media
from pixelis.errors import BadImage, InfraFailure, OperationError, PixelisError
from pixelis.operations import Scene, execute, select
from pixelis.operations.environment import Environment, environment_of, observe, select_environments, start
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Media, Observation, Question
from pixelis.telemetry.metrics import count

Pictures = dict[str, np.ndarray | Clip]
"""Images, uint8 [H, W, 3] at full resolution, and clips by media id."""
Objects = dict[str, dict[str, Any]]
"""Objects found by earlier operations of an episode, by id."""
InitialViews = tuple[list[ImageView], list[np.ndarray]]
"""Records and uint8 arrays of the views that a question starts with."""
Outcome = tuple[Observation, list[np.ndarray]]
"""Observation and uint8 views of an operation."""

log = logging.getLogger(__name__)

RESULT_BYTES = 128_000_000
"""Limit on the size of an operation's result."""
LINUX = sys.platform == "linux"


@dataclass(slots=True)
class Call:
    """An operation of an episode. media: index of each medium in the arguments of `Toolbox.execute`.

    episode: whose environment carries out the action; with a question, the environment starts.
    """

    action: Action
    images: list[ImageView]
    objects: Objects
    media: dict[str, int] = field(default_factory=dict)
    episode: str | None = None
    question: Question | None = None


@ray.remote(max_restarts=-1, max_task_retries=0)
class Toolbox:
    """Opens media and runs operations on references to them; holds the environments of running episodes."""

    def __init__(self, config: Config, multiple: int, kind: str):
        use_reserved_gpus()
        self.config, self.multiple, self.kind = config, multiple, kind
        self.crop = PixelBudget.of(config.dialogue.crop)
        self.operations = {operation.name: operation for operation in select(config.toolbox.operations)}
        self.environments = select_environments(config.toolbox)
        self.episodes = dict[str, Environment]()
        for operation in self.operations.values():
            operation.ready(config.toolbox)
        # On SIGALRM, write the stack to the worker's log, then end the process (the default action).
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)
        if LINUX:
            # A forked child keeps the sockets and would hide the death of this process from Ray: it dies too.
            os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(1, 9))
        freeze_gc()
        self.idle_bytes = _data_bytes()

    def health(self) -> int:
        return os.getpid()

    def open(self, questions: Sequence[list[Media]], timeout_s: float) -> tuple[Any, ...]:
        """Each medium at full resolution as a separate return value, question by question, and a list.

        The list has (initial views of each clip, content hash of each medium) by id for each question, or a
        BadImage.
        """
        with self._limits(timeout_s):
            opened, results = zip(*(self._open(media) for media in questions), strict=True)
        return *(item for pictures in opened for item in pictures), list(results)

    def _open(
        self, media: list[Media]
    ) -> tuple[list[Any], tuple[dict[str, InitialViews], dict[str, str]] | PixelisError]:
        try:
            opened = {item.id: open_media(item, self.config.toolbox) for item in media}
            initial = {
                id: first_look({id: item}, self.config.dialogue, self.multiple)
                for id, item in opened.items()
                if isinstance(item, Clip)
            }
            hashes = {item.id: _content_hash(item, opened[item.id]) for item in media}
            return [opened[item.id] for item in media], (initial, hashes)
        except MemoryError:
            error: PixelisError = decode_error(media, "takes too much memory to decode", "out_of_memory")
        except PixelisError as caught:
            error = caught
        except Exception as caught:  # must not fail the other questions of the batch
            log.warning("opening the media of a question failed", exc_info=True)
            error = decode_error(media, f"failed: {type(caught).__name__}", "crashed")
        return [None] * len(media), error

    def execute(
        self, calls: Sequence[Call], timeout_s: float, *media: Any
    ) -> tuple[list[tuple[Outcome, int]], bool]:
        """(outcome, size in bytes) of each call in order, and whether this process should end.

        It should if the calls left much memory behind and it holds no environment. Errors are outcomes.
        """
        with self._limits(timeout_s):
            results = [self._execute(call, {id: media[i] for id, i in call.media.items()}) for call in calls]
        is_large = _data_bytes() > self.idle_bytes + self.config.toolbox.memory_bytes // 2
        return results, is_large and not self.episodes

    def release(self, episode: str) -> None:
        if (environment := self.episodes.pop(episode, None)) is not None:
            environment.close()

    def _execute(self, call: Call, pictures: Pictures) -> tuple[Outcome, int]:
        if call.episode is not None:
            return self._execute_in_environment(call, pictures)
        start, name = time.perf_counter(), call.action.op[:30]
        world = pictures, call.images, call.objects
        scene = Scene.of(self.config.dialogue, self.config.toolbox, self.multiple, self.kind, *world)
        try:
            observation, views = execute(call.action, scene, self.operations)
            if (size := _size(observation, views)) > RESULT_BYTES:
                message = f"{name} returned {size} bytes, the limit is {RESULT_BYTES}"
                observation, views = error_outcome("limit", message)
        except MemoryError:
            observation, views = error_outcome("out_of_memory", f"{name} needs too much memory")
        except BaseException as error:  # an operation that raises SystemExit must not end the process
            observation, views = error_outcome("crashed", f"{name} failed: {type(error).__name__}")
        if observation.status == "error":
            size = len(observation.text)
        observation.seconds = time.perf_counter() - start
        operation = name if name in self.operations else "unknown"  # the policy writes the name
        count("toolbox/calls", tags={"operation": operation, "status": observation.status})
        count("toolbox/seconds", observation.seconds, {"operation": operation})
        return (observation, views), size

    def _execute_in_environment(self, call: Call, pictures: Pictures) -> tuple[Outcome, int]:
        """Start the environment of an episode, or carry out one of its actions.

        An error of the environment itself ends it, and is an outcome with a code `environment_...`.
        """
        assert call.episode is not None
        try:
            if call.question is not None:
                kind = environment_of(call.question, self.environments)
                assert kind is not None
                environment, result = start(kind, call.question, pictures, self.config.run.seed)
                self.episodes[call.episode] = environment
            elif (running := self.episodes.get(call.episode)) is None:
                raise InfraFailure("the process of the environment was replaced", code="environment_lost")
            else:
                result = running.execute(call.action)
            observation, views = observe(result, self.crop, self.multiple)
            if (size := _size(observation, views)) > RESULT_BYTES:
                message = f"it returned {size} bytes, the limit is {RESULT_BYTES}"
                raise InfraFailure(message, code="environment_limit")
        except OperationError as error:
            return error_outcome(error.code, error.message), 0
        except BaseException as error:
            self.release(call.episode)
            cause = "environment_out_of_memory" if isinstance(error, MemoryError) else "environment_crashed"
            code = error.code if isinstance(error, InfraFailure) else cause
            log.warning("the environment of episode %s failed", call.episode, exc_info=True)
            return error_outcome(code, f"the environment failed: {type(error).__name__}: {error}"), 0
        return (observation, views), size

    @contextmanager
    def _limits(self, timeout_s: float) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        if LINUX:
            most = self.idle_bytes + self.config.toolbox.memory_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    """Writable private memory of this process, which RLIMIT_DATA limits."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() if LINUX else 0


def _size(observation: Observation, views: Sequence[np.ndarray]) -> int:
    """Bytes of a result. Serialising it in the call assigns data that are not JSON to their operation."""
    return sum(view.nbytes for view in views) + len(observation.model_dump_json())


def _content_hash(media: Media, opened: np.ndarray | Clip) -> str:
    if isinstance(opened, Clip):
        return opened.sha256
    if media.is_inline:
        return hashlib.sha256(media.uri.encode()).hexdigest()
    with open(media.uri, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def error_outcome(code: str, text: str) -> Outcome:
    return Observation(status="error", code=code, text=text), []


def decode_error(media: Sequence[Media], problem: str, code: str) -> BadImage:
    kind = "video" if any(item.kind == "video" for item in media) else "image"
    message = f"{', '.join(item.id for item in media)} {problem}"
    return BadImage(message, code=f"{kind}_{code}", fix="check the file, or raise the limits of `toolbox`")
