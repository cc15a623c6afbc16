"""The Toolbox actor: opens media and runs pixel operations in a process that ends itself rather than hang.

An alarm of the system ends a call that takes too long, even one that never gives the interpreter back, and a limit of the system
turns exhausted memory into an error. What happens when the process is gone is the business of the pool in front of it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from pixelis.actors.cluster import freeze_gc
from pixelis.config import Config
from pixelis.datasets.media import open_media
from pixelis.errors import BadImage, PixelisError
from pixelis.operations import Scene, execute, select
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Media, Observation

Pictures = dict[str, np.ndarray | Clip]
"""Full-resolution uint8 [H, W, 3] pictures and clips by media id."""
Objects = dict[str, dict[str, Any]]
"""What earlier operations of an episode found, by id."""
Look = tuple[list[ImageView], list[np.ndarray]]
"""The views of a question's media at first: described, and as uint8 arrays."""
Outcome = tuple[Observation, list[np.ndarray]]

RESULT_BYTES = 128_000_000
"""Most bytes of what one call may give back."""
LINUX = sys.platform == "linux"


@dataclass(slots=True)
class Call:
    """One operation of one episode; ``group`` says which of the pictures passed along it is about."""

    action: Action
    images: list[ImageView]
    objects: Objects
    group: int = 0


@ray.remote(max_restarts=-1, max_task_retries=0)
class Toolbox:
    """Stateless between calls; pictures come and go by reference."""

    def __init__(self, config: Config, multiple: int, kind: str):
        self.config, self.multiple, self.kind = config, multiple, kind
        d = config.dialogue
        self.crop = PixelBudget(d.crop.min_pixels, d.crop.max_pixels)
        self.frame = PixelBudget(d.frame.min_pixels, d.frame.max_pixels)
        self.operations = {operation.name: operation for operation in select(config.toolbox.operations)}
        for operation in self.operations.values():
            operation.ready(config.toolbox)
        # The alarm writes where the call hangs to the worker's log and then does what it does by default: it ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)
        if LINUX:
            # A forked child holds this process's sockets: while it lives, Ray does not see that we died.
            os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(1, 9))
        freeze_gc()
        self.idle = _data_bytes()

    def health(self) -> tuple[int, str]:
        """Process id and node; answers when alive."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def open(self, questions: Sequence[list[Media]], limit_s: float) -> tuple[Any, ...]:
        """One return for each question, its full-resolution pictures by id, and one more for all.

        That holds what the policy sees of each question at first and the content hashes of its media by id, or the BadImage that
        says why they cannot be decoded under the caps.
        """
        with self._guarded(limit_s):
            opened, told = zip(*(self._open(media) for media in questions), strict=True)
        return *opened, list(told)

    def _open(self, media: list[Media]) -> tuple[Pictures | None, tuple[Look, dict[str, str]] | PixelisError]:
        try:
            opened = {item.id: open_media(item, self.config.toolbox) for item in media}
            look = first_look(opened, self.config.dialogue, self.multiple)
            return opened, (look, {item.id: _identity(item, opened[item.id]) for item in media})
        except MemoryError:
            return None, unopened(media, "takes too much memory to decode", "out_of_memory")
        except PixelisError as error:
            return None, error
        except Exception as error:  # the others of the batch are not to blame
            return None, unopened(media, f"failed: {type(error).__name__}", "crashed")

    def execute(self, calls: Sequence[Call], limit_s: float, *groups: Pictures) -> tuple[list[tuple[Outcome, int]], bool]:
        """Run calls one after another; an outcome (errors included) and its bytes for each.

        Beside them: whether calls left so much memory or so many threads behind that this process should end.
        """
        with self._guarded(limit_s):
            done = [self._one(call, groups[call.group]) for call in calls]
        return done, _data_bytes() > self.idle + self.config.toolbox.memory_bytes // 2

    def _one(self, call: Call, pictures: Pictures) -> tuple[Outcome, int]:
        start, name = time.perf_counter(), call.action.op[:30]
        scene = Scene(
            media=pictures,
            images=call.images,
            objects=call.objects,
            budget=self.crop,
            frame_budget=self.frame,
            multiple=self.multiple,
            kind=self.kind,
            settings=self.config.toolbox,
        )
        try:
            observation, views = execute(call.action, scene, self.operations)
            # Data that are not plain are found here, where their operation is known.
            size = sum(view.nbytes for view in views) + len(observation.model_dump_json())
            if size > RESULT_BYTES:
                observation, views = failed("limit", f"{name} gave {size} bytes, more than {RESULT_BYTES}")
        except MemoryError:
            observation, views = failed("out_of_memory", f"{name} needs too much memory")
        except BaseException as error:  # an operation that exits must not take the process along
            observation, views = failed("crashed", f"{name} failed: {type(error).__name__}")
        if observation.status == "error":
            size = len(observation.text)
        observation.seconds = time.perf_counter() - start
        return (observation, views), size

    @contextmanager
    def _guarded(self, limit_s: float) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        if LINUX:
            resource.setrlimit(resource.RLIMIT_DATA, (self.idle + self.config.toolbox.memory_bytes, before[1]))
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    """Writable private memory of this process, what RLIMIT_DATA counts; 0 where the system does not tell."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() if LINUX else 0


def _identity(media: Media, opened: np.ndarray | Clip) -> str:
    """What tells the content of one picture or clip from that of another: a hash of its encoded source."""
    if isinstance(opened, Clip):
        return opened.sha256
    if media.uri.startswith(("data:", "cards:")):
        return hashlib.sha256(media.uri.encode()).hexdigest()
    with open(media.uri, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def failed(code: str, text: str) -> Outcome:
    return Observation(status="error", code=code, text=text), []


def unopened(media: Sequence[Media], problem: str, code: str) -> BadImage:
    kind = "video" if any(item.kind == "video" for item in media) else "image"
    names = ", ".join(item.id for item in media)
    return BadImage(f"{names} {problem}", code=f"{kind}_{code}", fix="check the file, or raise the limits of `toolbox`")
