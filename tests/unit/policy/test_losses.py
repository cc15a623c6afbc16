"""The losses against formulas worked out by hand, and the LM head in pieces against the whole."""

from __future__ import annotations

import math

import pytest
import torch

from pixelis import config
from pixelis.policy.log_probs import ReferenceStates, banned_mask, project
from pixelis.policy.losses import DIVERGENCES, entropy_bonus, policy_loss

ON = config.LossConfig()


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_the_gradients_of_the_divergence_estimators():
    """Summed over a whole vocabulary: k2 follows KL(new || ref), k3 KL(ref || new), k1 nothing at all."""
    torch.manual_seed(0)
    logits, reference = torch.randn(11, requires_grad=True), torch.log_softmax(torch.randn(11), -1)
    p = torch.softmax(logits, -1)
    reverse = (p * (p.log() - reference)).sum()
    forward = (reference.exp() * (reference - p.log())).sum()
    expected = {"k1": torch.zeros(11)}
    expected |= {
        k: torch.autograd.grad(v, logits, retain_graph=True)[0]
        for k, v in {"k2": reverse, "k3": forward}.items()
    }
    expected["abs"] = torch.autograd.grad(
        (p.detach() * (p.log() - reference).abs()).sum(), logits, retain_graph=True
    )[0]
    for name, estimator in DIVERGENCES.items():
        mean = (p.detach() * estimator(torch.log_softmax(logits, -1), reference)).sum()
        assert torch.allclose(torch.autograd.grad(mean, logits)[0], expected[name], atol=1e-6)
        if name in ("k1", "k3"):
            assert float(mean.detach()) == pytest.approx(float(reverse.detach()), abs=1e-6)


def test_the_entropy_bonus_has_the_gradient_of_the_entropy_in_expectation():
    torch.manual_seed(0)
    logits = torch.randn(11, requires_grad=True)
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum()
    expected = torch.autograd.grad(entropy, logits, retain_graph=True)[0]
    drawn = (log_p.exp().detach() * entropy_bonus(log_p, entropy.expand(11))).sum()
    assert float(drawn.detach()) == pytest.approx(float(entropy.detach()), abs=1e-6)
    assert torch.allclose(torch.autograd.grad(drawn, logits)[0], expected, atol=1e-6)


def test_to_the_behaviour_the_ratio_takes_over_from_the_importance_weights():
    new = tensor(-1.0, -1.0)
    behaviour = new - tensor(math.log(1.5), math.log(0.5))
    setting = config.LossConfig(proximal="behaviour", clip_high=0.2, importance_cap=1.1)
    loss, sums = policy_loss(new, behaviour, tensor(1.0, 1.0), torch.ones(2), setting)
    assert float(loss) == pytest.approx(-1.2 - 0.5)
    assert float(sums["importance"]) == 2
    assert float(sums["ratio_max"]) == pytest.approx(1.5)
    assert float(sums["ratio_inverse_max"]) == pytest.approx(2.0)


def test_far_off_log_probs_give_finite_numbers():
    new = tensor(-1.0, -500.0).requires_grad_()
    loss, _ = policy_loss(
        new,
        tensor(-400.0, -1.0),
        tensor(1.0, -1.0),
        torch.ones(2),
        config.LossConfig(kl=0.1),
        reference=tensor(-1, 0.0),
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_lm_head_in_pieces_equals_the_whole_with_its_gradient(smoothing: float):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False)
    hidden, targets = torch.randn(33, 8, requires_grad=True), torch.randint(10, 50, (33,))
    banned = banned_mask((0, 1, 2), 50)
    whole, entropy = project(head, hidden, targets, banned, 0.8, smoothing=smoothing)
    pieces, entropy_pieces = project(
        head, hidden, targets, banned, 0.8, chunk_values=200, smoothing=smoothing
    )
    a = torch.autograd.grad(whole.square().sum(), (hidden, head.weight))
    b = torch.autograd.grad(pieces.square().sum(), (hidden, head.weight))
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))
    head.requires_grad_(False)
    frozen, entropy_frozen = project(
        head, hidden, targets, banned, 0.8, chunk_values=200, smoothing=smoothing
    )
    assert torch.allclose(torch.autograd.grad(frozen.square().sum(), hidden)[0], a[0], atol=1e-5)
    with torch.no_grad():
        unlearned, _ = project(head, hidden, targets, banned, 0.8, chunk_values=200, smoothing=smoothing)
    assert all(torch.allclose(whole, part, atol=1e-6) for part in (pieces, frozen, unlearned))
    assert all(torch.allclose(entropy, part, atol=1e-6) for part in (entropy_pieces, entropy_frozen))
    logits = (head(hidden) / 0.8)[:, 3:]
    probabilities = torch.softmax(logits, -1)
    assert torch.allclose(entropy, -(probabilities * probabilities.log()).sum(-1), atol=1e-5)
    chosen = probabilities.gather(1, targets[:, None] - 3)[:, 0].log()
    expected = (1 - smoothing) * chosen + smoothing * probabilities.log().mean(-1)
    assert torch.allclose(whole, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [2**24, 200])
@pytest.mark.parametrize("kind", ["frozen", "trained", "adapted"])
def test_the_full_divergence_is_that_of_torch_distributions(kind: str, chunk: int):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False).requires_grad_(kind == "trained")
    other = torch.randn(50, 8) if kind == "trained" else head.weight.detach()
    if kind == "adapted":
        from peft import LoraConfig, inject_adapter_in_model

        from pixelis.policy.lora_linear import LoraLinear

        settings = LoraConfig(
            r=2, lora_alpha=4, target_modules=["0"], lora_dropout=0.3, init_lora_weights=False
        )
        settings._register_custom_module({torch.nn.Linear: LoraLinear})
        head = inject_adapter_in_model(settings, torch.nn.Sequential(head))[0].eval()
    hidden = torch.randn(33, 8, requires_grad=True)
    reference = torch.randn(33, 8)
    targets = torch.randint(10, 50, (33,))
    parameters = [p for p in head.parameters() if p.requires_grad]
    values = [other] if kind == "trained" else [torch.randn_like(p) for p in parameters]
    if kind == "adapted":
        other = other + 2.0 * values[1] @ values[0]
    states = ReferenceStates(reference, values)
    own = [p.detach().clone() for p in parameters]
    log_probs, _, divergence = project(
        head, hidden, targets, banned_mask((0, 1, 2), 50), 0.8, chunk, reference=states
    )
    assert all(torch.equal(p, value) for p, value in zip(parameters, own, strict=True))
    p, q = (
        torch.distributions.Categorical(logits=logits[:, 3:] / 0.8)
        for logits in (head(hidden), reference @ other.t())
    )
    expected = torch.distributions.kl_divergence(p, q)
    assert torch.allclose(divergence, expected, atol=1e-5)
    inputs = (hidden, *parameters)
    weights = torch.randn(33)
    # With the log-probabilities, whose gradient shares the pass.
    got = torch.autograd.grad((weights * divergence).sum() + log_probs.square().sum(), inputs)
    wanted = torch.autograd.grad((weights * expected).sum() + p.log_prob(targets - 3).square().sum(), inputs)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, wanted, strict=True))
