"""The learner: its step against plain torch, exact resume, and steps that must not happen."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import (
    FAMILIES,
    LORA,
    check_log_probs,
    check_same_training,
    merged,
    policy,
    random_adapter,
    spec,
    stock,
    stock_log_probs,
    stock_logits,
)
from tiny_trainer import LEARNER, SMALL, batch, learner_with, trainer

from pixelis import config
from pixelis.errors import BadConfig, BadInput, DataFailure, InfraFailure, MissingFile
from pixelis.policy import checkpoint, objectives
from pixelis.policy.adapters import is_vision, load_adapter, save_adapter, to_float32
from pixelis.policy.lora import BaseWeights, add_lora, lora_parameters, merge_into
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import learning_rate

SAME = 0.01 * LEARNER.lr  # tolerance of weights: a hundredth of an update


def reference_run(
    family: str, samples: list[TrainSample], steps: int, kind: str, loss: config.LossConfig
) -> tuple[list[float], dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Plain torch, one unpadded sample at a time: losses, weights and AdamW's first moments of each step."""
    model = add_lora(stock(family), LORA, seed=0)
    parameters = lora_parameters(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNER.lr, betas=LEARNER.betas, weight_decay=0.0)
    tokens = sum(s.policy_tokens for s in samples)
    losses, moments = [], []
    for _ in range(steps):
        total = torch.zeros(())
        for sample in samples:
            new = stock_log_probs(model, sample)
            if kind == "sft":
                total = total - new.sum() / tokens
            else:
                behaviour = torch.from_numpy(sample.log_probs[sample.mask])
                importance = (new.detach() - behaviour).exp().clamp(max=loss.importance_cap)
                ratio = (new - new.detach()).exp()
                size = tokens if loss.aggregate == "token" else len(samples) * sample.policy_tokens
                total = total - (importance * ratio * sample.advantage).sum() / size
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), LEARNER.max_grad_norm)
        optimizer.step()
        losses.append(float(total.detach()))
        moments.append(
            {f"{n}.exp_avg": optimizer.state[p]["exp_avg"].numpy().copy() for n, p in parameters.items()}
        )
    return losses, {n: p.detach().numpy() for n, p in parameters.items()}, moments


@pytest.mark.parametrize(
    ("family", "kind", "aggregate"),
    [("qwen3_vl", "sft", "token"), ("qwen3_vl", "policy", "token"), ("qwen2_5_vl", "policy", "sequence")],
)
def test_steps_equal_those_of_plain_torch(family: str, kind: str, aggregate: str):
    samples, loss = batch(family=family), config.LossConfig(aggregate=aggregate)
    expected, weights, moments = reference_run(family, samples, 3, kind, loss)
    with trainer(family, loss=loss, learner=SMALL) as learner:
        metrics = [learner.update(samples, kind) for _ in range(3)]  # type: ignore[arg-type]
        assert metrics[0]["learner/micro_batches"] > 1
        assert [m["policy/loss"] for m in metrics] == pytest.approx(expected, abs=1e-5)
        check_same_training(learner.adapter().tensors, learner.model.zero.moments(), weights, moments, SAME)
        assert metrics[0]["learner/tokens"] == sum(len(s.tokens) for s in samples)
        assert 0 < metrics[0]["policy/entropy"] < np.log(spec(family).vocab)


def test_dropout_applies_to_training_but_not_to_measurements():
    samples = batch(3)
    half = policy(lora=LORA.model_copy(update={"dropout": 0.5}))
    with trainer(policy=half, adapter=random_adapter()) as dropping:
        measured = dropping.model.log_probs(samples)
        loss_with_dropout = dropping.update(samples, "sft")["policy/loss"]
    with trainer(adapter=random_adapter()) as plain:
        expected, loss = plain.model.log_probs(samples), plain.update(samples, "sft")["policy/loss"]
    assert all(np.array_equal(a, b) for a, b in zip(measured, expected, strict=True))
    assert abs(loss_with_dropout - loss) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "full"),
    [
        (2, False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((3, False), (1, False), (0, False), (1, True))
        ),
    ],
)
def test_resume_is_exact_for_every_zero_stage(stage: int, full: bool, tmp_path: Path):
    schedule = learner_with(zero_stage=stage, schedule="cosine", warmup=0.2, lr=1e-3)
    settings = {"learner": schedule, "policy": policy(full=full)}
    batches = [batch(3, seed=s) for s in range(10)]
    with trainer(**settings) as learner:
        metrics = []
        for i, samples in enumerate(batches):
            metrics.append(learner.update(samples))
            if i == 3:
                folder = learner.save(tmp_path, {"consumed": ["a", "b"]})
        final = learner.adapter()
    assert folder == checkpoint.latest(tmp_path)
    assert load_adapter(folder).kind == ("full" if full else "lora")
    with trainer(**settings, seed=99) as resumed:
        assert resumed.restore(folder) == {"consumed": ["a", "b"]}
        assert resumed.step_count == 4
        repeated = [resumed.update(samples) for samples in batches[4:]]
        for key in ("policy/loss", "policy/lr", "policy/grad_norm"):
            assert [m[key] for m in repeated] == pytest.approx([m[key] for m in metrics[4:]], abs=1e-6)
        assert all(np.abs(a - final.tensors[n]).max() < 1e-6 for n, a in resumed.adapter().tensors.items())
        assert len({m["policy/lr"] for m in metrics}) > 5


def test_a_checkpoint_of_the_model_alone_resumes_with_new_moments(tmp_path: Path):
    samples, loss = batch(), config.LossConfig(kl=0.1)
    with trainer(loss=loss, learner=learner_with(save_only_model=True)) as learner:
        learner.update(samples)
        learner.update(samples)
        folder = learner.save(tmp_path)
        expected, weights = learner.update(samples), load_adapter(folder)
    assert not list(folder.glob("optimizer*"))
    with trainer(loss=loss) as resumed:
        resumed.restore(folder)
        assert resumed.adapter().sha256() == weights.sha256()
        assert resumed.step_count == 2
        assert resumed.model.zero.moments().get("step", np.zeros(1))[0] == 0
        assert resumed.update(samples)["policy/loss"] == pytest.approx(expected["policy/loss"], abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_that_is_not_finite_changes_nothing_and_three_stop_the_run(
    stage: int, monkeypatch: pytest.MonkeyPatch
):
    healthy = objectives.policy_loss

    def broken(*args: object, **kwargs: object):
        loss, sums = healthy(*args, **kwargs)  # type: ignore[arg-type]
        return loss * 0 + float("inf"), sums

    def state() -> dict[str, np.ndarray]:
        return {**learner.adapter().tensors, **learner.model.zero.moments()}

    with trainer(learner=learner_with(zero_stage=stage)) as learner:
        learner.update(batch())
        before = state()
        monkeypatch.setattr(objectives, "policy_loss", broken)
        metrics = learner.update(batch())
        assert metrics["learner/skipped"] == 1
        assert np.isnan(metrics["policy/grad_norm"])
        assert all(np.array_equal(values, before[name]) for name, values in state().items())
        monkeypatch.setattr(objectives, "policy_loss", healthy)
        good = learner.update(batch())  # a good step in between starts the count again
        assert good["policy/grad_norm"] > 0
        assert good["learner/skipped"] == 1
        monkeypatch.setattr(objectives, "policy_loss", broken)
        learner.update(batch())
        learner.update(batch())
        with pytest.raises(InfraFailure, match="in three steps in a row"):
            learner.update(batch())


def test_samples_without_advantage_cost_nothing_but_count():
    samples = batch()
    for sample in samples[:3]:
        sample.advantage = 0.0
    with trainer() as one, trainer(loss=config.LossConfig(kl=1e-12)) as all_of_them:
        short, full = one.update(samples), all_of_them.update(samples)
        assert (short["learner/trained_sequences"], full["learner/trained_sequences"]) == (3, 6)
        assert short["learner/sequences"] == full["learner/sequences"] == 6
        assert short["policy/loss"] == pytest.approx(full["policy/loss"], abs=1e-5)
        moments = all_of_them.model.zero.moments()
        check_same_training(
            one.adapter().tensors, one.model.zero.moments(), all_of_them.adapter().tensors, [moments], SAME
        )
        for sample in samples:
            sample.advantage = 0.0
        before = one.adapter().sha256()
        metrics = one.update(samples)
        assert (metrics["policy/loss"], metrics["learner/trained_sequences"]) == (0, 0)
        assert one.adapter().sha256() == before


def test_unusable_samples_are_dropped_and_counted():
    samples = batch(4)
    samples[0].views = []
    samples[1].advantage = float("nan")
    with trainer() as learner:
        metrics = learner.update(samples)
        assert (metrics["learner/dropped_views_mismatch"], metrics["learner/dropped_non_finite"]) == (1, 1)
        assert metrics["learner/sequences"] == 2
        with pytest.raises(DataFailure, match="views_mismatch"):
            learner.update(samples[:2])


def test_the_kl_term_measures_the_distance_from_the_starting_policy():
    start = random_adapter()
    samples = batch()
    with trainer(loss=config.LossConfig(kl=0.1), adapter=start) as learner:
        first = learner.update(samples)
        assert first["policy/kl"] == pytest.approx(0, abs=1e-9)
        later = [learner.update(samples)["policy/kl"] for _ in range(3)][-1]
        assert later > 1e-5
        own, new = learner.adapter().tensors, learner.model.log_probs(samples)
        with learner.model.zero.using(learner.model.reference or {}):
            old = learner.model.log_probs(samples)
        assert all(np.array_equal(a, own[n]) for n, a in learner.adapter().tensors.items())
        d = np.concatenate(old) - np.concatenate(new)
        expected = float(np.mean(np.exp(d) - d - 1))
        assert learner.update(samples)["policy/kl"] == pytest.approx(expected, rel=1e-3, abs=1e-7)
        learner.model.reference = learner.model.zero.shards()
        assert learner.update(samples)["policy/kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("full", [False, True])
def test_the_full_kl_term_is_that_of_the_whole_distributions(full: bool):
    samples = batch(4)
    with trainer(loss=config.LossConfig(kl=0.3, kl_estimator="full"), policy=policy(full=full)) as learner:
        learner.update(samples)
        adapter = learner.adapter()
        measured = learner.update(samples)["policy/kl"]
    allowed = [token for token in range(spec().vocab) if token not in spec().banned]
    divergences = []
    with torch.no_grad():
        for sample in samples:
            predicting = np.flatnonzero(sample.mask) - 1
            logits = (stock_logits(model, sample)[predicting] for model in (merged(adapter), stock()))
            p, q = (torch.distributions.Categorical(logits=values[:, allowed]) for values in logits)
            divergences.append(torch.distributions.kl_divergence(p, q))
    expected = torch.cat(divergences).mean().item()
    assert measured == pytest.approx(expected, rel=1e-3)
    assert expected > 1e-5


def test_the_ratio_is_to_the_log_probs_before_the_first_of_several_steps():
    samples = batch()
    samples[1].views, samples[2].advantage = [], 0.0  # one that is dropped and one that is not computed
    with trainer(learner=SMALL) as first, trainer(learner=SMALL) as alone:
        old = first.model.log_probs(samples)
        assert [len(o) for o in old] == [s.policy_tokens if s.views else 0 for s in samples]
        with_old, without_old = first.update(samples, old=old), alone.update(samples)
        assert with_old["policy/loss"] == pytest.approx(without_old["policy/loss"], abs=1e-5)
        assert (with_old["policy/clipped"], without_old["policy/ratio_max"]) == (0, 1)
        assert with_old["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
        # Seen from log-probs 1 lower, every token is e times likelier now: with a positive advantage it has
        # to be clipped.
        repeated = first.update(samples, old=[o - 1 for o in first.model.log_probs(samples)])
        assert repeated["policy/ratio"] == pytest.approx(np.e, abs=1e-3)
        trained = [s for s in samples if s.views and s.advantage]
        likelier = sum(s.policy_tokens for s in trained if s.advantage > 0)
        expected = likelier / sum(s.policy_tokens for s in trained)
        assert repeated["policy/clipped_high"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "name", ["dr_grpo", "rloo", "reinforce_pp_baseline", "gspo", "gspo_token", "cispo", "sapo"]
)
def test_an_algorithm_steps_the_same_however_its_batch_is_packed(name: str):
    loss = config.load(
        None, [f"rft.algorithm={name}", "rft.loss.importance_level=sequence", "rft.loss.entropy=0.01"]
    ).rft.loss
    samples, metrics = batch(4), []
    for rows, row_tokens in ((2, 512), (1, 96)):
        with trainer(loss=loss, learner=learner_with(row_tokens=row_tokens, rows=rows)) as learner:
            old = [o + 0.01 for o in learner.model.log_probs(samples)]
            metrics.append(learner.update(samples, old=old))
    unsplit, split = metrics
    assert split["learner/micro_batches"] > unsplit["learner/micro_batches"]
    assert set(split) == set(unsplit)
    for key in unsplit:
        if key.startswith("policy/") and np.isfinite(unsplit[key]):
            assert split[key] == pytest.approx(unsplit[key], rel=1e-3, abs=1e-5), key


def test_the_divergence_for_the_reward_is_that_of_the_recorded_log_probs():
    loss = config.load(None, ["rft.algorithm=rloo"]).rft.loss
    samples = batch()
    samples[1].views = []
    with trainer(loss=loss, adapter=random_adapter()) as learner:
        before = learner.model.log_probs(samples)
        expected = [
            float((s.log_probs[s.mask] - b).sum()) if len(b) else None
            for s, b in zip(samples, before, strict=True)
        ]
        metrics = learner.update(samples)
        assert "policy/kl" not in metrics  # it is no term of the loss
        for kl, value in zip(learner.model.kl_to_reference(samples), expected, strict=True):
            assert kl == (None if value is None else pytest.approx(value, abs=1e-3))
    with trainer() as without, pytest.raises(BadConfig, match="no reference"):
        without.model.kl_to_reference(samples)


def test_an_entropy_bonus_trains_samples_without_advantage():
    samples = batch(3)
    for sample in samples:
        sample.advantage = 0.0
    with trainer(loss=config.LossConfig(entropy=0.1)) as learner:
        metrics = learner.update(samples)
        assert metrics["learner/trained_sequences"] == 3
        assert metrics["policy/loss"] == pytest.approx(-0.1 * metrics["policy/entropy"], rel=1e-5)
        assert metrics["policy/grad_norm"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_training_all_parameters_reaches_the_vision_tower(family: str):
    settings, samples = policy(family, full=True), batch(4, family)
    with trainer(family, policy=settings, learner=learner_with(lr=1e-3)) as learner:
        start = learner.adapter().tensors
        losses = [learner.update(samples, "sft")["policy/loss"] for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        trained, measured = learner.adapter(), learner.model.log_probs(samples)
        visual = next(n for n, values in start.items() if is_vision(n) and values.ndim == 2)
        assert not np.array_equal(trained.tensors[visual], start[visual])
        assert trained.kind == "full"
        assert learner.model.features is None
    check_log_probs(merged(trained, family), samples, measured)
    with trainer(family, policy=settings, adapter=trained) as resumed:
        assert resumed.adapter().sha256() == trained.sha256()
        assert np.array_equal(resumed.model.log_probs(samples)[0], measured[0])


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_adapters_of_the_vision_tower_start_from_an_adapter_without_them_and_learn(stage: int):
    samples = batch(4)
    with trainer() as learner:
        learner.update(samples, "sft")
        start, measured = learner.adapter(), learner.model.log_probs(samples[:1])[0]
    settings = policy(lora=LORA.model_copy(update={"vision_tower": True}))
    with trainer(policy=settings, learner=learner_with(zero_stage=stage), adapter=start, ema=0.5) as learner:

        def as_at_the_start() -> bool:
            return bool(np.abs(learner.model.log_probs(samples[:1])[0] - measured).max() < 1e-5)

        assert as_at_the_start(), "the product of new layers is 0"
        before = learner.adapter().tensors
        assert start.tensors.keys() < before.keys()
        for _ in range(2):
            learner.update(samples, "sft")
        published = learner.served()
        changed = {n for n, values in published.tensors.items() if not np.array_equal(values, before[n])}
        assert {n for n in before if ".visual." in n and n.endswith(".B")} <= changed
        assert learner.model.features is None
        check_log_probs(merged(learner.adapter()), samples[:1], learner.model.log_probs(samples[:1]))
        learner.reset_to(start)
        assert as_at_the_start(), "nothing learnt is left"
        learner.reset_to(published)
        assert learner.adapter().sha256() == published.sha256()
    with pytest.raises(BadInput, match="visual"), trainer(adapter=published):
        pass


@pytest.mark.parametrize("full", [False, True])
def test_a_frozen_vision_tower_keeps_its_bits_and_the_rest_learns(full: bool):
    samples = batch(4)
    with trainer(policy=policy(full=full, freeze_vision_tower=True)) as learner:
        parameters = dict(learner.model.network.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        for _ in range(2):
            learner.update(samples, "sft")
        changed = {name for name, p in parameters.items() if not torch.equal(before[name], p)}
        assert changed == {name for name, p in parameters.items() if p.requires_grad}
        assert learner.model.features.misses > 0, "the features of a frozen tower are computed once"
        published = learner.served()
        assert not any(".visual." in name for name in (*changed, *published.tensors))
        check_log_probs(merged(published), samples[:1], learner.model.log_probs(samples[:1]))
    if full:
        whole = policy(full=True)
        with pytest.raises(BadInput, match="visual") as error, trainer(policy=whole, adapter=published):
            pass
        assert "freeze_vision_tower" in str(error.value.fix)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_bfloat16_model_is_published_in_its_own_bytes(stage: int, tmp_path: Path):
    settings = policy(full=True, dtype="bfloat16")
    learner = learner_with(lr=1e-3, zero_stage=stage)
    with trainer(policy=settings, learner=learner) as trained:
        trained.update(batch(4), "sft")
        version, masters = trained.served(), trained.adapter()
    assert version.nbytes == 2 * sum(a.size for a in masters.tensors.values()) == masters.nbytes // 2
    for name, values in masters.tensors.items():  # rounded once, as torch rounds
        rounded = torch.from_numpy(values).bfloat16().float().numpy()
        assert np.array_equal(to_float32(version.tensors[name]), rounded)
    save_adapter(version, tmp_path / "v1")
    loaded = load_adapter(tmp_path / "v1")
    assert loaded.sha256() == version.sha256()
    model = stock().bfloat16()
    merge_into(model, BaseWeights(), loaded)
    for name, parameter in model.named_parameters():
        assert np.array_equal(to_float32(loaded.tensors[name]), parameter.detach().float().numpy())
    infinite = {n: np.full_like(a, 0x7F80) if n == "lm_head.weight" else a for n, a in loaded.tensors.items()}
    with pytest.raises(BadInput, match="not finite"):
        merge_into(model, BaseWeights(), replace(loaded, tensors=infinite))
    with trainer(policy=settings, learner=learner, adapter=loaded) as resumed:
        assert resumed.served().sha256() == version.sha256()


def test_gradient_checkpointing_changes_nothing_but_memory():
    with trainer() as plain, trainer(policy=policy(gradient_checkpointing=True)) as saving:
        for _ in range(2):
            a, b = plain.update(batch()), saving.update(batch())
            assert a["policy/loss"] == pytest.approx(b["policy/loss"], abs=1e-6)
            assert a["policy/grad_norm"] == pytest.approx(b["policy/grad_norm"], abs=1e-5)


def test_adapters_and_settings_that_do_not_fit_are_refused_before_training(tmp_path: Path):
    with trainer() as learner:
        adapter = load_adapter(learner.save(tmp_path))
        with pytest.raises(MissingFile):
            learner.restore(tmp_path / "checkpoints" / "step_00000009")
    (tmp_path / "ds.json").write_text('{"optimizer": {"type": "Adam"}}')
    other = policy(lora=config.LoraConfig(rank=2, alpha=8))
    for error, words, settings in (
        (BadInput, r"set policy\.lora\.rank=4", {"policy": other, "adapter": adapter}),
        (BadInput, "another base model", {"family": "qwen2_5_vl", "adapter": adapter}),
        (BadInput, r"policy\.full", {"policy": policy(full=True), "adapter": adapter}),
        (BadConfig, "temperature", {"temperature": 0.0}),
        (BadConfig, "decided by the learner", {"learner": learner_with(deepspeed=f"{tmp_path}/ds.json")}),
        (MissingFile, "no file", {"learner": learner_with(deepspeed="nowhere.json")}),
    ):
        with pytest.raises(error, match=words), trainer(**settings):
            pass


def test_the_learning_rate_warms_up_and_decays():
    cosine = config.LearnerConfig(lr=1.0, warmup=0.2, schedule="cosine")
    rates = [learning_rate(cosine, i, 10) for i in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[10] == pytest.approx(0)
    constant = config.LearnerConfig(lr=1.0, warmup=0.0)
    assert [learning_rate(constant, i, 10) for i in (0, 5, 50)] == [1.0] * 3
    linear = config.LearnerConfig(lr=2.0, warmup=0.0, schedule="linear", min_lr_ratio=0.5)
    assert [learning_rate(linear, i, 10) for i in (0, 5, 10, 20)] == [2.0, 1.5, 1.0, 1.0]


def test_deepspeed_uses_the_learners_device_whatever_the_environment_says():
    """`make` exports DS_ACCELERATOR=cuda on a machine with a GPU: a learner without one stays off it."""
    code = """
import torch
from pixelis.policy.deepspeed_engine import ensure_process_group
ensure_process_group(torch.device("cpu"))
from deepspeed.accelerator import get_accelerator
print(get_accelerator().device_name())
"""
    environment = {**os.environ, "DS_ACCELERATOR": "cuda"}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert output.split()[-1] == "cpu"
