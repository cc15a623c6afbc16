"""Agreement between raters: tables with a row for each rated thing and a column for each rater."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pixelis.evaluation.statistics import LEVEL

Table = Sequence[Sequence[float]] | np.ndarray


def cohen_kappa(table: Table) -> float | None:
    """Cohen's kappa (1960), mean over pairs of raters (Light, 1971); None if each gives one class only."""
    ratings = np.asarray(table).T
    shares = np.stack([(ratings == value).mean(axis=1) for value in np.unique(ratings)], axis=1)
    kappas = []
    for one, other in itertools.combinations(range(len(ratings)), 2):
        observed, chance = (ratings[one] == ratings[other]).mean(), shares[one] @ shares[other]
        if chance < 1:
            kappas.append((observed - chance) / (1 - chance))
    return float(np.mean(kappas)) if kappas else None


def fleiss_kappa(table: Table) -> float | None:
    """Fleiss' kappa (Psychological Bulletin 1971); None if all ratings are of one class."""
    classes, codes = np.unique(np.asarray(table), return_inverse=True)
    codes = codes.reshape(np.shape(table))
    counts = np.stack([(codes == k).sum(axis=1) for k in range(len(classes))], axis=1)
    raters = len(codes[0])
    observed = float(((counts**2).sum(axis=1) - raters).mean()) / (raters * (raters - 1))
    chance = float(((counts.sum(axis=0) / codes.size) ** 2).sum())
    return (observed - chance) / (1 - chance) if chance < 1 else None


def icc(table: Table) -> float | None:
    """ICC(2,1), agreement of single raters (Shrout and Fleiss, 1979); None without variation."""
    rows, columns, error, (n, k) = _mean_squares(table)
    spread = rows + (k - 1) * error + k * (columns - error) / n
    return (rows - error) / spread if spread > 0 else None


def icc_interval(table: Table) -> list[float] | None:
    """The 95 % interval of `icc` (McGraw and Wong, 1996, table 7); None where it is undefined."""
    from scipy.stats import f  # scipy.stats takes a second to import

    value = icc(table)
    rows, columns, error, (n, k) = _mean_squares(table)
    if value is None or value >= 1 or error <= 0:
        return None
    a = k * value / (n * (1 - value))
    b = 1 + k * value * (n - 1) / (n * (1 - value))
    parts = (a * columns) ** 2 / (k - 1) + (b * error) ** 2 / ((n - 1) * (k - 1))
    if parts <= 0:
        return None
    freedom = (a * columns + b * error) ** 2 / parts
    tail = 1 - (1 - LEVEL) / 2
    upper, lower = f.ppf(tail, n - 1, freedom), f.ppf(tail, freedom, n - 1)
    noise = k * columns + (k * n - k - n) * error
    return [
        float(n * (rows - upper * error) / (upper * noise + n * rows)),
        float(n * (lower * rows - error) / (noise + n * lower * rows)),
    ]


def _mean_squares(table: Table) -> tuple[float, float, float, tuple[int, int]]:
    """Mean squares of rows, columns and residuals of a two-way table, and its shape."""
    data = np.asarray(table, dtype=np.float64)
    n, k = data.shape
    by_row, by_column = data.mean(axis=1) - data.mean(), data.mean(axis=0) - data.mean()
    residuals = data - data.mean() - by_row[:, None] - by_column[None, :]
    rows, columns = k * float(by_row @ by_row) / (n - 1), n * float(by_column @ by_column) / (k - 1)
    return rows, columns, float((residuals**2).sum()) / ((n - 1) * (k - 1)), (n, k)
