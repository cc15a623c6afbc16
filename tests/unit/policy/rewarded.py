"""Groups of rollouts with rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pixelis.records import Group, ImageView, Question, StopReason, Trajectory


def group(
    rewards: Sequence[float | None],
    stops: Mapping[int, StopReason] | None = None,
    accuracies: Sequence[float] | None = None,
    advantages: Sequence[float | None] | None = None,
    name: str = "g",
) -> Group:
    """A group whose accuracies are its rewards unless given."""
    group = Group(id=name, question=Question(id=f"q-{name}", question="?"))
    for i, reward in enumerate(rewards):
        scores = {} if reward is None else {"accuracy": accuracies[i] if accuracies else reward}
        trajectory = Trajectory(id=f"{name}-{i}", question_id=group.question.id, group_id=name)
        trajectory.reward, trajectory.rewards = reward, scores
        trajectory.stop_reason = (stops or {}).get(i, StopReason.ANSWER)
        trajectory.advantage = advantages[i] if advantages else None
        trajectory.images = [ImageView(id="img0", view_size=(10, 10))]
        group.trajectories.append(trajectory)
    return group
