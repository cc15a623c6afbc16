"""Episodes that a call of a client's function has interrupted: the client goes on with the results, maybe elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pixelis.dialogue.agent import (
    Episode,
    Limits,
    Outcome,
    TokenConversation,
    Tools,
    TurnCallback,
    name_pictures,
    operate_all,
    show,
)
from pixelis.errors import BadInput
from pixelis.records import Action, StopReason, Trajectory, new_id

Content = TypeVar("Content")


@dataclass(frozen=True)
class Said(Generic[Content]):
    """What a client says after a policy turn, in this order.

    ``results`` of its functions, in the order of their calls, and a further user ``message``; an `Outcome` of either
    has no ids, and its pictures stand at the ``<image>`` of its text. ``reply`` and ``calls``: in place of a policy
    turn, text and calls that were not sampled (of an edited history), to which the results belong.
    """

    results: Sequence[Content] = ()
    message: Content | None = None
    reply: str | None = None
    calls: Sequence[Action] = ()


@dataclass(frozen=True)
class Resume:
    """An episode that its client goes on with: its end is a policy turn, or it has no turns yet."""

    episode: Episode
    said: Sequence[Said[Outcome]] = ()

    async def hear(
        self,
        conversation: TokenConversation,
        episode: Episode,
        tools: Tools | None,
        limits: Limits,
        on_turn: TurnCallback | None,
    ) -> StopReason | None:
        """Append what the client said, and what our operations of the same turns observe."""
        trajectory = episode.trajectory
        if trajectory.policy_turns >= limits.max_turns:
            return StopReason.OVER_TURN
        for item in self.said:
            last = trajectory.turns[-1]
            actions: Sequence[Action] = last.actions if trajectory.stop_reason is StopReason.CALL else ()
            # Whether or not the client offers them now too
            functions = {a.op for a in actions if a.op not in conversation.renderer.operations}
            quotes = item.reply is not None or bool(item.calls)
            if quotes:
                quote = conversation.quote(item.reply or "", item.calls, trajectory.images)
                changed = {"text": f"{last.text}\n{quote.text}", "tokens": [*last.tokens, *quote.tokens]}
                trajectory.turns[-1] = last.model_copy(update=changed)
                actions, functions = item.calls, {action.op for action in item.calls}
            missing = sum(action.op in functions for action in actions) - len(item.results)
            if quotes == last.is_policy or missing or not (item.results or item.message):
                raise BadInput(
                    "what the client said does not follow from the turn before", code="wrong_results"
                )
            results = await operate_all(tools, actions, trajectory, functions, item.results)
            shown, message = results, None
            if item.message is not None:
                message, views = item.message
                named = name_pictures(trajectory.images, message.images)
                message = message.model_copy(update={"images": named})
                shown = [*results, (message, views)]
            turns = conversation.observe(shown, len(trajectory.images), message)
            if (stop := show(episode, shown, turns, limits, on_turn)) is not None:
                return stop
        if trajectory.turns[-1].is_policy:
            raise BadInput("the client said nothing after a policy turn", code="wrong_results")
        return None


def up_to(trajectory: Trajectory, policy_turns: int) -> Trajectory:
    """A new trajectory, for a branch, with the turns up to this number of policy turns, or none."""
    ends = [0, *(place for place, turn in enumerate(trajectory.turns, 1) if turn.is_policy)]
    turns, after = trajectory.turns[: ends[policy_turns]], trajectory.turns[ends[policy_turns] :]
    images = trajectory.images[: sum(len(turn.images) for turn in turns)]
    update = {"id": new_id("traj"), "turns": turns, "images": images}
    if after:
        update["stop_reason"] = StopReason.CALL if after[0].role == "tool" else StopReason.NO_ACTION
    return trajectory.model_copy(update=update)
