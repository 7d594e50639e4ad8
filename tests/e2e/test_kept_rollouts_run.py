"""Runs keep their rollouts, synchronous and asynchronous alike, each step exactly once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_functions import in_process
from run_helpers import read_metrics

from spurline import Run, load_config
from spurline.plugins.hookspecs import hookimpl
from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER, KeptRollouts
from spurline_rl.kept_rollouts.files import RolloutFolder

ASYNC = {"name": "async_rollouts", "max_staleness": 0, "weight_sync": "in_process"}


def train(config: dict[str, Any], folder: str, **source: Any) -> Path:
    run_dir = f"{config['run_dir']}-{folder}"
    changed = {"run_dir": run_dir, "report": {"enabled": False}, "source": config["source"] | source}
    Run(load_config({**config, **changed})).train()
    return Path(run_dir)


def facts(run_dir: Path) -> list[Any]:
    return [
        (attempt.step, attempt.uid, attempt.sample, attempt.reward, attempt.advantage, attempt.turns[0].response_text)
        for attempt in KeptRollouts(run_dir).attempts()
    ]


def test_synchronous_and_asynchronous_runs_keep_the_same(rl_config: dict[str, Any]) -> None:
    rl_config |= {"steps": 2, "plugins": ["async_rl"], "checkpoint": {"every_steps": None}}
    synchronous = train(rl_config, "sync")
    assert facts(synchronous) == facts(train(rl_config, "async", **ASYNC))
    attempts = list(KeptRollouts(synchronous).attempts())
    assert len(attempts) == 2 * 16
    for line in read_metrics(synchronous):
        own = [attempt for attempt in attempts if attempt.step == line["step"]]
        assert np.mean([attempt.reward for attempt in own]) == pytest.approx(line["reward/mean"], abs=1e-6)
        turns = [attempt.turns[0] for attempt in own]
        gaps = np.concatenate([turn.gap for turn in turns if turn.gap is not None])
        assert np.abs(gaps).mean() == pytest.approx(line["mismatch/logprob_diff"], abs=1e-6)
        assert {age for turn in turns if turn.ages is not None for age in turn.ages.tolist()} == {0}
        assert sum(attempt.num_response_tokens for attempt in own) == line["rollout/tokens"]
        assert {"early", "brevity"} == own[0].rewards.keys()
    assert attempts[0].turns[0].prompt_text == attempts[0].info["prompt"]


def test_a_resume_trains_and_keeps_each_step_once(rl_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rl_config |= {"steps": 4, "checkpoint": {"every_steps": 2}, "report": {"enabled": False}}
    through = train(rl_config, "through")
    add, seen = RolloutFolder.add, []

    def dies(self: RolloutFolder, step: int, content: Any) -> None:
        add(self, step, content)
        seen.append(step)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RolloutFolder, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        train(rl_config, "again")
    run_dir = Path(f"{rl_config['run_dir']}-again")
    # The rollouts of step 3 are there, and no checkpoint covers them.
    assert list(KeptRollouts(run_dir).steps) == [1, 2, 3]
    train(rl_config, "again")
    assert facts(run_dir) == facts(through)
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2, 3, 4]


def test_a_checkpoint_waits_for_the_rollouts_it_covers(
    rl_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = RolloutFolder.add

    def slow(self: RolloutFolder, step: int, content: Any) -> None:
        time.sleep(0.5)
        add(self, step, content)

    monkeypatch.setattr(RolloutFolder, "add", slow)
    loaded = load_config(rl_config | {"steps": 1, "report": {"enabled": False}})
    found: list[int] = []

    class Looks:
        @hookimpl
        def on_checkpoint_saved(self) -> None:
            found.extend(KeptRollouts(rl_config["run_dir"]).steps)

    loaded.host.attach(Looks(), "looks")
    Run(loaded).train()
    assert found == [1]


def test_nothing_is_kept_where_that_is_asked_for(rl_config: dict[str, Any]) -> None:
    run_dir = train(rl_config | {"steps": 1}, "off", keep_rollouts=0)
    assert not (run_dir / ROLLOUTS_FOLDER).exists()


def test_filtered_groups_and_prompts_given_up_are_there(rl_config: dict[str, Any]) -> None:
    rl_config["source"]["environment"]["rewards"] = {"some": in_process("run_rewards:fails_on_some_rows")}
    del rl_config["source"]["reward_weights"]
    run_dir = train(
        rl_config | {"steps": 1, "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 4}},
        "filtered",
        faults={"retries": 1},
        zero_variance="refill",
        prompts_per_step=8,
        samples_per_prompt=2,
        sampling={"max_new_tokens": 1},
    )
    rollouts = KeptRollouts(run_dir)
    line = read_metrics(run_dir)[0]
    filtered = {attempt.uid for attempt in rollouts.attempts() if attempt.status == "filtered"}
    assert len(filtered) == line["groups/filtered"]
    lost = list(rollouts.given_up())
    assert len(lost) == line["groups/quarantined"] > 0
    assert all("seven" in prompt.reason for prompt in lost)
