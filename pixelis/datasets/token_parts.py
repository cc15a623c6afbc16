"""Labels the tokens of a demonstrated turn: thought, call, arguments or answer."""

from __future__ import annotations

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
_CLOSED = re.compile(r"\s*</[^<>]*>\s*")
_ARGUMENTS = '"arguments":'


def weights(
    trajectory: Trajectory, steps: Sequence[Step], tokenizer: PreTrainedTokenizerBase, counts: PartWeightsConfig
) -> np.ndarray | None:
    """What each token of a played demonstration counts, float32 [tokens]; None when all count 1. Tokens of others: 1."""
    if counts.equal:
        return None
    values = np.asarray([getattr(counts, part) for part in PARTS], np.float32)
    out, said = [], iter(steps)
    for turn in trajectory.turns:
        if turn.is_policy:
            out.append(values[parts(turn.tokens, next(said), tokenizer)])
        else:
            out.append(np.ones(len(turn.tokens), np.float32))
    return np.concatenate(out)


def parts(tokens: Sequence[int], step: Step, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Place in PARTS of each token of a policy turn, int64 [tokens]: the part that its first byte stands in.

    Tags belong to what they enclose, the turn's end to its last part. The arguments are the JSON value of the call, without the
    name where the dialect writes one.
    """
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    thought = _after_thought(text, step.think)
    begins = [(0, "think"), (thought, "answer")]
    if step.op is not None:
        named = text.find(_ARGUMENTS, thought)
        first = named + len(_ARGUMENTS) if named >= 0 else text.find("{", thought)
        begins = [(0, "think"), (thought, "call"), (first, "arguments"), (text.rfind("}") + 1, "call")]
    ends = np.cumsum([_size(token, tokenizer) for token in tokens])
    starts = np.concatenate([[0], ends[:-1]])
    places = np.asarray([len(text[:at].encode()) for at, _ in begins])
    which = np.searchsorted(places, starts, side="right") - 1
    return np.asarray([PARTS.index(part) for _, part in begins])[which]


def _after_thought(text: str, think: str | None) -> int:
    """Where the thought and its closing tag end. Tokenizers compose characters, so the thought is looked for in that form too."""
    for form in (think, unicodedata.normalize("NFC", think)) if think else ():
        if (at := text.find(form)) >= 0:
            closed = _CLOSED.match(text, at + len(form))
            return closed.end() if closed else at + len(form)
    return 0


def _size(token: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Bytes of a token: one for each character of a byte-level vocabulary, the text itself for added tokens."""
    added = tokenizer.added_tokens_decoder.get(token)
    return len(added.content.encode()) if added is not None else len(str(tokenizer.convert_ids_to_tokens(token)))
