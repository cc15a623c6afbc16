"""Where a policy is wrong: clusters of similar questions with their error rates.

All questions are clustered, because clusters of wrong ones alone would show where questions are frequent.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pixelis.errors import BadInput
from pixelis.evaluation.ablation import ALPHA, holm
from pixelis.evaluation.causes import error_causes
from pixelis.evaluation.metrics import correctness
from pixelis.evaluation.statistics import wilson
from pixelis.records import Group

EXAMPLES = 4
WORDS = 4
WORD_SHARE = 0.1
"""Smallest share of a cluster's questions that have one of its words."""
WORD_RATIO = 2.0
"""How many times more often a word stands in a cluster's questions than in the others."""
RESTARTS = 10
SAME = 1e-5
"""Relative size of differences between equal vectors, by rounding."""


def require_questions(count: int, clusters: int, source: str) -> None:
    if count < 2 * clusters:
        message = f"{source} has {count} questions, too few for evaluate.clusters={clusters}"
        raise BadInput(message, fix=f"lower evaluate.clusters to {count // 2}, or evaluate more questions")


def balanced_vectors(
    parts: Sequence[tuple[np.ndarray | None, np.ndarray | None]], weights: tuple[float, float]
) -> np.ndarray:
    """Vectors [n, d] of (visual, text) vectors, in which each part's weight is its share of the variance.

    Otherwise the part that happens to vary more decides alone. A missing part stands in the middle of the
    others.
    """
    blocks = [np.zeros((len(parts), 1))]
    for weight, values in zip(weights, zip(*parts, strict=True), strict=True):
        known = [i for i, value in enumerate(values) if value is not None]
        if known:
            rows = np.stack([values[i] for i in known]).astype(np.float64)
            spread, size = np.linalg.norm(rows - rows.mean(0)), np.linalg.norm(rows)
            if spread > SAME * size:
                block = np.zeros((len(parts), rows.shape[1]))
                block[known] = np.sqrt(weight * len(known)) / spread * (rows - rows.mean(0))
                blocks.append(block)
    return np.concatenate(blocks, axis=1)


def cluster_vectors(vectors: np.ndarray, clusters: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The k-means cluster of each vector [n, d], and its distance to the centre."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    model = KMeans(clusters, n_init=RESTARTS, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different vectors than clusters
        labels = model.fit_predict(vectors)
    return labels, np.linalg.norm(vectors - model.cluster_centers_[labels], axis=1)


def error_clusters(
    groups: Sequence[Group], vectors: np.ndarray, clusters: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Clusters of scored questions with vectors [n, d], those most wrong above the others first.

    A question is wrong if its mean accuracy is at most one half. ``p`` is of Fisher's exact test against all
    other questions; ``words`` stand out in the cluster's questions; ``ids`` are from the centre outwards, and
    ``examples`` the first wrong ones. Raises BadInput for fewer than two questions by cluster.
    """
    require_questions(len(groups), clusters, "the evaluation")
    from scipy.stats import fisher_exact

    right = correctness(trajectory for group in groups for trajectory in group.trajectories)
    wrong = np.array([right[group.question.id] <= 0.5 for group in groups])
    labels, distances = cluster_vectors(vectors, clusters, seed)
    words, rows = _Words([group.question.conversation for group in groups]), list[dict[str, Any]]()
    for label in np.unique(labels):
        inside = labels == label
        members = [int(i) for i in np.flatnonzero(inside)[np.argsort(distances[inside], kind="stable")]]
        failed = [groups[i] for i in members if wrong[i]]
        n, errors, others, other_errors = (
            int(x) for x in (inside.sum(), wrong[inside].sum(), (~inside).sum(), wrong[~inside].sum())
        )
        rest = other_errors / others if others else None
        rows.append(
            {
                "questions": n,
                "wrong": errors,
                "error_rate": errors / n,
                "ci95": list(wilson(errors, n)),
                "rest_error_rate": rest,
                "difference": 0.0 if rest is None else errors / n - rest,
                "p": float(
                    fisher_exact([[errors, n - errors], [other_errors, others - other_errors]]).pvalue
                ),
                "causes": {cause: count for cause, count in error_causes(failed).items() if count},
                "words": words.of(inside),
                "ids": [groups[i].question.id for i in members],
                "examples": [group.question.id for group in failed[:EXAMPLES]],
            }
        )
    for row, corrected in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = corrected
    return sorted(rows, key=lambda row: -row["difference"])


def is_notable(cluster: Mapping[str, Any]) -> bool:
    """Whether a cluster is wrong more often than the others by more than chance."""
    return cluster["difference"] > 0 and cluster["p_holm"] <= ALPHA


class _Words:
    def __init__(self, texts: Sequence[str]):
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(token_pattern=r"\w+", min_df=2)
        try:
            self.weights = vectorizer.fit_transform(texts)
            self.names = vectorizer.get_feature_names_out()
        except ValueError:  # no word stands in two texts
            self.weights, self.names = None, np.array([])

    def of(self, inside: np.ndarray) -> list[dict[str, Any]]:
        """The words that stand out in the texts of a mask, with their share of these texts and of the others."""
        if self.weights is None or inside.all():
            return []
        own, others = self.weights[inside], self.weights[~inside]
        excess = np.asarray(own.mean(0) - others.mean(0)).ravel()
        shares, rest = (part.getnnz(axis=0) / part.shape[0] for part in (own, others))
        order = [
            i
            for i in np.argsort(-excess, kind="stable")
            if shares[i] >= max(WORD_SHARE, WORD_RATIO * rest[i])
        ]
        return [
            {"word": str(self.names[i]), "share": float(shares[i]), "rest": float(rest[i])}
            for i in order[:WORDS]
        ]
