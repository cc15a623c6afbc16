"""Load generator of `benchmarks.service`: sends requests at a constant rate, independent of the replies.

    python benchmarks/service_load.py URL BODIES.json REQUESTS_PER_SECOND SECONDS

Prints counts and percentiles (ms) of answered, shed and failed requests as JSON. It runs as its own process
on the cores of the service; it is a plain aiohttp loop because locust needs 4 ms of CPU time per request,
more than the service needs to refuse one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np

HEADERS = {"Content-Type": "application/json"}


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[str, float]:
    """Send a request; return its outcome (ok, shed with a Retry-After header, failed) and its seconds."""
    start = time.perf_counter()
    try:
        async with session.post(url, data=body, headers=HEADERS) as reply:
            await reply.read()
            shed = reply.status in (429, 503) and "Retry-After" in reply.headers
            outcome = "ok" if reply.status == 200 else "shed" if shed else "failed"
    except (aiohttp.ClientError, TimeoutError):
        outcome = "failed"
    return outcome, time.perf_counter() - start


async def load(url: str, bodies: list[bytes], rate: float, seconds: float) -> list[tuple[str, float]]:
    """Send requests in an open loop, which slow replies do not delay."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start, requests = time.monotonic(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            requests.append(asyncio.create_task(ask(session, url, bodies[number % len(bodies)])))
        return await asyncio.gather(*requests)


def main() -> None:
    """Send the requests and print the result."""
    url, rate, seconds = sys.argv[1], float(sys.argv[3]), float(sys.argv[4])
    # Encoded once: encoding a picture for every request would take most of this process's time.
    bodies = [json.dumps(body).encode() for body in json.loads(Path(sys.argv[2]).read_text())]
    gc.disable()  # a pause here would count as latency of the service
    outcomes = asyncio.run(load(f"{url}/v1/agent", bodies, rate, seconds))
    result: dict[str, float] = {"sent": len(outcomes)}
    for outcome in ("ok", "shed", "failed"):
        times = [1e3 * seconds for name, seconds in outcomes if name == outcome]
        result[outcome] = len(times)
        result |= {f"{outcome}_p{p}": float(np.percentile(times, p)) if times else 0.0 for p in (50, 99)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
