"""Forward passes of the learner, and the cache of a frozen vision tower's features."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pixelis.families.features import Features

if TYPE_CHECKING:
    from pixelis.families.family import ModelSpec
    from pixelis.policy.packing import PackedBatch

VisionLanguageModel = Any

FEATURE_CACHE_BYTES = 256 * 2**20


class FeatureCache:
    """Least-recently-used cache of a frozen vision tower's features, by digest of the view."""

    def __init__(self, limit: int = FEATURE_CACHE_BYTES):
        self.limit = limit
        self.entries: OrderedDict[bytes, Features] = OrderedDict()
        self.nbytes = 0
        self.misses = 0

    def get(
        self,
        model: VisionLanguageModel,
        spec: ModelSpec,
        views: Sequence[np.ndarray],
        digests: Sequence[bytes],
    ) -> list[Features]:
        distinct = dict(zip(digests, views, strict=True))
        result = {d: self.entries[d] for d in distinct if d in self.entries}
        missing = [d for d in distinct if d not in result]
        self.misses += len(missing)
        for digest in result:
            self.entries.move_to_end(digest)
        if missing:
            with torch.no_grad():
                encoded = spec.family.encode_views(model, spec, [distinct[d] for d in missing])
            for digest, features in zip(missing, encoded, strict=True):
                # A slice would keep the whole batch in memory after the other views were evicted.
                result[digest] = Features(features.embeds.clone(), [d.clone() for d in features.deepstack])
                self.entries[digest] = result[digest]
                self.nbytes += result[digest].nbytes
        while self.nbytes > self.limit and self.entries:
            _, evicted = self.entries.popitem(last=False)
            self.nbytes -= evicted.nbytes
        return [result[d] for d in digests]

    def clear(self) -> None:
        """Empty the cache. Required when the vision tower changes."""
        self.entries.clear()
        self.nbytes = 0


def packed_hidden_states(
    model: VisionLanguageModel,
    spec: ModelSpec,
    batch: PackedBatch,
    features: Features | None,
    **attention: Any,
) -> Float[Tensor, "tokens hidden"]:
    """Hidden states of a packed batch. features: of its distinct views, in order."""
    if features is not None:
        features = features.rows(batch.image_rows)
    attention |= {"segments": batch.segments, "use_cache": False}
    positions = batch.positions[:, None]
    return spec.family.hidden_states(model, spec, batch.tokens[None], positions, features, **attention)[0]
