"""Object store and disk are estimated from what a job keeps in them, and a cluster with less is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_policy import LORA, Maker, policy

from pixelis.actors.cluster import check_object_stores
from pixelis.config import LearnerConfig, LossConfig, load
from pixelis.errors import InfraFailure
from pixelis.policy import storage
from pixelis.policy.adapters import save_adapter
from pixelis.policy.train_step import Trainer


def node(gigabytes: float, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"object_store_memory": gigabytes * 1e9}}


def test_a_cluster_with_small_object_stores_is_named(caplog: pytest.LogCaptureFixture) -> None:
    check_object_stores([node(4), node(4), node(9, alive=False)], int(8e9), int(3e9))
    assert not caplog.records
    check_object_stores([node(4), node(2)], int(20e9), int(3e9))
    assert "6 GB" in caplog.text
    with pytest.raises(InfraFailure, match="a policy version takes 33 GB"):
        check_object_stores([node(4), node(2)], 0, int(33e9))


def test_the_disk_of_a_run_is_estimated_from_its_checkpoints_and_versions(tmp_path: Path) -> None:
    """Against what a learner and the versions of a policy store take."""
    settings = policy(lora=LORA.model_copy(update={"rank": 32}))
    loss = LossConfig(kl=0.1)
    trainer = Trainer(settings, LearnerConfig(keep=2), loss, total_steps=8, device="cpu")
    trainer.update([Maker().sample() for _ in range(4)])
    adapter = trainer.adapter()
    for step in range(1, 6):
        trainer.save(tmp_path, name=step)
    trainer.close()
    c = load(None, ["learner.keep=2", "rft.loss.kl=0.1", "rft.evaluate_every=0", "policy_store.keep=4"])
    for number in range(storage.kept_versions(c, "rft")):
        save_adapter(adapter, tmp_path / "versions" / f"v{number:06d}")
    parts = storage.disk_parts(c, adapter.nbytes, adapter.nbytes, "rft")
    written = {
        name: sum(f.stat().st_size for f in (tmp_path / name).rglob("*") if f.is_file()) for name in parts
    }
    # The estimate counts a third checkpoint, which exists while it is written.
    assert written["checkpoints"] == pytest.approx(parts["checkpoints"] * 2 / 3, rel=0.15)
    assert written["versions"] == pytest.approx(parts["versions"], rel=0.15)
    assert set(storage.disk_parts(c, 1, 1, "sft")) == {"checkpoints"}
