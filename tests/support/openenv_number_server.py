"""A server of OpenEnv for tests: find a number. It is run as `python openenv_number_server.py PORT SESSIONS`."""

import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str = ""


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = -1

    def reset(self, seed: int | None = None, number: int | None = None, **_: Any) -> Hint:
        self.number = number if number is not None else (seed or 0) % 10
        return Hint(hint=f"Guess. {seed}")

    def step(self, action: Guess, **_: Any) -> Hint:
        if action.guess == 99:
            time.sleep(2.0)
        if action.guess == 98:
            raise ValueError("98 is broken")
        right = action.guess == self.number
        return Hint(hint="yes" if right else "no", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
