"""Agreement between raters.

Every table has one row per rated thing and one column per rater, without gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pixelis.evaluation.statistics import LEVEL

Table = Sequence[Sequence[float]] | np.ndarray


def cohen_kappa(table: Table) -> float | None:
    """Cohen's kappa; of more than two raters the mean over their pairs.

    None if every rater gives one class only.

    Source: Cohen, Educational and Psychological Measurement 1960; Light, Psychological Bulletin 1971.
    """
    classes, codes = np.unique(np.asarray(table), return_inverse=True)
    codes = codes.reshape(np.shape(table))
    kappas = []
    for left, right in itertools.combinations(codes.T, 2):
        chance = (
            float(np.bincount(left, minlength=len(classes)) @ np.bincount(right, minlength=len(classes)))
            / len(codes) ** 2
        )
        if chance < 1:
            kappas.append((float((left == right).mean()) - chance) / (1 - chance))
    return float(np.mean(kappas)) if kappas else None


def fleiss_kappa(table: Table) -> float | None:
    """Fleiss' kappa; None if all ratings are the same class. Source: Fleiss, Psychological Bulletin 1971."""
    classes, codes = np.unique(np.asarray(table), return_inverse=True)
    codes = codes.reshape(np.shape(table))
    counts = np.stack([(codes == k).sum(axis=1) for k in range(len(classes))], axis=1)
    raters = len(codes[0])
    observed = float(((counts**2).sum(axis=1) - raters).mean()) / (raters * (raters - 1))
    chance = float(((counts.sum(axis=0) / codes.size) ** 2).sum())
    return (observed - chance) / (1 - chance) if chance < 1 else None


def icc(table: Table) -> float | None:
    """Intraclass correlation ICC(2,1): absolute agreement of single raters drawn from many.

    None without any variation.

    Source: Shrout and Fleiss, Psychological Bulletin 1979.
    """
    rows, columns, error, (n, k) = _mean_squares(table)
    spread = rows + (k - 1) * error + k * (columns - error) / n
    return (rows - error) / spread if spread > 0 else None


def icc_interval(table: Table) -> list[float] | None:
    """The 95 % interval of `icc`; None where it is undefined.

    Source: McGraw and Wong, Psychological Methods 1996, table 7.
    """
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
