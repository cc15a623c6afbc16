"""The callers of `benchmarks.service`, a process of their own: requests at a constant rate, whatever the service does.

    python benchmarks/service_load.py URL BODIES.json REQUESTS_PER_SECOND SECONDS

Prints counts and percentiles (ms) of answers and refusals as JSON. A plain loop over aiohttp: callers share the cores with the
service, and locust takes 4 ms of them for each request, more than a refusal does.
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
    """What became of a request (ok, shed with a time to come back, failed), and after how many seconds."""
    began = time.perf_counter()
    try:
        async with session.post(url, data=body, headers=HEADERS) as reply:
            await reply.read()
            refused = reply.status in (429, 503) and "Retry-After" in reply.headers
            end = "ok" if reply.status == 200 else "shed" if refused else "failed"
    except (aiohttp.ClientError, TimeoutError):
        end = "failed"
    return end, time.perf_counter() - began


async def load(url: str, bodies: list[bytes], rate: float, seconds: float) -> list[tuple[str, float]]:
    """All requests of an open loop: late answers do not slow it down."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began, asked = time.monotonic(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            asked.append(asyncio.create_task(ask(session, url, bodies[number % len(bodies)])))
        return await asyncio.gather(*asked)


def main() -> None:
    """Ask, and print."""
    url, rate, seconds = sys.argv[1], float(sys.argv[3]), float(sys.argv[4])
    # Encoded once: to encode a picture for every request would be most of this process's work.
    bodies = [json.dumps(body).encode() for body in json.loads(Path(sys.argv[2]).read_text())]
    gc.disable()  # a pause of the caller's is not the service's
    ends = asyncio.run(load(f"{url}/v1/agent", bodies, rate, seconds))
    told: dict[str, float] = {"sent": len(ends)}
    for end in ("ok", "shed", "failed"):
        took = [1e3 * seconds for name, seconds in ends if name == end]
        told |= {end: len(took), **{f"{end}_p{share}": float(np.percentile(took, share)) if took else 0.0 for share in (50, 99)}}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
