"""Models without a family of their own in vLLM, with their own processors."""

from __future__ import annotations

import pytest
from generic_models import check_engine, folder, policy
from running import DIALOGUE

from pixelis import config


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("kind", "adapters"), [("idefics3", "swap"), ("idefics3", "merge")])
def test_vllm_generates_what_the_learner_scores(kind: str, adapters: str):
    pytest.importorskip("vllm", reason="vLLM's CPU build is not installed (make test installs it)")
    from pixelis.engines.vllm import VllmEngine

    settings = config.EngineConfig(name="vllm", adapters=adapters)  # type: ignore[arg-type]
    engine = VllmEngine(folder(kind), policy(kind), settings, DIALOGUE)
    assert check_engine(engine, kind) < 1e-4
