"""What the embedded engine alone does: waves, priorities, retries, memory."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
import torch
from tiny_policy import Maker, folder, policy, random_adapter

from pixelis import config
from pixelis.dialogue.session import Completion, SamplingParams, Session
from pixelis.engines import Engine
from pixelis.engines.decoding import KeyValues, Sampler, nucleus
from pixelis.engines.hf import HfEngine, HfSession
from pixelis.errors import BadInput, InfraFailure
from pixelis.policy.samples import TrainSample

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def with_engine(
    test: Callable[[HfEngine], Awaitable[None]],
    family: str = "qwen3_vl",
    max_num_seqs: int = 256,
    seed: int = 0,
) -> None:
    """Run an async test body with its own engine on its own event loop."""

    async def body() -> None:
        engine = HfEngine(
            folder(family), policy(family), config.EngineConfig(max_num_seqs=max_num_seqs), seed
        )
        try:
            await asyncio.wait_for(test(engine), 60)
        finally:
            await engine.aclose()

    asyncio.run(body())


class Prompt:
    """A question, and the observation that follows the first turn."""

    def __init__(self, maker: Maker, words: int = 4):
        self.view, self.crop = maker.view(), maker.view(32, 48)
        self.first = maker.text(3) + maker.image(self.view) + maker.text(words)
        self.then = maker.text(2) + maker.image(self.crop) + maker.text(3)

    async def play(self, session: Session, sampling: SamplingParams, turns: int = 2) -> TrainSample:
        tokens, mask, log_probs, views = [], [], [], []
        for new, view in ((self.first, self.view), (self.then, self.crop))[:turns]:
            said = await session.generate(new, [view], sampling)
            views.append(view)
            tokens += [*new, *said.tokens]
            mask += [False] * len(new) + [True] * len(said.tokens)
            log_probs += [0.0] * len(new) + said.log_probs
        session.close()
        return TrainSample(
            np.asarray(tokens), np.asarray(mask), np.asarray(log_probs, np.float32), 0.0, views
        )


async def play_all(
    engine: HfEngine, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]
) -> list[TrainSample]:
    sessions = [await engine.open() for _ in prompts]
    plays = zip(prompts, sessions, sampling, strict=True)
    return await asyncio.gather(*(p.play(session, s) for p, session, s in plays))


def test_nucleus_keeps_the_smallest_sufficient_set():
    logits = torch.log(
        torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5], [0.25, 0.25, 0.25, 0.25]])
    )
    kept = nucleus(logits, torch.tensor([0.7, 0.81, 1.0])).isfinite().tolist()
    assert kept == [[True, True, False, False], [False, True, True, True], [True] * 4]


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


def test_sessions_of_different_waves_go_on_together():
    async def body(engine: HfEngine) -> None:
        maker = Maker(seed=5)
        prompts = [Prompt(maker, words=i + 1) for i in range(6)]
        expected = [(await play_all(engine, [p], [GREEDY]))[0] for p in prompts]
        sessions = [await engine.open() for _ in prompts]
        said: list[Completion] = [Completion([], [], "stop")] * 6
        for members in ((4, 0), (3,), (1, 5, 2)):  # three waves of first turns
            done = await asyncio.gather(
                *(sessions[i].generate(prompts[i].first, [prompts[i].view], GREEDY) for i in members)
            )
            for i, completion in zip(members, done, strict=True):
                said[i] = completion
        late = await engine.open()
        fresh = late.generate(prompts[0].first, [prompts[0].view], GREEDY)
        *second, new = await asyncio.gather(
            *(s.generate(p.then, [p.crop], GREEDY) for s, p in zip(sessions, prompts, strict=True)), fresh
        )
        for prompt, one, two, whole in zip(prompts, said, second, expected, strict=True):
            assert [*prompt.first, *one.tokens, *prompt.then, *two.tokens] == whole.tokens.tolist()
            assert np.allclose(one.log_probs + two.log_probs, whole.log_probs[whole.mask], atol=1e-4)
        assert new.tokens == said[0].tokens

    with_engine(body)


def test_waiting_turns_with_a_lower_priority_come_first():
    async def body(engine: HfEngine) -> None:
        prompt, order = Prompt(Maker()), list[int]()

        async def play(priority: int) -> None:
            session = await engine.open()
            await session.generate(
                prompt.first, [prompt.view], dataclasses.replace(GREEDY, priority=priority)
            )
            order.append(priority)
            session.close()

        await asyncio.gather(*(play(priority) for priority in (10, 10, 0, 10, 0, -5)))
        assert order[:2] == [-5, 0] or order[:2] == [0, -5]
        assert order[2:] == [0, 10, 10, 10]

    with_engine(body, max_num_seqs=2)


def test_an_idle_session_delays_the_others_by_the_linger_only():
    async def body(engine: HfEngine) -> None:
        prompt = Prompt(Maker())
        idle, session = await engine.open(), await engine.open()
        started = asyncio.get_running_loop().time()
        await session.generate(prompt.first, [prompt.view], GREEDY)
        assert 0.2 < asyncio.get_running_loop().time() - started < 10
        waiting = asyncio.create_task(session.generate(prompt.then, [prompt.crop], GREEDY))
        await asyncio.sleep(0)
        idle.close()  # now every open session waits: no need to linger
        await waiting

    with_engine(body)


def test_a_turn_that_was_cancelled_in_the_queue_is_never_decoded():
    async def body(engine: HfEngine) -> None:
        prompt = Prompt(Maker())
        _idle, session = await engine.open(), await engine.open()
        turn = asyncio.create_task(session.generate(prompt.first, [prompt.view], GREEDY))
        await asyncio.sleep(0)  # queued, waiting for the idle session
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        health = await engine.health()
        assert (health["pending"], health["sessions"]) == (0, 1)
        await asyncio.sleep(0.3)
        assert engine.waves == 0

    with_engine(body)


def test_a_wave_that_breaks_is_retried_in_halves_and_only_the_culprit_fails(monkeypatch: pytest.MonkeyPatch):
    async def body(engine: HfEngine) -> None:
        maker = Maker()
        prompts = [Prompt(maker) for _ in range(5)]
        poison = prompts[3].first[0]
        run = engine._decoder.run

        def fragile(rows):
            if any(row.tokens[0] == poison for row in rows):
                raise RuntimeError("out of memory")
            return run(rows)

        monkeypatch.setattr(engine._decoder, "run", fragile)
        sessions = [await engine.open() for _ in prompts]
        done = await asyncio.gather(
            *(p.play(s, GREEDY) for p, s in zip(prompts, sessions, strict=True)), return_exceptions=True
        )
        assert [i for i, d in enumerate(done) if isinstance(d, InfraFailure)] == [3]
        assert all(isinstance(d, TrainSample) for i, d in enumerate(done) if i != 3)
        assert (await engine.health())["failures"] == 1

    with_engine(body)


def test_tokens_are_told_as_they_are_generated_and_once_each(monkeypatch: pytest.MonkeyPatch):
    """Also when a wave breaks after it has generated some, and is repeated in halves."""

    async def body(engine: HfEngine) -> None:
        maker = Maker()
        prompts = [Prompt(maker) for _ in range(4)]
        run, broken = engine._decoder.run, []

        def fragile(rows):
            results = run(rows)
            if len(rows) > 2 and not broken:
                broken.append(len(rows))
                raise RuntimeError("out of memory")
            return results

        monkeypatch.setattr(engine._decoder, "run", fragile)
        sessions = [await engine.open() for _ in prompts]
        heard: list[list[list[int]]] = [[] for _ in prompts]
        calls = [
            session.generate(prompt.first, [prompt.view], SamplingParams(1.0, 1.0, 6), pieces.append)
            for session, prompt, pieces in zip(sessions[:3], prompts, heard, strict=False)
        ]
        done = await asyncio.gather(
            *calls, sessions[3].generate(prompts[3].first, [prompts[3].view], SamplingParams(1.0, 1.0, 6))
        )
        assert broken == [4]
        assert [[token for piece in pieces for token in piece] for pieces in heard[:3]] == [
            c.tokens for c in done[:3]
        ]
        assert all(len(piece) == 1 for pieces in heard for piece in pieces)
        assert heard[3] == []
        for session in sessions:
            session.close()

    with_engine(body)


@pytest.mark.slow
def test_memory_is_given_back_when_sessions_close():
    async def body(engine: HfEngine) -> None:
        prompts = [Prompt(Maker()) for _ in range(4)]
        sessions: list[HfSession] = [await engine.open() for _ in prompts]
        turns = (
            s.generate(p.first, [p.view], SamplingParams(1.0, 1.0, 3))
            for s, p in zip(sessions, prompts, strict=True)
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

    with_engine(body)


def test_shutting_down_fails_waiting_calls():
    async def body(engine: HfEngine) -> None:
        assert isinstance(engine, Engine)
        prompt = Prompt(Maker())
        idle, session = await engine.open(), await engine.open()
        waiting = asyncio.create_task(session.generate(prompt.first, [prompt.view], GREEDY))
        load = asyncio.create_task(engine.load(3, None))
        await asyncio.sleep(0)
        await engine.aclose()
        for task in (waiting, load):
            with pytest.raises(InfraFailure):
                await task
        with pytest.raises(InfraFailure):
            await engine.open()
        idle.close()

    with_engine(body)


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"max_tokens": 0}]
)
def test_impossible_sampling_is_refused(values: dict[str, float]):
    with pytest.raises(BadInput):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_a_sleeping_engine_generates_and_loads_nothing_until_it_wakes():
    async def test(engine: HfEngine) -> None:
        prompt, adapter = Prompt(Maker(seed=7)), random_adapter("qwen3_vl", 3)
        await engine.load(1, adapter)
        before = await prompt.play(await engine.open(), GREEDY)
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
        after = await prompt.play(await engine.open(), GREEDY)
        assert (after.tokens.tolist(), engine.version) == (before.tokens.tolist(), 3)
        assert not (await engine.health())["asleep"]

    with_engine(test)
