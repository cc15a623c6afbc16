"""State of a toolbox pool: opened media, queued jobs and worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle

from pixelis.actors.toolbox import Call, decode_error, error_outcome
from pixelis.errors import InfraFailure
from pixelis.records import Media


@dataclass(frozen=True)
class Opened:
    """References to the media of a question in the object store, and their content hashes, both by id."""

    refs: Mapping[str, ray.ObjectRef]
    hashes: Mapping[str, str]


@dataclass(slots=True, eq=False)
class Job:
    """Queued work: media to open, or a call on opened media.

    waiters: callers that await `future`; deadline: monotonic time, set when a batch with this job has failed;
    worker: holds its environment.
    """

    number: int
    future: asyncio.Future
    work: list[Media] | Call
    opened: Opened | None = None
    key: Hashable = None
    quick: bool = False
    waiters: int = 0
    deadline: float | None = None
    worker: Worker | None = None

    @property
    def opens_images(self) -> bool:
        """Whether it opens only images and has not been in a failed batch."""
        return (
            isinstance(self.work, list)
            and self.deadline is None
            and all(item.kind == "image" for item in self.work)
        )

    def fail(self, code: str, seconds: float) -> None:
        if isinstance(self.work, Call):
            problems = {"timeout": f"took longer than {seconds:g} s", "crashed": "crashed"}
            if self.work.episode is not None:
                message = f"the environment of the episode {problems[code]}"
                self.future.set_exception(InfraFailure(message, code=f"environment_{code}"))
                return
            self.future.set_result(error_outcome(code, f"{self.work.action.op[:30]} {problems[code]}"))
        else:
            problems = {"timeout": f"could not be decoded in {seconds:g} s", "crashed": "crashed the decoder"}
            self.future.set_exception(decode_error(self.work, problems[code], code))


@dataclass(slots=True, eq=False)
class Worker:
    """A toolbox and the state of its process.

    exited: done when the process has ended, None where only Ray can detect that (after two seconds);
    environments: episodes whose environment is in the process; pinned: their waiting calls.
    """

    handle: ActorHandle
    pid: int = 0
    alive: bool = False
    fd: int = -1
    exited: asyncio.Future | None = None
    environments: set[str] = field(default_factory=set)
    pinned: deque[Job] = field(default_factory=deque)

    def lose_environments(self) -> None:
        """Fail the waiting calls of environments that end with the process; new ones wait for the next."""
        self.environments, waiting, self.pinned = set(), self.pinned, deque[Job]()
        for job in waiting:
            if isinstance(job.work, Call) and job.work.question is None:
                job.future.set_exception(
                    InfraFailure("the process of the environment ended", code="environment_lost")
                )
            elif isinstance(job.work, Call) and job.work.episode is not None:
                self.pinned.append(job)
                self.environments.add(job.work.episode)

    def mark_alive(self, pid: int) -> None:
        self.pid, self.alive, self.exited = pid, True, None
        with contextlib.suppress(AttributeError, OSError):  # other operating systems
            self.fd = fd = os.pidfd_open(pid)
            loop = asyncio.get_running_loop()
            self.exited = exited = loop.create_future()

            def on_exit() -> None:
                loop.remove_reader(fd)
                os.close(fd)
                exited.set_result(None)

            loop.add_reader(fd, on_exit)

    def terminate(self) -> None:
        if self.exited is None:
            ray.kill(self.handle, no_restart=False)
        elif not self.exited.done():
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)
