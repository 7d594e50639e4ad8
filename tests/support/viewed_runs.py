"""Run directories with kept rollouts whose tokens are the bytes of their texts, for the page of `spurline view`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spurline_rl.group_runner import GivenUpPrompt
from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER
from spurline_rl.kept_rollouts.keeper import step_file, write_step
from spurline_rl.kept_rollouts.table import KeptStep, step_table
from spurline_rl.trajectory import Group, Trajectory, Turn

END = 256
"""The special token that ends a response."""
MAX_STALENESS = 1


class BytePieces:
    """Tokens are bytes."""

    def of_all(self, token_ids: list[int]) -> list[bytes]:
        return [b"<end>" if token_id == END else bytes([token_id]) for token_id in token_ids]

    def is_special(self, token_id: int) -> bool:
        return token_id == END


def ids_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def make_attempt(
    uid: str, sample: int, prompt: str, response: str, step: int, reward: float, old: int = 0
) -> Trajectory:
    """Make one turn. old: the number of first tokens that are two updates old. The next token is one update old."""
    ids = np.append(ids_of(response), END).astype(np.int32)
    rewards = np.zeros(len(ids), np.float32)
    rewards[-1] = reward
    versions = np.full(len(ids), step - 1, np.int32)
    if old:
        versions[:old] = step - 3
        versions[old] = step - 2
    turn = Turn(
        ids_of(prompt),
        ids,
        (versions >= step - 1 - MAX_STALENESS).astype(np.uint8),
        logprobs=np.full(len(ids), -0.5, np.float32),
        versions=versions,
        rewards=rewards,
        finish_reason="stop",
    )
    return Trajectory(uid, sample, (turn,), {"right": reward}, {"note": f"<b>{sample}</b>"})


def write_rollouts(
    run_dir: Path,
    step: int,
    responses: Mapping[str, Sequence[tuple[str, float, int]]],
    lost: Mapping[str, str] | None = None,
) -> Path:
    """Write the rollouts of a step and return their file.

    Args:
        run_dir: The folder of the run.
        step: The step.
        responses: The attempts at each prompt: text, reward and number of old tokens.
        lost: The reason for each prompt that was given up, by uid.
    """
    groups: list[Group] = []
    gaps: list[np.ndarray] = []
    for number, (prompt, attempts) in enumerate(responses.items()):
        uid = f"rows:{number}@{step * 10 + number}"
        made = [
            make_attempt(uid, sample, prompt, *given[:1], step, *given[1:]) for sample, given in enumerate(attempts)
        ]
        tags = {"answer": str(number), "kind": prompt.split()[0]}
        groups.append(Group(uid, step * 10 + number, tuple(made), {"level": float(number)}, tags))
        gaps.append(np.zeros(sum(len(turn.response_ids) for attempt in made for turn in attempt.turns), np.float32))
    gap = np.concatenate(gaps)
    gap[0] = 2.0
    scores = {"old_logprobs": gap - 0.5, "advantages": np.full(len(gap), 0.3, np.float32)}
    given_up = [GivenUpPrompt(uid, step, reason) for uid, reason in (lost or {}).items()]
    folder = run_dir / ROLLOUTS_FOLDER
    folder.mkdir(exist_ok=True)
    pieces: Any = BytePieces()
    write_step(folder, step, step_table(KeptStep(step, groups, [], given_up, 100, scores.__getitem__), pieces))
    return step_file(folder, step)


def write_run(folder: Path, steps: int = 3, *, loss: float = 1.0, summary: Mapping[str, Any] | None = None) -> Path:
    """Write a run with two prompts a step. One has markup, control characters and old tokens."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"source": {"max_staleness": MAX_STALENESS}, "evaluations": {"hard": {}}})
    )
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "total_steps": steps, **(summary or {})}))
    (folder / "metrics.jsonl").touch()
    for step in range(1, steps + 1):
        add_step(folder, step, loss=loss)
    return folder


def add_step(folder: Path, step: int, *, loss: float = 1.0) -> None:
    """Append what a live run writes when a step is done."""
    line = {"step": step, "loss": loss / step, "reward/mean": 0.5, "eval/pass@1": 0.5, "eval/hard/pass@1": 0.25}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    hostile = "<img src=x onerror=window.hacked=1>\x1b[31m\u202e</script>é"
    write_rollouts(
        folder,
        step,
        {
            "Sort 3 1 2": [(f"1 2 3 at {step}", 1.0, 0), (f"3 2 1 at {step}", 0.0, 0)],
            "Write <b>HTML</b>": [(hostile, 0.25, 4), ("", -1.0, 0)],
        },
    )
