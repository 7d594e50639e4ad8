"""Failing environments and failing publishes: every prompt still ends exactly once. Kills are in `test_async_kills`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_every_prompt_ended_once, asynchronous
from reward_functions import in_process
from run_helpers import Config, read_metrics, train

from spurline.errors import RunFailedError
from spurline.protocols.backend import Backend
from spurline_async_rl.scheduling.scheduler import State
from spurline_async_rl.weights.buckets import InProcessSync
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.draws import row_of
from spurline_rl.kept_rollouts import KeptRollouts

FAULTY_REWARDS = '''
import asyncio, os, random

async def fails_and_hangs(answer):
    """Raises for 5 % of the attempts and hangs for 1 %, whatever it did before."""
    fate = random.Random(os.urandom(8)).random()
    if fate < 0.05:
        raise ConnectionError("the sandbox is gone")
    if fate < 0.06:
        await asyncio.sleep(3600)
    letters = [letter for letter in answer.response.lower() if letter.isalpha()]
    return sum(letter < "n" for letter in letters) / max(1, len(letters))
'''


@pytest.fixture
def faulty_config(rl_config: Config, tmp_path: Path) -> Config:
    """An asynchronous run whose reward raises at 5 % and hangs at 1 % of the attempts, retried once."""
    (tmp_path / "modules" / "faulty_rewards.py").write_text(FAULTY_REWARDS, encoding="utf-8")
    return asynchronous(
        rl_config | {"report": {"enabled": False}},
        max_staleness=2,
        correction="tis",
        max_concurrent_groups=6,
        environment={"name": "single_turn", "rewards": {"early": in_process("faulty_rewards:fails_and_hangs")}},
        reward_weights={},
        engine="in_process",
        faults={"retries": 1, "attempt_timeout_s": 2.0, "max_quarantined": 64},
    )


def test_environments_that_raise_and_hang_cost_prompts_but_lose_none(faulty_config: Config) -> None:
    faulty_config["source"]["faults"]["retries"] = 0
    faulty_config["steps"] = 12
    run = train(faulty_config)
    given_up = assert_every_prompt_ended_once(faulty_config).in_state(State.GIVEN_UP)
    assert given_up, "no attempt failed"
    reasons = json.loads((run.run_dir / "summary.json").read_text(encoding="utf-8"))["given_up"]
    # A row that fails again in a later epoch is the same loss.
    rows = {row_of(lost.uid) for lost in KeptRollouts(run.run_dir).given_up()}
    assert len(rows) <= len(reasons) <= len(given_up)
    assert all("the sandbox is gone" in reason or "did not end within 2 s" in reason for reason in reasons)


class _FailsOnce(InProcessSync):
    """Breaks off in the middle of the publish of version 4, or hangs there."""

    hangs = False

    def make_buckets(self, version: int, backend: Backend, *how: Any) -> Iterator[WeightBucket]:
        buckets = super().make_buckets(version, backend, *how)
        if version != 4:
            yield from buckets
            return
        yield next(buckets)
        if self.hangs:
            time.sleep(5)
        raise OSError("the link is down")


class _HangsOnce(_FailsOnce):
    hangs = True


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_FailsOnce, r"weights of version 4 over in_process failed: OSError: the link is down"),
        (_HangsOnce, r"version 4 over in_process did not end within 1 s"),
    ],
)
def test_nothing_is_trained_after_a_failed_publish_and_a_resume_goes_on_from_the_checkpoint(
    faulty_config: Config, monkeypatch: pytest.MonkeyPatch, broken: type, message: str
) -> None:
    faulty_config |= {"checkpoint": {"every_steps": 1}, "steps": 8}
    faulty_config["source"]["weight_sync"] = {"name": "in_process", "bucket_mb": 1, "timeout_s": 1.0}
    with monkeypatch.context() as patch:
        patch.setattr("spurline_async_rl.weights.buckets.InProcessSync", broken)
        with pytest.raises(RunFailedError, match=message):
            train(faulty_config)
    assert len(read_metrics(faulty_config["run_dir"])) == 3, "the step whose publish failed is not done"
    assert train(faulty_config).status == "finished"
    assert_every_prompt_ended_once(faulty_config)
