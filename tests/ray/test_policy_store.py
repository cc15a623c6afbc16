"""The PolicyStore: versions on disk, pruning, restarts, promotion and rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from placed_actors import restart

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.policy_store import PolicyStore
from pixelis.errors import BadInput, InfraFailure, MissingFile
from pixelis.policy.adapters import Adapter

pytestmark = pytest.mark.slow


Make = Callable[..., ray.actor.ActorHandle]


@pytest.fixture
def make(ray_cluster: None, tmp_path: Path) -> Iterator[Make]:
    """A function that starts a store that keeps so many versions."""
    stores = []

    def start(*keep: int) -> ray.actor.ActorHandle:
        stores.append(PolicyStore.remote(str(tmp_path), None, *keep))  # type: ignore[attr-defined]
        return stores[-1]

    yield start
    for store in stores:
        ray.kill(store)


def adapter(value: float) -> Adapter:
    tensors = {"layer.A": np.full((2, 3), value, np.float32), "layer.B": np.full((4, 2), value, np.float32)}
    return Adapter(tensors, alpha=2, rank=2, base_sha256="base")


def stored(store: ray.actor.ActorHandle, version: int) -> Adapter | None:
    (ref,) = ray.get(store.get.remote(version))
    return ray.get(ref)


def statuses(store: ray.actor.ActorHandle) -> list[str]:
    return [version.status.value for version in ray.get(store.list.remote())]


def test_versions_count_up_and_old_ones_are_pruned(make: Make, tmp_path: Path) -> None:
    store = make(3)
    published = [ray.get(store.publish.remote(adapter(i), "rft", i)) for i in range(1, 7)]
    assert published == [1, 2, 3, 4, 5, 6]
    assert ray.get(store.publish.remote(adapter(6), "rft", 6)) == 6
    assert ray.get(store.promoted.remote()) == 6
    assert stored(store, 0) is None
    for version in (4, 5, 6):
        assert np.array_equal(stored(store, version).tensors["layer.A"], adapter(version).tensors["layer.A"])
    with pytest.raises(MissingFile, match="version 1"):
        ray.get(store.get.remote(1))
    folders = sorted(p.name for p in (tmp_path / "versions").iterdir() if p.is_dir())
    assert folders == ["v000004", "v000005", "v000006"]
    restart(store)
    assert ray.get(store.promoted.remote()) == 6
    assert np.array_equal(stored(store, 5).tensors["layer.B"], adapter(5).tensors["layer.B"])
    assert ray.get(store.publish.remote(adapter(7), "rft", 7)) == 7


def test_a_version_is_loaded_before_it_is_on_disk_and_no_restart_gives_its_number_to_other_weights(
    make: Make, tmp_path: Path
) -> None:
    store = make()
    (tmp_path / "versions" / "v000001").mkdir(parents=True)  # of a run that crashed
    assert ray.get(store.publish.remote(adapter(1), "rft", 1, later=True)) == 1
    assert np.array_equal(stored(store, 1).tensors["layer.A"], adapter(1).tensors["layer.A"])
    assert not (tmp_path / "versions" / "v000001").exists()
    assert ray.get(store.promoted.remote()) == 0, "what a restart can load"
    restart(store)
    with pytest.raises(InfraFailure, match="not stored yet"):
        ray.get(store.get.remote(1))
    assert ray.get(store.publish.remote(adapter(2), "rft", 2)) == 2
    ray.get(store.keep.remote(1, adapter(1)))
    restart(store)
    for version in (1, 2):
        assert np.array_equal(stored(store, version).tensors["layer.A"], adapter(version).tensors["layer.A"])


def test_a_restarted_learner_withdraws_versions_after_its_checkpoint(make: Make) -> None:
    store = make(2)
    for i in range(1, 6):
        ray.get(store.publish.remote(adapter(i), "rft", i))
    assert ray.get(store.publish.remote(adapter(2), "rft", 2, restart=True)) == 2
    assert ray.get(store.promoted.remote()) == 2
    assert np.array_equal(stored(store, 2).tensors["layer.A"], adapter(2).tensors["layer.A"])
    # Sampling depends on the number: a repeated step has to serve the version that the lost one published.
    assert ray.get(store.publish.remote(adapter(3), "rft", 3)) == 3
    assert ray.get(store.promoted.remote()) == 3
    assert ray.get(store.publish.remote(adapter(9), "rft", 4)) == 6, "other weights never get a used number"
    assert ray.get(store.promoted.remote()) == 6
    assert statuses(store)[3:] == ["promoted", "rolled_back", "rolled_back", "promoted"]


def test_rollback_works_after_any_number_of_refused_candidates(make: Make) -> None:
    store = make(2)
    first, second = (ray.get(store.publish.remote(adapter(i), "evolve", i)) for i in (1, 2))
    for i in range(3, 8):
        ray.get(store.roll_back.remote(ray.get(store.publish.remote(adapter(i), "evolve", i, {}, False))))
    assert ray.get(store.roll_back.remote(second)) == first
    assert np.array_equal(stored(store, first).tensors["layer.A"], adapter(1).tensors["layer.A"])
    assert ray.get(store.roll_back.remote(first)) == 0
    with pytest.raises(BadInput, match="starting policy"):
        ray.get(store.roll_back.remote(0))
    with pytest.raises(MissingFile, match="version 3"):
        ray.get(store.promote.remote(3))  # refused, its weights are pruned


def test_promoting_an_earlier_version_withdraws_the_later_ones(make: Make) -> None:
    store = make()
    for i in (1, 2, 3):
        ray.get(store.publish.remote(adapter(i), "evolve", i))
    candidate = ray.get(store.publish.remote(adapter(4), "evolve", 4, {}, False))
    ray.get(store.promote.remote(1))
    assert ray.get(store.promoted.remote()) == 1
    assert statuses(store) == ["promoted", "promoted", "rolled_back", "rolled_back", "candidate"]
    ray.get(store.promote.remote(candidate))
    assert ray.get(store.promoted.remote()) == candidate


def test_a_store_that_cannot_start_says_which_file_is_damaged(make: Make, tmp_path: Path) -> None:
    ray.get(make().publish.remote(adapter(1), "rft", 1))
    (tmp_path / "versions" / "versions.json").write_bytes(b"")
    with pytest.raises(ray.exceptions.RayActorError) as caught:
        ray.get(make().promoted.remote())
    cause = unwrap_ray_error(caught.value)
    assert isinstance(cause, BadInput)
    assert "versions.json is damaged" in str(cause)
    assert "policy.adapter can be one of its versions" in str(cause)
