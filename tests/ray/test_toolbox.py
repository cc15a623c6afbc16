"""The toolbox pool under hanging, crashing and leaking operations."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
import ray
from PIL import Image
from placed_actors import stored_bytes, wait_until
from skimage import data as photos

from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.actors.toolbox_work import Opened
from pixelis.config import Config, parse
from pixelis.errors import BadConfig, BadImage, InfraFailure
from pixelis.operations import Scene, execute
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.records import Action, ImageView, Media, Observation

pytestmark = pytest.mark.slow

TIMEOUT_S = 2.0
# Extra seconds in which a busy machine ends a process and schedules the caller. Hanging operations would
# sleep for an hour.
BUSY_S = 60.0
HERE = Path(__file__).parent
Box = tuple[float, float, float, float]
Make = Callable[..., "Bench"]


class Bench:
    """A pool with one open 1080p photo, run on the event loop of the test module."""

    def __init__(self, runner: asyncio.Runner, config: Config, picture: Path, env: dict[str, str]):
        path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
        self.runner, self.config = runner, config
        runtime_env = {"env_vars": {"PYTHONPATH": path, **env}}
        self.pool = ToolboxPool(config, 32, "thousand", runtime_env=runtime_env)
        self.uri, self.pixels = str(picture), np.array(Image.open(picture))
        self.opened: Opened
        self.opened, (self.images, _) = self.run(self.pool.open([Media(id="img0", uri=str(picture))]))

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    async def call(self, op: str, images: list[ImageView] | None = None, **arguments: Any) -> Any:
        action = Action(op=op, arguments=arguments)
        return await self.pool.execute(action, images or self.images, {}, self.opened)

    async def all(
        self, calls: list[tuple[str, dict[str, Any]]]
    ) -> list[tuple[Observation, list[np.ndarray]]]:
        return await asyncio.gather(*(self.call(op, **arguments) for op, arguments in calls))

    def check_zoom(self, result: tuple[Observation, list[np.ndarray]], box: Box) -> None:
        observation, views = result
        crop = self.config.dialogue.crop
        budget = PixelBudget(crop.min_pixels, crop.max_pixels)
        scene = Scene({"img0": self.pixels}, self.images, budget=budget, multiple=32)
        expected, pixels = execute(Action(op="zoom_in", arguments={"box": box}), scene)
        assert (observation.status, observation.data) == ("ok", expected.data)
        assert np.array_equal(views[0], pixels[0])

    def wait_until_complete(self, timeout_s: float = 60.0) -> None:
        """Wait until every worker of the pool is alive."""

        async def wait() -> None:
            async with asyncio.timeout(timeout_s):
                while self.pool.health()["alive"] < self.pool.health()["size"]:
                    await asyncio.sleep(0.02)

        self.run(wait())


@pytest.fixture(scope="module")
def make(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    picture = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(photos.astronaut()).resize((1920, 1080)).save(picture)
    benches = []
    with asyncio.Runner() as runner:

        def build(env: dict[str, str] | None = None, **toolbox: Any) -> Bench:
            limits = {"timeout_s": TIMEOUT_S, "memory_bytes": 250_000_000}
            settings = {"operations": ["zoom_in", *hostile.ALL], **limits, **toolbox}
            dialogue = {"input": {"min_pixels": 4096, "max_pixels": 4096}}
            config = parse({"toolbox": settings, "dialogue": dialogue})
            benches.append(Bench(runner, config, picture, env or {}))
            return benches[-1]

        yield build
        for bench in benches:
            bench.pool.close()


@pytest.fixture(scope="module")
def bench(make: Make) -> Bench:
    """A pool of one worker, so that every call runs in the process of the previous call."""
    return make(workers=1)


def boxes(count: int, seed: int = 0) -> list[Box]:
    rng = np.random.default_rng(seed)
    return [(x, y, x + 0.1 + w, y + 0.1 + h) for x, y, w, h in rng.uniform(0, 0.4, (count, 4)).tolist()]


@pytest.mark.parametrize(
    ("op", "code"),
    [
        ("hold", "timeout"),
        ("leave", "crashed"),
        ("fail", "crashed"),
        ("eat_numpy", "out_of_memory"),
        ("huge", "limit"),
        ("refuse", "bad_arguments"),
        ("threads", None),
        # Other ways to the same ends
        pytest.param("sleep", "timeout", marks=pytest.mark.long),
        pytest.param("fork", "timeout", marks=pytest.mark.long),
        pytest.param("exit", "crashed", marks=pytest.mark.long),
        pytest.param("segfault", "crashed", marks=pytest.mark.long),
    ],
)
def test_a_hostile_call_returns_its_error_in_time_and_the_next_call_succeeds(
    bench: Bench, op: str, code: str | None
) -> None:
    bench.wait_until_complete()
    start = time.monotonic()
    observation, views = bench.run(bench.call(op))
    assert time.monotonic() - start < TIMEOUT_S + BUSY_S
    assert (observation.code, observation.status) == (code, "error" if code else "ok")
    assert views == []
    box = boxes(1, seed=len(op))[0]
    bench.check_zoom(bench.run(bench.call("zoom_in", box=box)), box)
    bench.wait_until_complete()


def test_code_of_the_policy_runs_in_its_own_process(make: Make) -> None:
    sandboxed = make(workers=1, operations=["zoom_in", "python"], timeout_s=120.0)
    observation, views = sandboxed.run(sandboxed.call("python", code="show(image[:64, :64])\nimage.shape"))
    assert (observation.status, observation.text) == ("ok", "(1080, 1920, 3)")
    assert len(views) == 1
    assert observation.images[0].parent == "made"
    for code, text in (
        ("x = bytearray(10**9)", "MemoryError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    ):
        observation, _ = sandboxed.run(sandboxed.call("python", code=code))
        assert observation.status == "ok"
        assert text in observation.text
    assert sandboxed.pool.health()["restarts"] == 0
    box = boxes(1)[0]
    sandboxed.check_zoom(sandboxed.run(sandboxed.call("zoom_in", box=box)), box)


def test_a_leaking_process_is_replaced_without_failing_a_call(bench: Bench) -> None:
    """One leak of 30 MB is below the limit. The process is replaced before several leaks reach it."""
    before = bench.pool.health()["restarts"]
    codes = Counter(bench.run(bench.call("leak", tag=i + 1))[0].code for i in range(10))
    assert codes == {None: 10}
    assert bench.pool.health()["restarts"] > before


@pytest.mark.parametrize(
    ("count", "leaves", "sleeps"), [(230, 7, 150), pytest.param(230, 100, 101, marks=pytest.mark.long)]
)
def test_calls_batched_with_a_hostile_one_get_their_own_results(
    bench: Bench, count: int, leaves: int, sleeps: int
) -> None:
    """Calls in the same batch, in the batch queued behind it, and in later batches."""
    bench.wait_until_complete()
    zooms = boxes(count, seed=leaves + sleeps)
    calls: list[tuple[str, dict[str, Any]]] = [("zoom_in", {"box": box}) for box in zooms]
    calls.insert(leaves, ("quick_leave", {"tag": count + leaves}))
    calls.insert(sleeps, ("quick_sleep", {"tag": count + sleeps}))
    results = bench.run(bench.all(calls))
    assert results.pop(sleeps)[0].code == "timeout"
    assert results.pop(leaves)[0].code == "crashed"
    for result, box in zip(results, zooms, strict=True):
        bench.check_zoom(result, box)


def test_equal_calls_are_run_once(bench: Bench) -> None:
    before = bench.pool.health()
    together = bench.run(bench.all([("process_info", {"tag": 1})] * 8))
    later = bench.run(bench.call("process_info", tag=1))
    other = bench.run(bench.call("process_info", tag=2))
    after = bench.pool.health()
    assert after["hits"] - before["hits"] == 8
    assert {id(observation) for observation, _ in [*together, later]} == {id(together[0][0])}
    assert later[0].seconds >= 0.05, "the seconds of the original call"
    assert other[0] is not later[0]
    box = boxes(1, seed=11)[0]
    first, second = bench.run(bench.call("zoom_in", box=box)), bench.run(bench.call("zoom_in", box=box))
    assert second[1][0] is first[1][0]
    assert not first[1][0].flags.writeable
    base = first[1][0].base
    assert base is None or base.nbytes <= 2 * first[1][0].nbytes, (
        "the cached view keeps a whole batch in memory"
    )


def test_cached_results_are_returned_only_if_all_inputs_are_equal(bench: Bench, tmp_path: Path) -> None:
    def text(**changes: Any) -> tuple[str, int]:
        hits = bench.pool.health()["hits"]
        observation, _ = bench.run(bench.call("process_info", **changes))
        assert observation.status == "ok"
        return observation.text, bench.pool.health()["hits"] - hits

    crop = ImageView(
        id="obs1", parent="img0", box=(0.1, 0.1, 0.5, 0.5), source_size=(768, 432), view_size=(64, 64)
    )
    text(tag=50)
    assert text(tag=50, images=[*bench.images, crop])[1] == 1, "a view that is not the target does not matter"
    mirrored = tmp_path / "mirrored.png"
    Image.fromarray(bench.pixels[:, ::-1]).save(mirrored)
    opened, (images, _) = bench.run(bench.pool.open([Media(id="img0", uri=str(mirrored))]))
    assert opened.hashes != bench.opened.hashes

    def hits_of(target: str, views: list[ImageView], media: Opened) -> int:
        hits = bench.pool.health()["hits"]
        action = Action(op="process_info", target=target, arguments={"tag": 50})
        assert bench.run(bench.pool.execute(action, views, {}, media))[0].status == "ok"
        return bench.pool.health()["hits"] - hits

    assert hits_of("img0", images, opened) == 0, "another picture under the same name"
    assert hits_of("obs1", [*bench.images, crop], bench.opened) == 0
    assert hits_of("obs1", [*bench.images, crop], bench.opened) == 1
    moved = crop.model_copy(update={"box": (0.2, 0.1, 0.6, 0.5)})
    assert hits_of("obs1", [*bench.images, moved], bench.opened) == 0, "another region under the same name"


def test_the_cache_stays_within_its_bytes(make: Make) -> None:
    small = make(workers=1, cache_bytes=40_000)
    small.run(small.all([("zoom_in", {"box": box}) for box in boxes(12)]))
    assert 0 < small.pool.health()["cached_bytes"] <= 40_000


def test_a_picture_is_stored_once_for_all_calls_of_a_pool_without_a_cache(make: Make) -> None:
    bench = make(workers=2, cache_bytes=0)
    bench.wait_until_complete()
    initial = stored_bytes()
    opened, _ = bench.run(bench.pool.open([Media(id="img0", uri=bench.uri)]))
    picture = stored_bytes() - initial
    assert bench.pixels.nbytes <= picture < 1.1 * bench.pixels.nbytes
    bench.opened = opened
    results = bench.run(bench.all([("process_info", {"tag": i}) for i in range(20)]))
    assert len({observation.text for observation, _ in results}) == 2, "both processes ran calls"
    assert not any(observation.data["writable"] for observation, _ in results)
    bench.run(bench.all([("zoom_in", {"box": box}) for box in boxes(20)] * 2))
    added = stored_bytes() - initial - picture
    assert added < 40 * 64 * 64 * 3 * 1.5, "only views were stored"
    assert bench.pool.health()["hits"] == bench.pool.health()["cached_bytes"] == 0


def test_equal_pictures_are_opened_once_while_they_fit_in_the_cache(make: Make, tmp_path: Path) -> None:
    # A quarter of it, 8 MB, is for pictures; one takes 6.2 MB
    bench = make(workers=1, cache_bytes=32_000_000)
    media = [Media(id="img0", uri=bench.uri)]
    initial = stored_bytes()
    together = bench.run(_gather([bench.pool.open(media) for _ in range(3)]))
    later = bench.run(bench.pool.open(media))
    assert {opened.refs["img0"] for opened, _ in [*together, later]} == {bench.opened.refs["img0"]}
    assert stored_bytes() - initial < 0.05 * bench.pixels.nbytes
    assert bench.pool.health()["picture_bytes"] >= bench.pixels.nbytes
    other = tmp_path / "other.png"
    Image.fromarray(bench.pixels[::-1]).save(other)
    opened, _ = bench.run(bench.pool.open([Media(id="img0", uri=str(other))]))
    assert opened.refs["img0"] != bench.opened.refs["img0"]
    assert bench.pool.health()["picture_bytes"] < 1.1 * bench.pixels.nbytes, "the older picture was dropped"
    Image.fromarray(bench.pixels).save(other)
    changed, _ = bench.run(bench.pool.open([Media(id="img0", uri=str(other))]))
    assert changed.refs["img0"] != opened.refs["img0"], "the file has changed"


def test_media_that_cannot_be_decoded_fail_only_their_own_question(make: Make, tmp_path: Path) -> None:
    bench = make(workers=1, env={"HOSTILE_OPEN": "1"})
    truncated = tmp_path / "truncated.png"
    truncated.write_bytes(Path(bench.uri).read_bytes()[:5000])
    codes = {
        str(truncated): "image_undecodable",
        str(tmp_path / "none.png"): "image_not_found",
        "hang.png": "image_timeout",
        "crash.png": "image_crashed",
        "eat.png": "image_out_of_memory",
    }
    # All at once, as a generator opens them: the pool batches them and returns each its own result.
    uris, start = [bench.uri, *codes, bench.uri], time.monotonic()
    results = bench.run(_gather([bench.pool.open([Media(id="img0", uri=uri)]) for uri in uris]))
    assert time.monotonic() - start < TIMEOUT_S + BUSY_S
    for uri, result in zip(uris, results, strict=True):
        if uri == bench.uri:
            opened, (images, _) = result
            assert opened.hashes == bench.opened.hashes
            assert images[0].source_size == bench.images[0].source_size
        else:
            assert isinstance(result, BadImage)
            assert result.code == codes[uri]
    box = boxes(1)[0]
    bench.check_zoom(bench.run(bench.call("zoom_in", box=box)), box)


async def _gather(calls: list) -> list:
    return await asyncio.gather(*calls, return_exceptions=True)


def test_a_cancelled_call_is_not_run(bench: Bench) -> None:
    async def abandon() -> None:
        cached = len(bench.pool.cache.values)
        busy = asyncio.create_task(bench.call("process_info", tag=100))
        await asyncio.sleep(0.01)
        late = [asyncio.create_task(bench.call("process_info", tag=101)) for _ in range(2)]
        await asyncio.sleep(0.01)
        for task in late:
            task.cancel()
        await busy
        await bench.call("process_info", tag=102)
        assert len(bench.pool.cache.values) == cached + 2
        assert bench.pool.in_flight == {}

    bench.run(abandon())


def test_a_pool_that_cannot_start_raises_the_reason(bench: Bench) -> None:
    with pytest.raises(BadConfig):
        ToolboxPool(parse({"toolbox": {"operations": ["nowhere:Class"]}}), 32, "thousand")
    cluster = bench.config.cluster.model_copy(update={"placement_timeout_s": 1.0})
    config = bench.config.model_copy(update={"cluster": cluster})
    without_hostile = {"env_vars": {"PYTHONPATH": str(HERE.parent.parent)}}
    media = [Media(id="img0", uri="cards:?")]
    with closing(ToolboxPool(config, 32, "thousand", runtime_env=without_hostile)) as pool:
        for call in (pool.ready, lambda: pool.open(media)):
            with pytest.raises(BadConfig, match="cannot be imported"):
                bench.run(call())
    with (
        closing(ToolboxPool(config, 32, "thousand", resources={"nowhere": 1})) as pool,
        pytest.raises(InfraFailure, match="no toolbox for 1 s"),
    ):
        bench.run(pool.open(media))


@ray.remote(num_cpus=0)
class PoolOwner:
    """Owns a pool, as a generator does."""

    def __init__(self, config: Config):
        self.pool = ToolboxPool(config, 32, "thousand")

    async def pids(self) -> list[int]:
        await self.pool.ready()
        return [worker.pid for worker in self.pool.workers]


def test_toolboxes_end_with_their_generator(ray_cluster: None) -> None:
    owner = PoolOwner.remote(parse({"toolbox": {"workers": 2}}))
    pids = ray.get(owner.pids.remote(), timeout=60)
    assert len(set(pids)) == 2
    ray.kill(owner)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s=20, every_s=0.1)
