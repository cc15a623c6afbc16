"""Routers that load or observe versions: choice, reservations, members that join and leave, timeouts."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError

from pixelis.actors.generator_member import HUNG_CHECKS
from pixelis.actors.generator_router import GeneratorRouter, RolloutRequest, RolloutResult, RouterTimeouts
from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import InfraFailure
from pixelis.records import Group, Question, Trajectory

QUICK = RouterTimeouts(rollout_s=5.0, load_s=5.0, retry_pause_s=0.001)


# -- following -----------------------------------------------------------------------------------------------


def follower(size: int = 3) -> GeneratorRouter:
    return GeneratorRouter([f"g{i}" for i in range(size)], follows=True, attempts=2, namespace="nowhere")


def pick(router: GeneratorRouter, *tried: int) -> str:
    async def inside() -> str:
        member, _ = await router._pick(time.monotonic() + 1, {router.members[i] for i in tried}, None)
        if router.polling is not None:
            router.polling.cancel()
            router.polling = None
        return member.name

    return asyncio.run(inside())


def test_a_follower_picks_the_least_loaded_generator_that_did_not_fail() -> None:
    router = follower()
    for member, running in zip(router.members, (8, 4, 6), strict=True):
        member.running = running
    assert pick(router) == "g1"
    router.members[1].failed_at = time.monotonic()
    assert pick(router) == "g2"
    assert pick(router, 0, 2) == "g1"
    assert pick(router, 0, 1, 2) == "g2"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_a_follower_ends_with_the_version_promoted_last(changes: list[tuple[int, bool]]) -> None:
    """Versions go up, or one back; generators load them in any order, some report them late."""
    router, version = follower(), 0
    for member in router.members:
        router.observe_version(member, version, time.monotonic())
    for first, back in changes:
        before = time.monotonic()
        version = max(0, version - 1) if back else version + 1
        router.observe_version(router.members[first % 3], version, time.monotonic())
        assert router.version == version
        if router.changed_at > before:
            router.observe_version(router.members[first % 3], version + 1, before)
            assert router.version == version, "a report from before the change"
        versions = {member.name: member.version for member in router.members}
        assert versions[pick(router)] == version
        for member in router.members:
            router.observe_version(member, version, time.monotonic())
        assert router.version == version


def test_a_follower_polls_outdated_generators_until_they_have_changed() -> None:
    class Polled(GeneratorRouter):
        async def health(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
            self.observe_version(self.members[0], 2, time.monotonic())
            return []

    async def body() -> None:
        router = Polled(["g0", "g1"], QUICK, follows=True)
        first, second = router.members
        router.observe_version(first, 1, time.monotonic())
        router.observe_version(second, 2, time.monotonic())
        second.running = 1
        assert router._pick_follower(set()) is second
        assert router.polling is not None
        await router.polling
        assert router._pick_follower(set()) is first
        assert router.polling is None

    asyncio.run(body())


# -- loading versions ----------------------------------------------------------------------------------------


class Actor:
    """A generator on this event loop. Its groups and loads end when the test sets an event."""

    def __init__(self, name: str = "g"):
        self.name, self.version, self.requests = name, -1, 0
        self.may_load, self.may_answer, self.is_alive = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self.may_load, self.may_answer, self.is_alive):
            event.set()
        self.load, self.rollout, self.stream = Method(self._load), Method(self._rollout), Method(self._stream)
        self.health = Method(self.is_alive.wait)

    async def _load(self, version: int) -> int:
        await self.may_load.wait()
        self.version = version
        return version

    def _rollout(self, request: RolloutRequest) -> tuple[Any, dict]:
        return asyncio.ensure_future(self._group(request.question, request.group_id, request.samples)), {}

    async def _stream(self, request: RolloutRequest) -> AsyncIterator[Awaitable[Any]]:
        group, added = self._rollout(request)
        await asyncio.wait({group})
        yield group
        yield added

    async def _group(self, question: Question, group_id: str, n: int) -> Group:
        self.requests, version = self.requests + 1, self.version
        await self.may_answer.wait()
        episodes = [
            Trajectory(question_id=question.id, group_id=group_id, policy_version=version) for _ in range(n)
        ]
        return Group(id=group_id, question=question, trajectories=episodes, policy_version=version)


class Method:
    def __init__(self, call: Callable[..., Any]):
        self.remote = call

    def options(self, num_returns: int) -> Method:
        return self


async def loaded(*actors: Actor, timeouts: RouterTimeouts = QUICK, version: int = 1) -> GeneratorRouter:
    router = GeneratorRouter(list(actors), timeouts)  # type: ignore[arg-type]
    await router.load(version)
    return router


async def both_able(router: GeneratorRouter) -> None:
    while router.stats()["generators/able"] < 2:
        await asyncio.sleep(0.001)


def request(name: str = "q") -> RolloutRequest:
    return RolloutRequest(Question(id=name, question="?"), name, 2, SamplingParams())


def on_loop(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "cancel", lambda call: isinstance(call, asyncio.Future) and call.cancel())
            asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


@on_loop
async def test_a_late_generator_gets_no_work_until_it_has_loaded() -> None:
    slow, quick = Actor("slow"), Actor("quick")
    slow.may_load.clear()
    router = await loaded(slow, quick, timeouts=RouterTimeouts(5.0, 0.05, 0.001), version=3)
    assert router.stats()["generators/able"] == 1
    results = await asyncio.gather(*(router.rollout(request(f"q{i}")) for i in range(4)))
    assert {r.group.policy_version for r in results} == {3}
    assert (slow.requests, quick.requests) == (0, 4)
    slow.may_load.set()
    await both_able(router)
    await asyncio.gather(*(router.rollout(request(f"p{i}")) for i in range(4)))
    assert slow.requests == 2


class Sleeper(Actor):
    def __init__(self, dies: bool = False):
        super().__init__()
        self.asleep, self.dies = False, dies
        self.sleep, self.wake = Method(self._sleep), Method(self._wake)

    async def _sleep(self) -> None:
        self.asleep = True

    async def _wake(self) -> None:
        self.asleep = False
        if self.dies:
            self.version = -1
            raise ActorUnavailableError("it died", None)

    async def _load(self, version: int) -> int:
        assert not self.asleep
        return await super()._load(version)


@on_loop
async def test_sleeping_generators_load_nothing_and_one_that_died_meanwhile_loads_its_version_again() -> None:
    sound, dying = Sleeper(), Sleeper(dies=True)
    router = await loaded(sound, dying)
    await router.sleep()
    loading = asyncio.create_task(router.load(2))
    await asyncio.sleep(0.01)
    assert sound.asleep
    assert dying.asleep
    assert not loading.done()
    await router.wake()
    await router.wake()
    await loading
    await both_able(router)
    assert (sound.version, dying.version) == (2, 2)
    assert router.failures["wake ActorUnavailableError"] == 1


@on_loop
async def test_a_generator_that_has_died_for_good_is_given_up_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Dead(Actor):
        async def _load(self, version: int) -> int:
            self.requests += 1
            raise ActorDiedError

    dead, alive = Dead("dead"), Actor("alive")
    router = await loaded(dead, alive)
    await asyncio.sleep(0.05)  # several pauses between attempts
    assert dead.requests == 1
    assert [member.actor for member in router.members] == [alive]
    assert "Ray does not restart it" in caplog.text
    assert (await router.rollout(request())).group.policy_version == 1


@on_loop
async def test_a_newer_load_does_not_wait_for_one_that_hangs() -> None:
    slow, quick = Actor(), Actor()
    router = await loaded(slow, quick)
    slow.may_load.clear()
    hanging = asyncio.create_task(router.load(2))
    await asyncio.sleep(0.01)
    back = asyncio.create_task(router.load(1))
    await asyncio.sleep(0.01)
    assert (await router.rollout(request())).group.policy_version == 1
    slow.may_load.set()
    await asyncio.gather(hanging, back)


@pytest.mark.parametrize("size", [1, 2, 4])
@on_loop
async def test_an_evaluation_keeps_its_version_on_its_share_while_training_goes_on(size: int) -> None:
    actors = [Actor() for _ in range(size)]
    router = await loaded(*actors)
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


@on_loop
async def test_a_reserved_generator_that_restarted_with_another_version_does_not_answer_for_its_own() -> None:
    actors = [Actor(), Actor()]
    router = await loaded(*actors)
    async with router.reserve(1, share=0.5) as reserved:
        await router.load(2)
        (held,) = [actor for actor in actors if actor.version == 1]
        held.version = 2  # a restarted process serves the promoted version
        assert (await router.rollout(request(), reserved)).group.policy_version == 1
    assert router.failures["WrongVersion"] == 1


@on_loop
async def test_a_place_in_a_broadcast_is_not_used_for_another_version() -> None:
    places: list[tuple[int, Any]] = []

    class Receiver(Actor):
        async def _load(self, version: int, place: Any = None) -> int:
            places.append((version, place))
            return await super()._load(version)

    async def arrange(names: list[str]) -> dict[str, Any]:
        return dict.fromkeys(names, "place of 3")

    async def evaluate() -> None:
        async with router.reserve(1, share=0.5) as reserved:
            assert (await router.rollout(request(), reserved)).group.policy_version == 1

    actors = [Receiver(), Receiver()]
    router = await loaded(*actors)
    for actor in actors:
        actor.may_load.clear()
    tasks = []
    for call in (router.load(2), router.load(3, arrange), evaluate()):  # each waits for the one before it
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(0.01)
    for actor in actors:
        actor.may_load.set()
    await asyncio.gather(*tasks)
    assert {version for version, place in places if place is not None} == {3}


@on_loop
async def test_a_generator_that_joins_is_used_with_the_current_version_and_one_that_leaves_is_not() -> None:
    first, second = Actor(), Actor()
    router = await loaded(first, version=7)
    router.join(second)  # type: ignore[arg-type]
    await both_able(router)
    assert second.version == 7
    router.leave(first)  # type: ignore[arg-type]
    before = first.requests
    await asyncio.gather(*(router.rollout(request(f"q{i}")) for i in range(3)))
    assert (first.requests, second.requests) == (before, 3)


HASTY = RouterTimeouts(rollout_s=15.0, load_s=15.0, retry_pause_s=0.001, health_s=0.002)


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_group_on_a_process_that_hangs_is_rolled_out_on_another_generator(stream: bool) -> None:
    stuck, sound = Actor("stuck"), Actor("sound")
    router = await loaded(stuck, sound, timeouts=HASTY)
    for event in (stuck.may_answer, stuck.may_load, stuck.is_alive):
        event.clear()
    start = time.monotonic()
    items = [item async for item in router.episodes(request(), stream=stream)]
    assert isinstance(items[-1], RolloutResult)
    assert (stuck.requests, sound.requests) == (1, 1)
    assert time.monotonic() - start >= HUNG_CHECKS * HASTY.health_s
    assert router.failures["GeneratorHung"] == 1
    assert [m.running for m in router.members] == [0, 0]
    assert router.members[0].watch is None
    assert router.stats()["generators/able"] == 1, "it gets no work until it has loaded"
    stuck.may_load.set()
    await both_able(router)


@on_loop
async def test_a_slow_generator_keeps_its_group_while_its_process_answers() -> None:
    slow, sound = Actor("slow"), Actor("sound")
    router = await loaded(slow, sound, timeouts=HASTY)
    slow.may_answer.clear()
    group = asyncio.create_task(router.rollout(request()))
    await asyncio.sleep(4 * HUNG_CHECKS * HASTY.health_s)
    slow.may_answer.set()
    await group
    assert (slow.requests, sound.requests) == (1, 0)
    assert not router.failures


@on_loop
async def test_a_group_that_takes_too_long_is_ended_and_tried_elsewhere_until_the_time_is_over() -> None:
    stuck = Actor()
    stuck.may_answer.clear()
    router = await loaded(stuck, timeouts=RouterTimeouts(0.2, 1.0, 0.001))
    start = time.monotonic()
    with pytest.raises(InfraFailure, match=r"no generator was available for 0.2 s \(TimeoutError x1\)"):
        await router.rollout(request())
    assert time.monotonic() - start < 20
    assert all(m.running == 0 for m in router.members)


def test_timeouts_follow_the_recipe_unless_they_are_set() -> None:
    nano, big = load("configs/nano/rft.yaml"), load("configs/qwen2_5_vl_7b/rft.yaml")
    assert nano.rollout_timeout_s == 600
    d, t = big.dialogue, big.toolbox.timeout_s
    assert big.rollout_timeout_s >= 2 * d.max_turns * (d.max_turn_tokens / 10 + t), (
        "the longest episode, and one before it"
    )
    assert big.load_timeout_s > big.rollout_timeout_s
    more = load("configs/qwen2_5_vl_7b/rft.yaml", ["dialogue.max_turns=32"])
    assert more.rollout_timeout_s > big.rollout_timeout_s
    own = load("configs/nano/rft.yaml", ["engine.rollout_timeout_s=5"])
    assert (own.rollout_timeout_s, own.load_timeout_s) == (5, 65)
    assert RouterTimeouts.of(own) == RouterTimeouts(5, 65)
    assert RouterTimeouts.serving(nano).load_s == nano.serve.timeout_s + 60
