"""What a pool of toolboxes caches: which results, for which calls, and in how much memory. Without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import skimage.data

from pixelis.actors.toolbox import Objects, Outcome, error_outcome
from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.actors.toolbox_work import Opened
from pixelis.config.load import parse
from pixelis.operations import OPERATIONS, Scene, execute
from pixelis.records import Action, ImageView, Observation

PICTURE = skimage.data.astronaut()
SIZE = PICTURE.shape[1], PICTURE.shape[0]
IMAGES = [ImageView(id="img0", source_size=SIZE, view_size=SIZE)]
CROP = ImageView(id="obs1", parent="img0", box=(0.0, 0.0, 0.5, 0.5), source_size=SIZE, view_size=SIZE)
OBJECTS: Objects = {
    "11111111": {"id": "11111111", "kind": "object", "root": "img0", "frame": None, "box": [0, 0, 0.5, 0.5]}
}
OPENED = Opened({}, {"img0": "a" * 64})


@pytest.fixture
def pool(monkeypatch) -> ToolboxPool:
    """A pool without workers, which the tests answer for."""
    monkeypatch.setattr(ToolboxPool, "_create_toolbox", lambda self: None)
    monkeypatch.setattr(ToolboxPool, "_ensure_started", lambda self: None)
    return ToolboxPool(parse({"toolbox": {"operations": [*OPERATIONS]}}), 32, "thousand")


def answered(
    pool: ToolboxPool, calls: list[tuple[Action, list[ImageView], Objects]], outcome: Any = None
) -> list[Outcome]:
    """The outcomes of calls that are made at once; ``outcome``, or else that of the operation itself."""

    async def run() -> list[Outcome]:
        tasks = [asyncio.create_task(pool.execute(*call, OPENED)) for call in calls]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            for queue in (pool.quick, pool.slow):
                while queue:
                    job = queue.popleft()
                    work: Any = job.work
                    result = outcome or execute(
                        work.action, Scene({"img0": PICTURE}, work.images, work.objects)
                    )
                    pool._resolve(job, result, len(result[0].text), is_batch=False)
        return [task.result() for task in tasks]

    return asyncio.run(run())


@pytest.mark.parametrize("code", ["timeout", "out_of_memory", "crashed"])
def test_an_error_that_may_pass_is_not_cached(pool: ToolboxPool, code: str):
    action = Action(op="python", target="img0", arguments={"code": "print(1)"})
    answered(pool, [(action, IMAGES, {})], error_outcome(code, "the sandbox did not start in time"))
    ((observation, _),) = answered(pool, [(action, IMAGES, {})], (Observation(status="ok", text="1"), []))
    assert observation.text == "1"
    ((observation, _),) = answered(
        pool, [(action, IMAGES, {})], error_outcome("limit", "the code wrote too much")
    )
    assert (observation.text, pool.counts["hits"]) == ("1", 1)


@pytest.mark.parametrize("together", [True, False])
def test_errors_list_the_ids_of_their_own_episode(pool: ToolboxPool, together: bool):
    zoom = Action(op="zoom_in", target="obs3", arguments={"box": [0.1, 0.1, 0.5, 0.5]})
    look = Action(op="get_properties", target="img0", arguments={"object": "deadbeef"})
    calls: list[tuple[Action, list[ImageView], Objects]] = [
        (zoom, IMAGES, {}),
        (zoom, [*IMAGES, CROP], {}),
        (look, IMAGES, {}),
        (look, IMAGES, OBJECTS),
    ]
    outcomes = (
        answered(pool, calls)
        if together
        else [outcome for call in calls for outcome in answered(pool, [call])]
    )
    texts = [observation.text for observation, _ in outcomes]
    assert ["obs1" in texts[0], "obs1" in texts[1]] == [False, True]
    assert ["11111111" in texts[2], "11111111" in texts[3]] == [False, True]
