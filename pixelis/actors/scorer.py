"""The Scorer actor: reward terms of whole groups."""

from __future__ import annotations

import ray

from pixelis.config import Config
from pixelis.records import Group
from pixelis.rewards.terms import score_group


@ray.remote(max_restarts=-1, max_task_retries=2)
class Scorer:
    """Scores complete groups, because some terms look at the whole group."""

    def __init__(self, config: Config):
        self.config = config

    def health(self) -> str:
        """Answers when alive."""
        return "ok"

    def score(self, group: Group) -> Group:
        """The group with raw terms, total reward or the cause it is unscored on each trajectory."""
        return score_group(group, self.config.rewards)
