"""A user's own algorithm: the worked example of docs/algorithms.md end to end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rewarded import group
from tiny_policy import policy, stock, stock_log_probs
from tiny_trainer import SMALL, batch, trainer

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.jobs import rft
from pixelis.policy import sequence_parallel, train_step
from pixelis.policy.advantages import assign_advantages, batch_advantages
from pixelis.policy.lora import add_lora
from pixelis.policy.losses import policy_loss

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "docs.examples.own_algorithm:ALGORITHM"

MODULE = """
from pixelis.config import Algorithm

def halved(rewards, settings):
    return [r / 2 for r in rewards]

def with_deviation(rewards, settings):
    return [r - 1.0 for r in rewards], 2.0

def sorting(rewards, settings):
    rewards.sort()
    return [0.0 for _ in rewards]

def too_few(rewards, settings):
    return rewards[1:]

def a_tuple(rewards, settings):
    return tuple(rewards)

def not_finite(rewards, settings):
    return [float("nan")] * len(rewards)

def of_one(rewards):
    return rewards

def plain(ratio, log_probs, advantages, settings):
    return ratio * advantages

def summed(ratio, log_probs, advantages, settings):
    return (ratio * advantages).sum()

def clashing(ratio, log_probs, advantages, settings):
    return ratio * advantages, {"ratio": ratio.sum()}

NUMBER = 3
NAMES = Algorithm({"group_size": 5}, advantage="loo", surrogate="own_module:plain")
LAMBDAS = Algorithm(advantage=lambda rewards, settings: list(rewards), surrogate=lambda *of_tokens: of_tokens[0])
UNKNOWN_KEY = Algorithm({"loss": {"clip_hihg": 0.3}})
BAD_VALUE = Algorithm({"loss": {"clip_high": -1}})
TWICE = Algorithm({"advantage": {"baseline": "loo"}})
NESTED = Algorithm({"algorithm": "dapo"})
NO_SUCH_BASELINE = Algorithm(advantage="mena")
WRONG_PARAMETERS = Algorithm(surrogate=lambda ratio: ratio)
"""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> config.RftConfig:
    monkeypatch.syspath_prepend(str(ROOT))
    for name in [n for n in sys.modules if n == "docs" or n.startswith("docs.")]:
        monkeypatch.delitem(sys.modules, name)
    return config.load(None, [f"rft.algorithm={EXAMPLE}"]).rft


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_module", "broken_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)


# -- the documented example ----------------------------------------------------------------------------------


def test_the_document_shows_the_file():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/algorithms.md").read_text(), re.DOTALL)
    assert blocks == [(ROOT / "docs/examples/own_algorithm.py").read_text()]


def test_a_dry_run_prints_what_the_example_resolves_to(
    example, capsys: pytest.CaptureFixture[str], monkeypatch
):
    keys = [f"rft.algorithm={EXAMPLE}", "rft.loss.clip_high=0.3", "rft.advantage.eps=0.5"]
    monkeypatch.setattr("sys.argv", ["rft", "configs/nano/rft.yaml", *keys, "--dry-run"])
    with pytest.raises(SystemExit) as left:
        rft.main()
    assert left.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    advantage, loss = printed["rft"]["advantage"], printed["rft"]["loss"]
    assert (advantage["baseline"], advantage["scale"], advantage["eps"]) == (EXAMPLE, "none", 0.5)
    assert (loss["surrogate"], loss["proximal"], loss["clip_high"]) == (EXAMPLE, "behaviour", 0.3)
    repeated = config.parse(printed)
    assert repeated.rft.algorithm == EXAMPLE
    assert yaml.safe_load(repeated.to_yaml()) == printed


def test_the_example_assigns_the_advantages_of_its_formula(example: config.RftConfig):
    rewards = ([1.0, 0.0, 0.0, None, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0], [1.0, None])
    groups = [group(of_group) for of_group in rewards]
    metrics = assign_advantages(groups, example.advantage)
    result = [[t.advantage for t in g.trajectories] for g in groups]
    assert result[0] == pytest.approx([3.0, -1.0, -1.0, None, -1.0])
    assert result[1] == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert result[2:] == [[0.0, 0.0], [None, None]]
    assert (metrics["advantage/silent_groups"], metrics["advantage/dropped_groups"]) == (1, 1)


def test_an_update_with_the_example_is_that_of_plain_torch(example: config.RftConfig):
    samples = batch()
    model = add_lora(stock(), policy().lora, seed=0)
    tokens, total, tapered = sum(s.policy_tokens for s in samples), torch.zeros(()), 0
    for sample in samples:
        new = stock_log_probs(model, sample)
        ratio = (new.detach() - torch.from_numpy(sample.log_probs[sample.mask])).exp()
        weight = ratio.clamp(max=1.0) if sample.advantage < 0 else torch.ones_like(ratio)
        tapered += int((ratio < 1).sum()) if sample.advantage < 0 else 0
        total = total - (weight * sample.advantage * new).sum() / tokens
    with trainer(loss=example.loss, learner=SMALL) as learner:
        before = learner.adapter().sha256()
        metrics = learner.update(samples)
        assert metrics["learner/micro_batches"] > 1
        assert metrics["policy/loss"] == pytest.approx(float(total.detach()), abs=1e-5)
        assert 0 < metrics["policy/tapered"] == pytest.approx(tapered / tokens)
        assert "policy/clipped" not in metrics
        assert learner.adapter().sha256() != before


def test_a_worker_without_samples_reports_the_metrics_of_the_others(
    example: config.RftConfig, monkeypatch: pytest.MonkeyPatch
):
    with trainer(loss=example.loss) as learner:
        names = set(learner.update(batch()))
        # Another worker that adds 1 to every number: a micro-batch, a sample, a token.
        for module in (train_step, sequence_parallel):
            monkeypatch.setattr(module, "sum_over_workers", lambda values, largest=0: [v + 1 for v in values])
        alone = learner.update([])
        assert names <= set(alone)
        assert alone["policy/tapered"] == 1


# -- other ways to write one ---------------------------------------------------------------------------------


def test_functions_may_be_named_by_text(module):
    settings = config.load(None, ["rft.algorithm=own_module:NAMES"]).rft
    expected = (5, "loo", "own_module:plain")
    assert (settings.group_size, settings.advantage.baseline, settings.loss.surrogate) == expected
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, sums = policy_loss(new, new.detach(), torch.tensor([1.0, 3.0]), torch.ones(2), settings.loss)
    assert float(loss.detach()) == -4.0
    assert "clipped" not in sums


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [[0.5, 0.0, None], [0.5, 0.5]]),
        ("std", [[0.5 / 0.5**0.5, 0.0, None], [0.0, 0.0]]),
        ("mad", [[1.0, 0.0, None], [0.0, 0.0]]),
    ],
)
def test_scales_go_with_an_own_advantage(module, scale: str, expected: list):
    settings = config.AdvantageConfig(baseline="own_module:halved", scale=scale, eps=1e-12)
    result = batch_advantages([[1.0, 0.0, None], [1.0, 1.0]], settings)
    for row, want in zip(result, expected, strict=True):
        assert row == pytest.approx(want)


def test_std_divides_by_a_user_defined_deviation(module):
    settings = config.AdvantageConfig(baseline="own_module:with_deviation", eps=1e-12)
    assert batch_advantages([[3.0, 1.0]], settings) == [pytest.approx([1.0, 0.0])]


# -- wrong ones ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("algorithm=nowhere_at_all:ALGORITHM", "rft.algorithm: nowhere_at_all:ALGORITHM cannot be imported: ModuleNotFound"),
        ("algorithm=broken_module:ALGORITHM", "rft.algorithm: broken_module:ALGORITHM cannot be imported: ZeroDivision"),
        ("algorithm=own_module:NAMSE", "did you mean `own_module:NAMES`?"),
        ("algorithm=own_module:2", "`own_module:2` is not of the form package.module:Name"),
        ("algorithm=own_module.NAMES", "or your own as package.module:NAME"),
        ("algorithm=own_module:halved", "own_module:halved is not an Algorithm but function"),
        ("algorithm=own_module:UNKNOWN_KEY", "unknown configuration key `rft.loss.clip_hihg` (did you mean"),
        ("algorithm=own_module:BAD_VALUE", "rft.loss.clip_high: Input should be greater than 0"),
        ("algorithm=own_module:TWICE", "set `advantage=` of the Algorithm instead"),
        ("algorithm=own_module:NESTED", "names another algorithm"),
        ("algorithm=own_module:NO_SUCH_BASELINE", "no baseline `mena` (did you mean `mean`?)"),
        ("algorithm=own_module:WRONG_PARAMETERS", "does not accept (ratio, log_probs, advantages, settings)"),
        ("advantage.baseline=own_module:of_one", "own_module:of_one does not accept (rewards, settings)"),
        ("advantage.baseline=own_module:NUMBER", "own_module:NUMBER is not a function but int"),
        ("loss.surrogate=own_module:missing", "own_module has no `missing`"),
        ("loss.surrogate=own_module:halved", "does not accept (ratio, log_probs, advantages, settings)"),
    ],
)  # fmt: skip
def test_wrong_function_names_are_reported_before_anything_starts(module, override: str, told: str):
    with pytest.raises(BadConfig) as caught:
        config.load(None, [f"rft.{override}"])
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["too_few", "a_tuple", "not_finite"])
def test_advantages_that_do_not_fit_the_rewards_are_refused(module, name: str):
    with pytest.raises(BadConfig, match=f"own_module:{name} returned .* for the rewards"):
        batch_advantages([[1.0, 0.0, 0.5]], config.AdvantageConfig(baseline=f"own_module:{name}"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("summed", "returned .* for 2 tokens"), ("clashing", "the metric ratio exists already")],
)
def test_gains_that_do_not_fit_the_tokens_are_refused(module, name: str, message: str):
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    with pytest.raises(BadConfig, match=message):
        policy_loss(
            new, new.detach(), torch.ones(2), torch.ones(2), config.LossConfig(surrogate=f"own_module:{name}")
        )
