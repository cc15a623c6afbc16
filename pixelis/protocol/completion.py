"""One reply of the policy, in an episode or to a vote, before it is written in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pixelis.dialogue.dialects import DIALECTS
from pixelis.protocol.messages import Call, Message
from pixelis.records import StopReason, Trajectory, Turn

TRUNCATED = ("length", "over_turn", "over_context", "over_images")
"""Reasons to stop without an answer that OpenAI calls ``length``."""


@dataclass(frozen=True)
class Completion:
    """A reply. Without a ``text`` or calls of the client's ``functions``, ``refusal`` says why.

    ``turns`` are those since the request, with the operations that ran on the server. The prompt's tokens are
    all before the reply. ``log_probs`` are in OpenAI's format. ``ids``: common part of the ids of output
    items, random if empty.
    """

    text: str | None
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    version: int = 0
    branch: str = "main"
    thought: str = ""
    calls: tuple[Call, ...] = ()
    refusal: str | None = None
    log_probs: dict[str, Any] | None = None
    turns: Sequence[Turn] = ()
    dialect: str = "qwen"
    functions: frozenset[str] = frozenset()
    ids: str = ""

    @classmethod
    def of(
        cls, trajectory: Trajectory, start: int, functions: Collection[str], branch: str = "main"
    ) -> Completion:
        """The reply in the turns of a trajectory from ``start``: an answer, calls, or the text of the last turn."""
        turns, reason = trajectory.turns[start:], trajectory.stop_reason
        replies = [number for number, turn in enumerate(turns) if turn.is_policy]
        first = start + replies[0] if replies else len(trajectory.turns)
        said = turns[replies[-1]] if replies else Turn(role="assistant")
        ids = f"call_{trajectory.id.removeprefix('traj_')}_{trajectory.policy_turns}"
        calls = tuple(
            Call(f"{ids}_{n}", action.op, action.arguments)
            for n, action in enumerate(said.actions)
            if action.op in functions
        )
        text = trajectory.answer
        if reason is StopReason.NO_ACTION:
            text = said.text.rpartition("</think>")[2].strip()
        thought = DIALECTS[trajectory.dialect].thought(said.text)
        finish: Literal["stop", "length", "tool_calls"] = "stop"
        if text is None and reason.value in TRUNCATED:
            finish = "length"
        elif reason is StopReason.CALL:
            finish = "tool_calls"
        return cls(
            text=text,
            finish=finish,
            prompt_tokens=sum(len(turn.tokens) for turn in trajectory.turns[:first]),
            completion_tokens=sum(len(turn.tokens) for turn in turns if turn.is_policy),
            version=trajectory.policy_version,
            branch=branch,
            thought=thought if thought != text else "",
            calls=calls if finish == "tool_calls" else (),
            refusal=None if text is not None or finish == "tool_calls" else f"no answer ({reason.value})",
            turns=turns,
            dialect=trajectory.dialect,
            functions=frozenset(functions),
        )

    @property
    def message(self) -> Message:
        """The message that a client sends back when it goes on."""
        return Message("assistant", self.text or "", calls=self.calls)

    @property
    def fields(self) -> dict[str, Any]:
        """What OpenAI's formats have no field for."""
        return {"branch": self.branch, "policy_version": self.version}
