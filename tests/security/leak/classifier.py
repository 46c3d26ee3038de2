"""Says which prompt was asked from the records of its answer, as an eavesdropper who knows the prompts would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests.security.leak.wire import Record

Features: TypeAlias = NDArray[np.float64]

_FIRST, _LAST = 48, 12
"""Records at the beginning and at the end of an answer whose sizes and times are features of their own."""
_BIN, _BINS = 0.02, 60
"""Seconds of a time bin, and bins, whose bytes are features."""
_FOLDS = 3
"""Of the cross-validation that chooses a classifier, within the half to train with."""


@dataclass(frozen=True, slots=True)
class Guessed:
    """How often the prompt was guessed.

    Attributes:
        classifier: the one that cross-validation within the half to train with chose.
        expected: its accuracy there.
        accuracy: share of the other half whose prompt it named.
        low, high: its 95% interval (Wilson).
    """

    classifier: str
    expected: float
    accuracy: float
    low: float
    high: float


def size_features(records: Sequence[Record], sent_at: float) -> Features:
    """Of the sizes alone: of the first and last records, their number, sum and spread."""
    sizes = np.array([size for _, size in records], np.float64)
    ends = np.concatenate([_fitted(sizes, _FIRST), _fitted(sizes[::-1], _LAST)])
    return np.concatenate([ends, [sizes.size, sizes.sum(), sizes.max(), sizes.std(), np.median(sizes)]])


def time_features(records: Sequence[Record], sent_at: float) -> Features:
    """Of the times: between the first and last records, their number, the whole duration, and records in each bin."""
    times = np.array([time - sent_at for time, _ in records], np.float64)
    gaps = np.diff(times, prepend=0.0)
    counts = np.bincount(np.minimum(times / _BIN, _BINS - 1).astype(int), minlength=_BINS)
    ends = np.concatenate([_fitted(gaps, _FIRST), _fitted(gaps[::-1], _LAST)])
    return np.concatenate([ends, counts, [times.size, times[-1], np.median(gaps), gaps.max(), gaps.std()]])


def all_features(records: Sequence[Record], sent_at: float) -> Features:
    """Of sizes and times, and the bytes in each bin."""
    sizes = np.array([size for _, size in records], np.float64)
    times = np.array([time - sent_at for time, _ in records], np.float64)
    counts = np.bincount(np.minimum(times / _BIN, _BINS - 1).astype(int), weights=sizes, minlength=_BINS)
    return np.concatenate([size_features(records, sent_at), time_features(records, sent_at), counts])


def guess(known: Features, known_prompts: Sequence[int], others: Features, prompts: Sequence[int]) -> Guessed:
    """Trains with the answers to known prompts, and guesses the prompts of others.

    Args:
        known, others: float64[answer, feature].
    """
    from scipy.stats import binomtest
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=0)
    candidates = _candidates()
    scores = {name: cross_val_score(one, known, known_prompts, cv=folds).mean() for name, one in candidates.items()}
    name = max(scores, key=lambda name: scores[name])
    named = candidates[name].fit(known, known_prompts).predict(others)
    right = int((named == np.asarray(prompts)).sum())
    interval = binomtest(right, len(prompts)).proportion_ci(method="wilson")
    return Guessed(name, float(scores[name]), right / len(prompts), float(interval.low), float(interval.high))


def _candidates() -> dict[str, Any]:
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "extra trees": ExtraTreesClassifier(300, random_state=0),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)),
        "nearest neighbour": make_pipeline(StandardScaler(), KNeighborsClassifier(1)),
    }


def _fitted(values: Features, count: int) -> Features:
    """The first `count` values, zeros if there are fewer."""
    return np.pad(values[:count], (0, max(0, count - values.size)))
