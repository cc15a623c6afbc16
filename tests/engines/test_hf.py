"""What the embedded engine alone does: waves, priorities, retries, memory."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from running import RunningEngine, start
from test_parity import GREEDY, SIZES, Episode, run_all
from tiny_policy import Maker, folder, policy, random_adapter

from pixelis.dialogue.session import Completion, SamplingParams, Start
from pixelis.engines import Engine, hf
from pixelis.engines.decoding import KeyValues, Sampler
from pixelis.engines.hf import HfEngine, HfSession
from pixelis.errors import BadInput, InfraFailure
from pixelis.policy.samples import TrainSample


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[RunningEngine]:
    values = dict(getattr(request, "param", {}))
    family = values.pop("family", "qwen3_vl")
    yield from start("hf", folder(family), policy(family), family, **values)


def episodes(count: int, seed: int = 0, family: str = "qwen3_vl") -> list[Episode]:
    """Episodes of two turns, each with a picture."""
    maker = Maker(family, seed)
    return [Episode(maker, [[SIZES[0]], [SIZES[1]]], words=i + 3) for i in range(count)]


@pytest.mark.parametrize(
    "lowest", [SamplingParams(1e-38), SamplingParams(1e-46), SamplingParams(top_p=1e-46)]
)
def test_a_row_at_the_lowest_settings_samples_the_best_token_and_disturbs_no_other(lowest: SamplingParams):
    logits = torch.tensor([[1.0, 3.0, -2.0, float("-inf")], [40.0, -1e4, 0.0, float("-inf")]])[[0, 1, 0]]
    others = [lowest, lowest, SamplingParams()]
    sampler = Sampler(others, [(i,) for i in range(3)], 32, torch.device("cpu"))
    alone = Sampler([SamplingParams()], [(2,)], 32, torch.device("cpu"))
    for step in range(32):
        chosen, probabilities = sampler(logits, torch.arange(3), step)
        assert chosen[:2].tolist() == [1, 0]
        assert probabilities.isfinite().all()
        expected, _ = alone(logits[2:], torch.arange(1), step)
        assert chosen[2] == expected[0]


@pytest.mark.parametrize(
    "running", [{}, pytest.param({"family": "qwen3_5"}, marks=pytest.mark.long)], indirect=True
)
async def test_sessions_of_different_waves_go_on_together(running: RunningEngine, engine: HfEngine):
    prompts = episodes(6, seed=5, family=running.family)
    expected = [(await run_all(engine, [p], [GREEDY]))[0] for p in prompts]
    sessions = [await engine.open() for _ in prompts]
    said: list[Completion] = [Completion([], [], "stop")] * 6
    for members in ((4, 0), (3,), (1, 5, 2)):  # three waves of first turns
        done = await asyncio.gather(*(sessions[i].generate(*prompts[i].turns[0], GREEDY) for i in members))
        for i, completion in zip(members, done, strict=True):
            said[i] = completion
    late = await engine.open()
    fresh = late.generate(*prompts[0].turns[0], GREEDY)
    *second, new = await asyncio.gather(
        *(s.generate(*p.turns[1], GREEDY) for s, p in zip(sessions, prompts, strict=True)), fresh
    )
    for prompt, one, two, whole in zip(prompts, said, second, expected, strict=True):
        assert [*prompt.turns[0][0], *one.tokens, *prompt.turns[1][0], *two.tokens] == whole.tokens.tolist()
        assert np.allclose(one.log_probs + two.log_probs, whole.log_probs[whole.mask], atol=1e-4)
    assert new.tokens == said[0].tokens


@pytest.mark.parametrize("running", [{"max_num_seqs": 2}], indirect=True)
async def test_waiting_turns_with_a_lower_priority_come_first(engine: HfEngine):
    (prompt,), order = episodes(1), list[int]()

    async def play(priority: int) -> None:
        session = await engine.open()
        await session.generate(*prompt.turns[0], dataclasses.replace(GREEDY, priority=priority))
        order.append(priority)
        session.close()

    await asyncio.gather(*(play(priority) for priority in (10, 10, 0, 10, 0, -5)))
    assert order[:2] == [-5, 0] or order[:2] == [0, -5]
    assert order[2:] == [0, 10, 10, 10]


async def test_an_idle_session_delays_the_others_by_the_linger_only(engine: HfEngine):
    (prompt,) = episodes(1)
    idle, session = await engine.open(), await engine.open()
    started = asyncio.get_running_loop().time()
    await session.generate(*prompt.turns[0], GREEDY)
    assert 0.2 < asyncio.get_running_loop().time() - started < 10
    waiting = asyncio.create_task(session.generate(*prompt.turns[1], GREEDY))
    await asyncio.sleep(0)
    idle.close()  # now every open session waits: no need to linger
    await waiting


async def test_a_wave_that_breaks_is_retried_in_halves_and_only_the_culprit_fails(
    engine: HfEngine, monkeypatch: pytest.MonkeyPatch
):
    prompts = episodes(5)
    poison = prompts[3].turns[0][0][0]
    run = engine._decoder.run

    def fragile(rows):
        if any(row.tokens[0] == poison for row in rows):
            raise RuntimeError("out of memory")
        return run(rows)

    monkeypatch.setattr(engine._decoder, "run", fragile)
    sessions = [await engine.open() for _ in prompts]
    done = await asyncio.gather(
        *(p.run(s, GREEDY) for p, s in zip(prompts, sessions, strict=True)), return_exceptions=True
    )
    assert [i for i, d in enumerate(done) if isinstance(d, InfraFailure)] == [3]
    assert all(isinstance(d, TrainSample) for i, d in enumerate(done) if i != 3)
    assert (await engine.health())["failures"] == 1


async def test_tokens_of_a_wave_that_breaks_and_is_repeated_are_told_once(
    engine: HfEngine, monkeypatch: pytest.MonkeyPatch
):
    run, broken = engine._decoder.run, []

    def fragile(rows):
        results = run(rows)
        if len(rows) > 2 and not broken:
            broken.append(len(rows))
            raise RuntimeError("out of memory")
        return results

    monkeypatch.setattr(engine._decoder, "run", fragile)
    heard: list[list[list[int]]] = [[] for _ in range(4)]
    calls = [
        (await engine.open()).generate(*episode.turns[0], SamplingParams(1.0, 1.0, 6), pieces.append)
        for episode, pieces in zip(episodes(4), heard, strict=True)
    ]
    done = await asyncio.gather(*calls)
    assert broken == [4]
    assert [[[token] for token in completion.tokens] for completion in done] == heard


@pytest.mark.slow
@pytest.mark.long
async def test_memory_is_given_back_when_sessions_close(engine: HfEngine):
    prompts = episodes(1) * 4
    sessions: list[HfSession] = [await engine.open() for _ in prompts]
    turns = (
        s.generate(*p.turns[0], SamplingParams(1.0, 1.0, 3)) for s, p in zip(sessions, prompts, strict=True)
    )
    await asyncio.gather(*turns)
    stores = {weakref.ref(s.past.store) for s in sessions if s.past is not None}
    assert len(stores) == 1
    for session in sessions:
        session.close()
    await asyncio.sleep(0.05)
    gc.collect()
    assert all(store() is None for store in stores)
    assert not [o for o in gc.get_objects() if isinstance(o, KeyValues)]


async def test_shutting_down_fails_waiting_calls(engine: HfEngine):
    assert isinstance(engine, Engine)
    (prompt,) = episodes(1)
    idle, session = await engine.open(), await engine.open()
    waiting = asyncio.create_task(session.generate(*prompt.turns[0], GREEDY))
    load = asyncio.create_task(engine.load(3, None))
    await asyncio.sleep(0)
    await engine.aclose()
    for task in (waiting, load):
        with pytest.raises(InfraFailure):
            await task
    with pytest.raises(InfraFailure):
        await engine.open()
    idle.close()


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"max_tokens": 0}]
)
def test_impossible_sampling_is_refused(values: dict[str, float]):
    with pytest.raises(BadInput):
        SamplingParams(**values)  # type: ignore[arg-type]


async def test_a_sleeping_engine_generates_and_loads_nothing_until_it_wakes(engine: HfEngine):
    (prompt,), adapter = episodes(1, seed=7), random_adapter("qwen3_vl", 3)
    await engine.load(1, adapter)
    before = await prompt.run(await engine.open(), GREEDY)
    session = await engine.open()
    sleeping = asyncio.ensure_future(engine.sleep())
    await asyncio.sleep(0.05)
    assert not sleeping.done(), "an open session ends first"
    session.close()
    await sleeping
    await engine.sleep()
    assert (await engine.health())["asleep"]
    opening, loading = asyncio.ensure_future(engine.open()), asyncio.ensure_future(engine.load(2, None))
    await asyncio.sleep(0.05)
    assert not opening.done()
    assert not loading.done()
    opening.cancel()
    await engine.wake()
    await loading
    await engine.load(3, adapter)
    after = await prompt.run(await engine.open(), GREEDY)
    assert (after.tokens.tolist(), engine.version) == (before.tokens.tolist(), 3)
    assert not (await engine.health())["asleep"]


async def test_what_a_client_may_go_on_with_is_kept_until_the_next_version(
    running: RunningEngine, engine: HfEngine, monkeypatch: pytest.MonkeyPatch
):
    """Only new tokens are read; other tokens or pictures, and a full store, cost time but give right answers."""

    async def go_on(episode: Episode, change: int = 0) -> int:
        """The tokens read by the second turn in a session of its own; change: of its first picture."""
        (first, pictures), (second, more) = episode.turns
        session = await engine.open()
        said = await session.generate(first, pictures, GREEDY)
        session.keep()
        session.close()
        before, views = engine._decoder.tokens_read, [picture + np.uint8(change) for picture in pictures]
        so_far = [*first, *said.tokens]
        later = await engine.open(start=Start(0, 1, (len(first), 1), (len(so_far), 1)))
        own = await later.generate([*so_far, *second], [*views, *more], GREEDY)
        later.close()
        plain = await engine.open()
        expected = await plain.generate([*so_far, *second], [*views, *more], GREEDY)
        plain.close()
        assert own.tokens == expected.tokens
        return engine._decoder.tokens_read - before - len(so_far) - len(second)

    asked, other, third = episodes(3, seed=8)
    assert await go_on(asked) == len(asked.turns[1][0]) + 1
    assert len(engine._kept) == 0, "taken"
    assert await go_on(other, change=1) == len(other.turns[0][0]) + len(other.turns[1][0]) + 6
    assert len(engine._kept) == 1
    monkeypatch.setattr(hf, "MAX_KEPT", 1)
    assert await go_on(third) == len(third.turns[1][0]) + 1
    assert await go_on(asked, change=1) > len(asked.turns[1][0]) + 6
    (past,) = engine._kept.values()
    assert past.store.valid.shape[0] == 1, "the rest of the wave is not kept"
    await engine.load(1, None)
    assert len(engine._kept) == 0
    assert engine._keys == {}


async def test_kept_episodes_are_the_first_to_go_when_memory_ends(
    running: RunningEngine, engine: HfEngine, monkeypatch: pytest.MonkeyPatch
):
    (episode,) = episodes(1)
    session = await engine.open()
    await session.generate(*episode.turns[0], GREEDY)
    session.keep()
    run, kept = engine._decoder.run, list[int]()

    def full(rows: list) -> list:
        kept.append(len(engine._kept))
        if engine._kept:
            raise MemoryError
        return run(rows)

    monkeypatch.setattr(engine._decoder, "run", full)
    assert (await session.generate(*episode.turns[1], GREEDY)).tokens
    assert kept == [1, 0]
