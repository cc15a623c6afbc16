"""Named algorithms: what `rft.algorithm: NAME` sets in the parts of `rft`. Explicit keys win over these.

Constants are those of the paper, or of the code where only that has them; the source stands beside each name. `grpo` with no
algorithm named is the default of `config.Advantage` and `config.Loss`: mean and std, token mean, no KL term.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, dict[str, Any]]

GROUP = {"baseline": "mean", "scale": "std"}
INCOMPLETE = ["over_turn", "over_context", "over_images"]
"""Stop reasons of episodes that a limit cut off before the policy could answer."""

ALGORITHMS: dict[str, Preset] = {
    # DeepSeekMath, arXiv 2402.03300: every sequence counts the same, KL term k3 in the loss.
    "grpo": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "sequence", "kl": 0.04, "kl_estimator": "k3"},
    },
    # Understanding R1-Zero-like training, arXiv 2503.20783: neither std nor own length in a denominator.
    "dr_grpo": {
        "advantage": {"baseline": "mean", "scale": "none"},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "constant", "kl": 0.0},
    },
    # arXiv 2503.14476: clip-higher, token mean, groups without a signal replaced. Its overlong punishment is a reward term.
    "dapo": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {"clip_low": 0.2, "clip_high": 0.28, "aggregate": "token", "kl": 0.0},
        "filter": {"key": "accuracy"},
    },
    # Back to basics, arXiv 2402.14740: KL in the reward, REINFORCE on whole sequences (one is an action: no length in it).
    "rloo": {
        "advantage": {"baseline": "loo", "scale": "none"},
        "loss": {
            "surrogate": "reinforce",
            "aggregate": "constant",
            "constant_tokens": 1,
            "kl": 0.05,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    },
    # arXiv 2501.03262: no group at all; rewards less KL are whitened over all tokens of the batch. Its weight as in OpenRLHF.
    "reinforce_pp": {
        "advantage": {"baseline": "none", "scale": "batch_std", "batch_over": "token", "eps": 1e-8, "min_group": 1},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.01, "kl_estimator": "k1", "kl_in": "reward"},
    },
    # arXiv 2501.03262, for groups: less the group's mean, then whitened over the batch; KL by k2 in the loss.
    "reinforce_pp_baseline": {
        "advantage": {"baseline": "mean", "scale": "batch_std", "batch_over": "token", "eps": 1e-8},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.01, "kl_estimator": "k2"},
    },
    # arXiv 2310.10505: less the reward of a greedy rollout of the same question, which costs one more rollout. Loss as in EasyR1.
    "remax": {
        "advantage": {"baseline": "greedy", "scale": "none", "min_group": 1},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.0},
    },
    # arXiv 2507.18071.
    "gspo": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence", "kl": 0.0},
    },
    "gspo_token": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {"ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence", "kl": 0.0},
    },
    # MiniMax-M1, arXiv 2506.13585: no lower bound, the upper one as in EasyR1 and ScaleRL (5). Its weight *is* the importance
    # weight, so the ratio is to the policy that sampled.
    "cispo": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {
            "surrogate": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "proximal": "behaviour",
            "aggregate": "token",
            "kl": 0.0,
        },
    },
    # arXiv 2511.20347; token mean as in EasyR1.
    "sapo": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {"surrogate": "sapo", "sapo_positive": 1.0, "sapo_negative": 1.05, "aggregate": "token", "kl": 0.0},
    },
    # Pass@k training, arXiv 2508.10751: the analytic advantage.
    "pass_at_k": {
        "advantage": {"baseline": "pass_at_k", "k": 4, "scale": "std", "eps": 1e-4},
        "loss": {"clip_low": 0.2, "clip_high": 0.28, "aggregate": "token", "kl": 0.0},
    },
    # arXiv 2503.19595, `grpo_passk` of verl and EasyR1: only the best rollout of a group learns.
    "second_best": {
        "advantage": {"baseline": "second_best", "scale": "std", "eps": 1e-6},
        "loss": {"clip_low": 0.2, "clip_high": 0.3, "aggregate": "token", "kl": 0.0},
    },
    # What the systems that people come from run.
    # arXiv 2505.15966: mean only, its own clip-higher, token mean; groups without a signal are replaced by kept rollouts.
    "pixel_reasoner": {
        "advantage": {"baseline": "mean", "scale": "none"},
        "loss": {"clip_low": 0.2, "clip_high": 0.35, "aggregate": "token", "kl": 0.0},
        "filter": {"key": "accuracy", "max_oversampling": 1.0},
        "replay": {"capacity": 4096, "alpha": 1.0},
    },
    # arXiv 2503.20752, and R1-V: TRL's GRPO of early 2025.
    "reason_rft": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "sequence", "kl": 0.04, "kl_estimator": "k3"},
    },
    "r1_v": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "sequence", "kl": 0.04, "kl_estimator": "k3"},
    },
    # arXiv 2504.16084.
    "ttrl": {
        "advantage": {**GROUP, "eps": 1e-6},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.001, "kl_estimator": "k3"},
    },
    # arXiv 2509.07969: an episode that a limit cut off is neither rewarded nor punished.
    "mini_o3": {
        "advantage": {**GROUP, "eps": 1e-6, "exclude": INCOMPLETE},
        "loss": {"clip_low": 0.2, "clip_high": 0.3, "aggregate": "token", "kl": 0.0},
    },
    # Its published code: such an episode is masked in the loss but enters the group's mean and std with reward 0.
    "mini_o3_repo": {
        "advantage": {**GROUP, "eps": 1e-6, "exclude": INCOMPLETE, "excluded_count": True},
        "loss": {"clip_low": 0.2, "clip_high": 0.3, "aggregate": "token", "kl": 0.0},
    },
    # arXiv 2505.14362.
    "deepeyes": {
        "advantage": {**GROUP, "eps": 1e-6},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.0},
    },
    # arXiv 2603.25091.
    "pixelis": {
        "advantage": {**GROUP, "eps": 1e-4},
        "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.001, "kl_estimator": "k3"},
    },
}
