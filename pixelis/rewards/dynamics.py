"""Curiosity reward: the prediction error of a small model of the state after an operation.

Source: Pixelis, arXiv 2603.25091, after arXiv 1705.05363.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from pixelis.errors import DataFailure
from pixelis.records import Action, Trajectory

OPERATIONS = (
    "zoom_in",
    "segment_object_at",
    "read_text",
    "get_properties",
    "track_object",
    "select_frames",
    "answer",
)
"""Elements 0..6 of an action vector; 7 is any other operation, 8 a turn without one."""
COORDINATES, HASHED = 10, 20
"""First elements of the coordinates and of the hashed other arguments."""

ACTION, HIDDEN, DROPOUT = 128, 256, 0.1
LR, EPOCHS = 1e-3, 4
BETA = 0.2
"""Share of the forward loss; the rest is that of the inverse loss."""
SCALE = 0.05
"""Weight 0.1 of the intrinsic reward times weight 0.5 (eta) of the prediction error."""

States = Sequence[Sequence[float]]
Transitions = Float[Tensor, "transitions state"]


class Dynamics(nn.Module):
    """Encoder, forward and inverse model over an embedder's states of ``size`` numbers; thread-safe.

    A trajectory has a state before its first policy turn and one after each.
    """

    def __init__(self, size: int, seed: int = 0):
        super().__init__()
        self.size = size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = nn.Sequential(
                nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, size), nn.LayerNorm(size)
            )
            self.forward_model = nn.Sequential(
                *(nn.Linear(size + ACTION, HIDDEN), nn.ReLU(), nn.Dropout(DROPOUT)),
                *(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Dropout(DROPOUT)),
                nn.Linear(HIDDEN, size),
            )
            self.inverse_model = nn.Sequential(
                nn.Linear(2 * size, HIDDEN), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(HIDDEN, ACTION)
            )
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        self.seed, self.updates = seed, 0
        self.lock = threading.Lock()
        self.eval()

    @torch.no_grad()
    def curiosity(self, trajectory: Trajectory, states: States) -> float:
        """SCALE * mean squared error of the predicted states, 0..1; 0 without transitions."""
        before, actions, after = self._transitions([(trajectory, states)])
        if not len(before):
            return 0.0
        with self.lock:
            errors = (self._predict(before, actions) - self.encoder(after)).square().mean(dim=-1)
        return min(1.0, SCALE * float(errors.mean()))

    def update(self, batch: Sequence[tuple[Trajectory, States]]) -> dict[str, float]:
        """Learn from the transitions of a step by beta * forward + (1 - beta) * inverse loss."""
        before, actions, after = self._transitions(batch)
        if not len(before):
            return {}
        losses: list[tuple[float, float]] = []
        with self.lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + self.updates)
            self.train()
            for _ in range(EPOCHS):
                target = self.encoder(after)
                # Detached: a trained target would become constant, which is easiest to predict.
                forward = functional.mse_loss(self._predict(before, actions), target.detach())
                inferred = self.inverse_model(torch.cat([self.encoder(before), target], dim=-1))
                inverse = functional.mse_loss(inferred, actions)
                loss = BETA * forward + (1 - BETA) * inverse
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.parameters(), 1.0)
                if torch.isfinite(norm):
                    self.optimizer.step()
                losses.append((forward.item(), inverse.item()))
            self.eval()
        self.updates += 1
        first, last = losses[0], losses[-1]
        return {
            "dynamics/forward_loss": last[0],
            "dynamics/inverse_loss": last[1],
            "dynamics/forward_loss_before": first[0],
            "dynamics/transitions": float(len(before)),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimiser moments by name."""
        tensors = {f"model.{name}": tensor.contiguous() for name, tensor in self.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            for name, tensor in moments.items():
                tensors[f"optimizer.{index}.{name}"] = tensor.contiguous()
        tensors["updates"] = torch.tensor(self.updates)
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.load_state_dict(
            {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        )
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, moment = name.split(".", 2)
                state.setdefault(int(index), {})[moment] = tensor.clone()
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.updates = int(tensors["updates"])

    def _predict(self, before: Transitions, actions: Float[Tensor, "transitions action"]) -> Transitions:
        return self.forward_model(torch.cat([self.encoder(before), actions], dim=-1))

    def _transitions(
        self, batch: Sequence[tuple[Trajectory, States]]
    ) -> tuple[
        Transitions,
        Float[Tensor, "transitions action"],
        Transitions,
    ]:
        before: list[Sequence[float]] = []
        after: list[Sequence[float]] = []
        actions: list[list[float]] = []
        for trajectory, states in batch:
            check_states(trajectory, states, self.size)
            before += states[:-1]
            after += states[1:]
            actions += [encode_action(turn.action, trajectory.answer) for turn in trajectory.replies]
        shape = (len(before), self.size)
        return (
            torch.tensor(before, dtype=torch.float32).reshape(shape),
            torch.tensor(actions, dtype=torch.float32).reshape(len(actions), ACTION),
            torch.tensor(after, dtype=torch.float32).reshape(shape),
        )


def check_states(trajectory: Trajectory, states: States, size: int) -> None:
    """DataFailure ``bad_states`` unless the states are finite, of ``size`` numbers and one more than turns."""
    if len(states) != trajectory.policy_turns + 1:
        raise DataFailure(f"{len(states)} states for {trajectory.policy_turns} turns", code="bad_states")
    if any(len(state) != size for state in states):
        raise DataFailure(f"a state has {len(states[0])} numbers, not {size}", code="bad_states")
    if not all(math.isfinite(value) for state in states for value in state):
        raise DataFailure("a state is not finite", code="bad_states")


def encode_action(action: Action | None, answer: str | None) -> list[float]:
    """A turn as a vector: one-hot operation, coordinates (0..1), hashed other arguments."""
    vector = [0.0] * ACTION
    if action is None:
        vector[OPERATIONS.index("answer") if answer is not None else 8] = 1.0
        return vector
    vector[OPERATIONS.index(action.op) if action.op in OPERATIONS else 7] = 1.0
    offset = COORDINATES
    places = (
        {"box": 4, "point": 2, "center": 2} if action.target else {}
    )  # else of a scale that we do not know
    for name, length in places.items():
        values = action.arguments.get(name)
        if isinstance(values, (list, tuple)) and len(values) == length:
            vector[offset : offset + length] = [float(v) for v in values]
        offset += length
    for name, value in sorted(action.arguments.items()):
        if name not in places:
            vector[
                HASHED + zlib.crc32(json.dumps([name, value], sort_keys=True).encode()) % (ACTION - HASHED)
            ] += 1.0
    return vector
