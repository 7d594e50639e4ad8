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

import eager_workers
import pytest
from prompt_fates import AGENT, REWARDS, assert_each_prompt_ended_once, write_prompts
from reward_functions import in_process
from run_helpers import assert_same_weights, deterministic, read_metrics
from run_trees import ORDERS, PHASES, Order, RunTree
from warm_runs import WarmRuns

from spurline import Run, load_config
from spurline_collation_fast.cache.upkeep import damage

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]

SOAK = bool(os.environ.get("SPURLINE_SOAK"))
Kill = tuple[str, Order]
"""When, and who is killed in which order."""
Kills = Sequence[Kill]
TrainAndKill = Callable[[dict[str, Any], Kills], None]

IN_ONE_PROCESS = ("start", "steps", "checkpoint")
"""Phases of a run that starts no processes and records no groups."""
ONLY_ASYNC = ("async/", "staleness/", "sync/")
"""Prefixes of the metrics that a synchronous run does not have."""
BY_TIME = ("collation/", "groups/retries")
"""Which attempts at a prompt were made again before another one of it failed for good is a matter of time too."""


def plans(*kills: Kill, soak: int, phases: Sequence[str] = PHASES) -> list[Any]:
    """Of one run each: these kills, or in a long run as many as `soak`, ten a run, by chance."""
    if not SOAK:
        return [pytest.param(kills, id="")]
    chances = [(seed, random.Random(seed)) for seed in range(soak // 10)]
    return [
        pytest.param([(chance.choice(phases), chance.choice(ORDERS)) for _ in range(10)], id=f"seed-{seed}")
        for seed, chance in chances
    ]


@pytest.fixture
def fated_config(rl_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An asynchronous run that filters groups, makes failed attempts again and gives prompts up."""
    (tmp_path / "modules" / "fated_rewards.py").write_text(REWARDS, encoding="utf-8")
    rl_config["data"] = {"train": str(tmp_path / "fated.jsonl"), "max_length": 128, "on_ignored": "warn"}
    write_prompts(tmp_path / "fated.jsonl")
    rl_config["plugins"] = ["async_rl", "agents"]
    rl_config["report"] = {"enabled": False}
    rl_config["minibatches"]["prompts_per_minibatch"] = 1
    rl_config["checkpoint"] = {"every_steps": 2, "keep_last": 1}
    rl_config["source"] |= {
        "name": "async_rollouts",
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_staleness": 2,
        "correction": "tis",
        "record_groups": True,
        "max_concurrent_groups": 2,
        "zero_variance": "refill",
        "environment": {"name": "single_turn", "rewards": {"fated": in_process("fated_rewards:fated")}},
        "reward_weights": {},
        "engine": {"name": "child_process", "engines": 1, "max_restarts": 1000, "deterministic": True},
        "faults": {"retries": 1, "max_quarantined": 64},
    }
    return rl_config


@pytest.fixture
def train_and_kill(
    warm_runs: WarmRuns,
    write_config: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> TrainAndKill:
    """Train a config to its end, killed on the way; after every kill, nothing of the run is left."""
    place = tmp_path / "place"
    monkeypatch.setenv("TMPDIR", str(place / "tmp"))
    chance = random.Random(3)

    def run(config: dict[str, Any], kills: Kills) -> None:
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
    fated_config: dict[str, Any], tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    fated_config["steps"] = 3 * len(kills) + 2
    fated_config["checkpoint"]["async"] = True
    fated_config["source"] |= {"max_concurrent_groups": 4}
    fated_config["source"]["engine"]["engines"] = 2
    # In processes of their own, which have to end with the run too.
    fated_config["source"]["environment"]["rewards"] = {"fated": "fated_rewards:fated"}
    train_and_kill(fated_config, kills)
    assert_each_prompt_ended_once(fated_config, write_prompts(tmp_path / "fated.jsonl"))


@pytest.mark.parametrize(
    "kills", plans(("update", "children first"), ("start", "controller"), ("close", "controller"), soak=60)
)
def test_a_run_without_staleness_ends_with_the_weights_of_one_that_was_never_killed_and_of_a_synchronous_one(
    fated_config: dict[str, Any], tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
) -> None:
    source = fated_config["source"]
    del source["correction"]
    source["max_staleness"] = 0
    fated_config["steps"] = 3 * len(kills) + 2
    train_and_kill(fated_config, kills)
    assert_each_prompt_ended_once(fated_config, write_prompts(tmp_path / "fated.jsonl"))
    whole = fated_config | {"run_dir": str(tmp_path / "whole")}
    whole["source"] = source | {"engine": {"name": "in_process", "deterministic": True}}
    Run(load_config(whole)).train()
    twin = fated_config | {"run_dir": str(tmp_path / "twin"), "plugins": []}
    other = ("name", "max_staleness", "record_groups", "max_concurrent_groups", "engine")
    twin["source"] = {name: value for name, value in source.items() if name not in other} | {
        "name": "rollouts",
        "engine": {"name": "in_process", "deterministic": True},
    }
    Run(load_config(twin)).train()
    lines = comparable(fated_config)
    assert lines == comparable(whole) == comparable(twin)
    assert {"groups/filtered", "groups/quarantined"} <= {name for line in lines for name in line if line[name]}
    for unkilled in ("whole", "twin"):
        assert_same_weights(Path(fated_config["run_dir"]), tmp_path / unkilled)


def comparable(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics that every run of the same prompts and seeds has in common."""
    return [
        {name: value for name, value in line.items() if not name.startswith((*ONLY_ASYNC, *BY_TIME))}
        for line in deterministic(read_metrics(config["run_dir"]))
    ]


@pytest.mark.parametrize("kills", plans(("evaluation", "controller"), soak=20, phases=(*IN_ONE_PROCESS, "evaluation")))
def test_a_synchronous_run_killed_between_evaluation_and_checkpoint_does_both_again(
    fated_config: dict[str, Any], tmp_path: Path, train_and_kill: TrainAndKill, spurline_chat_file: Path, kills: Kills
) -> None:
    source = fated_config["source"]
    for name in ("max_staleness", "correction", "record_groups", "max_concurrent_groups"):
        del source[name]
    source |= {"name": "rollouts", "engine": {"name": "in_process", "deterministic": True}}
    source["held_out"] = {"max_prompts": 2, "success": {"reward": "fated", "at_least": 0.5}}
    fated_config["data"]["eval"] = str(tmp_path / "held-out.jsonl")
    write_prompts(tmp_path / "held-out.jsonl", 3)
    fated_config |= {"plugins": [], "evaluation": {"every_steps": 4}, "steps": 3 * len(kills) + 2}
    fated_config["checkpoint"]["every_steps"] = 3
    train_and_kill(fated_config, kills)
    whole = fated_config | {"run_dir": str(tmp_path / "whole")}
    Run(load_config(whole)).train()
    assert comparable(fated_config) == comparable(whole)
    assert_same_weights(Path(fated_config["run_dir"]), tmp_path / "whole")
    samples = (Path(config["run_dir"]) / "eval_samples.jsonl" for config in (fated_config, whole))
    assert len({path.read_text() for path in samples}) == 1


@pytest.mark.parametrize("kills", plans(("steps", "any order"), ("engines", "controller"), soak=20))
def test_programs_of_agents_weights_on_disk_and_the_endpoint_end_with_the_run(
    fated_config: dict[str, Any], tmp_path: Path, train_and_kill: TrainAndKill, kills: Kills
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
    assert_each_prompt_ended_once(fated_config, write_prompts(tmp_path / "fated.jsonl"))
    assert not [*(Path(fated_config["run_dir"]) / "weights").iterdir()]


@pytest.mark.parametrize("kills", plans(("workers", "any order"), soak=20, phases=("start", "steps")))
def test_a_run_killed_while_it_fills_the_token_cache_fills_it_anew(
    base_config: dict[str, Any],
    tmp_path: Path,
    train_and_kill: TrainAndKill,
    kills: Kills,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eager_workers.install(tmp_path / "site", monkeypatch)
    row = {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it " * 20}]}
    base_config["data"]["train"] = str(tmp_path / "long.jsonl")
    Path(base_config["data"]["train"]).write_text((json.dumps(row) + "\n") * 1200, encoding="utf-8")
    base_config |= {"steps": 3 * len(kills) + 2, "report": {"enabled": False}}
    base_config["plugins"] = ["collation_fast", "eager_workers"]
    base_config["tokenization"] = {"name": "parallel", "workers": 2, "cache_dir": str(tmp_path / "cache")}
    train_and_kill(base_config, kills)
    [entry] = (tmp_path / "cache").iterdir()
    assert damage(entry) is None
    whole = base_config | {"run_dir": str(tmp_path / "whole"), "tokenization": {"name": "text/sequential"}}
    whole["plugins"] = ["collation_fast"]
    Run(load_config(whole)).train()
    assert comparable(base_config) == comparable(whole)
    assert_same_weights(Path(base_config["run_dir"]), tmp_path / "whole")
