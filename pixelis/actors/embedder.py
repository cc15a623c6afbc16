"""The Embedder actor: states of episodes by the frozen base model, for coherence and curiosity."""

from __future__ import annotations

import numpy as np
import ray

from pixelis.config import Config
from pixelis.records import Group


@ray.remote(max_restarts=-1, max_task_retries=2)
class Embedder:
    """The policy's base model without any adapter: what it says of an episode does not move while the policy learns."""

    def __init__(self, config: Config):
        import torch

        from pixelis.policy.forward import use_packed_attention
        from pixelis.policy.model import load_model

        torch.set_num_threads(config.engine.threads)
        self.config = config
        self.model, _, self.spec = load_model(config.policy)
        use_packed_attention(self.model)

    def health(self) -> str:
        """Answers when alive."""
        return "ok"

    def states(self, group: Group, views: dict[str, list[np.ndarray]]) -> dict[str, list[list[float]]]:
        """Vectors by trajectory id: one more than its policy turns; those the model cannot take are left out."""
        from pixelis.policy.embed import turn_states

        shown = [views[t.id] for t in group.trajectories]
        found = turn_states(self.model, self.spec, group.trajectories, shown, self.config.learner.row_tokens)
        return {t.id: states.tolist() for t, states in zip(group.trajectories, found, strict=True) if states is not None}
