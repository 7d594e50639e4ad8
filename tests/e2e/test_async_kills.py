"""Whole runs killed with all their processes, at any instant and in any order: nothing is lost, doubled or left behind.

Ten kills in all; SPURLINE_SOAK=1 makes 200, at random instants.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from async_runs import IN_PROCESS, asynchronous, comparable, synchronous
from killed_runs import AGENT, ORDERS, PHASES, REWARDS, Order, RunTree, assert_every_prompt_met_its_fate, write_prompts
from reward_functions import in_process
from run_helpers import Config, Trained, WriteConfig, assert_same_weights, train
from warm_children import WarmRuns

from spurline_collation_fast.cache.entry import open_entry

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]

SOAK = bool(os.environ.get("SPURLINE_SOAK"))
Kill = tuple[str, Order]
"""The phase in which a run is killed, and the order of its victims."""
Kills = Sequence[Kill]
TrainAndKill = Callable[[dict[str, Any], Kills], None]

IN_ONE_PROCESS = ("start", "steps", "checkpoint")
"""Phases of a run that starts no processes and records no groups."""
BY_TIME = ("collation/", "groups/retries")
"""Metrics that depend on time. Groups that fail for good end while some of their attempts are retried."""


def plans(*kills: Kill, soak: int, phases: Sequence[str] = PHASES) -> list[Any]:
    """Return the kills of each run: these of one run, or `soak` random ones in a long test, ten a run."""
    if not SOAK:
        return [pytest.param(kills, id="")]
    chances = [(seed, random.Random(seed)) for seed in range(soak // 10)]
    return [
        pytest.param([(chance.choice(phases), chance.choice(ORDERS)) for _ in range(10)], id=f"seed-{seed}")
        for seed, chance in chances
    ]


@pytest.fixture
def fated_config(rl_config: Config, tmp_path: Path) -> Config:
    """An asynchronous run that filters groups, makes failed attempts again and gives prompts up."""
    (tmp_path / "modules" / "fated_rewards.py").write_text(REWARDS, encoding="utf-8")
    write_prompts(tmp_path / "fated.jsonl")
    rl_config |= {
        "data": {"train": str(tmp_path / "fated.jsonl"), "max_length": 128, "on_ignored": "warn"},
        "plugins": ["agents"],
        "report": {"enabled": False},
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 1},
        "checkpoint": {"every_steps": 2, "keep_last": 1},
    }
    return asynchronous(
        rl_config,
        prompts_per_step=2,
        samples_per_prompt=2,
        max_staleness=2,
        correction="tis",
        max_concurrent_groups=2,
        zero_variance="refill",
        environment={"name": "single_turn", "rewards": {"fated": in_process("fated_rewards:fated")}},
        reward_weights={},
        engine={"name": "child_process", "engines": 1, "max_restarts": 1000, "deterministic": True},
        faults={"retries": 1, "max_quarantined": 64},
    )


@pytest.fixture
def train_and_kill(
    warm_runs: WarmRuns, write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TrainAndKill:
    """Train a config to its end, killed on the way; after every kill, nothing of the run is left."""
    place = tmp_path / "place"
    monkeypatch.setenv("TMPDIR", str(place / "tmp"))
    chance = random.Random(3)

    def run(config: Config, kills: Kills) -> None:
        tree = RunTree(warm_runs, write_config(config), Path(config["run_dir"]), place)
        for phase, order in kills:
            # Long runs start some engines as the product does.
            tree.start(warm_children=not SOAK or chance.random() < 0.9)
            if tree.wait_for_phase(phase, chance, config["steps"]):
                tree.kill(order, chance)
                tree.assert_gone()
            else:
                tree.finish()
                assert phase == "close", "the run ended before it could be killed"
        tree.start()
        tree.finish()
        left = [str(path) for path in Path(config["run_dir"]).rglob("*.tmp")]
        assert not left, f"left in the run directory: {left}"

    return run


@pytest.mark.parametrize(
    "kills",
    plans(
        ("steps", "a child, later the controller"),
        ("engines", "children first"),
        ("update", "any order"),
        ("checkpoint", "all at once"),
        soak=80,
    ),
)
def test_a_run_ahead_of_training_ends_every_prompt_once_whenever_it_is_killed(
    fated_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    fated_config["steps"] = 3 * len(kills) + 2
    fated_config["checkpoint"]["async"] = True
    fated_config["source"] |= {"max_concurrent_groups": 4}
    fated_config["source"]["engine"]["engines"] = 2
    # In processes of their own, which have to end with the run too.
    fated_config["source"]["environment"]["rewards"] = {"fated": "fated_rewards:fated"}
    train_and_kill(fated_config, kills)
    assert_every_prompt_met_its_fate(fated_config, write_prompts(tmp_path / "fated.jsonl"))


@pytest.mark.parametrize(
    "kills", plans(("update", "children first"), ("start", "controller"), ("close", "controller"), soak=60)
)
def test_a_run_without_staleness_ends_with_the_weights_of_one_that_was_never_killed_and_of_a_synchronous_one(
    fated_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    source = fated_config["source"]
    del source["correction"]
    source["max_staleness"] = 0
    fated_config["steps"] = 3 * len(kills) + 2
    train_and_kill(fated_config, kills)
    assert_every_prompt_met_its_fate(fated_config, write_prompts(tmp_path / "fated.jsonl"))
    whole = train(fated_config, name="whole", source=source | {"engine": IN_PROCESS})
    twin = train(synchronous(fated_config), name="twin")
    lines = numbers(fated_config["run_dir"])
    assert lines == numbers(whole) == numbers(twin)
    assert {"groups/filtered", "groups/quarantined"} <= {name for line in lines for name in line if line[name]}
    for unkilled in (whole, twin):
        assert_same_weights(fated_config["run_dir"], unkilled)


def numbers(run: Trained | Path | str) -> list[dict[str, Any]]:
    """The metrics that every run of the same prompts and seeds has in common."""
    return [{name: value for name, value in line.items() if not name.startswith(BY_TIME)} for line in comparable(run)]


@pytest.mark.parametrize("kills", plans(("evaluation", "controller"), soak=20, phases=(*IN_ONE_PROCESS, "evaluation")))
def test_a_synchronous_run_killed_between_evaluation_and_checkpoint_does_both_again(
    fated_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    config = synchronous(fated_config)
    del config["source"]["correction"]
    config["source"]["held_out"] = {"max_prompts": 2, "success": {"reward": "fated", "at_least": 0.5}}
    config["data"]["eval"] = str(tmp_path / "held-out.jsonl")
    write_prompts(tmp_path / "held-out.jsonl", 3)
    config |= {"evaluation": {"every_steps": 4}, "steps": 3 * len(kills) + 2, "checkpoint": {"every_steps": 3}}
    train_and_kill(config, kills)
    whole = train(config, name="whole")
    assert numbers(config["run_dir"]) == numbers(whole)
    assert_same_weights(config["run_dir"], whole)
    assert len({Path(run, "eval_samples.jsonl").read_text() for run in (config["run_dir"], whole)}) == 1


@pytest.mark.parametrize("kills", plans(("steps", "any order"), ("engines", "controller"), soak=20))
def test_programs_of_agents_weights_on_disk_and_the_endpoint_end_with_the_run(
    fated_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT, encoding="utf-8")
    fated_config["steps"] = 3 * len(kills) + 2
    fated_config["source"] |= {
        "max_staleness": 1,
        "environment": {"name": "harness", "command": [sys.executable, "-I", "-S", str(agent)]},
        "weight_sync": {"name": "disk"},
    }
    train_and_kill(fated_config, kills)
    assert_every_prompt_met_its_fate(fated_config, write_prompts(tmp_path / "fated.jsonl"))
    assert not [*(Path(fated_config["run_dir"]) / "weights").iterdir()]


@pytest.mark.parametrize("kills", plans(("workers", "any order"), soak=20, phases=("start", "steps")))
def test_a_run_killed_while_it_fills_the_token_cache_fills_it_again(
    base_config: Config, tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    row = {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it " * 20}]}
    base_config["data"]["train"] = str(tmp_path / "long.jsonl")
    Path(base_config["data"]["train"]).write_text((json.dumps(row) + "\n") * 1200, encoding="utf-8")
    base_config |= {"steps": 3 * len(kills) + 2, "report": {"enabled": False}}
    base_config["plugins"] = ["collation_fast"]
    base_config["tokenization"] = {"name": "parallel", "workers": 2, "cache_dir": str(tmp_path / "cache")}
    train_and_kill(base_config, kills)
    [entry] = (tmp_path / "cache").iterdir()
    open_entry(entry, whole=True)
    sequential = {"plugins": ["collation_fast"], "tokenization": {"name": "text/sequential"}}
    whole = train(base_config, name="whole", **sequential)
    assert numbers(base_config["run_dir"]) == numbers(whole)
    assert_same_weights(base_config["run_dir"], whole)
