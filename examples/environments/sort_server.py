"""A server of OpenEnv: sort seven digits, which the seed draws. The reward is the share of digits in their place.

python examples/environments/sort_server.py [PORT]
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class SortAction(Action):
    answer: str


class SortObservation(Observation):
    text: str = ""


class SortEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **_) -> SortObservation:
        draw = random.Random(seed)
        self.digits = [str(draw.randrange(10)) for _ in range(7)]
        return SortObservation(text=f"Sort: {' '.join(self.digits)}")

    def step(self, action: SortAction, **_) -> SortObservation:
        given, wanted = action.answer.split(), sorted(self.digits)
        in_place = sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
        return SortObservation(text="right" if in_place == 1 else "wrong", reward=in_place, done=True)

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(SortEnvironment, SortAction, SortObservation, max_concurrent_envs=16)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000, log_level="warning")
