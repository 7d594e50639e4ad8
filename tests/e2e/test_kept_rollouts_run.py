"""Synchronous and asynchronous runs keep the rollouts of each step exactly once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_runs import asynchronous, kept_attempts
from reward_functions import in_process
from run_helpers import Config, train

from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER, KeptRollouts, keeper


def test_synchronous_and_asynchronous_runs_keep_the_same(rl_config: Config) -> None:
    rl_config |= {"steps": 2, "checkpoint": {"every_steps": None}, "report": {"enabled": False}}
    run = train(rl_config)
    assert kept_attempts(run) == kept_attempts(train(asynchronous(rl_config, max_staleness=0), name="async"))
    attempts = list(KeptRollouts(run.run_dir).attempts())
    assert len(attempts) == 2 * 16
    for line in run.lines:
        own = [attempt for attempt in attempts if attempt.step == line["step"]]
        assert np.mean([attempt.reward for attempt in own]) == pytest.approx(line["reward/mean"], abs=1e-6)
        turns = [attempt.turns[0] for attempt in own]
        gaps = np.concatenate([turn.gap for turn in turns if turn.gap is not None])
        assert np.abs(gaps).mean() == pytest.approx(line["mismatch/logprob_diff"], abs=1e-6)
        assert {age for turn in turns if turn.ages is not None for age in turn.ages.tolist()} == {0}
        assert sum(attempt.num_response_tokens for attempt in own) == line["rollout/tokens"]
        assert {"early", "brevity"} == own[0].rewards.keys()
    assert attempts[0].turns[0].prompt_text == attempts[0].info["prompt"]
    off = train(rl_config, name="off", source=rl_config["source"] | {"keep_rollouts": 0})
    assert not (off.run_dir / ROLLOUTS_FOLDER).exists()


def test_a_resume_trains_and_keeps_each_step_once(rl_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    rl_config |= {"steps": 4, "checkpoint": {"every_steps": 2}, "report": {"enabled": False}}
    through = train(rl_config, name="through")
    write_step, seen = keeper.write_step, []

    def dies(folder: Path, step: int, table: Any) -> int:
        seen.append(write_step(folder, step, table))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return seen[-1]

    monkeypatch.setattr(keeper, "write_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train(rl_config)
    # The rollouts of step 3 are there, and no checkpoint covers them.
    assert list(KeptRollouts(rl_config["run_dir"]).steps) == [1, 2, 3]
    run = train(rl_config)
    assert kept_attempts(run) == kept_attempts(through)
    assert run.steps == [1, 2, 3, 4]


def test_a_checkpoint_waits_for_the_rollouts_it_covers(rl_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step = keeper.write_step

    def slow(folder: Path, step: int, table: Any) -> int:
        time.sleep(0.5)
        return write_step(folder, step, table)

    monkeypatch.setattr(keeper, "write_step", slow)
    found: list[int] = []
    train(rl_config, steps=1, on_checkpoint_saved=lambda: found.extend(KeptRollouts(rl_config["run_dir"]).steps))
    assert found == [1]


def test_filtered_groups_and_prompts_given_up_are_there(rl_config: Config) -> None:
    rl_config["source"]["environment"]["rewards"] = {"some": in_process("run_rewards:fails_on_some_rows")}
    rl_config["source"] |= {
        "reward_weights": {},
        "faults": {"retries": 1},
        "zero_variance": "refill",
        "prompts_per_step": 8,
        "samples_per_prompt": 2,
        "sampling": {"max_new_tokens": 1},
    }
    run = train(rl_config, steps=1, minibatches={"name": "by_prompt", "prompts_per_minibatch": 4})
    rollouts, [line] = KeptRollouts(run.run_dir), run.lines
    filtered = {attempt.uid for attempt in rollouts.attempts() if attempt.status == "filtered"}
    assert len(filtered) == line["groups/filtered"]
    lost = list(rollouts.given_up())
    assert len(lost) == line["groups/quarantined"] > 0
    assert all("seven" in prompt.reason and prompt.info == {} for prompt in lost)
