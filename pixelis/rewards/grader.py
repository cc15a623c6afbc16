"""Scores groups and keeps the state that later scores depend on: statistics, curriculum and dynamics model.

It changes only in ``advance``, so that scores do not depend on the order of a step's rollouts.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.config import RewardsConfig
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Group, Trajectory
from pixelis.rewards.curriculum import Curriculum
from pixelis.rewards.normalise import Normaliser
from pixelis.rewards.services import Services
from pixelis.rewards.terms import Context, score_in

if TYPE_CHECKING:
    from pixelis.rewards.dynamics import Dynamics, States

KEY = "pixelis.rewards.1"
"""Metadata key of the values that are no tensors; one, because safetensors writes several in any order."""


@dataclass
class Advance:
    """Result of a step: the name for a checkpoint if a curriculum phase ended, and metrics."""

    boundary: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Grader:
    """Scores groups; thread-safe."""

    def __init__(self, settings: RewardsConfig, run_dir: str | Path | None = None, seed: int = 0):
        self.settings = settings
        self.services = Services(settings, run_dir)
        self.normaliser = Normaliser(settings.normalise.terms)
        self.curriculum = Curriculum(settings.curriculum)
        self.seed = seed
        self.dynamics: Dynamics | None = None
        """The dynamics model, made when the first states tell their size."""
        self.step = -1
        self.scored: dict[str, Group] = {}
        self.transitions: dict[str, list[tuple[Trajectory, States]]] = {}
        self.lock = threading.Lock()
        try:
            self.services.check()
        except BaseException:
            self.services.close()
            raise

    def score(
        self,
        group: Group,
        step: int | None = None,
        states: Mapping[str, States] | None = None,
        truths: Sequence[str] | None = None,
    ) -> Group:
        """A scored copy of a group; see ``terms.score_group``.

        Without ``step`` (evaluation, traffic) the state does not learn from the group. ``states``: vectors by
        trajectory id, one before the first policy turn and one after each.
        """
        with self.lock:
            mixture, dynamics = self.curriculum.mixture, self._dynamics_for(states)
        context = Context(
            group,
            self.settings,
            self.services,
            list(truths if truths is not None else group.question.answers or []),
            self.step + 1 if step is None else step,
            pseudo=truths is not None,
            states=states or {},
            dynamics=dynamics,
            mixture=mixture,
            normalise=self.normaliser,
        )
        scored = score_in(context)
        if step is not None and self.settings.stateful:
            self.observe(scored, states)
        return scored

    def accuracy(self, group: Group, answers: Sequence[str], scorer: str) -> dict[str, float]:
        question = group.question.model_copy(update={"answers": list(answers), "scorer": scorer})
        context = Context(
            group.model_copy(update={"question": question}), self.settings, self.services, answers
        )
        return {id: score for id, score in context.scores.items() if isinstance(score, float)}

    def observe(self, scored: Group, states: Mapping[str, States] | None = None) -> None:
        """Add a scored group for the next ``advance``; a group added again counts once."""
        values: dict[str, list[float]] = {}
        for trajectory in scored.trajectories:
            for name, value in trajectory.rewards.items():
                values.setdefault(name, []).append(value)
        with self.lock:
            self.scored[scored.id] = scored
            self.normaliser.observe(scored.id, values)
            if self._dynamics_for(states) is not None and states:
                self.transitions[scored.id] = [
                    (t, states[t.id]) for t in scored.trajectories if t.id in states
                ]

    def _dynamics_for(self, states: Mapping[str, States] | None) -> Dynamics | None:
        if self.dynamics is None and self.settings.learns_dynamics and states:
            self.dynamics = self._new_dynamics(len(next(iter(states.values()))[0]))
        return self.dynamics

    def _new_dynamics(self, size: int) -> Dynamics:
        from pixelis.rewards.dynamics import Dynamics

        return Dynamics(size, self.seed)

    def advance(self, step: int, is_last: bool = False) -> Advance:
        """End a step: update statistics, dynamics model and curriculum with its groups. Idempotent."""
        with self.lock:
            if step <= self.step:
                return Advance(metrics=self._metrics())
            self.step = step
            self.normaliser.commit()
            metrics = self._learn()
            trajectories = [t for _, group in sorted(self.scored.items()) for t in group.trajectories]
            success = [float(t.rewards["accuracy"] > 0.5) for t in trajectories if "accuracy" in t.rewards]
            coherence = [t.rewards["coherence"] for t in trajectories if "coherence" in t.rewards]
            boundary = self.curriculum.advance(step, _mean(success), _mean(coherence), len(success))
            self.scored.clear()
            if is_last and self.settings.curriculum.kind != "none":
                boundary = boundary or self.curriculum.name
            return Advance(boundary, {**metrics, **self._metrics()})

    def _learn(self) -> dict[str, float]:
        batch = [pair for _, pairs in sorted(self.transitions.items()) for pair in pairs]
        self.transitions.clear()
        if self.dynamics is None:
            return {}
        from pixelis.rewards.dynamics import check_states

        usable = []
        for trajectory, states in batch:
            try:
                check_states(trajectory, states, self.dynamics.size)
                usable.append((trajectory, states))
            except DataFailure as failure:
                self.services.note(failure.code)
        return self.dynamics.update(usable)

    def _metrics(self) -> dict[str, float]:
        return {**self.normaliser.metrics(), **self.curriculum.metrics(), **self.services.metrics()}

    # State for checkpoints

    def state(self) -> bytes:
        """The state as a safetensors file, without the groups scored since the last ``advance``."""
        plain = {
            "step": self.step,
            "normaliser": self.normaliser.state_dict(),
            "curriculum": self.curriculum.state_dict(),
        }
        metadata = {KEY: json.dumps(plain)}
        with self.lock:
            if self.dynamics is None:
                from safetensors.numpy import save as save_plain

                return save_plain({}, metadata)
            from safetensors.torch import save

            return save(self.dynamics.tensors(), metadata)

    def load(self, state: bytes) -> None:
        """Load a ``state``; BadInput when it does not fit these rewards."""
        try:
            (size,) = struct.unpack("<Q", state[:8])
            metadata = json.loads(state[8 : 8 + size])["__metadata__"]
            plain: dict[str, Any] = json.loads(metadata[KEY])
            with self.lock:
                self.step = int(plain["step"])
                self.normaliser.load_state_dict(plain["normaliser"])
                self.curriculum.load_state_dict(plain["curriculum"])
                self.scored.clear()
                self.transitions.clear()
                self.dynamics = None
                if self.settings.learns_dynamics:
                    from safetensors.torch import load

                    if tensors := load(state):
                        self.dynamics = self._new_dynamics(tensors["model.encoder.0.weight"].shape[1])
                        self.dynamics.load_tensors(tensors)
        except (struct.error, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise BadInput(
                f"not a state of these rewards: {error!r:.300}",
                code="bad_state",
                fix="resume with the same rewards",
            ) from None

    def close(self) -> None:
        self.services.close()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
