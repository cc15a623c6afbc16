"""Which generator answers next: load, failures and the promoted version, as the pool has seen them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.errors import BadInput
from pixelis.serve.pool import GeneratorPool


def pool(size: int = 3) -> GeneratorPool:
    return GeneratorPool([f"g{i}" for i in range(size)], "nowhere")


def pick(some: GeneratorPool, *tried: str) -> str:
    async def inside() -> str:
        name = some.pick(set(tried))
        if some.looking is not None:
            some.looking.cancel()
            some.looking = None
        return name

    return asyncio.run(inside())


def test_the_least_loaded_that_did_not_fail() -> None:
    some = pool()
    some.running.update({"g0": 8, "g1": 4, "g2": 6})
    assert pick(some) == "g1"
    some.failed_at["g1"] = time.monotonic()
    assert pick(some) == "g2"
    assert pick(some, "g0", "g2") == "g1"
    assert pick(some, "g0", "g1", "g2") == "g2"
    with pytest.raises(BadInput):
        GeneratorPool([], "nowhere")


def test_a_promotion_and_a_way_back_are_followed() -> None:
    some = pool(2)
    some.saw("g0", 4, time.monotonic())
    some.saw("g1", 4, time.monotonic())
    assert some.promoted == 4
    some.saw("g1", 5, time.monotonic())
    some.running["g1"] = 100
    assert (some.promoted, pick(some)) == (5, "g1")
    late = time.monotonic()
    some.saw("g0", 5, time.monotonic())
    assert pick(some) == "g0"
    some.saw("g0", 4, time.monotonic())  # withdrawn: the lower version is the promoted one now
    assert (some.promoted, pick(some)) == (4, "g0")
    some.saw("g0", 5, late)  # what began before the change ends after it
    assert some.promoted == 4


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_all_end_with_what_was_promoted_last(changes: list[tuple[int, bool]]) -> None:
    """Versions go up, or one back; generators load them in any order, some only when asked again."""
    some, version = pool(), 0
    for name in some.names:
        some.saw(name, version, time.monotonic())
    for first, back in changes:
        version = max(0, version - 1) if back else version + 1
        some.saw(some.names[first % 3], version, time.monotonic())
        assert some.promoted == version
        assert some.versions[pick(some)] == version
        for name in some.names:
            some.saw(name, version, time.monotonic())
        assert some.promoted == version


def test_who_is_behind_is_looked_at_until_it_has_changed() -> None:
    class Told(GeneratorPool):
        async def health(self, timeout_s: float = 2.0) -> list[dict[str, Any]]:
            self.saw("g0", 2, time.monotonic())
            return []

    async def watch() -> None:
        some = Told(["g0", "g1"], "nowhere")
        some.saw("g0", 1, time.monotonic())
        some.saw("g1", 2, time.monotonic())
        some.running["g1"] = 1
        assert some.pick(set()) == "g1"
        assert some.looking is not None
        await some.looking
        assert some.pick(set()) == "g0"
        assert some.looking is None

    asyncio.run(watch())


def test_an_ingress_has_the_time_that_a_busy_machine_takes() -> None:
    from ray.serve._private import constants

    assert constants.PROXY_READY_CHECK_TIMEOUT_S >= 60
