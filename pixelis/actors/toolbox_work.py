"""Bookkeeping of a toolbox pool: opened media, queued jobs, worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle

from pixelis.actors.toolbox import Call, failed, unopened
from pixelis.records import Media


@dataclass(frozen=True)
class Opened:
    """A question's media in the object store, and their content hashes by id."""

    ref: ray.ObjectRef
    identity: Mapping[str, str]


@dataclass(slots=True, eq=False)
class Job:
    """Work that waits for a worker: media to open, or a call on opened ones."""

    number: int
    done: asyncio.Future
    work: list[Media] | Call
    opened: Opened | None = None
    key: Hashable = None
    quick: bool = False
    waiters: int = 0
    until: float | None = None
    retried: bool = False

    @property
    def opens_pictures(self) -> bool:
        """Whether it opens still pictures, and has not failed among others before."""
        return isinstance(self.work, list) and self.until is None and all(item.kind == "image" for item in self.work)

    def fail(self, code: str, seconds: float) -> None:
        """Answer that it hung (``timeout``) or ended its process (``crashed``)."""
        if isinstance(self.work, Call):
            words = {"timeout": f"took longer than {seconds:g} s", "crashed": "crashed"}
            self.done.set_result(failed(code, f"{self.work.action.op[:30]} {words[code]}"))
        else:
            words = {"timeout": f"could not be decoded in {seconds:g} s", "crashed": "crashed the decoder"}
            self.done.set_exception(unopened(self.work, words[code], code))


@dataclass(slots=True, eq=False)
class Worker:
    """A toolbox and what is known of its process."""

    handle: ActorHandle
    pid: int = 0
    node: str = ""
    alive: bool = False
    fd: int = -1
    line: list[asyncio.Task[bool]] = field(default_factory=list)
    """Its tasks: what it runs and what waits in it."""
    batch: bool = False
    """Whether these are quick calls that travel together."""
    gone: asyncio.Future | None = None
    """Done as soon as the process has ended; None where only Ray can tell, which takes it two seconds."""

    def joined(self, pid: int, node: str, here: bool) -> None:
        """It answers, as process ``pid``. On our own node the system can tell when that ends."""
        self.pid, self.node, self.alive, self.gone = pid, node, True, None
        if here:
            with contextlib.suppress(AttributeError, OSError):  # other systems, processes of other containers
                self.fd, loop = os.pidfd_open(pid), asyncio.get_running_loop()
                self.gone = loop.create_future()
                loop.add_reader(self.fd, _ended, loop, self.fd, self.gone)

    def end(self) -> None:
        """End the process, if it still lives, for Ray to start another."""
        if self.gone is None:
            ray.kill(self.handle, no_restart=False)
        elif not self.gone.done():
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)


def _ended(loop: asyncio.AbstractEventLoop, fd: int, gone: asyncio.Future) -> None:
    loop.remove_reader(fd)
    os.close(fd)
    gone.set_result(None)
