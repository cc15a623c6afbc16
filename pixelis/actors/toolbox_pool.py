"""The pool of Toolbox actors behind a generator: survives every bad call and runs equal calls once.

A worker runs one task at a time, so a death names its culprit. Quick calls travel together, and so do pictures to open; when
such a batch fails, its parts are tried one by one, so that only the culprit does. A full batch of quick calls may wait in the
worker behind another one; it did not run when that one fails, and goes to the next worker as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine, Hashable, Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.toolbox import Call, Look, Objects, Outcome, Toolbox
from pixelis.actors.toolbox_work import Job, Opened, Worker
from pixelis.config import Config
from pixelis.errors import BadInput, InfraFailure, OperationError, PixelisError
from pixelis.operations import geometry, select
from pixelis.operations.media import first_look
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView, Media

QUICK_CALLS = 64
"""Most quick calls that travel together."""
OPENED_TOGETHER = 16
"""Most questions whose pictures are opened together."""
QUICK_SHARE = 0.25
"""Share of the deadline that such a batch gets; when it fails its calls are tried one by one in what is left."""
GRACE_S = 0.5
"""Seconds after a call's limit in which the alarm must have ended its process."""
PING_S = 0.1
"""Seconds between questions to a starting worker whether it is alive."""


class ToolboxPool:
    """Runs calls on ``toolbox.workers`` processes of its own, from one event loop; every call is answered exactly once.

    ``multiple`` is what both sides of a view are divisible by (patch x merge), ``kind`` the scale of the policy's numbers. Calls
    that hang, crash or exhaust memory are error observations within ``toolbox.timeout_s`` + 1 seconds of being given to a
    worker. Equal calls on equal pictures are run once, as long as their results fit ``toolbox.cache_bytes``.
    """

    def __init__(self, config: Config, multiple: int, kind: str, **options: Any):
        self.config, self.timeout_s, self.multiple, self.kind = config, config.toolbox.timeout_s, multiple, kind
        self.operations = {operation.name: operation for operation in select(config.toolbox.operations)}
        self.make = lambda: Toolbox.options(num_cpus=config.toolbox.cpus, **options).remote(config, multiple, kind)  # type: ignore[attr-defined]
        self.workers = [Worker(self.make()) for _ in range(config.toolbox.workers)]
        self.node = ray.get_runtime_context().get_node_id()
        self.idle: deque[Worker] = deque()
        self.quick: deque[Job] = deque()
        self.slow: deque[Job] = deque()
        self.flights: dict[Hashable, Job] = {}
        self.cache: OrderedDict[Hashable, tuple[Outcome, int]] = OrderedDict()
        self.cached_bytes, self.number = 0, 0
        self.counts, self.failures = Counter[str](), Counter[str]()
        self.tasks: set[asyncio.Task] = set()
        self.joins: list[asyncio.Task] = []
        self.scheduled = False
        self.broken: PixelisError | None = None

    # -- what callers use ------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Return once every worker answers; raises what keeps one from starting."""
        self._start()
        await asyncio.gather(*self.joins)

    async def open(self, media: list[Media], decoded: ray.ObjectRef | None = None) -> tuple[Opened, Look]:
        """The opened media by reference, and what the policy sees of them at first; BadImage, InfraFailure.

        Of pictures that somebody has decoded already, uint8 [H, W, 3] by id, ``decoded`` is the reference; the URIs of ``media``
        then only tell their contents apart.
        """
        if decoded is not None:
            look = await asyncio.to_thread(first_look, await _result(decoded), self.config.dialogue, self.multiple)
            return Opened(decoded, {item.id: item.uri for item in media}), look
        ref, (look, identity) = await self._wait(self._submit(media))
        return Opened(ref, identity), look

    def bound(self, opened: Opened) -> BoundTools:
        """The tools of one group of episodes."""
        return BoundTools(self, opened)

    async def execute(self, action: Action, images: list[ImageView], objects: Objects, opened: Opened) -> Outcome:
        """Run one operation. What goes wrong with it is an error observation; InfraFailure when no worker can be had.

        The views are read-only and may be shared with other callers.
        """
        self.counts["calls"] += 1
        key = self._key(action, images, objects, opened) if self.config.toolbox.cache_bytes else None
        if key is not None and (kept := self.cache.get(key)):
            self.cache.move_to_end(key)
            self.counts["hits"] += 1
            return kept[0]
        job = self.flights.get(key) if key is not None else None
        if job is None:
            operation = self.operations.get(action.op)
            quick = operation is None or operation.quick
            job = self._submit(Call(action, images, objects), opened=opened, key=key, quick=quick)
            if key is not None:
                self.flights[key] = job
        else:
            self.counts["hits"] += 1
        return await self._wait(job)

    def health(self) -> dict[str, Any]:
        """Workers, calls, failures by code, restarts and the cache."""
        return {
            "size": len(self.workers),
            "alive": sum(worker.alive for worker in self.workers),
            "pids": [worker.pid for worker in self.workers],
            "waiting": len(self.quick) + len(self.slow),
            **{name: self.counts[name] for name in ("calls", "hits", "restarts")},
            "failures": dict(self.failures),
            "cached_bytes": self.cached_bytes,
        }

    def close(self) -> None:
        """End the workers; for owners that outlive the pool."""
        for task in self.tasks:
            task.cancel()
        for worker in self.workers:
            ray.kill(worker.handle)

    # -- the queue ---------------------------------------------------------------------------------------------------------

    def _submit(self, work: list[Media] | Call, **details: Any) -> Job:
        self._start()
        if self.broken is not None:
            raise self.broken
        loop = asyncio.get_running_loop()
        self.number += 1
        job = Job(self.number, loop.create_future(), work, **details)
        job.done.add_done_callback(_heard)
        (self.quick if job.quick else self.slow).append(job)
        if not self.scheduled:  # calls of the same tick of the event loop can then travel together
            self.scheduled = True
            loop.call_soon(self._dispatch)
        return job

    async def _wait(self, job: Job) -> Any:
        job.waiters += 1
        if len(self.quick) >= QUICK_CALLS:  # workers run these while the episodes that follow are read
            self._dispatch()
        try:
            return await asyncio.shield(job.done)
        finally:
            job.waiters -= 1

    def _dispatch(self) -> None:
        self.scheduled = False
        while self.idle and (jobs := self._take()):
            self._give(self.idle.popleft(), jobs)
        for worker in self.workers:
            if worker.batch and len(worker.line) == 1 and len(self.quick) >= QUICK_CALLS and not self.slow:
                self._give(worker, [self.quick.popleft() for _ in range(QUICK_CALLS)])

    def _give(self, worker: Worker, jobs: list[Job]) -> None:
        start = time.monotonic()
        limit = self._limit(jobs, start)
        try:
            refs = self._send(worker, jobs, limit)
        except Exception as error:  # arguments that cannot be sent
            if not worker.line:
                self.idle.append(worker)
            for job in jobs:
                self._refuse(job, error)
            return
        before = worker.line[-1] if worker.line else None
        worker.batch = jobs[0].quick and len(jobs) > 1
        worker.line.append(self._run(self._serve(worker, jobs, refs, start, limit, before)))

    def _take(self) -> list[Job]:
        """The next task: what has waited longest, quick calls together with other quick ones."""
        for queue in (self.quick, self.slow):
            while queue and not queue[0].waiters:  # nobody wants it any more
                self._forget(queue.popleft()).done.cancel()
        if self.quick and (not self.slow or self.quick[0].number < self.slow[0].number):
            share = min(QUICK_CALLS, -(-len(self.quick) // len(self.idle)))
            return [self.quick.popleft() for _ in range(share)]
        together = 0
        while together < min(OPENED_TOGETHER, len(self.slow)) and self.slow[together].opens_pictures:
            together += 1
        share = max(1, -(-together // len(self.idle)))
        return [self.slow.popleft() for _ in range(min(share, len(self.slow)))]

    def _forget(self, job: Job) -> Job:
        if job.key is not None and self.flights.get(job.key) is job:
            del self.flights[job.key]
        return job

    # -- the workers -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self.joins:
            self.joins = [self._run(self._join(worker)) for worker in self.workers]

    def _run(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(_heard)
        return task

    async def _join(self, worker: Worker) -> None:
        """Bring a worker (back) into the pool: it has to answer, and from another process than the one that failed."""
        patience = self.config.cluster.placement_timeout_s
        give_up, cause = time.monotonic() + patience, "it does not start"
        if worker.pid:
            worker.alive = False
            self.counts["restarts"] += 1
            worker.end()
        pings: set[asyncio.Task] = set()
        answer = None
        while answer is None:
            # One that arrives while Ray restarts the process fails only seconds later, so several are on their way.
            pings.add(self._run(_result(worker.handle.health.remote())))
            await asyncio.sleep(PING_S)
            for ping in [ping for ping in pings if ping.done()]:
                pings.discard(ping)
                try:
                    if ping.result()[0] != worker.pid:
                        answer = ping.result()
                except ActorDiedError as error:  # for good: it could not be made, or somebody else ended it
                    told = unwrap_ray_error(error)
                    if isinstance(told, BadInput):
                        self._break(told)
                        raise told from None
                    cause, worker.handle, pings = str(told), self.make(), set()
                    break
                except RayError as error:
                    cause = type(error).__name__
            if time.monotonic() > give_up and not any(other.alive for other in self.workers):
                self._fail_all(InfraFailure(f"no toolbox for {patience:g} s: {cause}", fix="look at `ray status`"))
        for ping in pings:
            ping.cancel()
        pid, node = answer
        worker.joined(pid, node, here=node == self.node)
        self.idle.append(worker)
        self._dispatch()

    def _break(self, error: PixelisError) -> None:
        self.broken = error
        self._fail_all(error)

    def _fail_all(self, error: PixelisError) -> None:
        for job in [*self.quick, *self.slow]:
            self._forget(job).done.set_exception(error)
        self.quick.clear()
        self.slow.clear()

    async def _serve(
        self,
        worker: Worker,
        jobs: list[Job],
        refs: list[ray.ObjectRef],
        start: float,
        limit: float,
        before: asyncio.Task[bool] | None,
    ) -> bool:
        """Wait for a worker to do these jobs, and see to it that every one is answered or waits again; whether it lived.

        ``before`` is the task that it runs first.
        """
        outcomes: list[tuple[Any, int]] = []
        worn, code, refusal = False, None, None
        reply = self._run(self._reply(jobs, refs))
        if before is not None:
            if not await before:
                self.quick.extendleft(reversed(jobs))
                self._dispatch()
                return False
            start = time.monotonic()
        await asyncio.wait({reply, worker.gone or reply}, timeout=limit + GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        try:
            if not reply.done():
                reply.cancel()
                raise TimeoutError
            outcomes, worn = reply.result()
        except (TimeoutError, RayActorError):
            code = "timeout" if time.monotonic() - start >= limit else "crashed"
        except Exception as error:  # by the method, or lost pictures
            refusal = unwrap_ray_error(error) or error
        del worker.line[0]
        if code is not None or (worn and not worker.line):
            worker.line.clear()
            self._run(self._join(worker))
        elif not worker.line:
            self.idle.append(worker)
        if code is not None:
            self._failed(jobs, code, start, here=worker.node == self.node)
        self._dispatch()  # before the answers: the worker has its next task while the episodes go on
        if refusal is not None:
            for job in jobs:
                self._refuse(job, refusal)
        for job, (outcome, size) in zip(jobs, outcomes, strict=bool(outcomes)):
            if isinstance(outcome, PixelisError):
                self._refuse(job, outcome)
            else:
                self._answer(job, outcome, size, shared=len(jobs) > 1)
        return code is None

    def _failed(self, jobs: list[Job], code: str, start: float, here: bool) -> None:
        """Answer for a worker that died, or queue its jobs to be tried one by one.

        On our own node a death is the call's doing; elsewhere the node may be gone, so a call on its own is tried once more.
        """
        again = len(jobs) > 1 or (code == "crashed" and not here and not jobs[0].retried)
        for job in reversed(jobs):
            if again:
                job.until, job.quick, job.retried = job.until or start + self.timeout_s, False, len(jobs) == 1
                self.slow.appendleft(job)
            else:
                self.failures[code] += 1
                self._forget(job).fail(code, self.timeout_s)

    def _limit(self, jobs: list[Job], now: float) -> float:
        """Seconds for a task: a batch gets a share of the deadline, a call from a failed batch what is left but not nothing."""
        short = QUICK_SHARE * self.timeout_s
        if len(jobs) > 1:
            return short
        return self.timeout_s if jobs[0].until is None else max(short, jobs[0].until - now)

    def _send(self, worker: Worker, jobs: list[Job], limit_s: float) -> list[ray.ObjectRef]:
        """Give a worker its task; the references to what it returns, the reply last."""
        if isinstance(jobs[0].work, list):
            return worker.handle.open.options(num_returns=len(jobs) + 1).remote([job.work for job in jobs], limit_s)
        groups: dict[ray.ObjectRef, int] = {}
        for job in jobs:
            assert isinstance(job.work, Call)
            assert job.opened is not None
            job.work.group = groups.setdefault(job.opened.ref, len(groups))
        return [worker.handle.execute.remote([job.work for job in jobs], limit_s, *groups)]

    async def _reply(self, jobs: list[Job], refs: list[ray.ObjectRef]) -> tuple[list[tuple[Any, int]], bool]:
        """An outcome and its bytes for each job, and whether the worker should end."""
        *opened, reply = refs
        if isinstance(jobs[0].work, Call):
            return await reply
        try:
            looks = await reply
        except RayError:
            for ref in opened:
                with contextlib.suppress(RayError):
                    await ref  # or Ray logs it as an error that nobody saw
            raise
        return [(one if isinstance(one, PixelisError) else (ref, one), 0) for ref, one in zip(opened, looks, strict=True)], False

    # -- what is kept --------------------------------------------------------------------------------------------------------

    def _answer(self, job: Job, outcome: Any, size: int, shared: bool) -> None:
        self._forget(job)
        if isinstance(job.work, Call):
            observation, views = outcome
            if observation.status == "error":
                self.failures[observation.code or "error"] += 1
            if shared and job.key is not None:
                views = [view.copy() for view in views]  # a view that is kept must not hold the whole batch
            for view in views:
                view.flags.writeable = False
            outcome = observation, views
            if job.key is not None and observation.code not in ("out_of_memory", "crashed"):
                self._keep(job.key, outcome, size)
        job.done.set_result(outcome)

    def _refuse(self, job: Job, error: Exception) -> None:
        self.failures[getattr(error, "code", type(error).__name__)] += 1
        self._forget(job).done.set_exception(error)

    def _keep(self, key: Hashable, outcome: Outcome, size: int) -> None:
        self.cache[key] = outcome, size
        self.cached_bytes += size
        while self.cached_bytes > self.config.toolbox.cache_bytes:
            self.cached_bytes -= self.cache.popitem(last=False)[1][1]

    def _key(self, action: Action, images: list[ImageView], objects: Objects, opened: Opened) -> Hashable:
        """What a result depends on: pictures, operation, arguments, and the views and objects that these name.

        None when the call cannot be carried out anyway.
        """
        if (operation := self.operations.get(action.op)) is None:
            return None
        try:
            arguments = operation.check(action.arguments)
            scale = Scale.of(self.kind, images)  # type: ignore[arg-type]
            places: list[tuple] = []
            found: list[str] = []
            known = {image.id for image in images}
            for name in (action.target, *_strings(action.arguments)):
                if name in known:
                    links = geometry.chain(images, name)
                    places.append(
                        (name, links[0].id, links[0].parent, links[0].frame, geometry.to_root(links), scale.extent(name))
                    )
                elif name in opened.identity:
                    places.append((name, *(image.view_size for image in images if image.parent == name)))
                if name in objects:
                    found.append(repr(objects[name]))
        except OperationError:
            return None
        media = tuple(opened.identity.items())
        return action.op, action.target, arguments.model_dump_json(), media, tuple(places), tuple(found)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)


class BoundTools:
    """What an episode sees as its tools: the operations on its own pictures."""

    def __init__(self, pool: ToolboxPool, opened: Opened):
        self.pool, self.opened = pool, opened

    async def execute(self, action: Action, images: list[ImageView], objects: Objects) -> Outcome:
        """Run one operation on the pool."""
        return await self.pool.execute(action, images, objects, self.opened)


async def _result(ref: ray.ObjectRef) -> Any:
    return await ref


def _heard(done: asyncio.Future) -> None:
    """Take note of a failure that nobody may be waiting for."""
    if not done.cancelled():
        done.exception()
