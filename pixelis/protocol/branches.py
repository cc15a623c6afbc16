"""Where a request stands in an episode: it goes on with a branch, opens one, or repeats a request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pixelis.protocol.answer_format import canonical
from pixelis.protocol.messages import Message


class Extends(NamedTuple):
    """The request has all messages of ``branch``, which ends in a reply, and ``new`` ones."""

    branch: str
    new: list[Message]


class Forks(NamedTuple):
    """The request opens ``branch``: the first ``keep`` messages of ``source``, up to a reply, then ``new``.

    ``source`` is None if they share no reply: the first request, an edited question, a sub-agent.
    """

    branch: str
    source: str | None
    keep: int
    new: list[Message]


class Repeats(NamedTuple):
    """The last request of ``branch`` again, whose reply the client lost or does not wait for any more."""

    branch: str


Place = Extends | Forks | Repeats


@dataclass
class Branch:
    """``messages`` end in a reply, or in the request that waits for one; ``key`` is that of the last request.

    ``replies`` are the places of the policy's replies, the first ``forked`` messages are another branch's.
    """

    messages: list[Message]
    key: str = ""
    replies: set[int] = field(default_factory=set)
    forked: int = 0

    @property
    def asked(self) -> int:
        """The number of messages of the last request."""
        return len(self.messages) - (len(self.messages) - 1 in self.replies)

    def kept(self, shared: int) -> int:
        """The number of messages up to the last reply among the first ``shared``."""
        return max((place + 1 for place in self.replies if place < shared), default=0)


class Branches:
    """The branches of one episode by name: ``main``, ``branch-1``, ..."""

    def __init__(self) -> None:
        self.branches: dict[str, Branch] = {}
        self.last = "main"
        """The branch of the last reply."""

    def place(self, messages: Sequence[Message], key: str = "") -> Place:
        """Place a request, which then waits for ``reply`` or ``abandon``.

        Of several branches that share as many messages, the one with the same ids of calls is continued, then
        the latest. A request is a repetition only with the same ``key``: a digest of what else changes the
        reply, such as the seed.
        """
        ranked = [(0, False, False, -1, "")]
        for number, (name, branch) in enumerate(self.branches.items()):
            shared, same_ids = shared_messages(branch.messages, messages)
            if shared == len(messages) == branch.asked and branch.key == key:
                return Repeats(name)
            keep = branch.kept(shared)
            extends = 0 < keep == len(branch.messages) < len(messages)
            ranked.append((keep, extends, same_ids, number, name))
        keep, extends, _, _, source = max(ranked)
        new = list(messages[keep:])
        earlier = self.branches[source] if keep else Branch([])
        if extends:
            earlier.messages, earlier.key = earlier.messages + new, key
            return Extends(source, new)
        names = ("main" if n == 0 else f"branch-{n}" for n in itertools.count())
        name = next(name for name in names if name not in self.branches)
        replies = {place for place in earlier.replies if place < keep}
        self.branches[name] = Branch(earlier.messages[:keep] + new, key, replies, keep)
        return Forks(name, source if keep else None, keep, new)

    def reply(self, branch: str, message: Message) -> None:
        """Record the reply to the request of a branch."""
        own = self.branches[branch]
        own.replies.add(len(own.messages))
        self.last = branch
        own.messages = [*own.messages, message]

    def abandon(self, branch: str) -> None:
        """Forget a request that failed, and its branch if that has no reply of its own."""
        own = self.branches[branch]
        end = own.kept(len(own.messages))
        if end == own.forked:
            del self.branches[branch]
        own.messages = own.messages[:end]


def shared_messages(known: Sequence[Message], sent: Sequence[Message]) -> tuple[int, bool]:
    """How many messages at the beginning are the same, and whether their calls have the same ids too.

    A client may rename calls, each in all places.
    """
    names: dict[str | None, str | None] = {}
    shared = 0
    for ours, theirs in zip(known, sent, strict=False):
        if _meaning(ours) != _meaning(theirs):
            break
        pairs = [
            (ours.call_id, theirs.call_id),
            *((a.id, b.id) for a, b in zip(ours.calls, theirs.calls, strict=True)),
        ]
        if any(names.setdefault(own, their) != their for own, their in pairs):
            break
        shared += 1
    return shared, all(own == their for own, their in names.items())


def _meaning(message: Message) -> tuple[object, ...]:
    calls = [(call.name, canonical(call.json)) for call in message.calls]
    return message.role, message.text.strip(), message.media, calls
