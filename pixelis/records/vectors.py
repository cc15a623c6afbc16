"""Vectors of experiences: a weighted sum of image and text embedding, normalised."""

from __future__ import annotations

import numpy as np

from pixelis.errors import BadInput


def combine(
    visual: np.ndarray | None, text: np.ndarray | None, weights: tuple[float, float] = (0.7, 0.3)
) -> np.ndarray:
    """``weights[0] visual/|visual| + weights[1] text/|text|``, normalised, float32 [d].

    None or a zero vector leaves only the other. Raises BadInput if both are missing.
    """
    pairs = zip(weights, (visual, text), strict=True)
    parts = [(w, unit(v)) for w, v in pairs if v is not None and w > 0 and np.any(v)]
    if not parts:
        raise BadInput("both vectors are missing or zero", code="bad_vector", fix="pass at least one of them")
    total = np.sum([w * v for w, v in parts], axis=0)
    return unit(total) if np.any(total) else parts[0][1]


def unit(vectors: np.ndarray) -> np.ndarray:
    """Normalise vectors [..., d] to float32 of length 1; zero vectors are unchanged."""
    vectors = np.asarray(vectors, np.float32)
    length = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1.0)).astype(np.float32)


def validate(vectors: np.ndarray, width: int | None = None, direction: bool = False) -> np.ndarray:
    """Convert to float32 [n, width]. Raises BadInput for another shape or unusable values."""
    try:
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise BadInput(f"not a vector array: {error}", code="bad_vector") from None
    if vectors.ndim != 2 or vectors.shape[1] == 0 or (width is not None and vectors.shape[1] != width):
        raise BadInput(
            f"vectors have shape {list(vectors.shape)}, expected [n, {width or 'd'}]",
            code="bad_vector",
            fix="a memory stores the vectors of one embedder: use another memory.dir for another model",
        )
    if not np.isfinite(vectors).all() or (direction and not np.any(vectors, axis=1).all()):
        raise BadInput(
            "a vector is zero or not finite", code="bad_vector", fix="check the input of the embedder"
        )
    return vectors
