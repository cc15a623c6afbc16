"""Answers compared as the repositories of other systems do it, defects included, for the presets `*-repo`.

Each takes the whole reply (``rewards.extractor: reply``) and the truths. Formulas are read by the installed
math-verify; R1-V pins 0.5.2, Reason-RFT 0.3.3. They run in a worker process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import math_verify

_END = "<|im_end|>"


def r1_v(reply: str, truth: str) -> float:
    """R1-V, ``src/r1-v/src/open_r1/grpo.py``: any formula of the reply, thought included, else equal text."""
    if _verify(reply, f"<answer> {truth} </answer>") > 0:
        return 1.0
    answer = _tagged(reply, 0)
    return float((reply.strip() if answer is None else answer) == truth.strip())


def reason_rft(reply: str, truth: str) -> float:
    """Reason-RFT, ``train/stage_rl/reward.py``: equal text in the first tags; without tags any equal formula."""
    answer = _tagged(reply, re.DOTALL)
    if (reply.strip() if answer is None else answer) == truth.strip():
        return 1.0
    return float(answer is None and _verify(reply, truth) > 0)


def reason_rft_band(reply: str, truth: str) -> float:
    """The same file's tolerance: 1 within 5 %, 0 beyond 20 %, a half cosine between; a truth of 0 never scores."""
    answer = _tagged(reply, re.DOTALL)
    try:
        value, expected = float(reply.strip() if answer is None else answer), float(truth)
    except ValueError:
        return reason_rft(reply, truth)
    error, low, high = abs(value - expected), 0.05 * abs(expected), 0.2 * abs(expected)
    score = 0.0
    if error < low:
        score = 1.0
    elif error <= high and high:
        score = 0.5 * (math.cos(math.pi * (error - low) / (high - low)) + 1)
    return score or float(answer is None and _verify(reply, truth) > 0)


def pixel_reasoner(reply: str, truths: Sequence[str]) -> float:
    """Pixel-Reasoner, ``experience_maker.py``: the last box, the first tags or any formula, in lower case.

    Also right is a box after which every comma-separated part of a truth occurs, within words too. A reply or
    truth without a formula is worth -1.
    """
    text = reply.lower() + _END
    expected = [f"\\boxed{{{truth.lower()}}}" for truth in truths]
    percent = next((truth.replace("%", "") for truth in expected if "%" in truth), None)
    if percent is not None and percent not in expected:
        expected.insert(0, percent)
    places = [text]
    if (tagged := re.search("<answer>(.*?)</answer>", text)) is not None:
        places.insert(0, f"\\boxed{{{tagged[1]}}}")
    if "\\boxed" in text:
        places.insert(0, text[text.rindex("\\boxed") :])
    box = "\\" + text[text.rfind("boxed") :]
    score = 0.0
    for truth in expected:
        for place in places:
            score = _verify(_plain(place), _plain(truth))
            if score > 0.5:
                return 1.0
        parts = [part.strip() for part in truth[len("\\boxed{") : -1].split(",")]
        if "boxed" in text and len(parts) > 1 and all(part in box for part in parts):
            return 1.0
    return score


def _plain(text: str) -> str:
    for old, new in (
        ("dfrac", "frac"),
        ("\\text", ""),
        ("\\varnothing", "\\emptyset"),
        ("minutes", ""),
        ("cm", ""),
    ):
        text = text.replace(old, new)
    return text


def _tagged(text: str, flags: int) -> str | None:
    match = re.search("<answer>(.*?)</answer>", text, flags)
    return match[1].strip() if match else None


def _verify(answer: str, truth: str) -> float:
    """1 when a formula of the answer equals one of the truth, -1 when either has none."""
    formulas, expected = (math_verify.parse(text, parsing_timeout=0) for text in (answer, truth))
    if not formulas or not expected:
        return -1.0
    return float(math_verify.verify(formulas, expected, timeout_seconds=None))


def _best(score: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    return lambda reply, truths: max(score(reply, truth) for truth in truths)


SYSTEM_SCORERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "r1_v_repo": _best(r1_v),
    "reason_rft_repo": _best(reason_rft),
    "reason_rft_band_repo": _best(reason_rft_band),
    "pixel_reasoner_repo": pixel_reasoner,
}
