"""Named rewards: the settings of `rewards` that `rewards.preset: NAME` stands for. Explicit keys override
them.

`paper` follows a publication, `repo` its code.
"""

from __future__ import annotations

from typing import Any

from pixelis.config.base import check_name

PIXELIS: dict[str, Any] = {
    "weights": {"accuracy": 1.0, "curiosity_dynamics": 0.05, "coherence": 0.1, "tool_misuse": 1.0},
    "clip": 10.0,
    "workers": 1,  # it keeps running statistics
}
NORMALISED = {"terms": ["accuracy", "curiosity_dynamics", "coherence"]}


def _pixelis(curiosity: float, coherence: float, **more: Any) -> dict[str, Any]:
    weights = {**PIXELIS["weights"], "curiosity_dynamics": curiosity, "coherence": coherence}
    terms = [name for name in NORMALISED["terms"] if weights[name]]
    return {**PIXELIS, "weights": weights, "normalise": {"terms": terms}, **more}


def _as_system(scorer: str) -> dict[str, Any]:
    return {"extractor": "reply", "scorer": scorer}


_REASON_RFT: dict[str, Any] = {
    "weights": {"accuracy": 1.0, "format": 1.0},
    "format": "think_answer",
    "extractor": "lenient",
}

REWARD_PRESETS: dict[str, dict[str, Any]] = {
    # Pixel-Reasoner, arXiv 2505.15966: a bonus while the group rarely calls operations, a cost for each call
    # after the first.
    "pr-paper": {
        "weights": {"accuracy": 1.0, "curiosity_bonus": 1.0, "efficiency": 1.0},
        "extractor": "lenient",
        "curiosity": {
            "form": "paper",
            "target": 0.3,
            "alpha": 0.5,
            "free_calls": 1,
            "beta": 0.05,
        },
    },
    "pr-repo": {
        "weights": {"accuracy": 1.0, "unrepaired_error_zero": 1.0, "curiosity_bonus": 1.0, "efficiency": 1.0},
        **_as_system("pixel_reasoner_repo"),
        "curiosity": {"form": "repo", "target": 0.3, "free_calls": 1, "beta": 0.05},
    },
    # Reason-RFT, arXiv 2503.20752; its options add the step markers and the length reward. Counts are equal
    # as text. Geometry has a tolerance in the paper and none in the code.
    "rr-count": {**_REASON_RFT, "scorers": {"math": "exact", "count": "exact"}},
    "rr-geo": {**_REASON_RFT, "scorers": {"math": "numeric_band"}},
    "rr-repo": {**_REASON_RFT, **_as_system("reason_rft_repo")},
    "rr-caption": {**_REASON_RFT, "format": "caption", "scorers": {"func_seq": "func_seq_full"}},
    "rr-trance": _REASON_RFT,
    "rr-long": {
        "weights": {"accuracy": 1.0, "format": 1.0, "step_markers": 1.0, "length": 0.05},
        "format": "think_answer",
        "extractor": "lenient",
        "length_start": 800,
    },
    # TTRL, arXiv 2504.16084: no reference answers.
    "ttrl": {
        "weights": {"accuracy": 0.0, "majority_vote": 1.0},
        "vote": {"min_share": 0.0, "tie": "first"},
        "extractor": "lenient",
    },
    # Mini-o3, arXiv 2509.07969: for `rft.algorithm: mini_o3`, which excludes episodes that a limit cut off.
    "mini-o3": {"weights": {"accuracy": 1.0}, "format": "turns", "judge": {"required": True}},
    "mini-o3-default": {
        "weights": {"accuracy": 1.0, "format": 1.0, "tool_penalty": 0.1},
        "format": "turns",
        "judge": {"required": True},
    },
    "r1v": _REASON_RFT,
    "r1v-repo": {**_REASON_RFT, **_as_system("r1_v_repo")},
    # DeepEyes, arXiv 2505.14362: a bonus for tools only with a correct answer.
    "deepeyes-paper": {
        "weights": {"accuracy": 1.0, "format": 1.0, "tool_if_correct": 1.0},
        "format": "balanced",
        "tool_above": 0.0,
        "judge": {"required": True},
    },
    "deepeyes-repo": {
        "weights": {"accuracy": 0.8, "format": 0.2, "tool_if_correct": 1.2},
        "format": "balanced",
        "tool_above": 0.5,
        "max_answer_chars": 1000,
        "tasks": {"math": {"weights": {"accuracy": 1.2, "format": 0.4}, "format": "boxed_once"}},
        "judge": {"required": True},
    },
    # PyVision-RL, arXiv 2602.20739, and its code: 0.1 for each tool call, only with a correct answer.
    "pyvision-rl": {
        "weights": {"accuracy": 1.0, "tool_calls_if_correct": 0.1},
        "max_answer_chars": 1000,
        "judge": {"required": True},
    },
    # Chain-of-Focus, arXiv 2505.15436, its code. Theirs pays a wrong answer half for a call, which rewards looking
    # alone, and a tenth for its form.
    "chain-of-focus": {
        "weights": {"accuracy": 0.0, "adaptive_calls": 1.0},
        "judge": {"required": True},
    },
    # TreeVGR, arXiv 2507.07999. Theirs pays for the regions of a wrong answer too, which rewards looking alone.
    "treevgr": {
        "weights": {"accuracy": 1.0, "format": 1.0, "dual_iou": 1.0},
        "judge": {"required": True},
    },
    # EasyR1.
    "easyr1-math": {"weights": {"accuracy": 0.9, "format": 0.1}, "format": "think_boxed"},
    "easyr1-r1v": {
        "weights": {"accuracy": 0.5, "format": 0.5},
        "format": "think_answer",
        "extractor": "tags",
    },
    # DAPO, arXiv 2503.14476: +1 or -1, and up to -1 for the length.
    "easyr1-dapo": {
        "weights": {"accuracy": 1.0, "wrong": 1.0, "overlong": 1.0},
        "overlong": {"max_tokens": 20480, "buffer": 4096},
    },
    # Pixelis, arXiv 2603.25091: three phases; its ablation uses the weights of one phase from the start.
    "pixelis": _pixelis(0.05, 0.1, curriculum={"kind": "trigger"}),
    "pixelis-steps": _pixelis(0.3, 0.2, curriculum={"kind": "steps"}),
    "pixelis-base": _pixelis(0.0, 0.0),
    "pixelis-coherence": _pixelis(0.0, 0.1),
    "pixelis-curiosity": _pixelis(0.05, 0.0),
    "pixelis-full": _pixelis(0.05, 0.1),
}


def reward_settings(name: str) -> dict[str, Any]:
    """The settings of a preset. Raises ValueError for an unknown name."""
    check_name("preset", name, REWARD_PRESETS)
    return REWARD_PRESETS[name]
