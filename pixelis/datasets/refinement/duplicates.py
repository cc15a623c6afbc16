"""Exact and near duplicates among demonstrations."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix

from pixelis.datasets.refinement.actions import rounded
from pixelis.records import Demonstration, Question
from pixelis.rewards.scorers import canonical

CHUNK = 512
MAX_PAIRS = 100_000
"""Pairs of texts that are compared at a time."""
GRID = 20
"""Number of steps per side to which coordinates are rounded for comparison."""


def question_hash(question: Question, pictures: Sequence[str]) -> str:
    """Hash of a question's normalised text and of the content of its pictures in any order."""
    return _sha([canonical(question.conversation), sorted(pictures)])


def content_hash(d: Demonstration, pictures: Sequence[str]) -> str:
    """Hash of a demonstration without ids, weights, scores, provenance and observations."""
    turns = [
        [
            canonical(turn.think or ""),
            turn.op,
            turn.target,
            rounded(turn.arguments, 4),
            canonical(turn.answer or ""),
            turn.learn,
        ]
        for turn in d.turns
    ]
    return _sha(
        [canonical(d.conversation), list(pictures), sorted(map(canonical, d.answers or [])), d.kind, turns]
    )


def exact(hashes: Sequence[str]) -> dict[int, int]:
    """The index of each repetition, mapped to the index of the first item with its hash."""
    first: dict[str, int] = {}
    return {i: first[key] for i, key in enumerate(hashes) if first.setdefault(key, i) != i}


def near(
    demonstrations: Sequence[Demonstration], pictures: Sequence[tuple], similarity: float
) -> dict[int, int]:
    """The index of each near duplicate, mapped to that of the earlier demonstration that stays.

    Same kind and answer, equal values in ``pictures``, and a TF-IDF cosine of ``similarity``.
    """
    blocks: dict[tuple, list[int]] = defaultdict(list)
    for i, d in enumerate(demonstrations):
        blocks[(d.kind, canonical(d.final or ""), tuple(pictures[i]))].append(i)
    rows = [i for block in blocks.values() if len(block) > 1 for i in block]
    if not rows:
        return {}
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer(analyzer=_tokens, sublinear_tf=True, dtype=np.float32)
    matrix = vectors.fit_transform(demonstrations[i] for i in rows)
    row_of = {i: row for row, i in enumerate(rows)}
    result: dict[int, int] = {}
    for block in blocks.values():
        if len(block) > 1:
            block_rows = [row_of[i] for i in block]
            result |= {block[i]: block[j] for i, j in greedy(matrix[block_rows], similarity - 1e-6).items()}
    return result


def greedy(matrix: csr_matrix, similarity: float) -> dict[int, int]:
    """Each row (a unit vector) that has a similar earlier row, mapped to the most similar of those that stay.

    By Cauchy-Schwarz, such rows share a term among those without which a row is shorter than ``similarity``:
    only these are compared.
    """
    heads = matrix.copy()
    for i in range(matrix.shape[0]):
        part = slice(matrix.indptr[i], matrix.indptr[i + 1])
        order = np.argsort(matrix.data[part])
        tail = np.sqrt(np.cumsum(matrix.data[part][order].astype(np.float64) ** 2)) < similarity
        heads.data[part][order[tail]] = 0
    heads.eliminate_zeros()
    result: dict[int, int] = {}
    staying: list[int] = []
    for start in range(0, matrix.shape[0], CHUNK):
        chunk = list(range(start, min(start + CHUNK, matrix.shape[0])))
        similar: dict[int, list[tuple[float, int]]] = defaultdict(list)
        others = staying + chunk
        shared = (heads[chunk] @ matrix[others].T).tocoo()
        rows, columns = start + shared.row, np.asarray(others)[shared.col]
        rows, columns = rows[columns < rows], columns[columns < rows]
        for first in range(0, len(rows), MAX_PAIRS):
            i, j = rows[first : first + MAX_PAIRS], columns[first : first + MAX_PAIRS]
            cosines = np.asarray(matrix[i].multiply(matrix[j]).sum(axis=1)).ravel()
            for k in np.flatnonzero(cosines >= similarity):
                similar[int(i[k])].append((float(cosines[k]), int(j[k])))
        new: set[int] = set()
        for i in chunk:
            candidates = [(cosine, -j) for cosine, j in similar[i] if j < start or j in new]
            if candidates:
                result[i] = -max(candidates)[1]
            else:
                new.add(i)
        staying += sorted(new)
    return result


def _tokens(d: Demonstration) -> list[str]:
    """The words of question and thoughts; each call is one word, with its coordinates on a coarse grid."""
    words = canonical(" ".join([d.conversation, *(turn.think or "" for turn in d.turns)])).split()
    for step in d.steps:
        numbers = [round(v * GRID) if isinstance(v, float) else v for v in _flat(rounded(step.arguments, 4))]
        words.append(f"{step.op} {step.target} {numbers}")
    return words


def _flat(value: object) -> list:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _flat(value[key])]
    return [leaf for inner in value for leaf in _flat(inner)] if isinstance(value, list) else [value]


def _sha(content: object) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, ensure_ascii=True, default=str).encode()
    ).hexdigest()
