"""Whole runs of asynchronous reinforcement learning, on a real model."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_equals_synchronous, asynchronous
from reward_functions import in_process
from run_helpers import Config, assert_problem, assert_same_weights, fail, train

from spurline import Run, load_config
from spurline.errors import ConfigError, DataError, HookFailedError, RunFailedError
from spurline.plugins import hookimpl
from spurline_async_rl.source import loop_thread as loop_module


@pytest.fixture
def async_config(rl_config: Config) -> Config:
    """The synchronous config with the asynchronous source, two updates of staleness allowed."""
    return asynchronous(rl_config, max_staleness=2, correction="tis")


@pytest.mark.slow
def test_zero_staleness_equals_the_synchronous_run_bit_for_bit_over_two_epochs(
    async_config: Config, spurline_chat_file: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(spurline_chat_file.read_text().splitlines(keepends=True)[:10]))
    del async_config["source"]["correction"]
    async_config["data"] |= {"train": str(few), "eval": str(few)}
    held_out = {"max_prompts": 3, "samples_per_prompt": 2, "temperature": 1.0, "success": {"reward": "early"}}
    async_config["source"]["held_out"] = held_out
    async_config["evaluation"] = {"every_steps": 4}
    lines = assert_equals_synchronous(async_config).lines
    assert lines[-1]["epoch"] > 2
    assert {line["staleness/max"] for line in lines} == {0.0}


@pytest.mark.processes
def test_zero_staleness_equals_the_synchronous_run_with_half_precision_and_changes_of_weights_alone(
    async_config: Config,
) -> None:
    async_config |= {"steps": 4, "report": {"enabled": False}}
    async_config["backend"] |= {"precision": "bf16", "weights": "bf16_masters"}
    async_config["source"]["engine"] = {"name": "child_process", "deterministic": True, "precision": "bf16"}
    async_config["source"]["weight_sync"] = {"name": "shared_memory", "full_every": 3}
    lines = assert_equals_synchronous(async_config).lines
    *changes, whole = [line["sync/bytes"] for line in lines if "sync/bytes" in line]
    assert 0 < max(changes) < whole


def test_zero_staleness_equals_the_synchronous_run_where_groups_are_replaced_and_given_up(async_config: Config) -> None:
    source = async_config["source"]
    source |= {"zero_variance": "refill", "max_draws_per_step": 7, "reward_weights": {}}
    source["sampling"]["max_new_tokens"] = 2
    source["environment"]["rewards"] = {"early": in_process("run_rewards:fails_on_some_rows")}
    source["faults"] = {"retries": 1, "max_quarantined": 64}
    lines = assert_equals_synchronous(async_config).lines
    for name in ("filtered", "quarantined", "retries", "refill_missing"):
        assert sum(line[f"groups/{name}"] for line in lines) > 0


def test_zero_staleness_equals_the_synchronous_run_with_tools_and_several_turns(async_config: Config) -> None:
    async_config["source"] |= {"reward_weights": {}}
    async_config["source"]["environment"] = {
        "name": "tools",
        "tools": ["calculator"],
        "max_turns": 2,
        "rewards": {"early": in_process("run_rewards:early_letters")},
    }
    # The tiny model's template knows no tools, and its answers call none on purpose.
    async_config["data"]["on_ignored"] = "warn"
    assert_equals_synchronous(async_config)


@pytest.mark.parametrize(("bound", "loss"), [(2, "ppo"), (1, "dppo")])
def test_training_waits_for_no_rollout_but_never_trains_on_tokens_over_the_bound(
    async_config: Config, bound: int, loss: str
) -> None:
    if loss == "dppo":
        # It weighs tokens by their ratio to the policy that sampled them, so it takes no correction.
        async_config |= {"plugins": [*async_config["plugins"], "objectives"], "loss": loss}
        async_config["source"] |= {"max_staleness": bound, "correction": None}
    said: list[str] = []
    run = train(async_config, steps=10, progress=said.append)
    assert "starting rollout engine 'in_process'" in said
    assert run.steps == list(range(1, 11))
    ages = [int(line["staleness/max"]) for line in run.lines]
    assert max(ages) <= bound
    assert max(ages) > 0, "generation never ran ahead"
    for line in run.lines:
        assert sum(line[f"staleness/tokens_{age}"] for age in range(bound + 1)) == line["loss_tokens"]
        assert (line.get("policy/divergence", 0.0) > 0) == (loss == "dppo")
        has_both = 0 < line["staleness/tokens_0"] < line["loss_tokens"]
        assert ("mismatch/fresh" in line) == has_both
        assert line.get("mismatch/fresh", 0.0) < 1e-5
    assert len((run.run_dir / "timeline.jsonl").read_text().splitlines()) == 10


def test_a_recorded_run_trains_again_to_the_same_weights_bit_for_bit(async_config: Config) -> None:
    async_config["source"]["publish_every"] = 3
    run = train(async_config)
    source = async_config["source"] | {"name": "recorded_rollouts", "recorded": async_config["run_dir"]}
    again = train(async_config, name="again", source=source)
    for name in ("loss", "grad_norm", "advantage/std", "correction/factor", "mismatch/kl"):
        assert [line[name] for line in again.lines] == [line[name] for line in run.lines]
    # The second and third step after a publish cannot be synchronous.
    assert max(line["staleness/max"] for line in run.lines) > 0
    assert_same_weights(run, again)
    shutil.rmtree(run.run_dir / "groups")
    with pytest.raises(DataError, match=r"source\.recorded: .* has no groups of step 1"):
        train(async_config, name="lost", source=source)


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"correction": None}, "max_staleness", "Set source.correction: tis"),
        ({"max_concurrent_groups": 13}, "max_concurrent_groups", "Lower it to 12"),
        ({"depth": 3}, "depth", "set depth: auto"),
        ({"depth": 13}, "depth", "set depth: auto"),
        ({"publish_every": 4}, "publish_every", "raise max_staleness to 3"),
        ({"at_bound": "mask", "order": "fifo"}, "at_bound", "Set order: window"),
    ],
)
def test_knobs_that_do_not_fit_each_other_are_refused_with_the_fix(
    async_config: Config, changes: Config, key: str, fix: str
) -> None:
    async_config["source"] |= changes
    with pytest.raises(ConfigError) as caught:
        load_config(async_config)
    assert_problem(caught, key=f"source.{key}", fix=fix)


STALLS = {
    "blocks": (
        "import asyncio, time\nasync def waits(answer):\n    await asyncio.sleep(0)\n    time.sleep(3)\n"
        "    return 0.0\n",
        r"blocked the event loop",
        ("has blocked", "run_blocks.py"),
    ),
    "waits": (
        "import asyncio\nasync def waits(answer):\n    await asyncio.sleep(3600)\n",
        r"(?s)No group has ended for .*Step 1 waits for 4 groups.*stall_timeout_s",
        ("2 are running", "group chat:", "have not returned"),
    ),
}


@pytest.mark.parametrize("case", STALLS)
def test_rollouts_that_stall_are_told_with_their_place(
    async_config: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    code, error, words = STALLS[case]
    (tmp_path / "modules" / f"run_{case}.py").write_text(code, encoding="utf-8")
    source = async_config["source"] | {"watchdog_s": 0.5, "stall_timeout_s": 1.8, "max_concurrent_groups": 2}
    source |= {"reward_weights": {}}
    source["environment"]["rewards"] = {"early": in_process(f"run_{case}:waits")}
    with pytest.raises(RunFailedError, match=error):
        train(async_config, steps=1, source=source)
    err = capfd.readouterr().err
    assert all(word in err for word in words), err


def test_parameters_swapped_in_the_backend_are_not_measured_by_engines_that_have_copies(
    async_config: Config, spurline_chat_file: Path
) -> None:
    class Measure:
        @hookimpl
        def on_run_start(self, run: Run) -> None:
            self._run = run

        @hookimpl
        def on_eval_end(self) -> None:
            backend: Any = self._run.backend
            self._run.evaluate("own")
            with backend.swapped("policy", {}):
                self._run.evaluate("other")

    async_config["data"]["eval"] = str(spurline_chat_file)
    async_config["source"]["held_out"] = {"max_prompts": 4, "success": {"reward": "early"}}
    with pytest.raises(RunFailedError, match=r"run\.evaluate\('other'\): the engines that answer have their own"):
        train(async_config, Measure(), steps=1)


def test_a_large_run_has_its_own_rhythm_of_collections_and_leaves_the_collector_as_it_was(
    async_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_MANY_ATTEMPTS", 2)
    before = gc.get_threshold(), gc.get_freeze_count()

    def fail_with_another_rhythm() -> None:
        assert gc.get_threshold() != before[0]
        assert gc.get_freeze_count() > before[1]
        fail()

    with pytest.raises(HookFailedError, match="ZeroDivisionError"):
        train(async_config, on_step_end=fail_with_another_rhythm)
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
