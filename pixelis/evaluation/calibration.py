"""Whether a confidence is a probability, and the logistic curve that makes it one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pixelis.errors import BadInput

MIN_ANSWERS = 50
BINS = 10
FOLDS = 5
Calibration = tuple[float, float]
"""Slope and intercept of a logistic curve over confidence."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers whose confidence lies in the same tenth."""

    answers: int
    confidence: float
    right: float


def bins(confidences: Sequence[float], right: Sequence[bool]) -> list[Bin]:
    """The tenths of 0..1 that have answers, in order."""
    values, truths = np.asarray(confidences, float), np.asarray(right, float)
    place = np.minimum((np.clip(values, 0, 1) * BINS).astype(int), BINS - 1)
    chosen = [place == k for k in range(BINS)]
    return [Bin(int(c.sum()), float(values[c].mean()), float(truths[c].mean())) for c in chosen if c.any()]


def calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """Expected calibration error over tenths, 0..1 (Naeini, Cooper and Hauskrecht, AAAI 2015)."""
    return sum(b.answers * abs(b.confidence - b.right) for b in bins(confidences, right)) / max(len(right), 1)


def fit(confidences: Sequence[float], right: Sequence[bool]) -> tuple[Calibration, float]:
    """The logistic curve of right answers over confidence (Platt, 1999), and its held-out calibration error.

    BadInput for too few answers, and if confidence says nothing about them.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    truths = np.asarray(right, bool)
    least = min(int(truths.sum()), int((~truths).sum()))
    if len(truths) < MIN_ANSWERS or least < FOLDS:
        raise BadInput(
            f"{len(truths)} answers, {int(truths.sum())} of them right, are too few to calibrate confidence",
            fix=f"give at least {MIN_ANSWERS} labelled questions, of which some are answered wrongly",
        )
    column, model = np.asarray(confidences, float)[:, None], LogisticRegression(C=1e3)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    unseen = cross_val_predict(model, column, truths, cv=folds, method="predict_proba")[:, 1]
    model.fit(column, truths)
    slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
    if slope <= 0:
        raise BadInput(
            "answers of more confidence are not right more often",
            fix="choose another evolution.vote.strategy, or more samples",
        )
    return (round(slope, 3), round(intercept, 3)), calibration_error(unseen.tolist(), truths.tolist())
