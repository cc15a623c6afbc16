"""Broadcasts of whole models in a real run, and a generator that dies in the middle of one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from placed_actors import greedy_tokens

from pixelis.actors import learner, placement
from pixelis.actors.batch_sources import RolloutSource
from pixelis.actors.train_job import TrainJob
from pixelis.actors.weights import StreamPublisher
from pixelis.config import load
from pixelis.errors import BadConfig
from pixelis.jobs.driver import run_folder
from pixelis.policy import checkpoint
from pixelis.telemetry import events

STEPS, FAILING = 4, 3
"""Steps of the run, and the version whose broadcast fails. Version 1 is the start, which is stored."""
RUN = ["policy.model=nano", "policy.full=true", "learner.lr=1e-4", f"rft.steps={STEPS}"]
RUN += ["rft.prompts_per_step=4", "rft.group_size=4", "dialogue.max_turn_tokens=16"]
RUN += ["rewards.weights.length=1.0", "engine.workers=2", "engine.cpus=0.25"]
RUN += ["policy_store.transfer=gloo", "policy_store.transfer_timeout_s=12"]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file


class KillingPublisher(StreamPublisher):
    """Kills a generator that is about to receive a broadcast."""

    victim: Any = None

    def _send(self, sender: Any, version: int, weights: Any) -> None:
        if version == FAILING:
            pid = ray.get(self.victim.health.remote())["pid"]
            sender._store.wait([f"request/{version}"])
            os.kill(pid, signal.SIGKILL)
        super()._send(sender, version, weights)


@pytest.mark.slow
@pytest.mark.long  # tests/unit/policy/test_weight_stream.py: broadcasts between processes, one of which dies
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_a_generator_that_dies_in_a_broadcast_costs_neither_version_nor_group(
    tmp_path: Path, record_figures: Callable[..., None]
) -> None:
    """Only that version comes from the store; the others are broadcast in the bytes of the parameters."""
    settings = load(None, [*RUN, f"run.dir={tmp_path}"])
    with run_folder(settings, settings.data.train), placement.placed(settings) as actors:
        weights = KillingPublisher(settings, actors.store, "rft")
        weights.victim = actors.generators[1]
        source = RolloutSource(settings, actors.coordinator, weights)
        latest = learner.fit(TrainJob(settings, source, settings.rft.loss, settings.rft.sampling.temperature))
        assert latest is not None
        assert checkpoint.step_of(latest) == STEPS
        records = ray.get(actors.store.list.remote())
        newest = ray.get(actors.store.promoted.remote())
        assert [record.version for record in records] == list(range(1 + 1 + STEPS))
        assert newest == records[-1].version
        for record in records[-3:]:  # as many models as `policy_store.keep` leaves
            (ref,) = ray.get(actors.store.get.remote(record.version))
            assert ray.get(ref).sha256() == record.sha256
        streamed, read = (actors.generators[0], greedy_tokens(actors.generators[0], newest))
        ray.get(streamed.load.remote(0))
        assert greedy_tokens(streamed, newest) == read, "the broadcast weights are not those in the store"
    (notice,) = (row["text"] for row in events.read(tmp_path, events.NOTICE) if "was not sent" in row["text"])
    assert f"version {FAILING}" in notice
    assert "load it from the policy store" in notice
    rows = {row["version"]: row for row in events.read(tmp_path, events.STREAMED)}
    assert set(rows) == set(range(2, 1 + 1 + STEPS)) - {FAILING}
    assert rows[2]["receivers"] == 2
    assert all(row["bytes"] == pytest.approx(records[-1].bytes, rel=0.01) for row in rows.values())
    steps = events.read(tmp_path, "step/policy")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["learner/sequences"] == 16 for row in steps)
    seconds = [round(row["seconds"], 3) for row in rows.values()]
    record_figures(versions=len(records), broadcast=sorted(rows), seconds=seconds)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy_store.transfer=gloo"], "is for policy.full=true"),
        (["policy_store.transfer=nccl", "policy.full=true"], "needs a GPU for each learner"),
        (["policy_store.transfer=nccl", "policy.full=true", "engine.colocate=true"], "needs a GPU for each"),
    ],
)
def test_a_broadcast_that_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        load(None, overrides)
