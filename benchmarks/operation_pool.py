"""Overhead of the toolbox pool over a direct call, on a local Ray: latency, bytes stored, restarts."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import operation_datasets as sets
from benchmarks.harness import Report, local_ray, percentile
from pixelis.config import Config, parse
from pixelis.operations import Scene, execute
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.records import Action, Media

CONCURRENT = 256
"""Concurrent calls."""


def run(report: Report, count: int) -> None:
    """Measure on a local Ray with ``count`` calls."""
    with tempfile.TemporaryDirectory() as folder:
        photo = Path(folder) / "photo.png"
        Image.fromarray(sets.photo("astronaut")).resize((1920, 1080)).save(photo)
        config = parse(
            {
                "cluster": {"cpus": 4, "object_store_bytes": 300_000_000},
                "toolbox": {"workers": 1, "cache_bytes": 0},
            }
        )
        with local_ray(config):
            asyncio.run(_measure(report, config, str(photo), count))


async def _measure(report: Report, config: Config, photo: str, count: int) -> None:
    from pixelis.actors.toolbox_pool import ToolboxPool

    env = {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))}
    pool = ToolboxPool(config, 32, "thousand", runtime_env={"env_vars": env})
    try:
        start = time.perf_counter()
        await pool.ready()
        report.row("pool: first worker ready, s", time.perf_counter() - start)
        initial_bytes = _stored_bytes()
        media, (images, _) = await pool.open([Media(id="img0", uri=photo)])
        pixels = np.asarray(Image.open(photo))
        picture_bytes = _stored_bytes() - initial_bytes
        rng = np.random.default_rng(0)
        boxes = [
            (x, y, x + 0.1 + w, y + 0.1 + h)
            for x, y, w, h in rng.uniform(0, 0.4, (count + CONCURRENT, 4)).tolist()
        ]
        actions = [Action(op="zoom_in", arguments={"box": box}) for box in boxes]
        crop = config.dialogue.crop
        scene = Scene(
            {"img0": pixels}, images, budget=PixelBudget(crop.min_pixels, crop.max_pixels), multiple=32
        )
        for action in actions[:20]:
            await pool.execute(action, images, {}, media)
        # Alternate, so that other load on the machine slows both.
        direct, pooled = [], []
        for action in actions[:count]:
            start = time.perf_counter()
            execute(action, scene)
            middle = time.perf_counter()
            observation, _ = await pool.execute(action, images, {}, media)
            pooled.append(1e3 * (time.perf_counter() - middle))
            direct.append(1e3 * (middle - start))
            assert observation.status == "ok"
        for share in (0.5, 0.9):
            added = percentile([a - b for a, b in zip(pooled, direct, strict=True)], share)
            note = (
                f"wall clock, 1080p; direct {percentile(direct, share):.2f} ms, pool "
                f"{percentile(pooled, share):.2f} ms"
            )
            report.row(
                f"pool: added to a zoom, p{100 * share:.0f}, ms", added, "<= 3" if share == 0.5 else "", note
            )
        note = f"then {_stored_bytes() - initial_bytes - picture_bytes} bytes of {count} calls"
        report.row("pool: bytes stored of a picture / its pixels", picture_bytes / pixels.nbytes, "1", note)
        concurrent = actions[count : count + CONCURRENT]
        start = time.perf_counter()
        for action in concurrent:
            await pool.execute(action, images, {}, media)
        sequential_s = time.perf_counter() - start
        start = time.perf_counter()
        await asyncio.gather(*(pool.execute(action, images, {}, media) for action in concurrent))
        concurrent_s = time.perf_counter() - start
        note = f"{1e3 * sequential_s:.0f} ms one by one, {1e3 * concurrent_s:.0f} ms at once"
        report.row(
            f"pool: {CONCURRENT} quick calls at once / one by one", concurrent_s / sequential_s, "< 1", note
        )
        await _restart(report, pool, actions[0], images, media)
    finally:
        pool.close()


async def _restart(report: Report, pool: Any, action: Action, images: Any, media: Any) -> None:
    """Kill the process of the only worker; report the time to the next successful result."""
    os.kill(pool.workers[0].pid, 9)
    start = time.perf_counter()
    observation, _ = await pool.execute(action, images, {}, media)
    first_s = time.perf_counter() - start
    if observation.status == "error":
        observation, _ = await pool.execute(action, images, {}, media)
    assert observation.status == "ok", observation.text
    note = f"the first call after the kill returned after {first_s:.2f} s"
    report.row("pool: kill to next good result, s", time.perf_counter() - start, "", note)


def _stored_bytes() -> int:
    """Return all bytes that were ever put into the object store of this node."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.cumulative_created_bytes)
