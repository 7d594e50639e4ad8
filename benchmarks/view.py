"""Measure how fast `spurline view` shows and filters 10,000 rollouts of 500 tokens.

    python benchmarks/view.py [--json] [--attempts 10000] [--repeats 5]

The benchmark writes a folder of kept rollouts, and sends requests to the page's application in this process: for the
first list, and for lists filtered by reward, by prompt, and by a text that is in no response, so that all are read.
Gates: the first list takes <= 1.5 s, and each filter <= 300 ms, by wall clock or by process time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from starlette.testclient import TestClient
from timing import Gate, Timing, gates_as_json, print_gates, print_timings, round_robin, timings_as_json

from spurline_insight.view.app import make_app
from spurline_insight.view.runs import open_runs
from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER
from spurline_rl.kept_rollouts.keeper import write_step
from spurline_rl.kept_rollouts.table import KeptStep, step_table
from spurline_rl.trajectory import Group, Trajectory, Turn
from spurline_rl.viewing import answers

PROMPT, RESPONSE, SAMPLES, PROMPTS_PER_STEP = 200, 500, 8, 32
VOCABULARY = 50_000
OPEN_S, FILTER_S = 1.5, 0.3
FILTERS = {
    "filter: reward range": {"min_reward": "0.5", "max_reward": "1"},
    "filter: prompt": {"prompt": "word77 "},
    "filter: tag": {"tag": "answer=42"},
    "filter: text of no response": {"text": "nothing says this"},
    "order: largest gap": {"sort": "max_gap"},
}


class Words:
    """The words of tokens, with 4 to 10 bytes each."""

    def of_all(self, token_ids: list[int]) -> list[bytes]:
        return [b" word%d" % token_id for token_id in token_ids]

    def is_special(self, token_id: int) -> bool:
        return token_id == 0


def write_rollouts(folder: Path, attempts: int) -> None:
    """Write this many attempts into a run directory. Some tokens are frequent and many are rare, as in text."""
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.3, 1 << 20), VOCABULARY).astype(np.int32)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").touch()
    (folder / ROLLOUTS_FOLDER).mkdir()
    for step, first in enumerate(range(0, attempts // SAMPLES, PROMPTS_PER_STEP), start=1):
        draws = range(first, min(first + PROMPTS_PER_STEP, attempts // SAMPLES))
        groups = [make_group(rng, tokens, draw, step) for draw in draws]
        num_attempts = len(groups) * SAMPLES
        scores = {
            "old_logprobs": rng.normal(0, 0.02, num_attempts * RESPONSE).astype(np.float32) - 0.5,
            "advantages": np.repeat(rng.normal(0, 1, num_attempts), RESPONSE).astype(np.float32),
        }
        kept = KeptStep(step, groups, [], [], 1000, scores.__getitem__)
        write_step(folder / ROLLOUTS_FOLDER, step, step_table(kept, Words()))


def make_group(rng: np.random.Generator, tokens: np.ndarray, draw: int, step: int) -> Group:
    """Make a group of one prompt with its attempts."""
    uid, prompt = f"train:{draw}@{draw}", rng.choice(tokens, PROMPT)
    attempts: list[Trajectory] = []
    for sample in range(SAMPLES):
        rewards = np.zeros(RESPONSE, np.float32)
        rewards[-1] = rng.integers(2)
        turn = Turn(
            prompt,
            rng.choice(tokens, RESPONSE),
            np.ones(RESPONSE, np.uint8),
            logprobs=np.full(RESPONSE, -0.5, np.float32),
            versions=np.full(RESPONSE, step - 1, np.int32),
            rewards=rewards,
        )
        attempts.append(Trajectory(uid, sample, (turn,), {"right": float(rewards[-1])}))
    return Group(uid, draw, tuple(attempts), {}, {"answer": "42"})


def open_all(folder: Path) -> None:
    """Request the first list with empty caches."""
    answers._listed.cache_clear()
    TestClient(make_app(open_runs([folder]))).get("/api/rollouts", params={"run": 0})


def main() -> int:
    """Print the figures, and return 1 if a gate is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--attempts", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rollouts(folder, arguments.attempts)
        size_mb = sum(path.stat().st_size for path in (folder / ROLLOUTS_FOLDER).iterdir()) / 1e6
        client = TestClient(make_app(open_runs([folder])))
        timings: dict[str, Timing] = round_robin(
            {
                "open": partial(open_all, folder),
                **{
                    label: partial(client.get, "/api/rollouts", params={"run": 0, **query})
                    for label, query in FILTERS.items()
                },
            },
            arguments.repeats,
        )
    gates = [
        Gate(f"{label}, s", timing.min_s, OPEN_S if label == "open" else FILTER_S, False, timing.min_cpu_s)
        for label, timing in timings.items()
    ]
    if arguments.json:
        figures = {
            "attempts": arguments.attempts,
            "file_mb": size_mb,
            "timings": timings_as_json(timings),
            "gates": gates_as_json(gates),
        }
        print(json.dumps(figures, indent=2))
    else:
        print(f"{arguments.attempts:,} attempts, {size_mb:.1f} MB")
        print_timings("spurline view", timings)
        print_gates(gates)
    return 0 if all(gate.met for gate in gates) else 1


if __name__ == "__main__":
    raise SystemExit(main())
