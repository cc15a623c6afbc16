"""A vLLM server as an engine: what it cannot be is found at the start, and its death is noticed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from running import DIALOGUE, served
from tiny_policy import Maker, folder, policy

from pixelis import config
from pixelis.dialogue.session import SamplingParams
from pixelis.engines.vllm_files import link_model
from pixelis.engines.vllm_server import VllmServerEngine
from pixelis.errors import BadConfig, InfraFailure
from pixelis.families.spec import load_spec

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
SETTINGS = config.EngineConfig(name="vllm_server", timeout_s=30)


def engine_at(
    url: str, dialogue: config.DialogueConfig = DIALOGUE, family: str = "qwen2_5_vl"
) -> VllmServerEngine:
    return VllmServerEngine(folder(family), policy(family), SETTINGS, dialogue, url)


def test_another_servers_faults_are_found_at_the_start_and_its_end_while_it_is_used(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(InfraFailure, match="does not answer"):
        engine_at("http://127.0.0.1:9")
    original = folder("qwen2_5_vl")
    model = link_model(original, tmp_path / "model", load_spec(original), DIALOGUE.input.max_pixels)
    with (
        served(model, tmp_path / "log", "--max-model-len=512") as url,
        pytest.raises(BadConfig, match="another distribution"),  # its log-probabilities are of temperature 1
    ):
        engine_at(url)
    with asyncio.Runner() as runner:
        with served(
            model, tmp_path / "log", "--max-model-len=512", "--logprobs-mode=processed_logprobs"
        ) as url:
            engine = engine_at(url)

            async def turn() -> list[int]:
                session = await engine.open()
                completion = await session.generate(
                    Maker("qwen2_5_vl").text(3), [], SamplingParams(max_tokens=4)
                )
                session.close()
                return completion.tokens

            assert len(runner.run(turn())) == 4
        with pytest.raises(InfraFailure):
            runner.run(turn())
        assert runner.run(engine.health())["alive"] is False
        runner.run(engine.aclose())
