"""Episodes and groups to score."""

from __future__ import annotations

from pixelis.records import Action, Group, Observation, Question, StopReason, Trajectory, Turn

CALL = "<tool_call>{}</tool_call>"


def episode(answer: str | None, ok: int = 0, failed: int = 0, stop=StopReason.ANSWER, **more) -> Trajectory:
    turns = [Turn(role="user", text="?")]
    for status in ["ok"] * ok + ["error"] * failed:
        turns.append(Turn(role="assistant", text=CALL, action=Action(op="zoom_in")))
        turns.append(Turn(role="tool", observation=Observation(status=status)))
    turns.append(Turn(role="assistant", text=f"<answer>{answer}</answer>"))
    return Trajectory(question_id="q", group_id="g", turns=turns, answer=answer, stop_reason=stop, **more)


def group(*trajectories: Trajectory, answers=("7",), scorer="exact", **more) -> Group:
    question = Question(
        id="q", question="?", answers=None if answers is None else list(answers), scorer=scorer, **more
    )
    return Group(id="g", question=question, trajectories=list(trajectories))
