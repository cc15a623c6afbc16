"""The object store is sized from what a job keeps in it, and a cluster with less is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pixelis.actors.cluster import _local_store_bytes, check_object_stores
from pixelis.config import load
from pixelis.errors import InfraFailure
from pixelis.policy import object_store
from pixelis.policy.architecture import Architecture


def node(gigabytes: float, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"object_store_memory": gigabytes * 1e9}}


def test_the_parts_follow_the_recipe() -> None:
    keys = "rft.prompts_per_step=10 rft.group_size=4 dialogue.max_turns=3 dialogue.max_images=8 rft.max_off_policy_steps=2"
    c = load(None, [*keys.split(), "dialogue.input.max_pixels=5000", "dialogue.crop.max_pixels=4096"])
    shares = object_store.parts(c, 1_000)
    assert shares["versions"] == 12_000
    assert shares["views"] == 40 * 3 * (5_000 + 2 * 4 * 4096)
    assert shares["pictures"] == 30 * 3 * object_store.PICTURE_PIXELS
    assert "replay" not in shares


def test_a_version_is_the_adapter_or_all_parameters() -> None:
    c = load(None, [])
    arch = Architecture(c.policy.model, torch.float32)
    full = load(None, ["policy.full=true"])
    assert object_store.version_bytes(full, arch) == arch.parameters * 4
    assert 0 < object_store.version_bytes(c, arch) < arch.parameters * 4
    needed, version = object_store.needed_bytes(c)
    assert needed >= object_store.MIN_BYTES
    assert version == object_store.version_bytes(c, arch)


def test_a_local_store_fits_the_shared_memory() -> None:
    assert 80_000_000 <= _local_store_bytes(0) <= 1_000_000_000
    assert _local_store_bytes(10**15) < 10**13


def test_a_cluster_with_small_object_stores_is_named() -> None:
    assert check_object_stores([node(4), node(4), node(9, alive=False)], int(8e9), int(3e9)) == ""
    warning = check_object_stores([node(4), node(2)], int(20e9), int(3e9))
    assert "the cluster have 6 GB, the job may need 20 GB" in warning
    with pytest.raises(InfraFailure, match="a policy version takes 33 GB, but the largest object store of the cluster has 4 GB"):
        check_object_stores([node(4), node(2)], 0, int(33e9))
