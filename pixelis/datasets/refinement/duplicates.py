"""Demonstrations that are there twice: of equal content, or so near that one teaches nothing the other does not.

Near are two of one kind with the same answer, pictures alike, and texts (question, thoughts, calls) whose TF-IDF vectors are as
similar as asked for. Only those that share kind, answer and pictures are compared, so 100,000 take minutes at most.
"""

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
PAIRS = 100_000
"""Pairs of texts that are compared at a time."""
GRID = 20
"""Steps per side in which places are compared: 1/20 of the picture."""


def question_hash(question: Question, pictures: Sequence[str]) -> str:
    """Hash of a question's text, as compared, and of the content of its pictures in any order."""
    return _sha([canonical(question.question), sorted(pictures)])


def content_hash(d: Demonstration, pictures: Sequence[str]) -> str:
    """Hash of all that a demonstration teaches; ids, weights, scores, provenance and observations do not count."""
    turns = [
        [canonical(turn.think or ""), turn.op, turn.target, rounded(turn.arguments, 4), canonical(turn.answer or ""), turn.learn]
        for turn in d.turns
    ]
    return _sha([canonical(d.question), list(pictures), sorted(map(canonical, d.answers or [])), d.kind, turns])


def exact(hashes: Sequence[str]) -> dict[int, int]:
    """Number of each repetition -> number of the first with its hash."""
    first: dict[str, int] = {}
    return {i: first[key] for i, key in enumerate(hashes) if first.setdefault(key, i) != i}


def near(demonstrations: Sequence[Demonstration], pictures: Sequence[tuple], similarity: float) -> dict[int, int]:
    """Number of each near duplicate -> number of the one that is kept in its place, which comes before it.

    ``pictures``: for each demonstration what its pictures are taken to be (equal for those that look alike). ``similarity``: the
    least cosine of two texts.
    """
    blocks: dict[tuple, list[int]] = defaultdict(list)
    for i, d in enumerate(demonstrations):
        blocks[(d.kind, canonical(d.final or ""), tuple(pictures[i]))].append(i)
    rows = [i for block in blocks.values() if len(block) > 1 for i in block]
    if not rows:
        return {}
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer(analyzer=_tokens, sublinear_tf=True, dtype=np.float32)
    matrix = vectors.fit_transform([demonstrations[i] for i in rows])
    at = {i: place for place, i in enumerate(rows)}
    out: dict[int, int] = {}
    for block in blocks.values():
        if len(block) > 1:
            places = [at[i] for i in block]
            out |= {block[i]: block[j] for i, j in greedy(matrix[places], similarity - 1e-6).items()}
    return out


def greedy(matrix: csr_matrix, similarity: float) -> dict[int, int]:
    """Row -> the earlier row that is kept and at least so similar. Rows are unit vectors."""
    out: dict[int, int] = {}
    kept: list[int] = []
    heads = _heads(matrix, similarity)
    for start in range(0, matrix.shape[0], CHUNK):
        part = list(range(start, min(start + CHUNK, matrix.shape[0])))
        near: dict[int, list[tuple[float, int]]] = defaultdict(list)
        others = kept + part
        shared = (heads[part] @ matrix[others].T).tocoo()
        rows, columns = start + shared.row, np.asarray(others)[shared.col]
        rows, columns = rows[columns < rows], columns[columns < rows]
        for at in range(0, len(rows), PAIRS):
            i, j = rows[at : at + PAIRS], columns[at : at + PAIRS]
            cosines = np.asarray(matrix[i].multiply(matrix[j]).sum(axis=1)).ravel()
            for k in np.flatnonzero(cosines >= similarity):
                near[int(i[k])].append((float(cosines[k]), int(j[k])))
        new: set[int] = set()
        for i in part:
            found = [(value, -j) for value, j in near[i] if j < start or j in new]
            if found:
                out[i] = -max(found)[1]
            else:
                new.add(i)
        kept += sorted(new)
    return out


def _heads(matrix: csr_matrix, similarity: float) -> csr_matrix:
    """Of each row the largest terms, so many that what is left is shorter than ``similarity``.

    A row as similar as that to another shares one of these with it (Cauchy-Schwarz), whatever the other is: only such pairs are
    compared.
    """
    heads = matrix.copy()
    for i in range(matrix.shape[0]):
        part = slice(matrix.indptr[i], matrix.indptr[i + 1])
        values = matrix.data[part]
        order = np.argsort(values)  # the smallest first: they are left as long as their length allows
        rest = np.sqrt(np.cumsum(values[order].astype(np.float64) ** 2)) < similarity
        heads.data[part][order[rest]] = 0
    heads.eliminate_zeros()
    return heads


def _tokens(d: Demonstration) -> list[str]:
    words = canonical(" ".join([d.question, *(turn.think or "" for turn in d.turns)])).split()
    for step in d.steps:
        numbers = [round(v * GRID) if isinstance(v, float) else v for v in _flat(rounded(step.arguments, 4))]
        words.append(f"{step.op} {step.target} {numbers}")
    return words


def _flat(value: object) -> list:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _flat(value[key])]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in _flat(inner)]
    return [value]


def _sha(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True, default=str).encode()).hexdigest()
