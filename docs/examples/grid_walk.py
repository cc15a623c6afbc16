"""GRID WALK: a square on a grid that the policy moves to the goal; the picture shows where it is after each
move.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from pixelis.errors import OperationError
from pixelis.operations import Environment, EnvironmentAction, EnvironmentResult, OperationArguments

CELLS, SIDE = 4, 16
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class MoveArguments(OperationArguments):
    """``direction``: where to."""

    direction: Literal["up", "down", "left", "right"] = Field(description="up, down, left or right")


class Move(EnvironmentAction):
    """One step of the walk."""

    name = "move"
    description = "Move the blue square by one cell."
    Arguments = MoveArguments


class GridWalk(Environment):
    """The goal earns 1 and ends the episode; a move against the border is refused and changes nothing."""

    name = "grid_walk"
    actions = (Move,)

    def reset(self, question, media, seed):
        """Two different cells, by the seed."""
        start, goal = np.random.default_rng(seed).choice(CELLS * CELLS, 2, replace=False)
        self.place, self.goal, self.moves = divmod(int(start), CELLS), divmod(int(goal), CELLS), 0
        return EnvironmentResult("Move the blue square to the red one.", [self.picture()])

    def execute(self, action):
        """Move, and show the grid."""
        step = STEPS[action.arguments["direction"]]
        row, column = self.place[0] + step[0], self.place[1] + step[1]
        if not (0 <= row < CELLS and 0 <= column < CELLS):
            raise OperationError("the border is there, move elsewhere", code="border")
        self.place, self.moves = (row, column), self.moves + 1
        done = self.place == self.goal
        text = "You are there." if done else "Not there yet."
        return EnvironmentResult(
            text, [self.picture()], reward=float(done), done=done, data={"moves": self.moves}
        )

    def picture(self) -> np.ndarray:
        """The grid: white, the goal red, the square blue."""
        cells = np.full((CELLS, CELLS, 3), 255, np.uint8)
        cells[self.goal], cells[self.place] = (220, 30, 30), (30, 60, 220)
        return cells.repeat(SIDE, 0).repeat(SIDE, 1)
