"""Training samples: trajectories as arrays, with the views of their images."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8

from pixelis.errors import DataFailure

if TYPE_CHECKING:
    from pixelis.families.family import ModelSpec
    from pixelis.records import Trajectory

T = TypeVar("T")
CAUSES = (
    "bad_shape",
    "over_context",
    "no_policy_tokens",
    "first_token",
    "bad_token",
    "banned_token",
    "bad_view",
    "views_mismatch",
    "non_finite",
)


@dataclass(slots=True)
class TrainSample:
    """One sequence to train on.

    mask: the tokens that the policy generated; log_probs: of the behaviour policy, 0 outside the mask;
    weights: of each token in the SFT loss; token_advantages: instead of the trajectory's; values, returns:
    for a critic.
    """

    tokens: Int64[np.ndarray, " length"]
    mask: Bool[np.ndarray, " length"]
    log_probs: Float32[np.ndarray, " length"]
    advantage: float
    views: list[UInt8[np.ndarray, "height width 3"]]
    version: int = 0
    id: str = ""
    weights: Float32[np.ndarray, " length"] | None = None
    token_advantages: Float32[np.ndarray, " policy_tokens"] | None = None
    values: Float32[np.ndarray, " policy_tokens"] | None = None
    returns: Float32[np.ndarray, " policy_tokens"] | None = None
    _digests: list[bytes] = field(default_factory=list, repr=False)

    @property
    def digests(self) -> list[bytes]:
        """Content hash of each view: equal views share their features."""
        if len(self._digests) != len(self.views):
            self._digests = [view_digest(view) for view in self.views]
        return self._digests

    @property
    def policy_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def weight(self) -> float:
        return float(
            self.policy_tokens if self.weights is None else self.weights[self.mask].sum(dtype=np.float64)
        )


@dataclass
class LearnerBatch:
    """One worker's share of batch ``step`` and the settings of its update.

    state: of the source after this batch; options: of `Trainer.update`; optional: skipped without a usable
    sample.
    """

    step: int
    samples: list[TrainSample]
    kind: Literal["sft", "policy"] = "policy"
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    optional: bool = False


def once_per_view(compute: Callable[[np.ndarray], T]) -> Callable[[np.ndarray], T]:
    """Keep the result for a read-only view as long as the view: the rollouts of a group share theirs."""
    results: dict[int, tuple[T, weakref.ref[np.ndarray]]] = {}

    def result_of(view: np.ndarray) -> T:
        if view.flags.writeable:
            return compute(view)
        key = id(view)
        if key not in results:
            results[key] = compute(view), weakref.ref(view, lambda _: results.pop(key))
        return results[key][0]

    return result_of


@once_per_view
def view_digest(view: np.ndarray) -> bytes:
    shape = f"{view.shape}{view.dtype}".encode()
    return hashlib.blake2b(
        np.ascontiguousarray(view).data, digest_size=16, key=hashlib.sha256(shape).digest()
    ).digest()


def from_trajectory(
    trajectory: Trajectory, views: Sequence[np.ndarray], advantage: float | None = None, whole: bool = False
) -> TrainSample:
    """A trajectory and its views, aligned with `trajectory.images`, as arrays.

    whole: keep observations after the policy's last token. Raises DataFailure if views are missing.
    """
    tokens = np.asarray(trajectory.token_ids(), dtype=np.int64)
    mask = np.asarray(trajectory.loss_mask(), dtype=bool)
    if len(views) != len(trajectory.images):
        raise DataFailure(
            f"{trajectory.id}: {len(views)} views for {len(trajectory.images)} images", code="views_mismatch"
        )
    weight = trajectory.advantage if advantage is None else advantage
    sample = TrainSample(
        tokens=tokens,
        mask=mask,
        log_probs=np.asarray(trajectory.behaviour_log_probs(), dtype=np.float32),
        advantage=0.0 if weight is None else float(weight),
        views=list(views),
        version=trajectory.policy_version,
        id=trajectory.id,
    )
    if whole or not mask.any():
        return sample
    images = used_images = length = used_length = 0
    for turn in trajectory.turns:
        images += len(turn.images)
        length += len(turn.tokens)
        if turn.is_policy:
            used_images, used_length = images, length
    sample.tokens, sample.mask = tokens[:used_length], mask[:used_length]
    sample.log_probs, sample.views = sample.log_probs[:used_length], sample.views[:used_images]
    return sample


def unusable(sample: TrainSample, spec: ModelSpec, row_tokens: int) -> str | None:
    """Reason why a sample cannot be trained on, one of `CAUSES`; None if it can."""
    length = len(sample.tokens)
    weights = sample.log_probs if sample.weights is None else sample.weights
    if not length == len(sample.mask) == len(sample.log_probs) == len(weights):
        return "bad_shape"
    if length > row_tokens:
        return "over_context"
    if not sample.mask.any():
        return "no_policy_tokens"
    if sample.mask[0]:
        return "first_token"
    if sample.tokens.min() < 0 or sample.tokens.max() >= spec.vocab:
        return "bad_token"
    if np.isin(sample.tokens[sample.mask], spec.banned).any():
        return "banned_token"
    if any(
        view.shape[0] % spec.multiple or view.shape[1] % spec.multiple or not view.size
        for view in sample.views
    ):
        return "bad_view"
    pads = sum(spec.image_tokens(view.shape[0], view.shape[1]) for view in sample.views)
    if pads != int((sample.tokens == spec.image_token).sum()):
        return "views_mismatch"
    if (
        not np.isfinite(sample.advantage)
        or not np.isfinite(sample.log_probs).all()
        or not np.isfinite(weights).all()
    ):
        return "non_finite"
    return None
