"""Behaviour that only vLLM has: full weights, its own preprocessing of prompts, and death of its process, in
the last test.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import DIALOGUE, RunningEngine, start
from test_parity import GREEDY, SIZES, Episode, check_greedy, run_all, sample_episodes
from tiny_policy import LORA, TINY, Maker, adapter_state, policy

from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, DeadlineExceeded, InfraFailure
from pixelis.nano.architecture import build
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.adapters import Adapter
from pixelis.policy.lora import BaseWeights, add_lora, merge_into
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint
from pixelis.policy.weight_stream import StreamPlace, WeightSender, receive, request

pytestmark = [pytest.mark.slow, pytest.mark.long]
FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings: on CPU vLLM keeps a copy of the output layer that an update must
    refresh.
    """
    folder = tmp_path_factory.mktemp("tied")
    tokenizer = build_tokenizer()
    model = build(tokenizer, FAMILY, seed=5, **TINY)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def running(tied: Path) -> Iterator[RunningEngine]:
    yield from start("vllm", tied, policy(FAMILY, model=str(tied), full=True), FAMILY)


def changed(model: torch.nn.Module, seed: int, folder: Path) -> Adapter:
    """Changes all parameters of a model, the vision tower's too; returns them as a version."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.from_numpy(rng.normal(0, 0.03, tuple(parameter.shape)).astype(np.float32))
    tensors = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return Adapter(tensors, 1, 1, fingerprint(folder), "full")


async def test_full_weights_replace_the_base_and_can_be_unloaded(running: RunningEngine, engine: Any):
    model = load_model(policy(FAMILY), "cpu", running.folder)[0]
    episodes = sample_episodes(Maker(FAMILY))
    before = await run_all(engine, episodes, [GREEDY] * 7)
    assert max(check_greedy(model, sample, running.spec.banned) for sample in before) < 1e-4
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    for seed in (1, 2):
        await engine.load(seed, changed(model, seed, running.folder))
        for _ in range(2):  # the second pass reads from the prefix cache
            samples = await run_all(engine, episodes, [GREEDY] * 7)
            assert max(check_greedy(model, sample, running.spec.banned) for sample in samples) < 1e-4
    lora = LORA.model_copy(update={"vision_tower": True})
    state = adapter_state(add_lora(load_model(policy(FAMILY), "cpu", running.folder)[0], lora, seed=1))
    changes = {n: a if n.endswith(".A") else a + 0.05 for n, a in state.items()}
    adapter = Adapter(changes, lora.alpha, lora.rank, "")
    merged = load_model(policy(FAMILY), "cpu", running.folder)[0]
    merge_into(merged, BaseWeights(), adapter)
    await engine.load(3, adapter)
    samples = await run_all(engine, episodes, [GREEDY] * 7)
    assert max(check_greedy(merged, sample, running.spec.banned) for sample in samples) < 1e-4
    await engine.load(4, None)
    after = await run_all(engine, episodes, [GREEDY] * 7)
    assert [s.tokens.tolist() for s in after] == [s.tokens.tolist() for s in before]


async def test_weights_from_a_broadcast_are_served_and_an_aborted_one_leaves_the_old_ones(
    running: RunningEngine, engine: Any
):
    model = load_model(policy(FAMILY), "cpu", running.folder)[0]
    episodes, sender = sample_episodes(Maker(FAMILY)), WeightSender("127.0.0.1", "gloo", 20.0)
    before = await run_all(engine, episodes, [GREEDY] * 7)
    alone = StreamPlace(dataclasses.replace(sender.address, timeout_s=0.3), "aborted", 1, 3)
    with pytest.raises(InfraFailure, match="not received"):
        await asyncio.to_thread(receive, alone)  # the other receiver never comes
    kept = await run_all(engine, episodes, [GREEDY] * 7)
    assert [s.tokens.tolist() for s in kept] == [s.tokens.tolist() for s in before]
    weights = changed(model, 3, running.folder)
    assert request(sender.address, 9, "all", 2)
    sent = asyncio.create_task(asyncio.to_thread(sender.send, 9, weights))
    await engine.load(9, await asyncio.to_thread(receive, StreamPlace(sender.address, "all", 1, 2)))
    assert (await sent)["bytes"] == pytest.approx(weights.nbytes, rel=0.01)
    samples = await run_all(engine, episodes, [GREEDY] * 7)
    assert max(check_greedy(model, sample, running.spec.banned) for sample in samples) < 1e-4
    assert [s.tokens.tolist() for s in samples] != [s.tokens.tolist() for s in before]
    await engine.load(10, None)


async def test_requests_beyond_the_limits_are_refused_before_vllm(engine: Any):
    maker = Maker(FAMILY, seed=3)
    session = await engine.open()
    too_large = maker.view(256, 256)
    with pytest.raises(BadInput, match="budget"):
        await session.generate(maker.image(too_large), [too_large], GREEDY)
    many = [maker.view(16, 16) for _ in range(9)]
    with pytest.raises(BadInput, match="max_images"):
        await session.generate([t for v in many for t in maker.image(v)], many, GREEDY)
    for temperature in (0.001, 3.0):
        with pytest.raises(BadInput, match="supports temperature"):
            await session.generate(maker.text(4), [], SamplingParams(temperature))
    last = await session.generate(
        maker.text(DIALOGUE.max_context - 3), [], dataclasses.replace(GREEDY, max_tokens=9)
    )
    assert (len(last.tokens), last.finish) == (3, "length") or last.finish == "stop"
    empty = await session.generate(maker.text(5), [], GREEDY)
    assert (empty.tokens, empty.log_probs, empty.finish) == ([], [], "length")


async def test_a_turn_that_exceeds_the_timeout_is_an_error(running: RunningEngine, engine: Any):
    episode = Episode(Maker(FAMILY, seed=4), [[SIZES[0]]])
    engine.timeout_s, original = 0.05, engine.timeout_s
    try:
        session = await engine.open()
        with pytest.raises(DeadlineExceeded):
            await session.generate(*episode.turns[0], SamplingParams(0.0, 1.0, 400))
    finally:
        engine.timeout_s = original
    retried = await session.generate(*episode.turns[0], GREEDY)  # the session is unchanged
    fresh = (await run_all(engine, [episode], [GREEDY]))[0]
    assert retried.tokens == fresh.tokens[fresh.mask].tolist()


async def test_the_death_of_vllm_fails_every_pending_request(engine: Any):
    episodes = sample_episodes(Maker(FAMILY, seed=5))[:4]
    sessions = [await engine.open() for _ in episodes]
    long = SamplingParams(0.0, 1.0, 300)
    tasks = [asyncio.create_task(p.run(s, long)) for p, s in zip(episodes, sessions, strict=True)]
    await asyncio.sleep(0.1)
    children = multiprocessing.active_children()
    assert len(children) == 1
    children[0].kill()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert {type(result) for result in results} == {InfraFailure}
    assert (await engine.health())["alive"] is False
    with pytest.raises(InfraFailure):
        await engine.open()
    for session in sessions:
        session.close()
    with pytest.raises(InfraFailure):
        await engine.load(9, None)
