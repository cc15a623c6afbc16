"""Three-dimensional rotary positions (M-RoPE) of one sample, for Qwen2.5-VL and Qwen3-VL with images.

Text counts on all three axes at once; an image stands at one time and spreads its tokens over rows and columns; the text after it
goes on behind the image's longer side. Both families agree as long as there are only images (frames of a video enter as images).
Source: Qwen2-VL (arXiv 2409.12191), section 2.1; equal to `get_rope_index` of transformers.
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
    """Positions of one sample or of its next piece.

    token_ids: [n], image tokens expanded; grids: [images, 3] (1, rows, columns in patches), in order of appearance;
    start: the first free position (what the previous piece returned). Returns int64 [3, n] (time, row, column) and the first
    free position after the piece. Raises BadInput when image tokens and grids disagree.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    positions = np.empty((3, len(ids)), dtype=np.int64)
    is_image = ids == image_token
    place, free = 0, int(start)
    for grid in grids:
        frames, rows, columns = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
        if frames != 1:
            raise BadInput(f"a grid of {frames} frames: frames of a video enter as separate images")
        ahead = np.flatnonzero(is_image[place:])
        size = rows * columns
        if not len(ahead) or not is_image[place + ahead[0] : place + ahead[0] + size].all() or len(ahead) < size:
            raise BadInput(f"{len(grids)} images need more image tokens than the {int(is_image.sum())} that the sample has")
        first = place + int(ahead[0])
        positions[:, place:first] = np.arange(free, free + first - place)
        free += first - place
        positions[0, first : first + size] = free
        positions[1, first : first + size] = free + np.repeat(np.arange(rows), columns)
        positions[2, first : first + size] = free + np.tile(np.arange(columns), rows)
        free += max(rows, columns)
        place = first + size
    if is_image[place:].any():
        raise BadInput(f"the sample has {int(is_image[place:].sum())} image tokens that no image explains")
    positions[:, place:] = np.arange(free, free + len(ids) - place)
    return positions, free + len(ids) - place
