"""Whole runs of asynchronous reinforcement learning, on a real model."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from reward_functions import in_process
from run_helpers import assert_same_weights, deterministic, read_metrics

from spurline import Run, load_config
from spurline.errors import ConfigError, RunFailedError
from spurline.plugins import hookimpl
from spurline_async_rl.source import load as load_module

Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[dict[str, Any]], Path]

ONLY_ASYNC = ("async/", "staleness/", "sync/", "controller/")
"""Prefixes of the metrics that a synchronous run does not have."""

TOOL_MODULE = '''
def letter(number: int) -> str:
    """A letter of the alphabet.

    Args:
        number: which one, from 0.
    """
    return "abcdefghijklmnopqrstuvwxyz"[int(number) % 26]
'''


@pytest.fixture
def async_config(rl_config: dict[str, Any]) -> dict[str, Any]:
    """The synchronous config with the asynchronous source, two updates of staleness allowed."""
    rl_config["plugins"] = ["async_rl"]
    rl_config["source"] |= {"name": "async_rollouts", "max_staleness": 2, "correction": "tis"}
    return rl_config


def train(config: dict[str, Any]) -> list[dict[str, Any]]:
    Run(load_config(config)).train()
    return read_metrics(config["run_dir"])


def synchronous_twin(config: dict[str, Any]) -> dict[str, Any]:
    """The same run with core's source."""
    source = {name: value for name, value in config["source"].items() if name != "max_staleness"}
    return {
        **config,
        "plugins": [],
        "run_dir": f"{config['run_dir']}-synchronous",
        "source": {**source, "name": "rollouts"},
    }


def without_async_metrics(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith(ONLY_ASYNC)}
        for line in deterministic(lines)
    ]


def assert_equals_synchronous(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Train the config and its synchronous twin, and compare every number and every weight. Returns the metrics."""
    config["source"]["max_staleness"] = 0
    lines = train(config)
    twin = synchronous_twin(config)
    assert without_async_metrics(lines) == deterministic(train(twin))
    assert_same_weights(Path(config["run_dir"]), Path(twin["run_dir"]))
    return lines


@pytest.mark.slow
def test_zero_staleness_equals_the_synchronous_run_bit_for_bit_over_two_epochs(
    async_config: dict[str, Any], spurline_chat_file: Path
) -> None:
    del async_config["source"]["correction"]
    async_config["steps"] = 34
    async_config["data"]["eval"] = str(spurline_chat_file)
    held_out = {"max_prompts": 3, "samples_per_prompt": 2, "temperature": 1.0, "success": {"reward": "early"}}
    async_config["source"]["held_out"] = held_out
    async_config["evaluation"] = {"every_steps": 10}
    lines = assert_equals_synchronous(async_config)
    assert lines[-1]["epoch"] > 2
    assert {line["staleness/max"] for line in lines} == {0.0}


def test_zero_staleness_equals_the_synchronous_run_with_weights_that_are_rounded_at_random(
    async_config: dict[str, Any],
) -> None:
    async_config |= {"steps": 2, "report": {"enabled": False}}
    async_config["backend"] = {**async_config["backend"], "precision": "bf16", "weights": "bf16_stochastic"}
    async_config["source"]["engine"]["precision"] = "bf16"
    assert_equals_synchronous(async_config)


def test_zero_staleness_equals_the_synchronous_run_where_groups_are_replaced_and_given_up(
    async_config: dict[str, Any],
) -> None:
    source = async_config["source"]
    source["zero_variance"] = "refill"
    source["max_draws_per_step"] = 7
    source["sampling"]["max_new_tokens"] = 2
    source["environment"]["rewards"] = {"early": in_process("run_rewards:fails_on_some_rows")}
    source["reward_weights"] = {}
    source["faults"] = {"retries": 1, "max_quarantined": 64}
    lines = assert_equals_synchronous(async_config)
    assert sum(line["groups/filtered"] for line in lines) > 0
    assert sum(line["groups/quarantined"] for line in lines) > 0
    assert sum(line["groups/retries"] for line in lines) > 0
    assert sum(line["groups/refill_missing"] for line in lines) > 0


def test_zero_staleness_equals_the_synchronous_run_with_tools_and_several_turns(
    async_config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "modules" / "run_tools.py").write_text(TOOL_MODULE, encoding="utf-8")
    source = async_config["source"]
    source["environment"] = {
        "name": "tools",
        "tools": ["run_tools:letter"],
        "max_turns": 2,
        "rewards": {"early": in_process("run_rewards:early_letters")},
    }
    source["reward_weights"] = {}
    # The tiny model's template knows no tools, and its answers call none on purpose.
    async_config["data"]["on_ignored"] = "warn"
    assert_equals_synchronous(async_config)


def test_training_waits_for_no_rollout_but_never_trains_on_tokens_over_the_bound(async_config: dict[str, Any]) -> None:
    async_config["steps"] = 10
    said: list[str] = []
    Run(load_config(async_config), progress=said.append).train()
    assert "starting rollout engine 'in_process'" in said
    lines = read_metrics(async_config["run_dir"])
    assert [line["step"] for line in lines] == list(range(1, 11))
    ages = [int(line["staleness/max"]) for line in lines]
    assert max(ages) <= 2
    assert max(ages) > 0, "generation never ran ahead"
    for line in lines:
        assert sum(line[f"staleness/tokens_{age}"] for age in range(3)) == line["loss_tokens"]
    timeline = [
        json.loads(line) for line in (Path(async_config["run_dir"]) / "timeline.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in timeline] == list(range(1, 11))


def test_a_recorded_run_trains_again_to_the_same_weights_bit_for_bit(async_config: dict[str, Any]) -> None:
    async_config["source"] |= {"record_groups": True, "publish_every": 3}
    lines = train(async_config)
    again = {**async_config, "run_dir": f"{async_config['run_dir']}-again"}
    again["source"] = {**async_config["source"], "name": "recorded_rollouts", "recorded": async_config["run_dir"]}
    replayed = train(again)
    compared = ("loss", "grad_norm", "advantage/std", "correction/factor", "mismatch/kl")
    assert [[line[name] for name in compared] for line in replayed] == [
        [line[name] for name in compared] for line in lines
    ]
    # The second and third step after a publish cannot be synchronous.
    assert max(line["staleness/max"] for line in lines) > 0
    assert_same_weights(Path(async_config["run_dir"]), Path(again["run_dir"]))


def test_a_recording_that_is_too_short_says_which_step_it_lacks(async_config: dict[str, Any], tmp_path: Path) -> None:
    async_config["source"] |= {"name": "recorded_rollouts", "recorded": str(tmp_path / "nothing")}
    with pytest.raises(Exception, match=r"source\.recorded: .*nothing has no groups of step 1 .*record_groups: true"):
        train(async_config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction": None}, r"source\.max_staleness is 2.*nothing weighs them.*Set source\.correction: tis"),
        ({"max_concurrent_groups": 13}, r"source\.max_concurrent_groups is 13.*no more than 12 groups.*Lower it to 12"),
        (
            {"depth": 3},
            r"source\.depth is 3, but a step takes prompts_per_step: 4 groups.*Raise it to 4, or set depth: auto",
        ),
        ({"depth": 13}, r"source\.depth is 13, .*no more than 12 groups .*Lower it to 12, or set depth: full"),
        ({"publish_every": 4}, r"source\.publish_every is 4: .*at most 3, or raise max_staleness to 3"),
        ({"at_bound": "mask", "order": "fifo"}, r"source\.at_bound is mask, but with order: fifo .*Set order: window"),
    ],
)
def test_knobs_that_do_not_fit_each_other_are_refused_with_the_fix(
    async_config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    async_config["source"] |= changes
    with pytest.raises(ConfigError, match=message):
        load_config(async_config)


def test_the_plan_states_the_bound(spurline: Spurline, write_config: WriteConfig, async_config: dict[str, Any]) -> None:
    code, out, err = spurline("plan", write_config(async_config))
    assert (code, err) == (0, "")
    told = " ".join(out.split())
    assert "No token is trained on that is more than 2 updates old" in told
    assert "At most 12 groups are ahead of training, 1 of them under way at a time" in told
    assert "While the trainer is busy, as few as it needs (depth: auto)" in told


def test_an_environment_that_blocks_everything_is_told_with_its_place_in_the_code(
    async_config: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "modules" / "run_stall.py").write_text(
        "import asyncio, time\n"
        "async def sleeps(answer):\n"
        "    await asyncio.sleep(0)\n"
        "    time.sleep(3)\n"
        "    return 1.0\n",
        encoding="utf-8",
    )
    async_config["steps"] = 1
    async_config["source"]["environment"]["rewards"] = {"early": in_process("run_stall:sleeps")}
    async_config["source"]["reward_weights"] = {}
    async_config["source"] |= {"watchdog_s": 0.5, "stall_timeout_s": 2.0}
    with pytest.raises(RunFailedError, match=r"blocks the event loop"):
        train(async_config)
    err = capfd.readouterr().err
    assert "Nothing moves for" in err
    assert "run_stall.py" in err


def test_rollouts_that_stall_are_told_with_prompt_and_time(
    async_config: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "modules" / "run_waits.py").write_text(
        "import asyncio\nasync def waits(answer):\n    await asyncio.sleep(3600)\n", encoding="utf-8"
    )
    async_config["source"]["environment"]["rewards"] = {"early": in_process("run_waits:waits")}
    async_config["source"]["reward_weights"] = {}
    async_config["source"] |= {"watchdog_s": 0.5, "stall_timeout_s": 1.5, "max_concurrent_groups": 2}
    with pytest.raises(
        RunFailedError, match=r"(?s)No group has ended for .*Step 1 waits for 4 groups.*stall_timeout_s"
    ):
        train(async_config)
    err = capfd.readouterr().err
    assert err.count("No group has ended for") >= 2
    assert "2 under way (order: window, max_staleness: 2, weights of version 0)" in err
    assert "group chat:" in err or "group train:" in err
    assert "the environments or rewards of these groups have not returned" in err


def test_parameters_swapped_in_the_backend_are_not_measured_by_engines_that_have_copies(
    async_config: dict[str, Any], spurline_chat_file: Path
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
    async_config["steps"] = 1
    loaded = load_config(async_config)
    loaded.host.attach(Measure(), "measure")
    with pytest.raises(
        RunFailedError, match=r"run\.evaluate\('other'\): the answers come from engines with weights of"
    ):
        Run(loaded).train()


@pytest.mark.parametrize("fails", [False, True])
def test_a_large_run_has_its_own_rhythm_of_collections_and_leaves_the_collector_as_it_was(
    async_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(load_module, "_MANY_ATTEMPTS", 2)
    before = gc.get_threshold(), gc.get_freeze_count()
    seen: list[tuple[bool, bool]] = []

    class Watcher:
        @hookimpl
        def on_step_end(self) -> None:
            seen.append((gc.get_threshold() != before[0], gc.get_freeze_count() > before[1]))
            if fails:
                raise RuntimeError("a hook failed")

    loaded = load_config(async_config)
    loaded.host.attach(Watcher(), "watcher")
    with pytest.raises(Exception, match="a hook failed") if fails else nullcontext():
        Run(loaded).train()
    assert seen
    assert all(entry == (True, True) for entry in seen)
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
