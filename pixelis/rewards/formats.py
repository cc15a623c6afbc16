"""Format checks of the generated text, one function for each convention."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from pixelis.dialogue.dialects import DIALECTS
from pixelis.errors import DataFailure
from pixelis.records import StopReason, Trajectory

_BOX = re.compile(r"\\boxed\{([^}]+)\}", re.DOTALL)
_CALL_TURN = re.compile(r"\s*<think>(.*?)</think>\s*<(tool_call|grounding)>(.*?)</\2>\s*", re.DOTALL)
_LAST_TURN = re.compile(r"\s*<think>(.*?)</think>\s*<(answer)>(.*?)</answer>\s*", re.DOTALL)
_TAGS = re.compile(r"</?(?:think|tool_call|grounding|answer)>")


def completion(trajectory: Trajectory) -> str:
    return "".join(turn.text for turn in trajectory.replies)


def dialect(trajectory: Trajectory) -> float:
    """1.0 when the episode ended with an answer and every policy turn is well-formed."""
    if trajectory.dialect not in DIALECTS:
        raise DataFailure(f"no dialect {trajectory.dialect}", code="unknown_dialect")
    parser = DIALECTS[trajectory.dialect]
    turns = trajectory.replies
    valid = all(
        turn.error is None and parser.well_formed(turn.text, max(len(turn.actions), 1)) for turn in turns
    )
    return float(bool(turns) and valid and trajectory.stop_reason is StopReason.ANSWER)


def _blocks(text: str, *tags: str) -> float:
    """1.0 for a block of each tag in this order, in time linear in the text."""
    start, end = f"<{tags[0]}>", f"</{tags[-1]}>"
    place = len(start)
    for closed, opened in pairwise(tags):
        if (match := re.compile(rf"</{closed}>\s*<{opened}>").search(text, place)) is None:
            return 0.0
        place = match.end()
    return float(text.startswith(start) and text.endswith(end) and place + len(end) <= len(text))


def think_answer(trajectory: Trajectory) -> float:
    """1.0 for a think and an answer block, nothing else (R1-V, Reason-RFT, EasyR1's r1v)."""
    return _blocks(completion(trajectory), "think", "answer")


def caption(trajectory: Trajectory) -> float:
    """1.0 for summary, caption, think and answer blocks in this order, nothing else (Reason-RFT)."""
    return _blocks(completion(trajectory), "summary", "caption", "think", "answer")


def turns(trajectory: Trajectory) -> float:
    """1.0 when the last turn is one thought and an answer, each earlier one a thought and one call (Mini-o3)."""
    texts = [turn.text for turn in trajectory.replies]
    if not texts:
        return 0.0
    matches = [*(_CALL_TURN.fullmatch(text) for text in texts[:-1]), _LAST_TURN.fullmatch(texts[-1])]
    return float(all(m is not None and not _TAGS.search(m[1]) and not _TAGS.search(m[3]) for m in matches))


def think_boxed(trajectory: Trajectory) -> float:
    r"""1.0 for a text that starts with a think block and has a ``\boxed{}`` after it (EasyR1's math)."""
    text = re.sub(r" ?(<|>|/) ?", r"\1", re.sub(r"\s+", " ", completion(trajectory)))
    thought = text.find("</think>") if text.startswith("<think>") else -1
    box = text.find("\\boxed{", thought) if thought >= 0 else -1
    return float(box >= 0 and "}" in text[box:])


def balanced(trajectory: Trajectory) -> float:
    """0.0 when think tags, and answer tags after the last thought, are balanced, else -1.0 (DeepEyes)."""
    text = completion(trajectory)
    rest = text.rpartition("</think>")[2]
    pairs = (text, "think"), (rest, "answer")
    return 0.0 if all(part.count(f"<{tag}>") == part.count(f"</{tag}>") for part, tag in pairs) else -1.0


def boxed_once(trajectory: Trajectory) -> float:
    r"""0.0 when think tags are balanced and one ``\boxed{}`` follows the last thought, else -1.0 (DeepEyes' math)."""
    text = completion(trajectory)
    valid = (
        text.count("<think>") == text.count("</think>")
        and len(_BOX.findall(text.rpartition("</think>")[2])) == 1
    )
    return 0.0 if valid else -1.0


def has_box(trajectory: Trajectory) -> bool:
    r"""Whether a ``\boxed{}`` follows the last thought: DeepEyes' math rewards nothing else."""
    return _BOX.search(completion(trajectory).rpartition("</think>")[2]) is not None


FORMATS: dict[str, Callable[[Trajectory], float]] = {
    "dialect": dialect,
    "think_answer": think_answer,
    "caption": caption,
    "turns": turns,
    "think_boxed": think_boxed,
    "balanced": balanced,
    "boxed_once": boxed_once,
}
PUNISHING = frozenset({"balanced", "boxed_once"})
"""Formats with the values 0 and -1 instead of 1 and 0."""
