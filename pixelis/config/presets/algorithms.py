"""Named algorithms: the settings of `rft` that `rft.algorithm: NAME` stands for. Explicit keys override them.

Constants are from the paper, or from the code where the paper has none; each entry names its source.
Functions are named by text and imported where they are used, so that the configuration loads no torch.
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
    """Settings of `rft`, nested as in a file, and functions of an algorithm; docs/algorithms.md specifies
    these.

    advantage: name in BASELINES, `package.module:function`, or a function `(rewards, settings)`. surrogate:
    the same with SURROGATES and `(ratio, log_probs, advantages, settings)`.
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
    "critic": "pixelis.policy.advantages:no_baseline",
    "pass_at_k": "pixelis.policy.advantages:pass_at_k",
    "second_best": "pixelis.policy.advantages:second_best",
}
"""`rft.advantage.baseline` -> function; `greedy`, `batch` and `critic` subtract their baseline elsewhere."""

GROUP_BASELINES = ("mean", "loo", "pass_at_k", "second_best")
"""Baselines that compare the rollouts of a group: equal rewards give an advantage of exactly 0."""

SURROGATES = {
    "clip": "pixelis.policy.losses:clip_surrogate",
    "cispo": "pixelis.policy.losses:cispo_surrogate",
    "sapo": "pixelis.policy.losses:sapo_surrogate",
    "reinforce": "pixelis.policy.losses:reinforce_surrogate",
}
"""Value of `rft.loss.surrogate` -> surrogate function."""

INCOMPLETE = ["over_turn", "over_context", "over_images"]
"""Stop reasons of episodes that a limit cut off before the policy could answer."""

WHITENED: dict[str, Any] = {"scale": "batch_std", "batch_over": "token", "eps": 1e-8}
KL_IN_REWARD: dict[str, Any] = {"kl_estimator": "k1", "kl_in": "reward"}
GSPO: dict[str, Any] = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence"}

ALGORITHMS: dict[str, Algorithm] = {
    # DeepSeekMath, arXiv 2402.03300: equal weight for every sequence, KL term k3 in the loss.
    "grpo": Algorithm({"loss": {"aggregate": "sequence", "kl": 0.04}}),
    # Understanding R1-Zero-like training, arXiv 2503.20783: no division by the std or by the length of a
    # sequence.
    "dr_grpo": Algorithm({"advantage": {"scale": "none"}, "loss": {"aggregate": "constant"}}),
    # arXiv 2503.14476: clip-higher, token mean, replacement of groups without a signal. Its overlong penalty
    # is a reward term.
    "dapo": Algorithm({"loss": {"clip_high": 0.28}, "filter": {"key": "accuracy"}}),
    # Back to basics, arXiv 2402.14740: KL in the reward, REINFORCE with a whole sequence as one action.
    "rloo": Algorithm(
        {
            "advantage": {"scale": "none"},
            "loss": {"aggregate": "constant", "constant_tokens": 1, **KL_IN_REWARD, "kl": 0.05},
        },
        advantage="loo",
        surrogate="reinforce",
    ),
    # arXiv 1707.06347 with GAE, arXiv 1506.02438; for language models arXiv 2203.02155: the KL penalty of
    # each token is in its reward. Advantages are whitened over the tokens of the batch, KL weight and value
    # clip as in OpenRLHF.
    "ppo": Algorithm(
        {
            "advantage": {**WHITENED, "min_group": 1, "gamma": 1.0, "lam": 0.95},
            "loss": {**KL_IN_REWARD, "kl": 0.01},
            "critic": {"clip": 0.2},
        },
        advantage="critic",
    ),
    # arXiv 2501.03262: no groups; each token's reward minus KL, whitened over all tokens of the batch. KL
    # weight as in OpenRLHF.
    "reinforce_pp": Algorithm(
        {"advantage": {**WHITENED, "min_group": 1}, "loss": {**KL_IN_REWARD, "kl": 0.01}}, advantage="none"
    ),
    # arXiv 2501.03262, for groups: minus the mean of the group, then whitened over the batch; KL term k2 in
    # the loss.
    "reinforce_pp_baseline": Algorithm({"advantage": WHITENED, "loss": {"kl": 0.01, "kl_estimator": "k2"}}),
    # arXiv 2310.10505: minus the reward of an additional greedy rollout of the question. Loss as in EasyR1.
    "remax": Algorithm({"advantage": {"scale": "none", "min_group": 1}}, advantage="greedy"),
    # arXiv 2507.18071.
    "gspo": Algorithm({"loss": {**GSPO, "ratio": "sequence"}}),
    "gspo_token": Algorithm({"loss": {**GSPO, "ratio": "sequence_token"}}),
    # MiniMax-M1, arXiv 2506.13585: no lower bound, the upper one as in EasyR1 and ScaleRL (5). The ratio is
    # the importance weight, so it is relative to the policy that sampled.
    "cispo": Algorithm(
        {"loss": {"clip_low": 1.0, "clip_high": 4.0, "proximal": "behaviour"}}, surrogate="cispo"
    ),
    # arXiv 2511.20347; token mean as in EasyR1.
    "sapo": Algorithm(surrogate="sapo"),
    # Pass@k training, arXiv 2508.10751: the analytic advantage.
    "pass_at_k": Algorithm({"advantage": {"k": 4}, "loss": {"clip_high": 0.28}}, advantage="pass_at_k"),
    # arXiv 2503.19595, `grpo_passk` of verl and EasyR1: only the best rollout of a group is trained on.
    "second_best": Algorithm(
        {"advantage": {"eps": 1e-6}, "loss": {"clip_high": 0.3}}, advantage="second_best"
    ),
    # Settings of other systems. arXiv 2505.15966: mean only, its own clip-higher, token mean; kept rollouts
    # replace groups without a signal.
    "pixel_reasoner": Algorithm(
        {
            "advantage": {"scale": "none"},
            "loss": {"clip_high": 0.35},
            "filter": {"key": "accuracy", "max_oversampling": 1.0},
            "replay": {"capacity": 4096, "alpha": 1.0},
        }
    ),
    # arXiv 2503.20752, and R1-V: TRL's GRPO of early 2025.
    "reason_rft": Algorithm({"loss": {"aggregate": "sequence", "kl": 0.04}}),
    "r1_v": Algorithm({"loss": {"aggregate": "sequence", "kl": 0.04}}),
    # arXiv 2504.16084.
    "ttrl": Algorithm({"advantage": {"eps": 1e-6}, "loss": {"kl": 0.001}}),
    # arXiv 2509.07969: episodes that a limit cut off are masked in the loss. Its text leaves open whether
    # they count in the statistics of their group; its code counts them with reward 0. Groups of equal rewards
    # or with a failed judge call are replaced.
    "mini_o3": Algorithm(
        {
            "advantage": {"eps": 1e-6, "exclude": INCOMPLETE, "count_excluded": True},
            "loss": {"clip_high": 0.3},
            "filter": {"key": "reward", "complete": True},
        }
    ),
    # arXiv 2505.14362.
    "deepeyes": Algorithm({"advantage": {"eps": 1e-6}}),
    # arXiv 2505.15436, settings of its code.
    "chain_of_focus": Algorithm({"advantage": {"eps": 1e-6}, "loss": {"kl": 0.001}}),
    # PyVision-RL, arXiv 2602.20739, settings of its code: mean only, groups of equal rewards are replaced,
    # episodes without room for tokens or images count in the statistics of their group and are not learnt.
    "pyvision_rl": Algorithm(
        {
            "advantage": {
                "scale": "none",
                "exclude": ["over_context", "over_images"],
                "count_excluded": True,
            },
            "filter": {"key": "reward"},
        }
    ),
    # arXiv 2603.25091: half of a batch may be replayed from the rollouts with the largest advantages.
    "pixelis": Algorithm(
        {
            "loss": {"kl": 0.001},
            "replay": {"capacity": 100, "min_advantage": 0.01, "quantile": 0.7, "share": 0.5},
        }
    ),
}
"""Without a key here it has its default: GRPO with mean and std, eps 1e-4, clip 0.2, token mean, no KL term.
"""


FUNCTIONS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "advantage": ("rft.advantage.baseline", BASELINES, ("rewards", "settings")),
    "surrogate": ("rft.loss.surrogate", SURROGATES, ("ratio", "log_probs", "advantages", "settings")),
}
"""Function of an algorithm -> its configuration key, its known names and its parameters."""


def algorithm_settings(name: str) -> dict[str, Any]:
    """The settings of `rft` of the algorithm `name`, or of the user-defined one `package.module:NAME`.

    A function object of a user-defined algorithm is named by the reference to the algorithm. Raises
    ValueError for an unknown name, BadConfig for a faulty Algorithm.
    """
    if ":" in name:
        algorithm = load_reference(name, "rft.algorithm")
        if not isinstance(algorithm, Algorithm):
            raise BadConfig(
                f"rft.algorithm: {name} is not an Algorithm but {type(algorithm).__name__}",
                fix="make it a pixelis.config.Algorithm, see docs/algorithms.md",
            )
    else:
        check_name("algorithm", name, ALGORITHMS, ", or your own as package.module:NAME")
        algorithm = ALGORITHMS[name]
    settings = algorithm.settings
    if "algorithm" in settings:
        raise BadConfig(
            f"rft.algorithm: {name} names another algorithm", fix="copy its settings with dataclasses.replace"
        )
    for part, (path, *_) in FUNCTIONS.items():
        _, section, key = path.split(".")
        if key in settings.get(section, {}):
            raise BadConfig(
                f"rft.algorithm: {name} sets {path} in its settings",
                fix=f"set `{part}=` of the Algorithm instead",
            )
        function = getattr(algorithm, part)
        settings = merge(settings, {section: {key: function if isinstance(function, str) else name}})
    return settings


def check_function(part: Literal["advantage", "surrogate"], name: str) -> None:
    """Check the name of a function; only a user-defined one is imported. ValueError, or BadConfig."""
    key, known, _ = FUNCTIONS[part]
    if ":" in name:
        find_function(part, name)
    else:
        check_name(key.rsplit(".", 1)[-1], name, known, ", or your own as package.module:function")


def find_function(part: Literal["advantage", "surrogate"], name: str) -> Callable[..., Any]:
    """Import the function of `rft.advantage.baseline` or `rft.loss.surrogate`.

    name: in BASELINES or SURROGATES, `package.module:function`, or the reference to an Algorithm with its own
    function. Raises BadConfig when it cannot be imported or does not accept the parameters in FUNCTIONS.
    """
    key, known, parameters = FUNCTIONS[part]
    function = load_reference(known.get(name, name), key)
    if isinstance(function, Algorithm):
        function = getattr(function, part)
    fix = f"name a function of ({', '.join(parameters)})"
    if not callable(function):
        raise BadConfig(f"{key}: {name} is not a function but {type(function).__name__}", fix=fix)
    if name not in known:
        try:
            inspect.signature(function).bind(*parameters)
        except TypeError as error:
            raise BadConfig(
                f"{key}: {name} does not accept ({', '.join(parameters)}): {error}", fix=fix
            ) from None
        except ValueError:  # a callable without a signature, such as a compiled one
            pass
    return function
