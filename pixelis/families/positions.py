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
    places = np.flatnonzero(np.asarray(token_ids) == image_token)
    sizes = [(int(rows) // merge, int(columns) // merge) for _, rows, columns in grids]
    if (expected := sum(rows * columns for rows, columns in sizes)) != len(places):
        raise BadInput(f"{len(sizes)} images need {expected} image tokens, the sample has {len(places)}")

    def text(stop: int) -> np.ndarray:
        """Tokens up to `stop`."""
        return np.broadcast_to(np.arange(free, free + stop - place), (3, stop - place))

    parts, place, free, seen = [], 0, int(start), 0
    for rows, columns in sizes:
        first = int(places[seen])
        parts.append(text(first))
        free += first - place
        parts.append(free + np.indices((1, rows, columns)).reshape(3, -1))
        free += max(rows, columns)
        place, seen = first + rows * columns, seen + rows * columns
    parts.append(text(len(token_ids)))
    return np.concatenate(parts, axis=1), free + len(token_ids) - place
