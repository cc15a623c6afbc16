"""Stops learning from callers whose votes are rarely clear, because then even the clear ones are often wrong."""

from __future__ import annotations

from collections import OrderedDict, deque

from pixelis.config import VotingConfig

WINDOW = 64
"""Latest verdicts of a user that count; it is judged from half as many on."""
MAX_USERS = 10_000


class ClearShare:
    """The share of each user's latest verdicts that passed the gate.

    Agreement shows an answer to be right only where the policy knows most answers. Where it knows few, its samples agree now and
    then on what it always gets wrong, and learning from these votes makes it surer of them: TTRL (arXiv 2504.16084)
    fails without prior knowledge of the task. How rarely votes are clear shows this without labels. Users are told apart, so that
    one whose pictures the policy does not understand does not stop it learning from the others.
    """

    def __init__(self, config: VotingConfig):
        self.config = config
        self.recent: OrderedDict[str, deque[bool]] = OrderedDict()

    def add(self, user: str, unclear: int) -> bool:
        """Count a clear verdict of ``user`` after ``unclear`` ones; True if enough of the latest ones are clear."""
        recent = self.recent.setdefault(user, deque(maxlen=WINDOW))
        self.recent.move_to_end(user)
        if len(self.recent) > MAX_USERS:
            self.recent.popitem(last=False)
        recent.extend([False] * min(unclear, WINDOW))
        recent.append(True)
        return len(recent) < WINDOW / 2 or sum(recent) >= self.config.min_clear * len(recent)
