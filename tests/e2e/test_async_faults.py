"""Failing environments and failing publishes: every prompt still ends exactly once. Kills are in `test_async_kills`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_runs import FAULTY_REWARDS, assert_every_prompt_ended_once, reasons_of_given_up
from reward_functions import in_process

from spurline import Run, load_config
from spurline.errors import RunFailedError
from spurline.protocols.backend import Backend
from spurline_async_rl.scheduling.scheduler import State
from spurline_async_rl.weights.buckets import InProcessSync
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.draws import row_of
from spurline_rl.kept_rollouts import KeptRollouts


@pytest.fixture
def faulty_config(rl_config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """An asynchronous run whose reward raises at 5 % and hangs at 1 % of the attempts, retried once."""
    (tmp_path / "modules" / "faulty_rewards.py").write_text(FAULTY_REWARDS, encoding="utf-8")
    rl_config["plugins"] = ["async_rl"]
    rl_config["source"] |= {
        "name": "async_rollouts",
        "max_staleness": 2,
        "correction": "tis",
        "max_concurrent_groups": 6,
        "record_groups": True,
        "environment": {"name": "single_turn", "rewards": {"early": in_process("faulty_rewards:fails_and_hangs")}},
        "reward_weights": {},
        "engine": "in_process",
        "faults": {"retries": 1, "attempt_timeout_s": 2.0, "max_quarantined": 64},
    }
    rl_config["report"] = {"enabled": False}
    return rl_config


def test_environments_that_raise_and_hang_cost_prompts_but_lose_none(faulty_config: dict[str, Any]) -> None:
    faulty_config["source"]["faults"] |= {"retries": 0}
    faulty_config["steps"] = 12
    Run(load_config(faulty_config)).train()
    scheduler = assert_every_prompt_ended_once(faulty_config)
    given_up = scheduler.in_state(State.GIVEN_UP)
    assert given_up, "no attempt failed"
    reasons = reasons_of_given_up(Path(faulty_config["run_dir"]))
    # A row that fails again in a later epoch is the same loss.
    rows = {row_of(lost.uid) for lost in KeptRollouts(Path(faulty_config["run_dir"])).given_up()}
    assert len(rows) <= len(reasons) <= len(given_up)
    assert all("the sandbox is gone" in reason or "did not end within 2 s" in reason for reason in reasons)


class _FailsOnce(InProcessSync):
    """Breaks off in the middle of the publish of one version, or hangs there."""

    version = 4
    hangs = False

    def make_buckets(self, version: int, backend: Backend, *how: Any) -> Iterator[WeightBucket]:
        buckets = super().make_buckets(version, backend, *how)
        if version != self.version:
            yield from buckets
            return
        yield next(buckets)
        if self.hangs:
            import time

            time.sleep(5)
        raise OSError("the link is down")


class _HangsOnce(_FailsOnce):
    hangs = True


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_FailsOnce, r"Publishing the weights of version 4 over in_process failed: OSError: the link is down"),
        (_HangsOnce, r"Publishing version 4 over in_process did not end within 1 s"),
    ],
)
def test_nothing_is_trained_after_a_failed_publish_and_a_resume_goes_on_from_the_checkpoint(
    faulty_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, broken: type, message: str
) -> None:
    faulty_config["checkpoint"] = {"every_steps": 1}
    faulty_config["steps"] = 8
    faulty_config["source"]["weight_sync"] = {"name": "in_process", "bucket_mb": 1, "timeout_s": 1.0}
    steps: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("spurline_async_rl.weights.buckets.InProcessSync", broken)
        run = Run(load_config(faulty_config))
        with pytest.raises(RunFailedError, match=message):
            run.train()
        steps.append(run.state.step)
    assert steps == [3], "the step whose publish failed is not done"
    assert Run(load_config(faulty_config)).train().status == "finished"
    assert_every_prompt_ended_once(faulty_config)
