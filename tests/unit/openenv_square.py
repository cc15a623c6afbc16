"""An environment of openenv-core behind its own server. usage: python openenv_square.py PORT"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Paint(Action):
    color: int


class Seen(Observation):
    screen: list = Field(default_factory=list)
    said: str = ""


class Square(Environment):
    """Paint the square in the color of the goal."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps, self.goal = 0, 0

    def reset(self, seed=None, episode_id=None, **_):
        self.goal = (seed or 0) % 256
        return Seen(screen=self.picture(self.goal), said=f"goal {self.goal}")

    def step(self, action, timeout_s=None, **_):
        if action.color > 255:
            raise ValueError("no such color")
        self.steps += 1
        done = action.color == self.goal
        return Seen(
            screen=self.picture(action.color), said=f"step {self.steps}", reward=float(done), done=done
        )

    def picture(self, color):
        return [[[color] * 3] * 32] * 32

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(Square, Paint, Seen, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
