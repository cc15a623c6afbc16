"""Which generator answers next, as a router that leads or follows has seen them; reservations, members that come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.actors import generator_router
from pixelis.actors.generator_router import GeneratorRouter, Member, RolloutRequest, RouterTimeouts
from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import InfraFailure
from pixelis.records import Group, Question, Trajectory

QUICK = RouterTimeouts(rollout_s=5.0, load_s=5.0, retry_pause_s=0.001)


# -- following -----------------------------------------------------------------------------------------------------------------


def follower(size: int = 3) -> GeneratorRouter:
    return GeneratorRouter([f"g{i}" for i in range(size)], follows=True, attempts=2, namespace="nowhere")


def pick(router: GeneratorRouter, *tried: int) -> str:
    async def inside() -> str:
        member, _ = await router._pick(time.monotonic() + 1, {router.members[i] for i in tried}, None)
        if router.looking is not None:
            router.looking.cancel()
            router.looking = None
        return member.name

    return asyncio.run(inside())


def test_the_least_loaded_that_did_not_fail() -> None:
    router = follower()
    for member, running in zip(router.members, (8, 4, 6), strict=True):
        member.running = running
    assert pick(router) == "g1"
    router.members[1].failed_at = time.monotonic()
    assert pick(router) == "g2"
    assert pick(router, 0, 2) == "g1"
    assert pick(router, 0, 1, 2) == "g2"


def test_a_promotion_and_a_way_back_are_followed() -> None:
    router = follower(2)
    one, two = router.members
    router.saw(one, 4, time.monotonic())
    router.saw(two, 4, time.monotonic())
    assert router.version == 4
    router.saw(two, 5, time.monotonic())
    two.running = 100
    assert (router.version, pick(router)) == (5, "g1")
    late = time.monotonic()
    router.saw(one, 5, time.monotonic())
    assert pick(router) == "g0"
    router.saw(one, 4, time.monotonic())  # withdrawn: the lower version is the promoted one now
    assert (router.version, pick(router)) == (4, "g0")
    router.saw(one, 5, late)  # what began before the change ends after it
    assert router.version == 4


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_all_end_with_what_was_promoted_last(changes: list[tuple[int, bool]]) -> None:
    """Versions go up, or one back; generators load them in any order, some only when asked again."""
    router, version = follower(), 0
    for member in router.members:
        router.saw(member, version, time.monotonic())
    for first, back in changes:
        version = max(0, version - 1) if back else version + 1
        router.saw(router.members[first % 3], version, time.monotonic())
        assert router.version == version
        held = {member.name: member.version for member in router.members}
        assert held[pick(router)] == version
        for member in router.members:
            router.saw(member, version, time.monotonic())
        assert router.version == version


def test_who_is_behind_is_looked_at_until_it_has_changed() -> None:
    class Seen(GeneratorRouter):
        async def health(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
            self.saw(self.members[0], 2, time.monotonic())
            return []

    async def watch() -> None:
        router = Seen(["g0", "g1"], QUICK, follows=True)
        one, two = router.members
        router.saw(one, 1, time.monotonic())
        router.saw(two, 2, time.monotonic())
        two.running = 1
        assert router._follow(set()) is two
        assert router.looking is not None
        await router.looking
        assert router._follow(set()) is one
        assert router.looking is None

    asyncio.run(watch())


def test_an_ingress_has_the_time_that_a_busy_machine_takes() -> None:
    from ray.serve._private import constants

    assert constants.PROXY_READY_CHECK_TIMEOUT_S >= 60


# -- leading -------------------------------------------------------------------------------------------------------------------


class Actor:
    """A generator on this event loop, whose groups and loads end when they are told to."""

    def __init__(self, name: str = "g"):
        self.name, self.version, self.asked = name, -1, 0
        self.may_load, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_load.set()
        self.may_answer.set()
        self.load, self.rollout = Method(self._load), Method(self._rollout)

    async def _load(self, version: int) -> int:
        await self.may_load.wait()
        self.version = version
        return version

    def _rollout(self, question: Question, group_id: str, n: int, *_: Any) -> tuple[Any, dict]:
        return asyncio.ensure_future(self._group(question, group_id, n)), {}

    async def _group(self, question: Question, group_id: str, n: int) -> Group:
        self.asked, version = self.asked + 1, self.version
        await self.may_answer.wait()
        made = [Trajectory(question_id=question.id, group_id=group_id, policy_version=version) for _ in range(n)]
        return Group(id=group_id, question=question, trajectories=made, policy_version=version)


class Method:
    def __init__(self, call: Callable[..., Any]):
        self.remote = call


def request(name: str = "q") -> RolloutRequest:
    return RolloutRequest(Question(id=name, question="?"), name, 2, SamplingParams())


def run(test: Callable[[], Awaitable[None]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator_router, "_cancel", lambda call: call.cancel())
        asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


def test_a_late_generator_gets_no_work_until_it_has_loaded() -> None:
    async def body() -> None:
        slow, quick = Actor("slow"), Actor("quick")
        router = GeneratorRouter([slow, quick], RouterTimeouts(5.0, 0.05, 0.001))  # type: ignore[list-item]
        slow.may_load.clear()
        await router.load(3)
        assert router.stats()["generators/able"] == 1
        results = await asyncio.gather(*(router.rollout(request(f"q{i}")) for i in range(4)))
        assert {r.group.policy_version for r in results} == {3}
        assert (slow.asked, quick.asked) == (0, 4)
        slow.may_load.set()
        while router.stats()["generators/able"] < 2:
            await asyncio.sleep(0.01)
        await asyncio.gather(*(router.rollout(request(f"p{i}")) for i in range(4)))
        assert slow.asked == 2

    run(body)


def test_a_newer_load_does_not_wait_for_one_that_hangs() -> None:
    async def body() -> None:
        slow, quick = Actor(), Actor()
        router = GeneratorRouter([slow, quick], QUICK)  # type: ignore[list-item]
        await router.load(1)
        slow.may_load.clear()
        hanging = asyncio.create_task(router.load(2))
        await asyncio.sleep(0.01)
        back = asyncio.create_task(router.load(1))
        await asyncio.sleep(0.01)
        assert (await router.rollout(request())).group.policy_version == 1
        slow.may_load.set()
        await asyncio.gather(hanging, back)

    run(body)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_evaluation_keeps_its_version_on_its_share_while_training_goes_on(size: int) -> None:
    async def body() -> None:
        actors = [Actor() for _ in range(size)]
        router = GeneratorRouter(actors, QUICK)  # type: ignore[arg-type]
        await router.load(1)
        async with router.reserve(1, share=0.25) as reserved:
            load = asyncio.create_task(router.load(2))
            await asyncio.sleep(0.02)
            assert load.done() is (size > 1), "a load waits only where no generator is left for it"
            assert sorted(a.version for a in actors) == sorted([1] + [2] * (size - 1))
            assert (await router.rollout(request("held-out"), reserved)).group.policy_version == 1
            assert (await router.rollout(request("training"))).group.policy_version == (2 if size > 1 else 1)
        await load
        while {a.version for a in actors} != {2}:
            await asyncio.sleep(0.01)

    run(body)


def test_a_generator_that_joins_is_used_with_the_current_version_and_one_that_leaves_is_not() -> None:
    async def body() -> None:
        first, second = Actor(), Actor()
        router = GeneratorRouter([first], QUICK)  # type: ignore[list-item]
        await router.load(7)
        router.join(second)  # type: ignore[arg-type]
        while router.stats()["generators/able"] < 2:
            await asyncio.sleep(0.005)
        assert second.version == 7
        router.leave(first)  # type: ignore[arg-type]
        before = first.asked
        await asyncio.gather(*(router.rollout(request(f"q{i}")) for i in range(3)))
        assert (first.asked, second.asked) == (before, 3)

    run(body)


def test_a_group_that_takes_too_long_is_ended_and_tried_elsewhere_until_the_time_is_over() -> None:
    async def body() -> None:
        stuck = Actor()
        stuck.may_answer.clear()
        router = GeneratorRouter([stuck], RouterTimeouts(0.2, 1.0, 0.001))  # type: ignore[list-item]
        await router.load(1)
        began = time.monotonic()
        with pytest.raises(InfraFailure, match=r"no generator was able to work for 0.2 s \(TimeoutError x1\)"):
            await router.rollout(request())
        assert time.monotonic() - began < 5
        assert all(m.running == 0 for m in router.members)

    run(body)


def test_timeouts_follow_the_recipe_unless_they_are_set() -> None:
    nano, big = load("configs/nano/rft.yaml"), load("configs/qwen2_5_vl_7b/rft.yaml")
    assert nano.rollout_timeout_s == 600
    d, t = big.dialogue, big.toolbox.timeout_s
    assert big.rollout_timeout_s >= 2 * d.max_turns * (d.max_turn_tokens / 10 + t), "the longest episode, and one before it"
    assert big.load_timeout_s > big.rollout_timeout_s
    more = load("configs/qwen2_5_vl_7b/rft.yaml", ["dialogue.max_turns=32"])
    assert more.rollout_timeout_s > big.rollout_timeout_s
    own = load("configs/nano/rft.yaml", ["engine.rollout_timeout_s=5", "engine.load_timeout_s=7"])
    assert (own.rollout_timeout_s, own.load_timeout_s) == (5, 7)
    assert RouterTimeouts.of(own) == RouterTimeouts(5, 7, 1.0, 10.0, 2.0)
    assert RouterTimeouts.serving(nano).load_s == nano.serve.timeout_s + 60
    assert Member("named").name == "named"
