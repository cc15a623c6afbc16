"""Three-dimensional rotary positions (M-RoPE) of one sample, for Qwen2.5-VL and Qwen3-VL with images.

Text advances all three axes together. An image has one time, and its tokens extend over rows and columns; the
following text continues after the image's longer side. Source: Qwen2-VL (arXiv 2409.12191), section 2.1;
equal to `get_rope_index` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pixelis.errors import BadInput


def mrope_positions(
    token_ids: Sequence[int] | np.ndarray,
    grids: Sequence[Sequence[int]] | np.ndarray,
    image_token: int,
    merge: int,
    start: int = 0,
) -> tuple[np.ndarray, int]:
    """Positions int64 [3, n] (time, row, column) of a sample or its next piece, and the next free position.

    ``token_ids``: [n], image tokens expanded. ``grids``: [images, 3] (1, rows, columns in patches). ``start``:
    the free position after the previous piece. Raises BadInput if image tokens and grids disagree.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    positions = np.empty((3, len(ids)), dtype=np.int64)
    is_image = ids == image_token
    place, free = 0, int(start)
    for grid in grids:
        frames, rows, columns = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
        if frames != 1:
            raise BadInput(f"a grid of {frames} frames: pass video frames as separate images")
        offsets = np.flatnonzero(is_image[place:])
        size = rows * columns
        if len(offsets) < size or not is_image[place + offsets[0] : place + offsets[0] + size].all():
            raise BadInput(
                f"{len(grids)} images need more image tokens than the sample's {int(is_image.sum())}"
            )
        first = place + int(offsets[0])
        positions[:, place:first] = np.arange(free, free + first - place)
        free += first - place
        positions[0, first : first + size] = free
        positions[1, first : first + size] = free + np.repeat(np.arange(rows), columns)
        positions[2, first : first + size] = free + np.tile(np.arange(columns), rows)
        free += max(rows, columns)
        place = first + size
    if is_image[place:].any():
        raise BadInput(f"the sample has {int(is_image[place:].sum())} image tokens without an image")
    positions[:, place:] = np.arange(free, free + len(ids) - place)
    return positions, free + len(ids) - place
