"""Ranks from what a full fine-tune changed, against numpy's decomposition, and adapters that use them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import pixelis
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny_policy import LORA, Maker, adapter_state, folder, policy, random_adapter, stock
from tiny_trainer import trainer

from pixelis import config
from pixelis.errors import BadConfig, BadInput, MissingFile
from pixelis.jobs import ranks as job
from pixelis.policy import rank_choice, ranks
from pixelis.policy.adapters import Adapter, load_adapter, save_adapter
from pixelis.policy.export import write_peft
from pixelis.policy.lora import adapted_layers, add_lora
from pixelis.policy.model_path import fingerprint

PLAIN = config.RanksConfig()


def low_rank(rng: np.random.Generator, out: int, inside: int, rank: int, noise: float = 0.0) -> np.ndarray:
    product = rng.normal(size=(out, rank)) @ rng.normal(size=(rank, inside))
    return (product + noise * rng.normal(size=(out, inside))).astype(np.float32)


def changed(delta: np.ndarray, components: int = 512) -> rank_choice.WeightChange:
    base = np.random.default_rng(1).normal(size=delta.shape).astype(np.float64)
    return rank_choice.weight_change(
        torch.from_numpy(base), torch.from_numpy(base + delta), components=components
    )


# -- the decomposition ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    out=st.integers(1, 40),
    inside=st.integers(1, 40),
    rank=st.integers(1, 12),
    share=st.floats(0.1, 1),
)
def test_the_rank_is_the_smallest_that_retains_the_energy_according_to_numpy(
    seed: int, out: int, inside: int, rank: int, share: float
):
    delta = low_rank(np.random.default_rng(seed), out, inside, min(rank, out, inside), 0.05)
    change = changed(delta)
    values = np.linalg.svd(delta.astype(np.float64), compute_uv=False)
    assert change.method == "exact"
    assert np.allclose(change.values, values, rtol=1e-4, atol=1e-4)
    assert math.isclose(change.energy, float((values**2).sum()), rel_tol=1e-4)
    r = rank_choice.energy_rank(change, share)
    assert r is not None
    retained = np.cumsum(values**2) / (values**2).sum()
    assert retained[r - 1] >= share - 1e-5
    assert r == 1 or retained[r - 2] < share + 1e-5
    assert math.isclose(change.retained(r), retained[r - 1], rel_tol=1e-4)


def test_a_large_layer_gets_a_randomised_decomposition_with_the_exact_energy():
    rng = np.random.default_rng(0)
    delta = low_rank(rng, 240, 160, 12, 1.0)
    change = changed(delta, components=24)
    values = np.linalg.svd(delta.astype(np.float64), compute_uv=False)
    assert (change.method, len(change.values)) == ("randomised", 24)
    assert np.allclose(change.values[:12], values[:12], rtol=1e-3)
    assert change == changed(delta, components=24), "the seed decides"
    # The energy is that of all values, not of the 24 computed ones.
    assert math.isclose(change.energy, float((values**2).sum()), rel_tol=1e-4)
    assert math.fsum(s * s for s in change.values) < 0.95 * change.energy
    exact = int(np.argmax(np.cumsum(values**2) >= 0.9 * (values**2).sum())) + 1
    assert rank_choice.energy_rank(changed(delta), 0.9) == exact
    # A share that the computed values cannot reach is reported, and the layer gets the largest rank.
    noise = changed(rng.normal(size=(200, 200)).astype(np.float32), components=10)
    assert rank_choice.energy_rank(noise, 0.9) is None
    file = rank_choice.choose_ranks({"a.q_proj": noise}, PLAIN, {})
    assert file.layer_ranks == {"a.q_proj": 128}
    assert file.analysis_metadata["not_reached"] == ["a.q_proj"]
    assert file.layer_metadata["a.q_proj"]["reached"] is False
    assert file.layer_metadata["a.q_proj"]["energy_retained"] < 0.9


def test_foreign_and_broken_weights_are_refused():
    with pytest.raises(BadInput, match=r"\[2, 3\]"):
        rank_choice.weight_change(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(BadInput, match="finite"):
        rank_choice.weight_change(torch.ones(2, 2), torch.full((2, 2), math.nan))


# -- from spectra to ranks -----------------------------------------------------------------------------------


def test_ranks_of_the_specification():
    assert [rank_choice.bounded_rank(r, 4, 128) for r in (1, 4, 13, 16, 17, 22, 23, 48, 90, 91, 500)] == [
        4, 4, 13, 16, 16, 16, 32, 64, 64, 128, 128
    ]  # fmt: skip
    smooth = rank_choice.smoothed_ranks({"l.0.q_proj": 4, "l.1.q_proj": 16, "l.0.weight": 64}, 0.8)
    assert smooth == pytest.approx({"l.0.q_proj": 8.8, "l.1.q_proj": 11.2, "l.0.weight": 64})


def test_a_model_equal_to_its_base_is_refused():
    with pytest.raises(BadInput, match="equals its base"):
        rank_choice.choose_ranks({"a.q_proj": changed(np.zeros((4, 4), np.float32))}, PLAIN, {})


# -- adapters of these ranks ---------------------------------------------------------------------------------


def rank_file(path: Path, smallest: int = 2) -> config.LoraConfig:
    """Ranks from 2 to 6 for all layers except the first, which has not changed."""
    skipped, *names = adapted_layers(stock(), LORA.targets)
    layer_ranks = {name: smallest + i % 5 for i, name in enumerate(names)}
    file = ranks.RankFile(layer_ranks=layer_ranks, analysis_metadata={"skipped": [skipped]})
    path.write_text(file.model_dump_json())
    return LORA.model_copy(update={"ranks": str(path)})


def test_an_adapter_of_different_ranks_is_saved_and_written_for_vllm(tmp_path: Path):
    lora, adapter = rank_file(tmp_path / "ranks.json"), random_adapter(mixed=True)
    layer_ranks = ranks.read(tmp_path / "ranks.json").layer_ranks
    assert adapter.ranks == layer_ranks
    peft_folder = write_peft(adapter, tmp_path / "v1")
    assert json.loads((peft_folder / "adapter_config.json").read_text())["r"] == 6 == ranks.largest_rank(lora)
    save_adapter(adapter, tmp_path / "saved")
    loaded = load_adapter(tmp_path / "saved")
    assert (loaded.sha256(), loaded.ranks) == (adapter.sha256(), layer_ranks)
    header = loaded.metadata()
    pattern, alphas = json.loads(header["rank_pattern"]), json.loads(header["alpha_pattern"])
    assert all(alphas[name] == 2 * rank == 2 * layer_ranks[name] for name, rank in pattern.items())
    assert "rank_pattern" not in random_adapter().metadata(), "adapters of one rank keep their hashes"


def test_the_learner_resumes_adapters_of_its_ranks_and_refuses_others(tmp_path: Path):
    lora, adapter = rank_file(tmp_path / "ranks.json"), random_adapter(mixed=True)
    with trainer(policy=policy(lora=lora), adapter=adapter) as learner:
        assert learner.adapter().sha256() == adapter.sha256()
        learner.update([Maker().sample(advantage=1.0)])
        learner.restore(learner.save(tmp_path / "run"))
        assert learner.adapter().ranks == adapter.ranks
    for other in (LORA, rank_file(tmp_path / "other.json", smallest=3)):
        with (
            pytest.raises(BadInput, match="checkpoint") as caught,
            trainer(policy=policy(lora=other), adapter=adapter),
        ):
            pass
        assert "policy.lora.ranks" in (caught.value.fix or "")


def test_a_rank_file_of_another_model_or_of_other_targets_is_refused(tmp_path: Path):
    lora = rank_file(tmp_path / "ranks.json")
    foreign = json.loads((tmp_path / "ranks.json").read_text())
    foreign["layer_ranks"]["model.language_model.layers.9.mlp.up_proj"] = 4
    for name, text in (
        ("foreign", json.dumps(foreign)),
        ("zero", '{"layer_ranks": {"a": 0}}'),
        ("half", '{"layer_ranks"'),
        ("list", "[]"),
    ):
        (tmp_path / name).write_text(text)
    for values, error, words in (
        ({"targets": [*LORA.targets, "lm_head"]}, BadConfig, "has no rank for lm_head"),
        ({"ranks": "none.json"}, MissingFile, "no rank file"),
        ({"ranks": f"{tmp_path}/foreign"}, BadConfig, "no layer model"),
        *(
            ({"ranks": f"{tmp_path}/{name}"}, BadInput, "is not a rank file")
            for name in ("zero", "half", "list")
        ),
    ):
        with pytest.raises(error, match=words):
            add_lora(stock(), lora.model_copy(update=values))
    fewer = add_lora(stock(), lora.model_copy(update={"targets": ["q_proj"]}))
    assert {name.rsplit(".", 2)[-2] for name in adapter_state(fewer)} == {"q_proj"}


# -- the job -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """Runs the job; returns its exit code and what it wrote."""
    before = signal.getsignal(signal.SIGTERM)
    yield functools.partial(pixelis, capsys, monkeypatch, "ranks", f"policy.model={folder('qwen3_vl')}")
    signal.signal(signal.SIGTERM, before)


def tuned_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """A full checkpoint whose layers (but the first) changed by rank 3; returns the changes."""
    model, rng, deltas = stock(), np.random.default_rng(0), {}
    tensors = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    for name, layer in list(adapted_layers(stock(), LORA.targets).items())[1:]:
        deltas[name] = low_rank(rng, *layer.weight.shape, 3) * 0.01
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + deltas[name]
    save_adapter(Adapter(tensors, 1, 1, fingerprint(folder("qwen3_vl")), "full"), path)
    return deltas


def test_the_job_finds_the_ranks_of_a_checkpoint_and_resumes_after_an_interruption(
    tmp_path: Path,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    deltas, out = tuned_checkpoint(tmp_path / "full"), tmp_path / "out"
    arguments = [
        f"ranks.tuned={tmp_path / 'full'}",
        f"run.dir={out}",
        f"policy.lora.targets=[{','.join(LORA.targets)}]",
        *("ranks.smallest=1", "ranks.smoothing=0", "ranks.energy=0.999999"),
    ]
    assert run(*arguments)[0] == 0
    file = ranks.read(out / "ranks.json")
    assert file.layer_ranks == dict.fromkeys(deltas, 3)
    assert len(file.skipped) == 1
    sizes = {name: math.prod(delta.shape) for name, delta in deltas.items()}
    assert file.total_parameters == 3 * sum(sum(delta.shape) for delta in deltas.values())
    assert file.compression_ratio == pytest.approx(sum(sizes.values()) / file.total_parameters)
    assert {row["type"] for row in file.layer_metadata.values()} == {
        n.rsplit(".", 1)[-1] for n in adapted_layers(stock(), LORA.targets)
    }
    assert (out / "ranks.html").read_text().count("<svg") == 3
    # Stopped after five layers: they are not computed again.
    lines = (out / "changes.jsonl").read_text().splitlines(keepends=True)
    (out / "changes.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    (out / "ranks.json").unlink()
    calls, original = [], job.weight_change
    monkeypatch.setattr(job, "weight_change", lambda *a: calls.append(1) or original(*a))
    assert run(*arguments)[0] == 0
    assert len(calls) == len(lines) - 5
    assert ranks.read(out / "ranks.json") == file
    assert "tuned: ../full" in pixelis(capsys, monkeypatch, "lineage", str(out / "ranks.json"))[1]


def test_the_job_refuses_anything_but_a_full_fine_tune(tmp_path: Path, run: Callable[..., Any]):
    save_adapter(random_adapter(), tmp_path / "lora")
    full = Adapter({"x": np.zeros(2, np.float32)}, 1, 1, "of another", "full")
    save_adapter(full, tmp_path / "other")
    save_adapter(dataclasses.replace(full, base_sha256=fingerprint(folder("qwen3_vl"))), tmp_path / "empty")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "hf" / "model.safetensors")
    for tuned, expected, words in (
        (None, 2, "ranks.tuned names no model"),
        ("gone", 1, "no model in"),
        ("lora", 1, "has adapters"),
        ("other", 1, "was not tuned from"),
        ("empty", 1, "has no parameter"),
        ("hf", 1, "has no parameter"),
    ):
        more = [f"ranks.tuned={tmp_path / tuned}"] if tuned else []
        code, _, error = run(*more, f"run.dir={tmp_path / 'out'}")
        assert (code, words in error) == (expected, True), error
