"""locust's part of `benchmarks.service`, a process of its own because gevent patches whatever it meets.

    python benchmarks/service_load.py URL BODIES.json REQUESTS_PER_SECOND SECONDS

Sends at a constant rate whatever the service does, and prints counts and percentiles of answers and refusals as JSON.
"""

from gevent import monkey

monkey.patch_all()

import itertools  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import gevent  # noqa: E402
from locust import FastHttpUser, constant_throughput, task  # noqa: E402
from locust.env import Environment  # noqa: E402

url, rate, seconds = sys.argv[1], float(sys.argv[3]), float(sys.argv[4])
# Encoded once: to encode a picture for every request would be most of this process's work.
bodies = [json.dumps(body).encode() for body in json.loads(Path(sys.argv[2]).read_text())]
HEADERS = {"Content-Type": "application/json"}
USERS = max(1, min(400, round(rate * 4)))
number = itertools.count()


class Asker(FastHttpUser):
    """One of many that together ask at the rate wanted."""

    host = url
    wait_time = constant_throughput(rate / USERS)
    network_timeout = connection_timeout = 60.0

    def on_start(self) -> None:
        """All users at the same moment would be a burst of many seconds' requests."""
        gevent.sleep(random.random() * USERS / rate)

    @task
    def ask(self) -> None:
        """One question; refusals that say when to come back are counted apart."""
        body = bodies[next(number) % len(bodies)]
        with self.client.post("/v1/agent", data=body, headers=HEADERS, catch_response=True, name="ok") as reply:
            if reply.status_code in (429, 503) and reply.headers.get("Retry-After"):
                reply.request_meta["name"] = "shed"
                reply.success()


environment = Environment(user_classes=[Asker])
runner = environment.create_local_runner()
runner.start(USERS, spawn_rate=USERS)
time.sleep(seconds)
runner.stop()
gevent.sleep(0.2)
ok, shed = environment.stats.get("ok", "POST"), environment.stats.get("shed", "POST")
print(
    json.dumps(
        {
            "sent": ok.num_requests + shed.num_requests,
            "ok": ok.num_requests - ok.num_failures,
            "shed": shed.num_requests,
            "failed": ok.num_failures,
            "ok_p50": ok.get_response_time_percentile(0.5) or 0.0,
            "ok_p99": ok.get_response_time_percentile(0.99) or 0.0,
            "shed_p50": shed.get_response_time_percentile(0.5) or 0.0,
            "shed_p99": shed.get_response_time_percentile(0.99) or 0.0,
        }
    )
)
