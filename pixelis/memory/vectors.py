"""An experience's vector: the picture's and the question's direction, weighted, of length 1."""

from __future__ import annotations

import numpy as np

from pixelis.errors import BadInput


def combine(visual: np.ndarray | None, text: np.ndarray | None, weights: tuple[float, float] = (0.7, 0.3)) -> np.ndarray:
    """``weights[0] visual/|visual| + weights[1] text/|text|`` brought to length 1, float32 [d].

    visual, text: [d] of any length; a part that is None, or without direction, leaves the other alone. BadInput without either.
    """
    parts = [(w, unit(v)) for w, v in zip(weights, (visual, text), strict=True) if v is not None and w > 0 and np.any(v)]
    if not parts:
        raise BadInput("neither picture nor question gives a direction", code="bad_vector", fix="pass at least one of them")
    total = np.sum([w * v for w, v in parts], axis=0)
    return unit(total) if np.any(total) else parts[0][1]


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors [..., d] brought to length 1, float32; those of length 0 stay."""
    vectors = np.asarray(vectors, np.float32)
    length = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1.0)).astype(np.float32)


def checked(vectors: np.ndarray, width: int | None = None, direction: bool = False) -> np.ndarray:
    """The same as float32 [n, width]; BadInput when the shape is another, a value is not finite, or (direction) a length is 0."""
    try:
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise BadInput(f"these are no vectors: {error}", code="bad_vector", fix="pass floats of shape [n, d]") from None
    if vectors.ndim != 2 or vectors.shape[1] == 0 or (width is not None and vectors.shape[1] != width):
        raise BadInput(
            f"vectors of shape {list(vectors.shape)} where [n, {width or 'd'}] is wanted",
            code="bad_vector",
            fix="a memory keeps the vectors of one embedder: with another model use another memory.dir",
        )
    if not np.isfinite(vectors).all():
        raise BadInput("a vector has values that are not finite", code="bad_vector", fix="look at the embedder's input")
    if direction and not np.any(vectors, axis=1).all():
        raise BadInput("a vector of length 0 has no direction", code="bad_vector", fix="look at the embedder's input")
    return vectors
