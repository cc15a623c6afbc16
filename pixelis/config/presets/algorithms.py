"""Named algorithms: what `rft.algorithm: NAME` sets in the sections of `rft`. Explicit keys win over these.

An algorithm is one entry of ALGORITHMS: settings, a function for the advantage, and a function for the surrogate of the loss. A
user's own algorithm is an `Algorithm` in a module of theirs, named `package.module:NAME`. The configuration names functions by
text, and they are imported where they are used: it stays plain data and loads no torch.

Constants are those of the paper, or of the code where only that has them; the source stands beside each name. `grpo` with no
algorithm named is the default of `config.Advantage` and `config.Loss`: mean and std, token mean, no KL term.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pixelis.config.base import check_name, merge
from pixelis.config.references import load_reference
from pixelis.errors import BadConfig


@dataclass(frozen=True)
class Algorithm:
    """What one name under `rft.algorithm` stands for.

    settings: keys of `rft`, nested as in the configuration file. advantage: name in BASELINES, `package.module:function`, or a
    function `(rewards, settings)`. surrogate: name in SURROGATES, `package.module:function`, or a function
    `(ratio, log_probs, advantages, settings)`. What the functions receive and return: docs/algorithms.md.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    advantage: str | Callable[..., Any] = "mean"
    surrogate: str | Callable[..., Any] = "clip"


BASELINES = {
    "mean": "pixelis.policy.advantages:group_mean_baseline",
    "loo": "pixelis.policy.advantages:leave_one_out_baseline",
    "greedy": "pixelis.policy.advantages:no_baseline",
    "batch": "pixelis.policy.advantages:no_baseline",
    "none": "pixelis.policy.advantages:no_baseline",
    "pass_at_k": "pixelis.policy.advantages:pass_at_k",
    "second_best": "pixelis.policy.advantages:second_best",
}
"""Advantage functions by their name under `rft.advantage.baseline`; what `greedy` and `batch` subtract is not of the group."""

GROUP_BASELINES = ("mean", "loo", "pass_at_k", "second_best")
"""Baselines that compare the rollouts of a group: equal rewards have an advantage of exactly 0."""

SURROGATES = {
    "clip": "pixelis.policy.losses:clip_surrogate",
    "cispo": "pixelis.policy.losses:cispo_surrogate",
    "sapo": "pixelis.policy.losses:sapo_surrogate",
    "reinforce": "pixelis.policy.losses:reinforce_surrogate",
}
"""Surrogate functions by their name under `rft.loss.surrogate`."""

INCOMPLETE = ["over_turn", "over_context", "over_images"]
"""Stop reasons of episodes that a limit cut off before the policy could answer."""

ALGORITHMS: dict[str, Algorithm] = {
    # DeepSeekMath, arXiv 2402.03300: every sequence counts the same, KL term k3 in the loss.
    "grpo": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "sequence", "kl": 0.04, "kl_estimator": "k3"},
        }
    ),
    # Understanding R1-Zero-like training, arXiv 2503.20783: neither std nor own length in a denominator.
    "dr_grpo": Algorithm(
        settings={
            "advantage": {"scale": "none"},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "constant", "kl": 0.0},
        }
    ),
    # arXiv 2503.14476: clip-higher, token mean, groups without a signal replaced. Its overlong punishment is a reward term.
    "dapo": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {"clip_low": 0.2, "clip_high": 0.28, "aggregate": "token", "kl": 0.0},
            "filter": {"key": "accuracy"},
        }
    ),
    # Back to basics, arXiv 2402.14740: KL in the reward, REINFORCE on whole sequences (one is an action: no length in it).
    "rloo": Algorithm(
        advantage="loo",
        surrogate="reinforce",
        settings={
            "advantage": {"scale": "none"},
            "loss": {
                "aggregate": "constant",
                "constant_tokens": 1,
                "kl": 0.05,
                "kl_estimator": "k1",
                "kl_in": "reward",
            },
        },
    ),
    # arXiv 2501.03262: no group at all; rewards less KL are whitened over all tokens of the batch. Its weight as in OpenRLHF.
    "reinforce_pp": Algorithm(
        advantage="none",
        settings={
            "advantage": {"scale": "batch_std", "batch_over": "token", "eps": 1e-8, "min_group": 1},
            "loss": {
                "clip_low": 0.2,
                "clip_high": 0.2,
                "aggregate": "token",
                "kl": 0.01,
                "kl_estimator": "k1",
                "kl_in": "reward",
            },
        },
    ),
    # arXiv 2501.03262, for groups: less the group's mean, then whitened over the batch; KL by k2 in the loss.
    "reinforce_pp_baseline": Algorithm(
        settings={
            "advantage": {"scale": "batch_std", "batch_over": "token", "eps": 1e-8},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.01, "kl_estimator": "k2"},
        }
    ),
    # arXiv 2310.10505: less the reward of a greedy rollout of the same question, which costs one more rollout. Loss as in EasyR1.
    "remax": Algorithm(
        advantage="greedy",
        settings={
            "advantage": {"scale": "none", "min_group": 1},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.0},
        },
    ),
    # arXiv 2507.18071.
    "gspo": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence", "kl": 0.0},
        }
    ),
    "gspo_token": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {"ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence", "kl": 0.0},
        }
    ),
    # MiniMax-M1, arXiv 2506.13585: no lower bound, the upper one as in EasyR1 and ScaleRL (5). Its weight *is* the importance
    # weight, so the ratio is to the policy that sampled.
    "cispo": Algorithm(
        surrogate="cispo",
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {
                "clip_low": 1.0,
                "clip_high": 4.0,
                "proximal": "behaviour",
                "aggregate": "token",
                "kl": 0.0,
            },
        },
    ),
    # arXiv 2511.20347; token mean as in EasyR1.
    "sapo": Algorithm(
        surrogate="sapo",
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {"sapo_positive": 1.0, "sapo_negative": 1.05, "aggregate": "token", "kl": 0.0},
        },
    ),
    # Pass@k training, arXiv 2508.10751: the analytic advantage.
    "pass_at_k": Algorithm(
        advantage="pass_at_k",
        settings={
            "advantage": {"k": 4, "scale": "std", "eps": 1e-4},
            "loss": {"clip_low": 0.2, "clip_high": 0.28, "aggregate": "token", "kl": 0.0},
        },
    ),
    # arXiv 2503.19595, `grpo_passk` of verl and EasyR1: only the best rollout of a group learns.
    "second_best": Algorithm(
        advantage="second_best",
        settings={
            "advantage": {"scale": "std", "eps": 1e-6},
            "loss": {"clip_low": 0.2, "clip_high": 0.3, "aggregate": "token", "kl": 0.0},
        },
    ),
    # What the systems that people come from run.
    # arXiv 2505.15966: mean only, its own clip-higher, token mean; groups without a signal are replaced by kept rollouts.
    "pixel_reasoner": Algorithm(
        settings={
            "advantage": {"scale": "none"},
            "loss": {"clip_low": 0.2, "clip_high": 0.35, "aggregate": "token", "kl": 0.0},
            "filter": {"key": "accuracy", "max_oversampling": 1.0},
            "replay": {"capacity": 4096, "alpha": 1.0},
        }
    ),
    # arXiv 2503.20752, and R1-V: TRL's GRPO of early 2025.
    "reason_rft": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "sequence", "kl": 0.04, "kl_estimator": "k3"},
        }
    ),
    "r1_v": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "sequence", "kl": 0.04, "kl_estimator": "k3"},
        }
    ),
    # arXiv 2504.16084.
    "ttrl": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-6},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.001, "kl_estimator": "k3"},
        }
    ),
    # arXiv 2509.07969: an episode that a limit cut off is neither rewarded nor punished.
    "mini_o3": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-6, "exclude": INCOMPLETE},
            "loss": {"clip_low": 0.2, "clip_high": 0.3, "aggregate": "token", "kl": 0.0},
        }
    ),
    # Its published code: such an episode is masked in the loss but enters the group's mean and std with reward 0.
    "mini_o3_repo": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-6, "exclude": INCOMPLETE, "excluded_count": True},
            "loss": {"clip_low": 0.2, "clip_high": 0.3, "aggregate": "token", "kl": 0.0},
        }
    ),
    # arXiv 2505.14362.
    "deepeyes": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-6},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.0},
        }
    ),
    # arXiv 2603.25091.
    "pixelis": Algorithm(
        settings={
            "advantage": {"scale": "std", "eps": 1e-4},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token", "kl": 0.001, "kl_estimator": "k3"},
        }
    ),
}


FUNCTIONS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "advantage": ("rft.advantage.baseline", BASELINES, ("rewards", "settings")),
    "surrogate": ("rft.loss.surrogate", SURROGATES, ("ratio", "log_probs", "advantages", "settings")),
}
"""Of each function of an algorithm: the key that names it, the names known, and its parameters."""


def algorithm_settings(name: str) -> dict[str, Any]:
    """What the algorithm `name`, or the user's own that `package.module:NAME` refers to, sets in `rft`.

    A function that an own algorithm holds is named by the reference to the algorithm. Raises ValueError for an unknown name;
    BadConfig for a reference that cannot be imported or names no Algorithm, and for settings that belong elsewhere.
    """
    if ":" in name:
        algorithm = load_reference(name, "rft.algorithm")
        if not isinstance(algorithm, Algorithm):
            raise BadConfig(
                f"rft.algorithm: {name} is no Algorithm but {type(algorithm).__name__}",
                fix="make it a pixelis.config.Algorithm(settings=..., advantage=..., surrogate=...), see docs/algorithms.md",
            )
    else:
        check_name("algorithm", name, ALGORITHMS, ", or your own as package.module:NAME")
        algorithm = ALGORITHMS[name]
    settings = algorithm.settings
    if not isinstance(settings, dict) or not all(
        isinstance(settings.get(section, {}), dict) for section in ("advantage", "loss")
    ):
        raise BadConfig(f"rft.algorithm: the settings of {name} are no nested dict", fix='write {"loss": {"clip_high": 0.3}}')
    if "algorithm" in settings:
        raise BadConfig(f"rft.algorithm: {name} names another algorithm", fix="copy the settings with dataclasses.replace")
    for part, (path, *_) in FUNCTIONS.items():
        _, section, key = path.split(".")
        if key in settings.get(section, {}):
            raise BadConfig(f"rft.algorithm: {name} sets {path} in its settings", fix=f"set `{part}=` of the Algorithm instead")
        function = getattr(algorithm, part)
        settings = merge(settings, {section: {key: function if isinstance(function, str) else name}})
    return settings


def check_function(part: Literal["advantage", "surrogate"], name: str) -> None:
    """Check the name of a function; only a user's own is imported. Raises ValueError for an unknown name, BadConfig as below."""
    key, known, _ = FUNCTIONS[part]
    if ":" in name:
        find_function(part, name)
    else:
        check_name(key.rsplit(".", 1)[-1], name, known, ", or your own as package.module:function")


def find_function(part: Literal["advantage", "surrogate"], name: str) -> Callable[..., Any]:
    """Import the function that `rft.advantage.baseline` or `rft.loss.surrogate` names.

    name: a name in BASELINES or SURROGATES, `package.module:function`, or the reference to an Algorithm with a function of its
    own. Raises BadConfig when it cannot be imported, or is no function of the parameters in FUNCTIONS.
    """
    key, known, parameters = FUNCTIONS[part]
    function = load_reference(known.get(name, name), key)
    if isinstance(function, Algorithm):
        function = getattr(function, part)
    fix = f"name a function of ({', '.join(parameters)})"
    if not callable(function):
        raise BadConfig(f"{key}: {name} is no function but {type(function).__name__}", fix=fix)
    if name not in known:
        try:
            inspect.signature(function).bind(*parameters)
        except TypeError as error:
            raise BadConfig(f"{key}: {name} does not take ({', '.join(parameters)}): {error}", fix=fix) from None
        except ValueError:  # a callable without a signature, compiled for example
            pass
    return function
