"""Ranks from what a full fine-tune changed, against numpy's decomposition, and adapters that use them."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_policy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny_policy import LORA, Maker, adapter_state, folder, policy, set_adapter_state, stock, stock_log_probs

from pixelis import config
from pixelis.errors import BadConfig, BadInput, MissingFile, PixelisError
from pixelis.jobs import lineage as lineage_job
from pixelis.jobs import ranks as job
from pixelis.policy import architecture, rank_choice, ranks
from pixelis.policy.adapters import Adapter, adapter_bytes, load_adapter, save_adapter
from pixelis.policy.export import write_peft
from pixelis.policy.lora import BaseWeights, add_lora, merge_into
from pixelis.policy.model_path import fingerprint
from pixelis.policy.train_step import Trainer

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


@given(rank=st.integers(1, 600), smallest=st.integers(1, 12), largest=st.integers(12, 300))
def test_bounds_and_powers_of_two(rank: int, smallest: int, largest: int):
    bounded = rank_choice.bounded_rank(rank, smallest, largest)
    assert smallest <= bounded <= largest
    assert bounded <= 16 or bounded & (bounded - 1) == 0
    if smallest <= rank <= min(16, largest):
        assert bounded == rank


def test_ranks_of_the_specification():
    assert [rank_choice.bounded_rank(r, 4, 128) for r in (1, 4, 13, 16, 17, 22, 23, 48, 90, 91, 500)] == [
        4, 4, 13, 16, 16, 16, 32, 64, 64, 128, 128
    ]  # fmt: skip
    smooth = rank_choice.smoothed_ranks({"l.0.q_proj": 4, "l.1.q_proj": 16, "l.0.weight": 64}, 0.8)
    assert smooth == pytest.approx({"l.0.q_proj": 8.8, "l.1.q_proj": 11.2, "l.0.weight": 64})


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 4))
def test_a_rank_file_adds_up(seed: int, count: int):
    rng = np.random.default_rng(seed)
    changes = {
        f"m.layers.{i}.{kind}": changed(
            low_rank(rng, 48, int(rng.integers(8, 60)), int(rng.integers(1, 9)), 0.01)
        )
        for i in range(count)
        for kind in ("q_proj", "up_proj")
    }
    changes["m.layers.0.o_proj"] = changed(np.zeros((8, 8), np.float32))
    file = rank_choice.choose_ranks(changes, PLAIN, {"base": "x"})
    assert file.skipped == ["m.layers.0.o_proj"]
    assert set(file.layer_ranks) == set(changes) - set(file.skipped)
    for name, rank in file.layer_ranks.items():
        row = file.layer_metadata[name]
        assert min(4, *changes[name].shape) <= rank <= min(128, *changes[name].shape)
        assert row["type"] == name.rsplit(".", 1)[-1]
        assert len(row["singular_values"]) == min(50, *changes[name].shape)
        assert row["energy_retained"] == pytest.approx(changes[name].retained(rank))
    shapes = {name: changes[name].shape for name in file.layer_ranks}
    assert file.total_parameters == adapter_bytes(shapes, file.layer_ranks, 1)
    assert file.compression_ratio == pytest.approx(
        sum(math.prod(s) for s in shapes.values()) / file.total_parameters
    )
    assert set(file.analysis_metadata["type_medians"]) == {"q_proj", "up_proj"}
    assert ranks.RankFile.model_validate_json(json.dumps(file.model_dump(mode="json"))) == file


def test_a_model_equal_to_its_base_is_refused():
    with pytest.raises(BadInput, match="equals its base"):
        rank_choice.choose_ranks({"a.q_proj": changed(np.zeros((4, 4), np.float32))}, PLAIN, {})


# -- adapters of these ranks ---------------------------------------------------------------------------------


def layers_of(family: str = "qwen3_vl") -> dict[str, tuple[int, int]]:
    return architecture.Architecture(str(folder(family)), torch.float32).shapes(LORA.targets)


def rank_file(path: Path, family: str = "qwen3_vl", skip: int = 1, smallest: int = 2) -> Path:
    """Ranks from 2 to 6 for all layers except the first `skip`, which have not changed."""
    names = list(layers_of(family))
    layer_ranks = {name: smallest + i % 5 for i, name in enumerate(names[skip:])}
    path.write_text(
        ranks.RankFile(layer_ranks=layer_ranks, analysis_metadata={"skipped": names[:skip]}).model_dump_json()
    )
    return path


def mixed(path: Path, family: str = "qwen3_vl", seed: int = 0) -> tuple[config.LoraConfig, Adapter]:
    """(configuration, random adapter) of a rank file's ranks."""
    lora = LORA.model_copy(update={"ranks": str(rank_file(path, family))})
    return lora, tiny_policy.random_adapter(family, seed, mixed=True)


@pytest.mark.parametrize("family", tiny_policy.FAMILIES)
def test_layers_of_different_ranks_compute_the_same_trained_merged_and_saved(family: str, tmp_path: Path):
    lora, adapter = mixed(tmp_path / "ranks.json", family)
    layer_ranks = ranks.read(tmp_path / "ranks.json").layer_ranks
    assert adapter.ranks == layer_ranks
    assert adapter.nbytes == adapter_bytes(layers_of(family), layer_ranks)
    trained, merged, sample = add_lora(stock(family), lora), stock(family), Maker(family).sample()
    set_adapter_state(trained, adapter.tensors)
    base = BaseWeights()
    uniform = tiny_policy.random_adapter(family)
    merge_into(merged, base, uniform)
    merge_into(merged, base, adapter)
    with torch.no_grad():
        expected = stock_log_probs(trained, sample)
        assert (expected - stock_log_probs(merged, sample)).abs().max() < 1e-4
    # The files for vLLM contain the scale and have the largest rank.
    peft_folder = write_peft(adapter, tmp_path / "v1")
    assert json.loads((peft_folder / "adapter_config.json").read_text())["r"] == 6 == ranks.largest_rank(lora)
    save_adapter(adapter, tmp_path / "saved")
    loaded = load_adapter(tmp_path / "saved")
    assert (loaded.sha256(), loaded.ranks) == (adapter.sha256(), layer_ranks)
    header = loaded.metadata()
    pattern, alphas = json.loads(header["rank_pattern"]), json.loads(header["alpha_pattern"])
    assert all(alphas[name] == 2 * rank == 2 * layer_ranks[name] for name, rank in pattern.items())
    assert "rank_pattern" not in uniform.metadata(), "adapters of one rank keep their hashes"


def test_the_learner_resumes_adapters_of_its_ranks_and_refuses_others(tmp_path: Path):
    lora, adapter = mixed(tmp_path / "ranks.json")
    learner = config.LearnerConfig(zero_stage=0, lr=1e-2)
    trainer = Trainer(policy(lora=lora), learner, total_steps=2, adapter=adapter, device="cpu")
    before = trainer.adapter()
    assert before.sha256() == adapter.sha256()
    trainer.update([Maker().sample(advantage=1.0)])
    step = trainer.save(tmp_path / "run")
    trainer.restore(step)
    assert trainer.adapter().ranks == adapter.ranks
    trainer.close()
    for other in (
        LORA,
        lora.model_copy(update={"ranks": str(rank_file(tmp_path / "other.json", smallest=3))}),
    ):
        with pytest.raises(BadInput, match="checkpoint") as caught:
            Trainer(policy(lora=other), learner, total_steps=2, adapter=adapter, device="cpu")
        assert "policy.lora.ranks" in (caught.value.fix or "")


def test_a_rank_file_of_another_model_or_of_other_targets_is_refused(tmp_path: Path):
    path = rank_file(tmp_path / "ranks.json")
    lora = LORA.model_copy(update={"ranks": str(path)})
    cases: list[tuple[config.LoraConfig, type[PixelisError], str]] = [
        (
            lora.model_copy(update={"targets": [*LORA.targets, "lm_head"]}),
            BadConfig,
            "has no rank for lm_head",
        ),
        (LORA.model_copy(update={"ranks": str(tmp_path / "none.json")}), MissingFile, "no rank file"),
    ]
    foreign = json.loads(path.read_text())
    foreign["layer_ranks"]["model.language_model.layers.9.mlp.up_proj"] = 4
    (tmp_path / "foreign.json").write_text(json.dumps(foreign))
    cases.append(
        (LORA.model_copy(update={"ranks": str(tmp_path / "foreign.json")}), BadConfig, "no layer model")
    )
    for name, text in (("zero", '{"layer_ranks": {"a": 0}}'), ("half", '{"layer_ranks"'), ("list", "[]")):
        (tmp_path / name).write_text(text)
        cases.append(
            (LORA.model_copy(update={"ranks": str(tmp_path / name)}), BadInput, "is not a rank file")
        )
    for refused, error, word in cases:
        with pytest.raises(error, match=word):
            add_lora(stock(), refused)
    fewer = add_lora(stock(), lora.model_copy(update={"targets": ["q_proj"]}))
    assert {name.rsplit(".", 2)[-2] for name in adapter_state(fewer)} == {"q_proj"}


# -- the job -------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ranks", *arguments])
    try:
        job.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def tuned_checkpoint(path: Path, ranks_of_change: int = 3) -> dict[str, np.ndarray]:
    """A full checkpoint whose layers (but the first) changed by this rank; returns the changes."""
    model, rng, deltas = stock(), np.random.default_rng(0), {}
    tensors = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    for name, shape in list(layers_of().items())[1:]:
        deltas[name] = low_rank(rng, *shape, ranks_of_change) * 0.01
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + deltas[name]
    save_adapter(Adapter(tensors, 1, 1, fingerprint(folder("qwen3_vl")), "full"), path)
    return deltas


@pytest.mark.usefixtures("_quiet")
def test_the_job_finds_the_ranks_of_a_checkpoint_and_resumes_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    deltas = tuned_checkpoint(tmp_path / "full")
    out = tmp_path / "out"
    arguments = [
        f"policy.model={folder('qwen3_vl')}",
        f"ranks.tuned={tmp_path / 'full'}",
        f"run.dir={out}",
        "ranks.smallest=1",
    ]
    arguments.append(f"policy.lora.targets=[{','.join(LORA.targets)}]")
    assert run(monkeypatch, *arguments, "ranks.smoothing=0", "ranks.energy=0.999999") == 0
    file = ranks.read(out / "ranks.json")
    assert file.layer_ranks == dict.fromkeys(deltas, 3)
    assert len(file.skipped) == 1
    assert (out / "ranks.html").read_text().count("<svg") == 3
    # Stopped after five layers: they are not computed again.
    lines = (out / "changes.jsonl").read_text().splitlines(keepends=True)
    (out / "changes.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    (out / "ranks.json").unlink()
    calls, original = [], job.weight_change
    monkeypatch.setattr(job, "weight_change", lambda *a: calls.append(1) or original(*a))
    assert run(monkeypatch, *arguments, "ranks.smoothing=0", "ranks.energy=0.999999") == 0
    assert len(calls) == len(lines) - 5
    assert ranks.read(out / "ranks.json") == file
    monkeypatch.setattr(sys, "argv", ["lineage", str(out / "ranks.json")])
    capsys.readouterr()
    lineage_job.main()
    assert "tuned: ../full" in capsys.readouterr().out


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch):
    import signal

    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_quiet")
def test_the_job_refuses_anything_but_a_full_fine_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = f"policy.model={folder('qwen3_vl')}"
    save_adapter(tiny_policy.random_adapter(), tmp_path / "lora")
    full = Adapter({"x": np.zeros(2, np.float32)}, 1, 1, "of another", "full")
    save_adapter(full, tmp_path / "other")
    save_adapter(dataclasses.replace(full, base_sha256=fingerprint(folder("qwen3_vl"))), tmp_path / "empty")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "hf" / "model.safetensors")
    for tuned, code, word in (
        (None, 2, "ranks.tuned names no model"),
        ("gone", 1, "no model in"),
        ("lora", 1, "has adapters"),
        ("other", 1, "was not tuned from"),
        ("empty", 1, "has no parameter"),
        ("hf", 1, "has no parameter"),
    ):
        more = [f"ranks.tuned={tmp_path / tuned}"] if tuned else []
        assert run(monkeypatch, model, *more, f"run.dir={tmp_path / 'out'}") == code
        assert word in capsys.readouterr().err
