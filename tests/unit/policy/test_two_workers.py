"""Two learner workers with unequal shares take the steps of one, under every ZeRO stage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import FAMILIES, check_same_training
from two_workers import CASES, LEARNER, SAVED, launch, metrics, samples_of

from pixelis.policy import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the metrics of both workers, `rank0.json` and `rank1.json`, and the checkpoint of SAVED."""
    out = tmp_path_factory.mktemp("workers")
    launch("two_workers.py", 2, out, "short")
    return out


@pytest.fixture(scope="module")
def long_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the metrics of the long cases."""
    out = tmp_path_factory.mktemp("long")
    launch("two_workers.py", 2, out, "long")
    return out


CASES_BY_LENGTH = [
    pytest.param(name, marks=[pytest.mark.long] if case.length == "long" else [])
    for name, case in CASES.items()
    if case.length != "nf4"
]


def folder_of(name: str, request: pytest.FixtureRequest) -> Path:
    """Folder with the results of a case."""
    return request.getfixturevalue("long_out" if CASES[name].length == "long" else "out")


@pytest.mark.parametrize("name", CASES_BY_LENGTH)
def test_two_workers_take_the_step_of_one(request: pytest.FixtureRequest, name: str) -> None:
    case = CASES[name]
    alone = case.trainer(stage=0)
    try:
        expected = case.run(alone, samples_of(case.family))
        moments = alone.model.zero.moments()
    finally:
        alone.close()
    names = ("policy/loss", "policy/drift", "policy/grad_norm", *(("policy/kl",) if case.kl else ()))
    assert case.kl == 0 or expected[-1]["policy/kl"] > 0
    tolerance = {"abs": 1e-5, "rel": 1e-4} if case.dtype == "float32" else {"abs": 0.01, "rel": 0.03}
    for step, one in zip(metrics(folder_of(name, request))[name], expected, strict=True):
        assert [step[n] for n in names] == pytest.approx([one[n] for n in names], **tolerance)
    if case.sequence_parallel > 1:  # the gradients too: a sum over the steps
        found = np.load(folder_of(name, request) / f"{name}.npz")
        gradients = {key: values for key, values in moments.items() if key.endswith(".exp_avg")}
        scale = max(np.linalg.norm(values) for values in gradients.values())
        for key, values in gradients.items():
            assert np.linalg.norm(found[key] - values) < 1e-5 * scale, key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_divided_while_it_is_read(out: Path, family: str) -> None:
    for rank in range(2):
        result = json.loads((out / f"divided{rank}.json").read_text())[family]
        assert result["share"] == pytest.approx(0.5, abs=0.01)
        assert result["weights"]
        assert result["buffers"], "DeepSpeed has rounded the rotary frequencies"


@pytest.mark.parametrize("stage", [0, 1])
def test_all_workers_skip_a_step_that_is_not_finite_on_one(out: Path, stage: int) -> None:
    for rank in range(2):
        # The first step, not the second
        assert json.loads((out / f"skipped{rank}_stage{stage}.json").read_text()) == [1, 1]


def test_one_worker_resumes_the_checkpoint_of_two(out: Path) -> None:
    case = CASES[SAVED]
    alone = case.trainer(stage=0)
    moments, losses = [], []
    for _ in range(case.steps):
        losses.append(alone.update(samples_of(case.family))["policy/loss"])
        moments.append(alone.model.zero.moments())
    weights = alone.adapter().tensors
    alone.close()
    latest = checkpoint.latest(out)
    assert latest is not None
    tensors, _ = checkpoint.read(latest)
    check_same_training(tensors["adapter"], tensors["optimizer"], weights, moments, 0.01 * LEARNER.lr)
    resumed = case.trainer(stage=1)
    try:
        assert resumed.restore(latest) == {"rank": 0}
        assert resumed.update(samples_of(case.family))["policy/loss"] < losses[0]
    finally:
        resumed.close()


def test_no_worker_goes_on_before_all_have_released_their_memory(out: Path) -> None:
    (_, first), (second, _) = (json.loads((out / f"released{rank}.json").read_text()) for rank in (0, 1))
    assert first >= second, "the engine would wake beside the second worker's memory"
