"""Latency that HTTP adds to a generator, and behaviour of the service near and far beyond its capacity.

    python -m benchmarks.service --adapter runs/quickstart/rft/checkpoints/step_00000040

`overhead`: the same greedy question through `/v1/agent` and directly to the Generator actor, alternately;
without a memory, and with a memory that is searched before every vote and extended before or after
(`"remember": "later"`) every reply. `stream`: time to the first event of a streamed reply. `load`: requests
at 80 % of the measured capacity, then at ten times the capacity. `kills`: a gateway replica, a generator, a
memory shard and the learner are killed under load. The service runs the embedded model. Clients share its
cores, so figures under load are pessimistic.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from PIL import Image

from benchmarks.harness import Ratio, Report, local_ray, parse_args, percentile, time_call
from pixelis.actors import placement
from pixelis.actors.generator_router import RolloutRequest
from pixelis.actors.serving import ServingActors
from pixelis.config import Config, load
from pixelis.datasets import cards
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.session import SamplingParams
from pixelis.jobs.serve import serving
from pixelis.records import Question, new_id

PAUSE_S = 0.15
BARE = ["memory.enabled=false", "evolution.rehearse=0"]
"""Overrides of a service without a memory."""
PARTS = ("overhead", "stream", "load", "kills")


@dataclass
class Service:
    """The running service and the questions for it."""

    config: Config
    url: str
    actors: placement.Actors
    serving_actors: ServingActors
    questions: list[tuple[Question, dict[str, Any]]]

    def request(self, number: int, **fields: Any) -> dict[str, Any]:
        """Return the httpx arguments of a request, encoded in advance because encoding is the client's
        work.
        """
        body = self.questions[number % len(self.questions)][1]
        return {
            "content": json.dumps({**body, **fields}).encode(),
            "headers": {"Content-Type": "application/json"},
        }


@contextmanager
def running(adapter: str, folder: str, overrides: list[str], format: str) -> Iterator[Service]:
    """Serve the embedded model, by default with memory and without a learner, and prepare twenty requests."""
    settings = {
        "policy.adapter": adapter,
        "run.dir": folder,
        "evolution.enabled": "false",
        "serve.cache": "0",
    }
    settings |= dict(override.split("=", 1) for override in overrides)
    config = load("configs/nano/serve.yaml", [f"{key}={value}" for key, value in settings.items()])
    questions = [
        encode_question(question, format)
        for question in read_questions("cards:?split=train&seed=5", limit=20, epochs=1)
    ]
    with (
        placement.placed(config, learner=False, initial=adapter) as actors,
        serving(config, actors) as (url, serving_actors),
    ):
        yield Service(config, url, actors, serving_actors, questions)


def encode_question(question: Question, format: str) -> tuple[Question, dict[str, Any]]:
    """Return the question with its picture as a data URL, and the body of its request."""
    buffer = io.BytesIO()
    picture = Image.fromarray(cards.render(question.media[0].uri))
    picture.save(buffer, format=format, **({"quality": 92} if format == "jpeg" else {"compress_level": 1}))
    url = f"data:image/{format};base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    media = [question.media[0].model_copy(update={"uri": url})]
    return question.model_copy(update={"media": media}), {"question": question.question, "image": url}


def overhead(service: Service, report: Report, repeats: int, variant: str, **fields: Any) -> None:
    """Report the latency that HTTP adds to one request at a time; the order of HTTP and actor is random.

    The pause before each request lets background work after a reply finish. Replies have one turn without
    operations, because their duration varies least.
    """
    d, generator, rng = service.config.dialogue, service.actors.generators[0], random.Random(5)
    greedy = SamplingParams(0.0, 1.0, d.max_turn_tokens, 1)
    with httpx.Client(base_url=service.url, timeout=60) as client:

        def by_http(number: int) -> float:
            request = service.request(number, temperature=0.0, operations=False, max_turns=1, **fields)
            return time_call(lambda: client.post("/v1/agent", **request).raise_for_status())

        def by_actor(number: int) -> float:
            question, name = service.questions[number % len(service.questions)][0], new_id("group")
            request = RolloutRequest(question, name, 1, greedy, operations=False, max_turns=1, views=False)
            return time_call(lambda: ray.get(generator.rollout.remote(request)[0]))

        pairs = []
        for number in range(repeats + 5):
            times = {}
            for call in rng.sample([by_http, by_actor], 2):
                time.sleep(PAUSE_S)
                times[call] = call(number)
            pairs.append((times[by_http], times[by_actor]))
    http, direct = zip(*pairs[5:], strict=True)  # the first five are the warm-up
    added = sorted(a - b for a, b in zip(http, direct, strict=True))
    ratio = sorted(a / b for a, b in zip(http, direct, strict=True))
    spread = Ratio(
        percentile(list(http), 0.5),
        percentile(list(direct), 0.5),
        *(percentile(ratio, share) for share in (0.5, 0.25, 0.75)),
    )
    report.row(f"{variant}: seconds of a greedy request, HTTP / actor", spread)
    # Ranks of the median's 95 % interval for any distribution
    half, middle = 0.98 * math.sqrt(repeats), repeats / 2
    low, high = (
        1e3 * added[min(repeats - 1, max(0, round(rank)))] for rank in (middle - half - 1, middle + half)
    )
    report.row(f"{variant}: added ms, p50", 1e3 * percentile(added, 0.5), "<= 5", f"[{low:.1f}, {high:.1f}]")
    report.row(f"{variant}: added ms, p99", 1e3 * percentile(added, 0.99), "<= 20")


def stream(service: Service, report: Report, repeats: int) -> None:
    """Report the seconds to the first event of a stream and to the whole reply."""
    first, whole = [], []
    with httpx.Client(base_url=service.url, timeout=60) as client:
        for number in range(repeats):
            request = service.request(number, temperature=0.0, stream=True)
            start = time.perf_counter()
            with client.stream("POST", "/v1/agent", **request) as reply:
                lines = (line for line in reply.iter_lines() if line.startswith("event: "))
                next(lines)
                first.append(time.perf_counter() - start)
                for _ in lines:
                    pass
            whole.append(time.perf_counter() - start)
    report.row("first event of a stream, ms (p50)", 1e3 * percentile(first, 0.5))
    report.row("whole streamed reply, ms (p50)", 1e3 * percentile(whole, 0.5))


def capacity(service: Service, seconds: float) -> float:
    """Return the requests answered per second with as many clients as the service runs requests at once (at
    most 16).
    """
    from pixelis.serve.limits import running_limit

    stop = time.monotonic() + seconds

    def count_answers(number: int) -> int:
        answered = 0
        with httpx.Client(base_url=service.url, timeout=60) as client:
            while time.monotonic() < stop:
                answered += client.post("/v1/agent", **service.request(number)).status_code == 200
        return answered

    clients = min(16, running_limit(service.config))
    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(count_answers, range(clients))) / seconds


def load_part(service: Service, report: Report, seconds: float) -> None:
    """Report the service under 80 % of its capacity, then under ten times its capacity."""
    limit = capacity(service, min(10.0, seconds))
    report.row("capacity, requests a second", limit)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as bodies:
        json.dump([body for _, body in service.questions], bodies)
        bodies.flush()
        normal = _run_load(service, bodies.name, 0.8 * limit, seconds)
        before = _gateway_bytes()
        overload = _run_load(service, bodies.name, 10 * limit, seconds)
        after = _gateway_bytes()
    report.row(
        "80 % load: answered / sent",
        normal["ok"] / max(1, normal["sent"]),
        ">= 0.99",
        f"{normal['sent']} requests",
    )
    report.row("80 % load: p50, p99 ms", normal["ok_p50"], "", f"p99 {normal['ok_p99']:.0f}")
    note = f"{overload['sent']} requests, {overload['failed']} failed otherwise"
    report.row("10 x: shed", overload["shed"] / max(1, overload["sent"]), "", note)
    report.row("10 x: shed p50, p99 ms", overload["shed_p50"], "p99 <= 50", f"p99 {overload['shed_p99']:.0f}")
    report.row("10 x: accepted p99 / p99 at 80 %", overload["ok_p99"] / max(1e-9, normal["ok_p99"]), "<= 2")
    report.row("10 x: gateway's memory, after / before", after / before, "<= 1.05")


def _run_load(service: Service, bodies: str, rate: float, seconds: float) -> dict[str, float]:
    # Ray's workers run at niceness 15: a client with niceness 0 would take all of their cores.
    script = str(Path(__file__).with_name("service_load.py"))
    command = ["nice", "-n", "15", sys.executable, script, service.url, bodies, str(rate), str(seconds)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(process.stdout.strip().splitlines()[-1])


def _gateway_bytes() -> int:
    """Return the resident bytes of the gateway replicas on this machine."""
    return sum(
        p.memory_info().rss
        for p in psutil.process_iter(["cmdline"])
        if "Gateway" in " ".join(p.info["cmdline"] or [])
    )


VICTIMS = {
    "gateway replica": "ray::ServeReplica:pixelis:Gateway",
    "generator": "ray::Generator",
    "memory shard": "ray::MemoryShard",
    "learner": "ray::RayTrainWorker",
}


def kills(service: Service, report: Report, seconds: float) -> None:
    """Report the replies to four requests a second, each retried once, while a process of each kind is
    killed.
    """
    from pixelis.jobs.serve import Learning

    answers: list[tuple[float, float, bool, bool]] = []
    stop, client = threading.Event(), httpx.Client(base_url=service.url, timeout=60)

    def ask(number: int) -> None:
        start = time.monotonic()
        attempts = 0
        ok = False
        while attempts < 2 and not ok:
            attempts += 1
            with contextlib.suppress(httpx.HTTPError):
                ok = client.post("/v1/agent", **service.request(number)).status_code == 200
        answers.append((start, time.monotonic() - start, ok, attempts == 1))

    def send_requests() -> None:
        with ThreadPoolExecutor(32) as pool:
            number = 0
            while not stop.wait(0.25):
                pool.submit(ask, number)
                number += 1

    learning = Learning(service.config, service.actors, service.serving_actors)
    thread = threading.Thread(target=send_requests)
    thread.start()
    deaths = []
    for name, title in VICTIMS.items():
        time.sleep(seconds / (len(VICTIMS) + 1))
        victims = [p for p in psutil.process_iter(["cmdline"]) if title in " ".join(p.info["cmdline"] or [])]
        if victims:
            victims[0].kill()
            deaths.append((name, time.monotonic()))
    time.sleep(seconds / (len(VICTIMS) + 1))
    stop.set()
    thread.join()
    learning.stop()
    report.row("kills", ", ".join(name for name, _ in deaths))
    answered = sum(ok for _, _, ok, _ in answers) / len(answers)
    report.row("answered with one retry at most", answered, ">= 0.99", f"{len(answers)} requests")
    report.row(
        "answered at the first attempt", sum(first and ok for _, _, ok, first in answers) / len(answers)
    )
    after = [seconds for start, seconds, *_ in answers if any(0 <= start - death < 5 for _, death in deaths)]
    steady = [
        seconds for start, seconds, *_ in answers if not any(-1 <= start - death < 8 for _, death in deaths)
    ]
    report.row(
        "p99 within 5 s of a kill / p99 otherwise", percentile(after, 0.99) / percentile(steady, 0.99), "<= 3"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", required=True, help="checkpoint of `rft`")
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--format", choices=("jpeg", "png"), default="jpeg", help="encoding of the pictures")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each load")
    args = parse_args(parser, part=["overhead", "stream", "load"], repeats=2, seconds=1.0)
    parts = args.part or PARTS
    report = Report("service")
    with (
        tempfile.TemporaryDirectory() as folder,
        local_ray(load("configs/nano/serve.yaml", ["cluster.cpus=8"])),
    ):
        voting = ["evolution.enabled=true", "evolution.cold_start=0", "evolution.canary.enabled=false"]
        if "overhead" in parts and not args.smoke:
            with running(args.adapter, f"{folder}/voting", voting, args.format) as service:
                overhead(service, report, args.repeats, "memory, stored before the reply")
                overhead(service, report, args.repeats, "memory, stored after it", remember="later")
        with running(args.adapter, f"{folder}/bare", BARE, args.format) as service:
            if "overhead" in parts:
                overhead(service, report, args.repeats, "no memory")
            if "stream" in parts:
                stream(service, report, args.repeats // 2)
            if "load" in parts:
                load_part(service, report, args.seconds)
        if "kills" in parts:
            replicated = ["engine.workers=2", "memory.shards=2", "serve.replicas=2"]
            learning = ["evolution.enabled=true", "evolution.cold_start=0"]
            with running(args.adapter, f"{folder}/kills", [*replicated, *learning], args.format) as service:
                kills(service, report, 2 * args.seconds)
    report.close()


if __name__ == "__main__":
    main()
