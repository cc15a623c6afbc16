"""Scores groups step after step, and keeps the state that later scores depend on.

That is the running statistics, the curriculum and the dynamics model. All three stand still within a step and move in
``advance``, so that the rollouts of a step are measured alike in whatever order they come.
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
from pixelis.rewards.services import Tools
from pixelis.rewards.terms import Context, score_in

if TYPE_CHECKING:
    from pixelis.rewards.dynamics import Dynamics, States

KEY = "pixelis.rewards.1"
"""Where a state file keeps what is no tensor; one key only, as safetensors writes several in any order."""


@dataclass
class Advance:
    """What a step brought: the name under which to keep a checkpoint, if a boundary was crossed, and metrics."""

    boundary: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Grader:
    """Scores groups; safe to use from many threads. BadConfig when the configured judge or own rewards cannot be used.

    ``run_dir`` is where the judge's verdicts are kept.
    """

    def __init__(self, settings: RewardsConfig, run_dir: str | Path | None = None, seed: int = 0):
        self.settings = settings
        self.tools = Tools(settings, run_dir)
        self.normaliser = Normaliser(settings.normalise)
        self.curriculum = Curriculum(settings.curriculum)
        self.dynamics: Dynamics | None = None
        if self.learns_dynamics:
            from pixelis.rewards.dynamics import Dynamics

            self.dynamics = Dynamics(settings.dynamics, seed)
        self.step = -1
        self.seen: dict[str, Group] = {}
        self.transitions: dict[str, list[tuple[Trajectory, States]]] = {}
        self.lock = threading.Lock()
        try:
            self.tools.check()
        except BaseException:
            self.tools.close()
            raise

    @property
    def learns_dynamics(self) -> bool:
        """True when a dynamics model is part of the reward, now or in a later phase."""
        return self.settings.curriculum.kind != "none" or any(w.curiosity_dynamics for w in self.settings.mixtures)

    def score(
        self,
        group: Group,
        step: int | None = None,
        truths: Sequence[str] | None = None,
        states: Mapping[str, States] | None = None,
    ) -> Group:
        """The scored copy of a complete group; see ``pixelis.rewards.terms.score_group``.

        ``step`` is the number of the training step the group belongs to; without it (evaluation, traffic) nothing is learned
        from the group. ``states`` are an embedder's vectors by trajectory id: one more than policy turns, before the first
        turn and after each.
        """
        with self.lock:
            mixture = self.curriculum.mixture
        context = Context(
            group,
            self.settings,
            self.tools,
            list(truths if truths is not None else group.question.answers or []),
            self.step + 1 if step is None else step,
            states or {},
            self.dynamics,
            mixture,
            self.normaliser,
        )
        scored = score_in(context)
        if step is not None and self.settings.stateful:
            self.observe(scored, states)
        return scored

    def observe(self, scored: Group, states: Mapping[str, States] | None = None) -> None:
        """Take in a scored group, which the next ``advance`` learns from; the same group again changes nothing."""
        values: dict[str, list[float]] = {}
        for trajectory in scored.trajectories:
            for name, value in trajectory.rewards.items():
                values.setdefault(name, []).append(value)
        with self.lock:
            self.seen[scored.id] = scored
            self.normaliser.observe(scored.id, values)
            if self.dynamics is not None and states:
                self.transitions[scored.id] = [(t, states[t.id]) for t in scored.trajectories if t.id in states]

    def advance(self, step: int) -> Advance:
        """Step number ``step`` is over: statistics, dynamics model and curriculum move on with the groups scored since the last.

        Calling it again for the same step changes nothing.
        """
        with self.lock:
            if step <= self.step:
                return Advance(metrics=self._metrics())
            self.step = step
            self.normaliser.commit()
            metrics = self._learn()
            trajectories = [t for _, group in sorted(self.seen.items()) for t in group.trajectories]
            right = [float(t.rewards["accuracy"] > 0.5) for t in trajectories if "accuracy" in t.rewards]
            coherence = [t.rewards["coherence"] for t in trajectories if "coherence" in t.rewards]
            boundary = self.curriculum.advance(step, _mean(right), _mean(coherence), len(right))
            self.seen.clear()
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
                check_states(trajectory, states, self.settings.dynamics.state)
                usable.append((trajectory, states))
            except DataFailure as failure:
                self.tools.note(failure.code)
        return self.dynamics.update(usable)

    def _metrics(self) -> dict[str, float]:
        return {**self.normaliser.metrics(), **self.curriculum.metrics(), **self.tools.metrics()}

    # -- state for checkpoints --------------------------------------------------------------------------------------

    def state(self) -> bytes:
        """All that later scores depend on, as one safetensors file; groups since the last ``advance`` are not part of it."""
        plain = {"step": self.step, "normaliser": self.normaliser.state_dict(), "curriculum": self.curriculum.state_dict()}
        metadata = {KEY: json.dumps(plain)}
        with self.lock:
            if self.dynamics is None:
                from safetensors.numpy import save as save_plain

                return save_plain({}, metadata)
            from safetensors.torch import save

            return save(self.dynamics.tensors(), metadata)

    def load(self, state: bytes) -> None:
        """Go on from ``state``; BadInput ``bad_state`` for bytes that are none."""
        try:
            (size,) = struct.unpack("<Q", state[:8])
            metadata = json.loads(state[8 : 8 + size])["__metadata__"]
            plain: dict[str, Any] = json.loads(metadata[KEY])
            with self.lock:
                self.step = int(plain["step"])
                self.normaliser.load_state_dict(plain["normaliser"])
                self.curriculum.load_state_dict(plain["curriculum"])
                self.seen.clear()
                self.transitions.clear()
                if self.dynamics is not None:
                    from safetensors.torch import load

                    self.dynamics.load_tensors(load(state))
        except (struct.error, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise BadInput(f"no state of rewards: {error!r:.300}", code="bad_state", fix="resume with the same rewards") from None

    def close(self) -> None:
        """End processes, connections and threads."""
        self.tools.close()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
