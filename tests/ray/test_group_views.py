"""What a group's views take in the object store, on a real generator whose views are large enough for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from PIL import Image
from placed_actors import held_bytes, stored_bytes, wait_until
from ray.actor import ActorHandle

from pixelis.actors.generator import Generator
from pixelis.actors.generator_router import GeneratorRouter, RolloutRequest, RolloutResult
from pixelis.actors.group_views import fetch_groups
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.records import Media, Question

pytestmark = pytest.mark.slow

SIDE = 256
"""Of the policy's view. It takes 197 KB; Ray keeps objects below 100 KB elsewhere."""
OVERRIDES = ["dialogue.max_context=640", "dialogue.max_turn_tokens=4", "toolbox.workers=1", "toolbox.cpus=0"]
OVERRIDES += [f"dialogue.input.{end}_pixels={SIDE**2}" for end in ("min", "max")] + ["toolbox.cache_bytes=0"]


@pytest.fixture(scope="module")
def generator(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorHandle]:
    """A generator whose toolbox caches nothing."""
    folder = tmp_path_factory.mktemp("run")
    store = PolicyStore.options(name="views-store").remote(str(folder))  # type: ignore[attr-defined]
    config = load("configs/nano/base.yaml", [*OVERRIDES, f"run.dir={folder}"])
    actor = Generator.options(num_cpus=0).remote(config, "views-store")  # type: ignore[attr-defined]
    ray.get([actor.ready.remote(), actor.load.remote(0)], timeout=120)
    yield actor
    ray.kill(actor)
    ray.kill(store)


def picture(seed: int, side: int = 2 * SIDE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def ask(router: GeneratorRouter, uri: str, stream: bool = False) -> RolloutResult:
    """A group of two rollouts about a picture, as a Coordinator or a gateway asks for it."""
    question = Question(id="q", question="which?", media=[Media(id="img0", uri=uri)])
    request = RolloutRequest(question, "g", 2, SamplingParams(max_tokens=4), max_turns=1)

    async def last() -> RolloutResult:
        items = [item async for item in router.episodes(request, stream=stream)]
        assert isinstance(items[-1], RolloutResult)
        return items[-1]

    return asyncio.run(asyncio.wait_for(last(), 120))


def view_of(result: RolloutResult) -> np.ndarray:
    """The view that both rollouts show."""
    (views,) = fetch_groups([result.views])
    (first,), (second,) = (views[t.id] for t in result.group.trajectories)
    assert np.shares_memory(first, second)
    return first


def test_groups_that_show_a_picture_share_its_view_until_the_last_of_them_is_released(
    generator: ActorHandle, tmp_path: Path
) -> None:
    router, uri = GeneratorRouter([generator], follows=True), str(tmp_path / "picture.png")
    Image.fromarray(picture(0)).save(uri)
    base, created = held_bytes(), stored_bytes()
    groups = [ask(router, uri)]
    view = SIDE * SIDE * 3
    assert stored_bytes() - created < picture(0).nbytes + 1.05 * view
    groups += [ask(router, uri, stream=stream) for stream in (False, True)]
    opened = 3 * picture(0).nbytes  # each group opens the picture, none stores its view
    assert stored_bytes() - created < opened + 1.05 * view
    wait_until(lambda: held_bytes() - base < 1.05 * view)
    assert all(np.array_equal(view_of(group), view_of(groups[0])) for group in groups)
    assert view_of(groups[0]).shape == (SIDE, SIDE, 3)
    del groups[:2]
    assert np.array_equal(view_of(groups[0]), view_of(ask(router, uri)))
    groups.clear()
    wait_until(lambda: held_bytes() <= base)


def test_a_group_shows_the_new_picture_of_a_file_that_has_changed(
    generator: ActorHandle, tmp_path: Path
) -> None:
    router, uri = GeneratorRouter([generator], follows=True), str(tmp_path / "picture.png")
    shown = []
    for seed in (1, 2, 2):
        Image.fromarray(picture(seed, SIDE)).save(uri)
        shown.append(ask(router, uri))
    for group, seed in zip(shown, (1, 2, 2), strict=True):
        assert np.array_equal(view_of(group), picture(seed, SIDE))
