"""Start `mini` from the trained `nano`: a wider model that says what the smaller one says.

The weights of `nano` become the first rows and columns of wider matrices. What is new starts without influence
on what is known: new attention heads and feed-forward units read everything and write nothing yet, the new layer
adds nothing, and known parts do not read the new dimensions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CODE, CODE_GAIN = 0.02, 3.0
"""Standard deviation of what an embedding has in the new dimensions, and the gain of their norms. `lm_head` starts
with the same values there, so that copying a token is the same for all, not one thing to learn for each.
"""


@torch.no_grad()
def widen(
    small: PreTrainedModel,
    large: PreTrainedModel,
    small_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Give ``large`` the weights of ``small``; its other tokens get random embeddings of the same size."""
    known, own = small.state_dict(), large.state_dict()
    old, new = small.config.text_config.hidden_size, large.config.text_config.hidden_size
    for name, weights in own.items():
        if name not in known:  # a new layer adds nothing yet
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights.zero_()
        elif known[name].shape == weights.shape:
            weights.copy_(known[name])
        elif "embed_tokens" not in name and "lm_head" not in name:
            _extend(name, known[name], weights, old, new)
    _extend_vocabulary(small, large, small_tokenizer, tokenizer)


def _extend(name: str, known: Tensor, weights: Tensor, old: int, new: int) -> None:
    if weights.ndim == 1:
        # A norm divides by the root mean square, which more dimensions without content make smaller.
        norm = name.endswith("norm.weight") or name.endswith("layernorm.weight")
        weights.fill_(CODE_GAIN if norm else 0.0)
        weights[: len(known)] = known * (math.sqrt(old / new) if norm else 1.0)
        return
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        known = known.repeat(old // len(known), 1)  # heads that shared keys and values get their own
    rows, columns = known.shape
    weights[:rows, columns:] = 0.0
    if name.endswith(("o_proj.weight", "down_proj.weight", "linear_fc2.weight")):
        weights[rows:] = 0.0
    weights[:rows, :columns] = known


def _extend_vocabulary(
    small: PreTrainedModel,
    large: PreTrainedModel,
    small_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    known_in, known_out = small.get_input_embeddings().weight, small.get_output_embeddings().weight
    own_in, own_out = large.get_input_embeddings().weight, large.get_output_embeddings().weight
    old = known_in.shape[1]
    own_in[:, :old].mul_(float(known_in.std() / own_in.std()))
    own_in[:, old:].mul_(CODE / float(own_in.std()))
    own_out.copy_(own_in)
    own_out[:, old:].mul_(float(known_out.std()) / CODE)
    places = small_tokenizer.get_vocab()
    for token, place in tokenizer.get_vocab().items():
        if token in places:
            own_in[place, :old] = known_in[places[token]]
            own_out[place, :old] = known_out[places[token]]
