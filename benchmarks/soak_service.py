"""The service under mixed traffic for a long time while its processes are killed; a part of
`benchmarks.soak`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import aiohttp

from benchmarks import process_tree
from benchmarks.harness import Report, percentile
from benchmarks.service import encode_question
from pixelis.config import load
from pixelis.datasets.questions import read_questions
from pixelis.evolution import audit

ROOT = Path(__file__).parents[1]
WHOLE = "whole tree"
VICTIMS: dict[str, tuple[str, ...]] = {
    "gateway": ("Gateway",),
    "proxy": ("ProxyActor",),
    "generator": ("Generator",),
    "memory shard": ("MemoryShard",),
    "Evolution": ("Evolution",),
    "learner": ("RayTrainWorker",),
}
"""What is killed, with the roles of its processes; the first that runs is killed."""
MIX = {"agent": 50, "chat": 15, "stream": 15, "feedback": 10, "read": 10}
"""Requests in 100. Feedback and reads name an experience that was acknowledged."""
USERS = 50
START_S = 300.0
SAMPLE_S = 10.0
SETTLE_S = 60.0
"""Seconds after a restart of all processes whose memory is not compared."""
SETTINGS = [
    "engine.workers=2",
    "memory.shards=2",
    "serve.replicas=2",
    "memory.capacity=1000000",
    "evolution.cold_start=16",
]
SETTINGS += [
    "cluster.cpus=8",
    "evolution.audit.rotate_bytes=200000",
    "telemetry.progress=false",
    "serve.cache=0",
]

Kind = Literal["agent", "chat", "stream", "feedback", "read"]


@dataclass
class Outcome:
    """A request: kind, start (seconds of the run), duration, and the status or error of each attempt."""

    kind: str
    at: float
    seconds: float
    attempts: list[str]

    @property
    def answered(self) -> bool:
        """True when the last attempt was answered."""
        return self.attempts[-1] == "200"


@dataclass
class Record:
    """What the run saw. Times are seconds since ``began``."""

    began: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)
    acknowledged: dict[str, float] = field(default_factory=dict)
    feedback: dict[str, int] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    kills: list[tuple[str, float]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    samples: list[tuple[float, dict[str, process_tree.Usage]]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    @property
    def load(self) -> float:
        """Median load average."""
        return percentile(self.loads, 0.5) if self.loads else 0.0

    def now(self) -> float:
        """Seconds since the start of the traffic."""
        return time.monotonic() - self.began

    def in_outage(self, outcome: Outcome) -> bool:
        """Whether a request met a time in which no process of the service was there to answer."""
        return any(start <= outcome.at + outcome.seconds and outcome.at <= end for start, end in self.outages)


class Service:
    """The service as its own tree of processes, with a Ray of its own."""

    def __init__(self, folder: Path, adapter: str, overrides: Sequence[str]):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.mark = folder, f"soak-{uuid4().hex}"
        self.settings = [
            *SETTINGS,
            f"policy.adapter={adapter}",
            f"run.dir={folder}",
            f"serve.port={self.port}",
            *overrides,
        ]
        self.config = load("configs/nano/serve.yaml", self.settings)
        self.url, self.process = f"http://127.0.0.1:{self.port}", None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = open(folder / "service.log", "ab")  # noqa: SIM115 - the service writes to it

    def start(self) -> None:
        """Start the process; returns at once."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {
            process_tree.MARK: self.mark,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        command = [
            sys.executable,
            "-m",
            "pixelis.jobs.serve",
            str(ROOT / "configs/nano/serve.yaml"),
            *self.settings,
        ]
        streams: dict[str, Any] = {"stdout": self.log, "stderr": self.log, "start_new_session": True}
        self.process = subprocess.Popen(command, env=environment, **streams)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait for a generator that answers.

        Raises RuntimeError if the service ends, TimeoutError after START_S.
        """
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(
                    f"{self.url}/healthz", timeout=aiohttp.ClientTimeout(total=5)
                ) as reply:
                    if reply.status == 200:
                        return
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / "service.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the service did not start, exit code {self.process.returncode}:\n{text}")
            await asyncio.sleep(0.2)

    def stop(self) -> int | None:
        """Stop the service as an operator does; returns its exit code, None if it had to be killed."""
        if self.process is None:
            return None
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(120)
        return None

    def kill(self) -> int:
        """Kill every process; returns how many there were."""
        count = process_tree.kill_all(self.mark)
        if self.process is not None:
            self.process.wait(30)
        return count


class Traffic:
    """Sends requests of all kinds at a rate that slow replies do not change."""

    def __init__(self, service: Service, session: aiohttp.ClientSession, record: Record, seed: int):
        self.service, self.session, self.record, self.random = service, session, record, random.Random(seed)
        self.bodies = [
            encode_question(q, "jpeg")[1]
            for q in read_questions("cards:?split=train&seed=5", limit=60, epochs=1)
        ]
        self.model = "pixelis-nano"
        self.ids: list[str] = []
        self.running: set[asyncio.Task[None]] = set()

    async def flow(self, rate: float, seconds: float) -> None:
        """Send ``rate`` requests a second for so long, then wait for the last replies."""
        started = time.monotonic()
        for number in itertools.count():
            if (at := number / rate) > seconds:
                break
            await asyncio.sleep(max(0.0, started + at - time.monotonic()))
            task = asyncio.create_task(self.ask(self.choose()))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        if self.running:
            await asyncio.wait(list(self.running))

    async def capacity(self, clients: int, seconds: float) -> float:
        """Requests of the mix answered a second by as many clients as the service serves at once."""
        stop, before = time.monotonic() + seconds, len(self.record.outcomes)

        async def client() -> None:
            while time.monotonic() < stop:
                await self.ask(self.choose())

        await asyncio.gather(*(client() for _ in range(clients)))
        return sum(outcome.answered for outcome in self.record.outcomes[before:]) / seconds

    def choose(self) -> str:
        """A kind of request at random; a question while there is nothing to read."""
        kind = self.random.choices(list(MIX), weights=list(MIX.values()))[0]
        return kind if self.ids or kind in ("agent", "chat", "stream") else "agent"

    async def ask(self, kind: str) -> None:
        """Send a request, once more if it fails, and record what came back."""
        body = {**self.random.choice(self.bodies), "user": f"user-{self.random.randrange(USERS)}"}
        known = self.random.choice(self.ids) if self.ids else ""
        at, attempts = self.record.now(), []
        for _ in range(2):
            try:
                status, wait = await self._send(kind, body, known)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                status, wait = type(error).__name__, 1.0
            attempts.append(status)
            if status == "200":
                break
            await asyncio.sleep(min(wait, 10.0))
        self.record.outcomes.append(Outcome(kind, at, self.record.now() - at, attempts))

    async def _send(self, kind: str, body: dict[str, Any], known: str) -> tuple[str, float]:
        url, payload = f"{self.service.url}/v1", body
        if kind == "read":
            async with self.session.get(f"{url}/experiences/{known}") as reply:
                await reply.read()
                if reply.status == 404:
                    self.record.unreadable.append(known)
                return str(reply.status), _retry_after(reply)
        if kind == "feedback":
            payload = {"experience_id": known, "correct": self.random.random() < 0.5}
        elif kind == "stream":
            payload = {**body, "stream": True}
        elif kind == "chat":
            parts = [
                {"type": "text", "text": body["question"]},
                {"type": "image_url", "image_url": {"url": body["image"]}},
            ]
            payload = {
                "model": self.model,
                "messages": [{"role": "user", "content": parts}],
                "user": body["user"],
            }
        route = {"feedback": "feedback", "chat": "chat/completions"}.get(kind, "agent")
        async with self.session.post(f"{url}/{route}", json=payload) as reply:
            text = await reply.text()
            if reply.status != 200:
                return str(reply.status), _retry_after(reply)
        if kind == "feedback":
            self.record.feedback[known] = self.record.feedback.get(known, 0) + 1
            return "200", 0.0
        if kind == "stream":
            event, _, data = text.strip().split("\n\n")[-1].partition("\n")
            if event != "event: answer":
                return f"stream ended by {event[:20]!r}", 1.0
            answer = json.loads(data.removeprefix("data: "))
        else:
            answer = json.loads(text)
            answer = answer["pixelis"] if kind == "chat" else answer
        if id := answer["experience_id"]:
            self.record.acknowledged[id] = self.record.now()
            self.ids.append(id)
        return "200", 0.0

    async def stored(self) -> dict[str, int]:
        """All stored experiences by pages: id -> number of its feedback."""
        rows: dict[str, int] = {}
        before = ""
        while True:
            async with self.session.get(
                f"{self.service.url}/v1/experiences", params={"limit": 200, "before": before}
            ) as reply:
                reply.raise_for_status()
                page = await reply.json()
            rows |= {row["id"]: len(row["feedback"]) for row in page["data"]}
            if (before := page["next_before"]) is None:
                return rows


def _retry_after(reply: aiohttp.ClientResponse) -> float:
    try:
        return float(reply.headers.get("Retry-After", 1.0))
    except ValueError:
        return 1.0


def schedule(seconds: float, every_s: float, trees: int, victims: Sequence[str]) -> list[tuple[float, str]]:
    """Times and victims: one kill ``every_s``, in turns; ``trees`` of them, evenly spread, kill
    everything.
    """
    times = [every_s * (i + 1) for i in range(int((seconds - 1) // every_s))]
    whole = {round(len(times) * (i + 1) / (trees + 1)) for i in range(trees)}
    turns = itertools.cycle(victims)
    return [(at, WHOLE if i in whole else next(turns)) for i, at in enumerate(times)]


async def kills(
    service: Service, session: aiohttp.ClientSession, record: Record, plan: list[tuple[float, str]]
) -> None:
    """Kill by plan.

    After the end of the whole tree the service is started again at once, and later kills wait for it.
    """
    pause = plan[0][0] if plan else 0.0
    earliest = 0.0
    for at, victim in plan:
        await asyncio.sleep(max(at, earliest) - record.now())
        if record.now() > plan[-1][0] + pause:
            return  # the traffic has ended
        if victim != WHOLE:
            processes = await asyncio.to_thread(process_tree.marked, service.mark)
            if process_tree.kill_role(processes, VICTIMS[victim]) is None:
                record.absent.append(victim)
            else:
                record.kills.append((victim, record.now()))
            continue
        start = record.now()
        await asyncio.to_thread(service.kill)
        record.kills.append((victim, start))
        record.heads.append(audit.verify(service.folder / audit.FOLDER).head)
        service.start()
        await service.ready(session)
        record.outages.append((start, record.now()))
        earliest = record.now() + pause / 2


async def sample(service: Service, record: Record, every_s: float) -> None:
    """Record the memory and open files of all processes until cancelled."""
    while True:
        record.loads.append(os.getloadavg()[0])
        processes = await asyncio.to_thread(process_tree.marked, service.mark)
        record.samples.append((record.now(), await asyncio.to_thread(process_tree.usage, processes)))
        await asyncio.sleep(every_s)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    """Start the service; leave none of its processes behind."""
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        try:
            service.start()
            await service.ready(session)
            yield session
        finally:
            await asyncio.to_thread(service.kill)
            service.log.close()


async def _run(args: argparse.Namespace, report: Report) -> list[str]:
    from pixelis.serve.limits import running_limit

    folder, seconds = Path(args.dir).absolute() / "service", 60 * args.minutes
    service, record = Service(folder, str(Path(args.adapter).absolute()), args.override), Record()
    clients = min(16, running_limit(service.config))
    async with running(service) as session:
        report.row("service: seconds to start", record.now())
        traffic = Traffic(service, session, record, args.seed)
        # Warms up and passes the cold start, so that the learner works
        await traffic.capacity(clients, args.capacity_s / 2)
        limit = await traffic.capacity(clients, args.capacity_s)
        rate = max(0.2, args.share * limit)
        report.row("service: capacity, requests a second", limit, "", f"{clients} clients, learning on")
        report.row(
            "service: rate, requests a second", rate, "", f"{args.share:.0%} of it, {args.minutes:g} minutes"
        )
        record.outcomes.clear()
        record.began = time.monotonic()
        plan = schedule(seconds, args.kill_every_s, args.trees, args.victim or list(VICTIMS))
        killing = asyncio.create_task(kills(service, session, record, plan))
        sampling = asyncio.create_task(sample(service, record, SAMPLE_S if args.minutes > 3 else 2.0))
        try:
            await traffic.flow(rate, seconds)
            await killing
        finally:
            killing.cancel()
            sampling.cancel()
            _write(folder, record)
        await service.ready(session)
        stored = await traffic.stored()
        async with session.get(f"{service.url}/v1/evolution") as reply:
            status = await reply.json()
        code = await asyncio.to_thread(service.stop)
        left = [process_tree.role(process) for process in process_tree.marked(service.mark)]
    return _report(report, record, stored, status, code, left, folder)


def _write(folder: Path, record: Record) -> None:
    """The whole record as JSON beside the run, for questions that the report does not answer."""
    values = asdict(record) | {
        "samples": [(at, {n: asdict(u) for n, u in row.items()}) for at, row in record.samples]
    }
    (folder / "soak.json").write_text(json.dumps(values), encoding="utf-8")


def _report(
    report: Report,
    record: Record,
    stored: dict[str, int],
    status: dict[str, Any],
    code: int | None,
    left: list[str],
    folder: Path,
) -> list[str]:
    """Print what was seen; returns the promises that were broken."""
    row, broken = report.row, []
    row(
        "service: load of the machine, 1 minute",
        record.load,
        "",
        f"{os.cpu_count()} cores; the client's share is in it",
    )
    counts = Counter(name for name, _ in record.kills)
    row("service: kills", sum(counts.values()), "", ", ".join(f"{n} {name}" for name, n in counts.items()))
    if record.absent:
        row(
            "service: victims that did not run", len(record.absent), "", ", ".join(sorted(set(record.absent)))
        )
    outages = [end - start for start, end in record.outages]
    row("service: restarts of everything, s", ", ".join(f"{s:.0f}" for s in outages) or "none")
    quiet = [o for o in record.outcomes if not record.in_outage(o)]
    for name, outcomes in (("all", record.outcomes), ("outside restarts of everything", quiet)):
        if outcomes:
            answered = sum(o.answered for o in outcomes) / len(outcomes)
            first = sum(o.attempts[0] == "200" for o in outcomes) / len(outcomes)
            row(
                f"service: answered, {name}",
                answered,
                ">= 0.99",
                f"{len(outcomes)} requests, {first:.4f} at once",
            )
    for kind in MIX:
        of_kind = [o for o in quiet if o.kind == kind]
        if times := [o.seconds for o in of_kind if o.answered]:
            share = sum(o.answered for o in of_kind) / len(of_kind)
            note = f"{len(of_kind)}, answered {share:.4f}, p99 {percentile(times, 0.99):.2f}"
            row(f"service: {kind}, p50 s", percentile(times, 0.5), "", note)
    failures = Counter(status for o in quiet for status in o.attempts if status != "200")
    row("service: failed attempts outside restarts", sum(failures.values()), "", json.dumps(dict(failures)))
    lost = sorted(set(record.acknowledged) - set(stored))
    row(
        "service: acknowledged experiences lost",
        len(lost),
        "0",
        f"of {len(record.acknowledged)}; {len(stored)} stored",
    )
    missing = sum(max(0, count - stored.get(id, 0)) for id, count in record.feedback.items() if id in stored)
    row("service: acknowledged feedback lost", missing, "0", f"of {sum(record.feedback.values())}")
    row("service: reads of an acknowledged id that got 404", len(record.unreadable), "0")
    for name, value in (
        ("experiences lost", len(lost)),
        ("feedback lost", missing),
        ("reads of 404", len(record.unreadable)),
    ):
        broken += [f"{value} {name}"] if value else []
    broken += _files(report, record, folder)
    row(
        "service: updates, version",
        f"{status['updates']}, {status['policy_version']}",
        "",
        f"{len(status['alerts'])} alerts",
    )
    row("service: exit code, processes left", f"{code}, {len(left)}", "130, 0", ", ".join(left))
    broken += [f"exit code {code}"] if code != 130 else []
    broken += [f"processes left: {', '.join(left)}"] if left else []
    steady = [
        usage for at, usage in record.samples if not any(s <= at <= e + SETTLE_S for s, e in record.outages)
    ]
    if len(steady) >= 6:
        row(
            "service: private memory, last third / second",
            process_tree.growth(steady, lambda u: u.bytes),
            "<= 1.01",
        )
        row(
            "service: open files, last third / second",
            process_tree.growth(steady, lambda u: u.files),
            "<= 1.01",
        )
    for line in process_tree.table(steady):
        row(f"service: {line.pop('role')}", json.dumps(line))
    return broken


def _files(report: Report, record: Record, folder: Path) -> list[str]:
    """Check the audit log and the databases of the stopped service."""
    broken = []
    result = audit.verify(folder / audit.FOLDER)
    unknown = [head for head in record.heads if not audit.verify(folder / audit.FOLDER, head).ok]
    report.row(
        "service: audit log",
        "whole" if result.ok else "broken",
        "whole",
        f"{result.lines} events, {result.files} files",
    )
    broken += (
        []
        if result.ok and not unknown
        else [f"audit log: {len(result.problems)} problems, {len(unknown)} heads missing"]
    )
    damaged = []
    paths = sorted(folder.rglob("*.sqlite*")) + sorted(folder.rglob("*.db"))
    for path in (p for p in paths if not p.name.endswith(("-wal", "-shm"))):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            damaged += [path.name] if database.execute("PRAGMA integrity_check").fetchone()[0] != "ok" else []
    report.row("service: damaged databases", len(damaged), "0", f"of {len(paths)} files")
    return broken + ([f"damaged: {', '.join(damaged)}"] if damaged else [])


def run(args: argparse.Namespace, report: Report) -> list[str]:
    """Run the part; returns the promises that were broken."""
    return asyncio.run(_run(args, report))
