"""Rate limits, the reply cache, access control and errors: the parts of the gateway without actors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config import load
from pixelis.errors import BadInput, InfraFailure, Overloaded
from pixelis.protocol.errors import ApiError
from pixelis.serve.access import Access, Shield, is_local
from pixelis.serve.cache import ReplyCache, key_of
from pixelis.serve.counters import Counters
from pixelis.serve.dependencies import require_own_origin
from pixelis.serve.keys import digest
from pixelis.serve.limits import BURST_S, Admission, ByteBudget, RateLimits, Uploads, admission_limits
from pixelis.serve.responses import add_exception_handlers, api_error, until


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# -- admission -----------------------------------------------------------------------------------------------


def test_a_short_overload_delays_and_a_lasting_one_is_refused() -> None:
    """A gateway that died sends its requests to the other one for some seconds: they wait there."""
    clock = Clock()
    admission, inside = Admission(running=2, waiting=2, burst=8, clock=clock), list[Any]()

    def enter() -> None:
        request = admission.enter()
        request.__enter__()
        inside.append(request)

    def leave() -> None:
        inside.pop().__exit__(None, None, None)

    for _ in range(10):
        enter()
    with pytest.raises(Overloaded):
        enter()
    leave()
    clock.now += BURST_S + 1  # the queue was never empty since: every request would wait longer and longer
    for _ in range(6):
        with pytest.raises(Overloaded):
            enter()
        leave()
    assert admission.inside == 3
    enter()
    while inside:
        leave()
    for _ in range(10):
        enter()
    with pytest.raises(Overloaded):
        enter()


async def wait_for_slot(admission: Admission, name: str, priority: int, order: list[str]) -> None:
    try:
        async with admission.slot(priority):
            order.append(name)
    except Overloaded:
        order.append(f"{name} refused")


def test_live_requests_go_before_batches_which_age() -> None:
    clock, order = Clock(), list[str]()
    arrivals = ("b1", 1), ("l1", 1), ("b2", 1), ("l2", 7.5), ("l3", 2), ("l4", 0)

    async def run() -> None:
        admission = Admission(running=1, waiting=9, clock=clock)
        async with asyncio.TaskGroup() as tasks, admission.slot(0):
            for name, pause in arrivals:
                tasks.create_task(wait_for_slot(admission, name, 10 if name[0] == "b" else 0, order))
                await asyncio.sleep(0)
                clock.now += pause

    asyncio.run(run())
    assert order == ["l1", "l2", "b1", "l3", "b2", "l4"]


def test_batches_that_wait_make_room_for_live_requests() -> None:
    order = list[str]()

    async def request(admission: Admission, name: str, priority: int) -> None:
        try:
            with admission.enter():
                await wait_for_slot(admission, name, priority, order)
        except Overloaded:
            order.append(f"{name} kept out")

    async def run() -> None:
        admission = Admission(running=1, waiting=3, clock=Clock())
        async with asyncio.TaskGroup() as tasks:
            with admission.enter():
                async with admission.slot(0):
                    for name in ("b1", "b2", "b3", "b4", "l1", "l2", "l3"):
                        tasks.create_task(request(admission, name, 10 if name[0] == "b" else 0))
                        for _ in range(3):  # a refused request leaves before the next one arrives
                            await asyncio.sleep(0)
        assert (admission.inside, admission.free, admission.queue, admission.shed) == (0, 1, [], 4)

    asyncio.run(run())
    # The first batch keeps its place: otherwise none would ever be answered while live requests alone are too
    # many.
    assert order == ["b4 refused", "b3 refused", "b2 refused", "l3 kept out", "l1", "l2", "b1"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["arrive", "leave", "cancel", "resize"]), st.integers(0, 9)), max_size=40
    )
)
def test_slots_are_given_in_the_order_of_ranks(moves: list[tuple[str, int]]) -> None:
    """However requests come, end, give up and the limit changes."""

    async def run() -> None:
        clock = Clock()
        admission = Admission(running=2, waiting=50, clock=clock)
        waiting, running = list[asyncio.Task[None]](), list[asyncio.Event]()

        async def request(priority: int) -> None:
            done, rank = asyncio.Event(), clock.now + priority
            async with admission.slot(priority):
                assert all(rank <= waiter.rank for waiter in admission.queue)
                running.append(done)
                await done.wait()

        for kind, number in moves:
            clock.now += 0.5
            if kind == "arrive":
                waiting.append(asyncio.create_task(request(number)))
            elif kind == "leave" and running:
                running.pop(number % len(running)).set()
            elif kind == "cancel" and waiting:
                waiting.pop(number % len(waiting)).cancel()
            elif kind == "resize":
                admission.resize(1 + number % 4, 50)
            for _ in range(3):
                await asyncio.sleep(0)
        while not all(task.done() for task in waiting):
            for done in running:
                done.set()
            await asyncio.sleep(0)
        assert (admission.free, admission.queue) == (admission.running, [])

    asyncio.run(run())


def test_a_configured_queue_holds_no_more() -> None:
    config = load(None, ["engine.workers=1", "engine.max_num_seqs=8", "serve.samples=4", "serve.replicas=1"])
    assert admission_limits(config) == (2, 2, 8)
    config = load(None, ["serve.max_queue=3"])
    assert admission_limits(config)[1:] == (3, 3)


# -- rates ---------------------------------------------------------------------------------------------------


def test_rates_are_limited_per_minute_and_hour() -> None:
    clock = Clock()
    rates = RateLimits(2, 3, clock)

    def retry_after(client: str, pause: float = 0.0) -> float | None:
        clock.now += pause
        return rates.take(client).retry_after_s  # type: ignore[union-attr]

    assert rates.take("a").headers() == {  # type: ignore[union-attr]
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "1m0s",
    }
    assert (retry_after("a", 30), retry_after("a")) == (None, 30)
    assert retry_after("b") is None, "another client's share is its own"
    assert retry_after("a", 30) is None
    clock.now += 60
    last = rates.take("a")
    assert last.retry_after_s == pytest.approx(3600 - 120)  # the hour's
    assert (last.limit, rates.refused) == (3, 2)
    assert RateLimits(0, 0).take("a") is None


def test_the_number_of_tracked_clients_is_bounded() -> None:
    rates = RateLimits(1, 0, Clock(), clients=10)
    for i in range(1000):
        rates.take(f"client-{i}")
    assert len(rates.accepted) == 10


# -- the cache -----------------------------------------------------------------------------------------------


def test_a_cached_reply_is_returned_until_it_expires() -> None:
    clock = Clock()
    cache = ReplyCache(2, 10, clock=clock)
    cache.put("a", {"answer": "7"}, 3, "exp_1")
    reply = cache.get("a")
    assert (json.loads(reply.body), reply.version, reply.experience_id) == ({"answer": "7"}, 3, "exp_1")
    cache.put("b", {}, 3, None)
    cache.get("a")
    cache.put("c", {}, 3, None)  # b was not used for longest
    assert [cache.get(k) is not None for k in "abc"] == [True, False, True]
    cache.forget({"exp_1"})
    assert cache.get("a") is None
    clock.now += 10
    assert cache.get("c") is None
    assert cache.bytes == 0


def test_cache_keys_do_not_depend_on_the_order_of_fields() -> None:
    assert key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1}) != key_of({"a": 1, "b": [3]})


# -- who is let in -------------------------------------------------------------------------------------------


LOCAL = ["localhost", "LocalHost:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]"]
FOREIGN = ["", "example.com", "localhost.example.com", "localhost@example.com", "127.0.0.1.example.com"]
FOREIGN += ["10.0.0.1", "0.0.0.0:8000", "[::1", "[::1]x", "localhost:80a", "2130706433"]


def test_local_host_names() -> None:
    assert [host for host in [*LOCAL, *FOREIGN] if is_local(host)] == LOCAL


def request(client: str = "10.0.0.1", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw, "client": (client, 1)})


def test_clients_are_identified_by_a_hash_of_their_address() -> None:
    access = Access(load(None, []), None)
    one, other = access.client_id(request("10.0.0.1")), access.client_id(request("10.0.0.2"))
    assert one != other
    assert "10.0.0" not in one
    assert access.client_id(request("10.0.0.1", x_forwarded_for="1.2.3.4")) == one  # no trusted proxy set it
    # As uvicorn presents a caller on this machine that sends the header
    invented = [access.client_id(request(f"1.2.3.{n}", x_forwarded_for=f"1.2.3.{n}")) for n in (4, 5)]
    assert invented[0] == invented[1]
    assert invented[0] != access.client_id(request("127.0.0.1"))
    assert access.client_id(request("2001:db8::1")) == access.client_id(request("2001:db8::2"))  # one network
    assert access.client_id(request("2001:db8::1")) != access.client_id(request("2001:db8:0:1::1"))
    assert access.client_id(request("::ffff:10.0.0.1")) == one
    assert Access(load(None, []), None).client_id(request("10.0.0.1")) != one  # salted anew
    behind = Access(load(None, ["serve.proxies=1"]), None)
    seen = [
        behind.client_id(request("127.0.0.1", x_forwarded_for=text))
        for text in ("9.9.9.9, 1.2.3.4", "1.2.3.4", "9.9.9.9")
    ]
    assert seen[0] == seen[1] != seen[2]


def test_forms_of_other_sites_are_refused() -> None:
    asyncio.run(require_own_origin(request(host="localhost")))  # no browser
    asyncio.run(require_own_origin(request(host="localhost", origin="http://localhost")))
    for origin in ("https://example.com", "null", "http://[x", ""):
        with pytest.raises(ApiError) as caught:
            asyncio.run(require_own_origin(request(host="localhost", origin=origin)))
        assert (caught.value.status, caught.value.code) == (403, "origin_not_allowed")


async def shielded(key_digest: bytes | None, path: str, host: str) -> tuple[httpx.Response, str]:
    counters = Counters("r1", lambda: {"inside": 1, "shed": 2})
    app = FastAPI()

    @app.get("/fine")
    async def fine(response: Response) -> None:
        response.headers["Cache-Control"] = "max-age=5"

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("secret internals")

    add_exception_handlers(app)
    app.add_middleware(Shield, access=Access(load(None, []), key_digest), counters=counters)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
        return await client.get(path), counters.text().decode()


def test_foreign_host_names_are_refused_without_a_key() -> None:
    reply, text = asyncio.run(shielded(None, "/fine", "evil.example"))
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "host_not_allowed"
    assert 'status="403"' in text
    assert asyncio.run(shielded(None, "/fine", "localhost:8000"))[0].status_code == 200
    assert asyncio.run(shielded(digest("k"), "/fine", "pixelis.example"))[0].status_code == 200


def test_every_reply_has_security_headers_and_is_counted() -> None:
    reply, text = asyncio.run(shielded(None, "/fine", "localhost"))
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "max-age=5"  # the route's own stays
    assert "access-control-allow-origin" not in reply.headers
    assert 'pixelis_requests_total{replica="r1",route="/fine",status="200"} 1.0' in text
    assert 'pixelis_inside{replica="r1"} 1.0' in text
    assert 'pixelis_shed_total{replica="r1"} 2.0' in text
    broken, text = asyncio.run(shielded(None, "/broken", "localhost"))
    assert (broken.status_code, "secret" in broken.text) == (500, False)
    assert 'route="/broken",status="500"' in text
    assert 'route="other",status="404"' in asyncio.run(shielded(None, "/a/path/of/theirs", "localhost"))[1]


# -- failures and streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadInput("x", code="unknown_experience"), 404),
        (BadInput("x", code="already_decided"), 409),
        (BadInput("x", code="image_undecodable"), 400),
        (InfraFailure("a shard is away"), 503),
        (KeyError("internals"), 500),
    ],
)
def test_failures_map_to_statuses(error: Exception, status: int) -> None:
    reply = api_error(error)
    assert reply.status == status
    assert "internals" not in reply.message


def test_a_deadline_ends_a_stream_and_its_source() -> None:
    ended: list[str] = []

    async def source() -> Any:
        try:
            yield 1
            await asyncio.sleep(60)
            yield 2
        finally:
            ended.append("source")

    items: list[int] = []

    async def run() -> None:
        async for item in until(asyncio.get_running_loop().time() + 0.05, source()):
            items.append(item)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert items == [1]
    assert ended == ["source"]


# -- memory for decoded pictures -----------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 10), st.sampled_from(["reserve", "cancel", "release"])), max_size=40)
)
def test_decoded_pictures_never_exceed_their_budget_and_nobody_waits_for_free_memory(
    moves: list[tuple[int, str]],
) -> None:
    async def play() -> None:
        budget, holds = ByteBudget(10), list[tuple[asyncio.Task[None], asyncio.Event]]()

        async def hold(size: int, end: asyncio.Event) -> None:
            async with budget.reserve(size):
                await end.wait()

        for size, move in moves:
            if move == "reserve":
                end = asyncio.Event()
                holds.append((asyncio.create_task(hold(size, end)), end))
            elif holds:
                task, end = holds.pop(size % len(holds))
                task.cancel() if move == "cancel" else end.set()
            for _ in range(size % 3):
                await asyncio.sleep(0)
            assert 0 <= budget.used <= 10
        for _, end in holds:
            end.set()
        results = await asyncio.gather(*(task for task, _ in holds), return_exceptions=True)
        assert all(r is None or isinstance(r, Overloaded) for r in results)
        for _ in range(10):
            await asyncio.sleep(0)
        assert budget.used == 0
        assert not budget.queue

    asyncio.run(play())


def test_a_client_and_all_clients_together_may_send_only_so_much_at_once() -> None:
    uploads = Uploads(2, 100)
    with uploads.enter("a") as receive, uploads.enter("a"):
        with pytest.raises(Overloaded, match="2 bodies already"), uploads.enter("a"):
            pass
        with uploads.enter("b") as other:
            receive(60)
            other(40)
            with pytest.raises(Overloaded):
                other(1)
        receive(40)
    assert (uploads.clients, uploads.bytes) == ({}, 0)
