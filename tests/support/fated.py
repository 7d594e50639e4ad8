"""A reward and an environment for runs with several environments, whose rows say what their attempts come to.

Each row says it in its column `fate`: `trained`; `filtered`, as its rewards are all equal; `given_up`, as its reward
always fails; or `retried`, whose reward fails for a third of the responses, so that other attempts decide.

Tests that kill runs copy this file, so it imports nothing of the tests.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spurline_rl.chat_front import ChatFront

FATES = ("trained", "trained", "filtered", "trained", "retried", "given_up")


def fated(answer: Any) -> float:
    """Differ between any two responses, except where the row demands something else."""
    fate, seen = answer.row["fate"], zlib.crc32(answer.response.encode())
    if fate == "given_up" or (fate == "retried" and seen % 3 == 0):
        raise ConnectionError("the sandbox is gone")
    return 1.0 if fate == "filtered" else seen / 2**32


class Twice:
    """An environment that asks for two answers, with the reward term `both` and a reward for each turn."""

    def __init__(self, config: Any, registry: Any, tokenizer: Any, data: Any) -> None:
        self._tokenizer = tokenizer

    async def run(self, task: Any, policy: Any) -> Any:
        chat = ChatFront(policy, self._tokenizer, task.row["messages"][:1], where=task.location)
        first = await chat.reply()
        chat.add({"role": "user", "content": "again"})
        second = await chat.reply()
        both = fated(SimpleNamespace(row=task.row, response=f"{first.text}\n{second.text}"))
        return policy.finish({"both": both}, turn_rewards=[0.25, 0.5], info={"metrics": {"twice": 2.0}})


def write_prompts(path: Path, count: int = 24, environments: tuple[str, ...] = ("once", "twice")) -> list[str]:
    """Write rows with all fates in each environment. Returns their fates."""
    digits = random.Random(0)
    fates = [FATES[number % len(FATES)] for number in range(count)]
    rows = [
        {
            "messages": [{"role": "user", "content": f"sort {digits.randrange(1000):03}"}],
            "fate": fate,
            "environment": environments[number // len(FATES) % len(environments)],
        }
        for number, fate in enumerate(fates)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return fates


def two_environments(module: str, reward: Any) -> dict[str, Any]:
    """Return settings of two environments of different shape: `once`, one answer, and `twice`, two."""
    return {
        "name": "by_row",
        "environments": {
            "once": {"name": "single_turn", "rewards": {"fated": reward}},
            "twice": {"name": "custom", "path": f"{module}:Twice", "max_turns": 2},
        },
        "limits": {"twice": {"max_new_tokens": 3, "attempt_timeout_s": 500}},
    }
