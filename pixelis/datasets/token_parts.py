"""Labels the tokens of a demonstrated turn: thought, call, arguments or answer."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pixelis.config import PartWeightsConfig
from pixelis.records import Step, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARTS = ("think", "call", "arguments", "answer")
_OPENED = re.compile(r"\s*<[^<>/]*>")
_CLOSED = re.compile(r"\s*</[^<>]*>\s*")
_ARGUMENTS = '"arguments":'
_CALL = re.compile("<tool_call>")
"""Opens a call in the dialects whose turns may have several."""


def weights(
    trajectory: Trajectory,
    steps: Sequence[Step],
    tokenizer: PreTrainedTokenizerBase,
    counts: PartWeightsConfig,
) -> np.ndarray | None:
    """The loss weight of each token of a played demonstration, float32 [tokens]; None when all are 1."""
    if counts.equal:
        return None
    values = np.asarray([getattr(counts, part) for part in PARTS], np.float32)
    remaining = iter(steps)
    return np.concatenate(
        [
            values[parts(turn.tokens, next(remaining), tokenizer)]
            if turn.is_policy
            else np.ones(len(turn.tokens), np.float32)
            for turn in trajectory.turns
        ]
    )


def parts(tokens: Sequence[int], step: Step, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The index in PARTS of each token of a policy turn, int64 [tokens], by the part of its first byte.

    Tags belong to the part that they enclose, the end of the turn to its last part.
    """
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    thought = _after_thought(text, step.think)
    begins = [(0, "think"), (thought, "answer")]
    if step.op is not None:
        further = list(_CALL.finditer(text, thought))[1 : 1 + len(step.further)]
        begins, opened = [(0, "think")], [thought, *(call.start() for call in further)]
        for start, end in itertools.pairwise([*opened, len(text)]):
            key = text.find(_ARGUMENTS, start, end)
            first = key + len(_ARGUMENTS) if key >= 0 else text.find("{", start, end)
            begins += [(start, "call"), (first, "arguments"), (text.rfind("}", start, end) + 1, "call")]
    added = tokenizer.added_tokens_decoder
    # In bytes: other tokens have a character for each byte
    pieces = [
        added[token].content.encode() if token in added else str(tokenizer.convert_ids_to_tokens(token))
        for token in tokens
    ]
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = np.concatenate([[0], ends[:-1]])
    part_starts = np.asarray([len(text[:index].encode()) for index, _ in begins])
    segments = np.searchsorted(part_starts, starts, side="right") - 1
    return np.asarray([PARTS.index(part) for _, part in begins])[segments]


def _after_thought(text: str, think: str | None) -> int:
    """The end of the thought and its closing tag; also searched in NFC, as tokenizers compose characters."""
    opening_tag = _OPENED.match(text)
    # A thought may be a part of the tag: "hi" of "<think>"
    for start in (opening_tag.end(), 0) if opening_tag else (0,):
        for form in (think, unicodedata.normalize("NFC", think)) if think else ():
            if (begin := text.find(form, start)) >= 0:
                end = begin + len(form)
                closing_tag = _CLOSED.match(text, end)
                return closing_tag.end() if closing_tag else end
    return 0
