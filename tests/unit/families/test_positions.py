"""M-RoPE positions of one sample, checked against the models of transformers."""

import numpy as np
import pytest
import torch

from pixelis.errors import BadInput
from pixelis.families.positions import mrope_positions
from pixelis.nano.architecture import build
from pixelis.nano.tokenizer import build_tokenizer

IMAGE = 9


def sample(*pieces: int | tuple[int, int]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Token ids and grids of text runs (a length) and images (rows, columns in merged cells)."""
    ids: list[int] = []
    grids = []
    for piece in pieces:
        if isinstance(piece, int):
            ids += [1] * piece
        else:
            ids += [IMAGE] * (piece[0] * piece[1])
            grids.append((1, 2 * piece[0], 2 * piece[1]))
    return ids, grids


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "pieces", [(7,), (3, (4, 4), 5), ((2, 5), 1, (6, 3), 2, (1, 1)), (2, (3, 2), 4, (3, 2), 1)]
)
def test_equal_to_transformers(family, pieces):
    ids, grids = sample(*pieces)
    model = build(build_tokenizer(), family)
    rows = torch.tensor([ids])
    theirs, delta = model.model.get_rope_index(
        rows,
        mm_token_type_ids=(rows == IMAGE).int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
        attention_mask=torch.ones_like(rows),
    )
    ours, free = mrope_positions(ids, grids, IMAGE, 2)
    assert np.array_equal(ours, theirs[-3:, 0].numpy())
    if not isinstance(pieces[-1], tuple):
        assert free == len(ids) + int(delta)


def test_pieces_continue_each_other():
    ids, grids = sample(3, (4, 4), 5, (2, 3), 4)
    whole, end = mrope_positions(ids, grids, IMAGE, 2)
    head, free = mrope_positions(ids[:22], grids[:1], IMAGE, 2)
    tail, last = mrope_positions(ids[22:], grids[1:], IMAGE, 2, start=free)
    assert np.array_equal(np.concatenate([head, tail], axis=1), whole)
    assert last == end


@pytest.mark.parametrize(
    ("ids", "grids"),
    [([1, IMAGE, 1], []), ([1, 1], [(1, 2, 2)]), ([IMAGE] * 8, [(2, 4, 4)]), ([IMAGE] * 5, [(1, 4, 4)])],
)
def test_disagreement_is_refused(ids, grids):
    with pytest.raises(BadInput):
        mrope_positions(ids, grids, IMAGE, 2)
