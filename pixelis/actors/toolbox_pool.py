"""A generator's pool of Toolbox actors: survives calls that hang, crash or exhaust memory.

A worker runs one task at a time, so a dead worker identifies the call that killed it. Quick calls and images
to open are batched; a failed batch is retried one by one. Equal calls run once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Coroutine, Hashable, Mapping
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayError

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.toolbox import Call, InitialViews, Objects, Outcome, Toolbox
from pixelis.actors.toolbox_cache import NAMES_IDS, ByteCache, call_key, is_reusable, media_key, memory_bytes
from pixelis.actors.toolbox_work import Job, Opened, Worker
from pixelis.config import Config
from pixelis.errors import BadInput, InfraFailure, PixelisError
from pixelis.operations import select
from pixelis.operations.media import first_look
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Media

QUICK_BATCH = 64
OPEN_BATCH = 16
BATCH_SHARE = 0.25
"""Share of the timeout that a batch gets. The rest is left to retry its jobs one by one."""
GRACE_S = 0.5
"""Seconds after a task's timeout by which the alarm must have ended its process."""
PICTURE_SHARE = 0.25
"""Share of `toolbox.cache_bytes` for pictures that no group uses any more."""
PING_S = 0.1


class ToolboxPool:
    """Runs calls on `toolbox.workers` processes, from one event loop; answers each call exactly once.

    multiple: divisor of the sides of views; kind: scale of the policy's coordinates. A call that hangs,
    crashes or exhausts memory becomes an error observation within `toolbox.timeout_s` + 1 seconds.
    """

    def __init__(self, config: Config, multiple: int, kind: str, **options: Any):
        self.config = config
        self.timeout_s = config.toolbox.timeout_s
        self.multiple = multiple
        self.kind = kind
        self.operations = {operation.name: operation for operation in select(config.toolbox.operations)}
        self.options = {"num_cpus": config.toolbox.cpus, "num_gpus": config.toolbox.gpus, **options}
        self.workers = [Worker(self._create_toolbox()) for _ in range(config.toolbox.workers)]
        self.idle: deque[Worker] = deque()
        self.quick: deque[Job] = deque()
        self.slow: deque[Job] = deque()
        self.in_flight: dict[Hashable, Job] = {}
        self.cache = ByteCache(config.toolbox.cache_bytes)
        self.pictures = ByteCache(int(PICTURE_SHARE * config.toolbox.cache_bytes))
        self.submitted = 0
        self.counts, self.failures = Counter[str](), Counter[str]()
        self.tasks: set[asyncio.Task] = set()
        self.starts: list[asyncio.Task] = []
        self.is_dispatch_scheduled = False
        self.error: PixelisError | None = None

    def _create_toolbox(self) -> ActorHandle:
        return Toolbox.options(**self.options).remote(self.config, self.multiple, self.kind)  # type: ignore[attr-defined]

    # -- calls

    async def ready(self) -> None:
        """Return once every worker answers. Raises BadInput if toolboxes cannot be constructed."""
        self._ensure_started()
        await asyncio.gather(*self.starts)

    async def open(
        self, media: list[Media], decoded: Mapping[str, ray.ObjectRef] | None = None
    ) -> tuple[Opened, InitialViews]:
        """Open the media of a question. The views are read-only and may be shared with other callers.

        decoded: references to decoded images, uint8 [H, W, 3], by id; the URIs of `media` are then content
        hashes. Raises BadImage, InfraFailure.
        """
        if not media:
            return Opened({}, {}), ([], [])
        if decoded:
            pixels = dict(zip(decoded, await asyncio.gather(*decoded.values()), strict=True))
            shown = {item.id: pixels[item.id] for item in media}
            return Opened(decoded, {item.id: item.uri for item in media}), await self._first_look(shown)
        key = media_key(media) if self.config.toolbox.cache_bytes else None
        if cached := self.pictures.get(key):
            return cached
        return await self._wait(self.in_flight.get(key) or self._submit(media, key=key))

    async def execute(
        self, action: Action, images: list[ImageView], objects: Objects, opened: Opened
    ) -> Outcome:
        """Run an operation; its failures are error observations. The views are read-only and may be shared."""
        self.counts["calls"] += 1
        operation, key = self.operations.get(action.op), None
        if operation is not None and self.config.toolbox.cache_bytes:
            key = call_key(operation, self.kind, action, images, objects, opened)
        if cached := self.cache.get(key):
            self.counts["hits"] += 1
            return cached
        quick = operation is None or operation.quick
        if (job := self.in_flight.get(key)) is not None:
            outcome = await self._wait(job)
            if outcome[0].code not in NAMES_IDS:
                self.counts["hits"] += 1
                return outcome
            key = None  # the ids are those of the other episode
        call = Call(action, images, objects)
        return await self._wait(self._submit(call, opened=opened, key=key, quick=quick))

    def environment_worker(self) -> Worker:
        return min(self.workers, key=lambda worker: (len(worker.environments), not worker.alive))

    async def execute_on(self, worker: Worker, call: Call, opened: Opened) -> Outcome:
        self.counts["calls"] += 1
        return await self._wait(self._submit(call, opened=opened, worker=worker))

    def health(self) -> dict[str, Any]:
        return {
            "size": len(self.workers),
            "alive": sum(worker.alive for worker in self.workers),
            "pids": [worker.pid for worker in self.workers],
            "waiting": len(self.quick) + len(self.slow),
            **{name: self.counts[name] for name in ("calls", "hits", "restarts")},
            "failures": dict(self.failures),
            "cached_bytes": self.cache.bytes,
            "picture_bytes": self.pictures.bytes,
        }

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for worker in self.workers:
            ray.kill(worker.handle)

    # -- queue

    def _submit(self, work: list[Media] | Call, **details: Any) -> Job:
        self._ensure_started()
        if self.error is not None:
            raise self.error
        loop = asyncio.get_running_loop()
        self.submitted += 1
        job = Job(self.submitted, loop.create_future(), work, **details)
        if job.key is not None:
            self.in_flight[job.key] = job
        job.future.add_done_callback(_retrieve_exception)
        queue = job.worker.pinned if job.worker is not None else self.quick if job.quick else self.slow
        queue.append(job)
        if not self.is_dispatch_scheduled:  # batches the calls of one iteration of the event loop
            self.is_dispatch_scheduled = True
            loop.call_soon(self._dispatch)
        return job

    async def _wait(self, job: Job) -> Any:
        job.waiters += 1
        try:
            return await asyncio.shield(job.future)
        finally:
            job.waiters -= 1

    def _dispatch(self) -> None:
        self.is_dispatch_scheduled = False
        for worker in [worker for worker in self.idle if worker.pinned]:
            while worker.pinned and not worker.pinned[0].waiters:  # cancelled
                worker.pinned.popleft().future.cancel()
            if worker.pinned:
                self.idle.remove(worker)
                self._assign(worker, [worker.pinned.popleft()])
        while self.idle and (jobs := self._next_jobs()):
            self._assign(self.idle.popleft(), jobs)

    def _assign(self, worker: Worker, jobs: list[Job]) -> None:
        start = time.monotonic()
        timeout_s = BATCH_SHARE * self.timeout_s
        if len(jobs) == 1:  # all the time, or what a failed batch with this job has left
            deadline = jobs[0].deadline
            timeout_s = self.timeout_s if deadline is None else max(timeout_s, deadline - start)
        try:
            refs = self._send(worker, jobs, timeout_s)
        except Exception as error:  # arguments that cannot be serialised
            self.idle.append(worker)
            for job in jobs:
                self._reject(job, error)
            return
        self._spawn(self._complete(worker, jobs, refs, start, timeout_s))

    def _next_jobs(self) -> list[Job]:
        """The oldest job, batched with others of its kind: an even share for each idle worker."""
        for queue in (self.quick, self.slow):
            while queue and not queue[0].waiters:  # cancelled
                self._unregister(queue.popleft()).future.cancel()
        if self.quick and (not self.slow or self.quick[0].number < self.slow[0].number):
            share = min(QUICK_BATCH, -(-len(self.quick) // len(self.idle)))
            return [self.quick.popleft() for _ in range(share)]
        openings = 0
        while openings < min(OPEN_BATCH, len(self.slow)) and self.slow[openings].opens_images:
            openings += 1
        share = max(1, -(-openings // len(self.idle)))
        return [self.slow.popleft() for _ in range(min(share, len(self.slow)))]

    def _unregister(self, job: Job) -> Job:
        if self.in_flight.get(job.key) is job:
            del self.in_flight[job.key]
        return job

    # -- workers

    def _ensure_started(self) -> None:
        if not self.starts:
            self.starts = [self._spawn(self._start(worker)) for worker in self.workers]

    def _spawn(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(_retrieve_exception)
        return task

    async def _start(self, worker: Worker) -> None:
        timeout_s = self.config.cluster.placement_timeout_s
        deadline, cause = time.monotonic() + timeout_s, "it does not start"
        if worker.pid:
            worker.alive = False
            self.counts["restarts"] += 1
            worker.terminate()
        pings: set[asyncio.Future] = set()
        answer = None
        while answer is None:
            # A ping that arrives while Ray restarts the process fails only seconds later, so send several.
            pings.add(asyncio.ensure_future(worker.handle.health.remote()))
            await asyncio.sleep(PING_S)
            for ping in [ping for ping in pings if ping.done()]:
                pings.discard(ping)
                try:
                    if ping.result() != worker.pid:
                        answer = ping.result()
                except ActorDiedError as error:  # its construction failed, or it was killed from outside
                    reason = unwrap_ray_error(error)
                    if isinstance(reason, BadInput):
                        self.error = reason
                        self._fail_all(reason)
                        raise reason from None
                    cause, worker.handle, pings = str(reason), self._create_toolbox(), set()
                    break
                except RayError as error:
                    cause = type(error).__name__
            if time.monotonic() > deadline and not any(other.alive for other in self.workers):
                message = f"no toolbox for {timeout_s:g} s: {cause}"
                self._fail_all(InfraFailure(message, fix="look at `ray status`"))
        for ping in pings:
            ping.cancel()
        worker.mark_alive(answer)
        self.idle.append(worker)
        self._dispatch()

    def _fail_all(self, error: PixelisError) -> None:
        for job in [*self.quick, *self.slow, *(job for worker in self.workers for job in worker.pinned)]:
            self._unregister(job).future.set_exception(error)
        for worker in self.workers:
            worker.pinned.clear()
        self.quick.clear()
        self.slow.clear()

    async def _complete(
        self, worker: Worker, jobs: list[Job], refs: list[ray.ObjectRef], start: float, timeout_s: float
    ) -> None:
        outcomes: list[tuple[Any, int]] = []
        should_end, code, refusal = False, None, None
        reply = self._spawn(self._reply(jobs, refs))
        await asyncio.wait(
            {reply, worker.exited or reply}, timeout=timeout_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        try:
            if not reply.done():
                reply.cancel()
                raise TimeoutError
            outcomes, should_end = reply.result()
        except (TimeoutError, RayActorError):
            code = "timeout" if time.monotonic() - start >= timeout_s else "crashed"
        except Exception as error:  # raised by the method, or lost images
            refusal = unwrap_ray_error(error) or error
        if code is not None or should_end:
            worker.lose_environments()
            self._spawn(self._start(worker))
        else:
            self.idle.append(worker)
        if code is not None and len(jobs) == 1:
            self.failures[code] += 1
            self._unregister(jobs[0]).fail(code, self.timeout_s)
        elif code is not None:  # each of them alone, in their order
            for job in reversed(jobs):
                job.deadline, job.quick = start + self.timeout_s, False
                self.slow.appendleft(job)
        self._dispatch()  # before answering, so that the worker runs its next task while episodes continue
        if refusal is not None:
            self.pictures.clear()  # one of them may be lost
            for job in jobs:
                self._reject(job, refusal)
        for job, (outcome, size) in zip(jobs, outcomes, strict=bool(outcomes)):
            if isinstance(outcome, PixelisError):
                self._reject(job, outcome)
            else:
                self._resolve(job, outcome, size, is_batch=len(jobs) > 1)

    def _send(self, worker: Worker, jobs: list[Job], timeout_s: float) -> list[ray.ObjectRef]:
        if isinstance(jobs[0].work, list):
            media = [job.work for job in jobs]
            count = sum(map(len, media))  # type: ignore[arg-type]
            return worker.handle.open.options(num_returns=count + 1).remote(media, timeout_s)
        places: dict[ray.ObjectRef, int] = {}
        for job in jobs:
            assert isinstance(job.work, Call)
            assert job.opened is not None
            job.work.media = {id: places.setdefault(ref, len(places)) for id, ref in job.opened.refs.items()}
        return [worker.handle.execute.remote([job.work for job in jobs], timeout_s, *places)]

    async def _reply(self, jobs: list[Job], refs: list[ray.ObjectRef]) -> tuple[list[tuple[Any, int]], bool]:
        """(outcome, size in bytes) of each job, and whether the worker should end."""
        *opened, reply = refs
        if isinstance(jobs[0].work, Call):
            return await reply
        try:
            results = await reply
        except RayError:
            for ref in opened:
                with contextlib.suppress(RayError):
                    await ref  # otherwise Ray logs an unretrieved error
            raise
        references, outcomes = iter(opened), list[tuple[Any, int]]()
        for job, result in zip(jobs, results, strict=True):
            assert isinstance(job.work, list)
            own = {item.id: next(references) for item in job.work}
            if isinstance(result, PixelisError):
                outcomes.append((result, 0))
                continue
            clips, hashes = result
            try:
                looks = [
                    clips[id] if id in clips else await self._first_look({id: await ref})
                    for id, ref in own.items()
                ]
            except BadInput as error:  # a picture that has no view
                outcomes.append((error, 0))
                continue
            images = [image for look in looks for image in look[0]]
            views = [view for look in looks for view in look[1]]
            size = sum(3 * image.source_size[0] * image.source_size[1] for image in images)
            outcomes.append(((Opened(own, hashes), (images, views)), size))
        return outcomes, False

    async def _first_look(self, media: Mapping[str, np.ndarray | Clip]) -> InitialViews:
        return await asyncio.to_thread(first_look, media, self.config.dialogue, self.multiple)

    # -- answers and cache

    def _resolve(self, job: Job, outcome: Any, size: int, is_batch: bool) -> None:
        self._unregister(job)
        if isinstance(job.work, Call):
            observation, views = outcome
            if observation.status == "error":
                self.failures[observation.code or "error"] += 1
            if is_batch and job.key is not None:  # a cached view must not keep the batch's buffer in memory
                outcome = observation, views = observation, [view.copy() for view in views]
            if job.key is not None and is_reusable(observation):
                self.cache.put(job.key, outcome, memory_bytes(views, size))
        else:
            _, (_, views) = outcome
            if job.key is not None:
                self.pictures.put(job.key, outcome, size + sum(view.nbytes for view in views))
        for view in views:
            view.flags.writeable = False
        job.future.set_result(outcome)

    def _reject(self, job: Job, error: Exception) -> None:
        self.failures[getattr(error, "code", type(error).__name__)] += 1
        self._unregister(job).future.set_exception(error)


def _retrieve_exception(future: asyncio.Future) -> None:
    """Keep asyncio from logging the exception if no caller waits any more."""
    if not future.cancelled():
        future.exception()
