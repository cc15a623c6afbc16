"""What only vLLM has: whole weights by file, its own reading of the prompt, its death. One engine, killed at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from running import DIALOGUE, Running, start
from test_parity import GREEDY, SIZES, Play, check_greedy, play_all, plays
from tiny_policy import Maker, policy

from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, DeadlineExceeded, InfraFailure
from pixelis.nano.architecture import build
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.adapters import Adapter
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint

pytestmark = pytest.mark.slow
FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output layer is its embedding: on CPU vLLM keeps a copy that an update must renew."""
    folder = tmp_path_factory.mktemp("tied")
    sizes = {"hidden": 64, "heads": 2, "kv_heads": 1, "layers": 2, "feedforward": 96, "vision_hidden": 32, "vision_layers": 2}
    tokenizer = build_tokenizer()
    model = build(tokenizer, FAMILY, seed=5, **sizes)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def running(tied: Path) -> Iterator[Running]:
    yield from start("vllm", tied, policy(FAMILY, model=str(tied), full=True), FAMILY)


def test_whole_weights_replace_the_base_and_go_again(running: Running):
    async def body(engine) -> None:
        model = load_model(policy(FAMILY), "cpu", running.folder)[0]
        episodes = plays(Maker(FAMILY))
        before = await play_all(engine, episodes, [GREEDY] * 7)
        assert max(check_greedy(model, sample, running.spec.banned) for sample in before) < 1e-4
        assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
        for seed in (1, 2):
            rng = np.random.default_rng(seed)
            with torch.no_grad():
                for parameter in model.parameters():  # the vision tower too
                    parameter += torch.from_numpy(rng.normal(0, 0.03, tuple(parameter.shape)).astype(np.float32))
            tensors = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
            await engine.load(seed, Adapter(tensors, 1, 1, fingerprint(running.folder), "full"))
            for settings in ([GREEDY] * 7, [GREEDY] * 7):  # the second time from the caches
                samples = await play_all(engine, episodes, settings)
                assert max(check_greedy(model, sample, running.spec.banned) for sample in samples) < 1e-4
        await engine.load(3, None)
        after = await play_all(engine, episodes, [GREEDY] * 7)
        assert [s.tokens.tolist() for s in after] == [s.tokens.tolist() for s in before]

    running.run(body)


def test_a_prompt_that_vllm_reads_otherwise_is_a_failure_not_an_answer(running: Running):
    async def body(engine) -> None:
        maker = Maker(FAMILY, seed=2)
        small, large = Play(maker, [[SIZES[0]]]), Play(maker, [[SIZES[3]]])
        one = await engine.open()
        await one.generate(*small.turns[0], GREEDY)
        other = await engine.open()
        # Two pictures under one name: vLLM takes the one it knows, of another size.
        digest = one.digests[0]
        complete = engine.complete

        async def confused(session, sampling):
            session.digests = [digest]
            return await complete(session, sampling)

        engine.complete = confused
        try:
            with pytest.raises(InfraFailure) as failure:
                await other.generate(*large.turns[0], GREEDY)
        finally:
            del engine.complete
        assert failure.value.code in ("prompt_mismatch", "engine_failed")

    running.run(body)


def test_what_does_not_fit_is_refused_before_vllm_sees_it(running: Running):
    async def body(engine) -> None:
        maker = Maker(FAMILY, seed=3)
        session = await engine.open()
        too_large = maker.view(256, 256)
        with pytest.raises(BadInput, match="budget"):
            await session.generate(maker.image(too_large), [too_large], GREEDY)
        many = [maker.view(16, 16) for _ in range(9)]
        with pytest.raises(BadInput, match="max_images"):
            await session.generate([t for v in many for t in maker.image(v)], many, GREEDY)
        for temperature in (0.001, 3.0):
            with pytest.raises(BadInput, match="temperatures"):
                await session.generate(maker.text(4), [], SamplingParams(temperature))
        said = await session.generate(maker.text(DIALOGUE.max_context - 3), [], dataclasses.replace(GREEDY, max_tokens=9))
        assert (len(said.tokens), said.finish) == (3, "length") or said.finish == "stop"
        nothing = await session.generate(maker.text(5), [], GREEDY)
        assert (nothing.tokens, nothing.log_probs, nothing.finish) == ([], [], "length")

    running.run(body)


def test_a_turn_has_a_deadline(running: Running):
    async def body(engine) -> None:
        episode = Play(Maker(FAMILY, seed=4), [[SIZES[0]]])
        engine.timeout_s, before = 0.05, engine.timeout_s
        try:
            session = await engine.open()
            with pytest.raises(DeadlineExceeded):
                await session.generate(*episode.turns[0], SamplingParams(0.0, 1.0, 400))
        finally:
            engine.timeout_s = before
        again = await session.generate(*episode.turns[0], GREEDY)  # the session is as it was
        fresh = (await play_all(engine, [episode], [GREEDY]))[0]
        assert again.tokens == fresh.tokens[fresh.mask].tolist()

    running.run(body)


def test_when_vllm_dies_everybody_waiting_is_told(running: Running):
    async def body(engine) -> None:
        episodes = plays(Maker(FAMILY, seed=5))[:4]
        sessions = [await engine.open() for _ in episodes]
        long = SamplingParams(0.0, 1.0, 300)
        tasks = [asyncio.create_task(p.run(s, long)) for p, s in zip(episodes, sessions, strict=True)]
        await asyncio.sleep(0.1)
        children = multiprocessing.active_children()
        assert len(children) == 1
        children[0].kill()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert {type(d) for d in done} == {InfraFailure}
        assert (await engine.health())["alive"] is False
        with pytest.raises(InfraFailure):
            await engine.open()
        for session in sessions:
            session.close()
        with pytest.raises(InfraFailure):
            await engine.load(9, None)

    running.run(body)
