"""Shams: observations that a call did not return, to measure what an episode's answer owes to what it saw.

The policy's last turn is scored again with a sham in the place of a call's observation. A blank, and the same
call elsewhere, take the evidence away; what the same operation returned for another question misleads.
docs/looking.md defines causal use by them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.dialogue.agent import Episode, Outcome, Tools, name_observation
from pixelis.dialogue.augmentation import corrected
from pixelis.dialogue.dialects.base import is_of_client
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadInput
from pixelis.records import ELSEWHERE, MISLEADING, REAL, Action, Question, StopReason

MIN_SHIFT = 0.9
"""Share of its width or height by which a region is moved elsewhere."""
REMEMBERED = 2
"""Outcomes of an operation that are kept, each of another question."""
Input = tuple[list[int], list[np.ndarray]]
"""All tokens and views of an episode."""
Score = Callable[[list[int], list[np.ndarray], int], Awaitable[float]]
"""Log-probability of the last of these tokens, given their number."""


@dataclass(frozen=True)
class Shown:
    """A successful call of one of our operations: its action, and the place and outcome of its observation."""

    place: int
    action: Action
    outcome: Outcome


def calls_shown(episode: Episode) -> Iterator[Shown]:
    """The successful calls of an episode's pixel operations, in order."""
    views, actions = 0, list[Action]()
    for place, turn in enumerate(episode.trajectory.turns):
        start, views = views, views + len(turn.images)
        if turn.is_policy:
            actions = list(turn.actions)
        elif turn.observation is not None and actions:
            action = actions.pop(0)
            if turn.observation.status == "ok" and not is_of_client(turn.observation):
                yield Shown(place, action, (turn.observation, episode.views[start:views]))


def elsewhere(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call for another place of the same size; None if there is none, or no place."""
    changes = dict[str, Any]()
    for name in ("box", "center", "point"):
        if (place := arguments.get(name)) is None:
            continue
        if name != "box":
            changes[name] = tuple((value + 0.5) % 1.0 for value in place)
            continue
        x0, y0, x1, y1 = place
        left = 0.0 if x0 + x1 > 1 else 1 - (x1 - x0)
        top = 0.0 if y0 + y1 > 1 else 1 - (y1 - y0)
        if max(abs(left - x0) / (x1 - x0), abs(top - y0) / (y1 - y0)) < MIN_SHIFT:
            return None
        changes[name] = (left, top, left + x1 - x0, top + y1 - y0)
    return {**arguments, **changes} if changes else None


class Shams:
    """Measures the episodes of one process, and remembers what operations returned for shams of other questions."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self.seen = defaultdict[str, deque[tuple[str, Outcome]]](lambda: deque(maxlen=REMEMBERED))

    async def measure(self, question: Question, episode: Episode, tools: Tools, score: Score) -> None:
        """Set ``answer_log_probs`` of the observations that an answered episode's last turn follows."""
        trajectory = episode.trajectory
        if trajectory.stop_reason is not StopReason.ANSWER:
            return
        calls = [call for call in calls_shown(episode) if self._is_ours(episode, call)]
        outcomes = await asyncio.gather(*(self.of(question, episode, call, tools) for call in calls))
        inputs: list[Input] = [(trajectory.token_ids(), episode.views)]
        for call, shams in zip(calls, outcomes, strict=True):
            inputs += [self._replaced(episode, call, outcome) for outcome in shams.values()]
        if len(inputs) == 1:
            return
        answer = len(trajectory.turns[-1].tokens)
        if name := trajectory.augmentation:
            inputs = [(tokens, corrected(trajectory, views, name)) for tokens, views in inputs]
        try:
            real, *values = await asyncio.gather(*(score(*item, answer) for item in inputs))
        except BadInput:  # a sham is longer, and does not fit the context
            return
        following = iter(values)
        for call, shams in zip(calls, outcomes, strict=True):
            if shams:
                call.outcome[0].answer_log_probs = {REAL: real} | dict(zip(shams, following, strict=False))

    def remember(self, episode: Episode) -> None:
        """Keep what the operations of an episode returned, for shams of other questions."""
        for call in calls_shown(episode):
            seen, question = self.seen[call.action.op], episode.trajectory.question_id
            if all(question != other for other, _ in seen):
                seen.append((question, call.outcome))

    async def of(self, question: Question, episode: Episode, call: Shown, tools: Tools) -> dict[str, Outcome]:
        """The shams of a call by kind; one that cannot be made is left out."""
        trajectory, (own, views) = episode.trajectory, call.outcome
        shams = dict[str, Outcome]()
        grey = [np.full_like(view, int(view.mean())) for view in views]
        shams["blank"] = own.model_copy(update={"text": ""}), grey
        if (arguments := elsewhere(call.action.arguments)) is not None:
            moved = call.action.model_copy(update={"arguments": arguments})
            earlier = sum(len(turn.images) for turn in trajectory.turns[: call.place])
            outcome = await tools.execute(moved, trajectory.images[:earlier], trajectory.objects)
            if outcome[0].status == "ok" and len(outcome[1]) == len(views):
                shams[ELSEWHERE] = outcome
        for other, outcome in self.seen[call.action.op]:
            if other != question.id and len(outcome[1]) == len(views):
                shams[MISLEADING] = outcome
        return {name: self._named(call, outcome) for name, outcome in shams.items()}

    def _named(self, call: Shown, outcome: Outcome) -> Outcome:
        """An outcome under the names of a call's own."""
        own, (theirs, views) = call.outcome[0], outcome
        data = {**theirs.data, "op": call.action.op, "target": call.action.target}
        changed = theirs.model_copy(update={"data": data})
        return name_observation(changed, int(str(own.id).removeprefix("obs")) - 1), views

    def _tokens(self, episode: Episode, call: Shown, outcome: Outcome) -> list[int]:
        """The tokens that show an outcome in the place of a call's own."""
        turns, place = episode.trajectory.turns, call.place
        first = max(i for i in range(place) if turns[i].is_policy) + 1
        count = next(i for i in range(place, len(turns)) if turns[i].is_policy) - first
        shown = sum(len(turn.images) for turn in turns[:place])
        return self.renderer.observation(outcome[0], shown, place - first, count).tokens

    def _is_ours(self, episode: Episode, call: Shown) -> bool:
        """Whether a turn is as we write it, but for the end of a policy turn that was cut off."""
        own, tokens = self._tokens(episode, call, call.outcome), episode.trajectory.turns[call.place].tokens
        return tokens[-len(own) :] == own

    def _replaced(self, episode: Episode, call: Shown, outcome: Outcome) -> Input:
        turns, place = episode.trajectory.turns, call.place
        tokens = [list(turn.tokens) for turn in turns]
        own = self._tokens(episode, call, call.outcome)
        tokens[place][-len(own) :] = self._tokens(episode, call, outcome)
        start = sum(len(turn.images) for turn in turns[:place])
        views = [*episode.views[:start], *outcome[1], *episode.views[start + len(turns[place].images) :]]
        return [token for turn in tokens for token in turn], views
