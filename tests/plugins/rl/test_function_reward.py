"""Reward `function`: what may be named, and what happens when the function misbehaves in the run's own process."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import reward_functions
from rl_attempts import run

from spurline import load_config
from spurline.errors import ConfigError, PluginError
from spurline_agents.configs import HarnessConfig
from spurline_concurrency import calls
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import ExactMatchConfig, FunctionRewardConfig
from spurline_rl.rewards.function import FunctionReward
from spurline_rl.scoring import checked_score, make_rewards, reward_terms

ANSWER = Answer("a prompt", "four", "4", {"difficulty": 3})


def make_reward(name: str, timeout_s: float = 30.0) -> FunctionReward:
    return FunctionReward(FunctionRewardConfig(path=f"reward_functions:{name}", timeout_s=timeout_s, in_process=True))


def terms(name: str, timeout_s: float = 30.0) -> dict[str, float]:
    return run(reward_terms({"mine": make_reward(name, timeout_s)}, ANSWER))


def test_a_function_of_the_script_itself_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"is in the script or notebook that runs.*Write it in a file"):
        FunctionReward(FunctionRewardConfig(path="__main__:mine"))


@pytest.fixture
def hung_threads() -> Iterator[None]:
    """Lets the threads go that a test has left hanging."""
    reward_functions.release.clear()
    yield
    reward_functions.release.set()
    for thread in threading.enumerate():
        if thread.name == "call-hangs":
            thread.join(timeout=30)


@pytest.mark.parametrize("name", ["length", "length_later"])
def test_plain_and_async_functions_are_called_with_the_answer(name):
    assert terms(name) == {"mine": 4.0}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"on the response 'four': ValueError: no such unit \(.*reward_functions\.py:"),
        ("is_cancelled", r"CancelledError: the pool was closed \(.*reward_functions\.py:"),
        ("times_out", r"TimeoutError: no answer \(.*reward_functions\.py:"),
        ("exits", r": it raised SystemExit\(2\)"),
        ("reads_a_variable", r"KeyError: 'NO_SUCH_VARIABLE' \(.*reward_functions\.py:\d+ in"),
    ],
)
def test_a_function_that_raises_is_named_with_its_error_and_its_place(name, words):
    with pytest.raises(AttemptFailedError, match=rf"Reward 'mine' failed .*{words}"):
        terms(name)


@pytest.mark.parametrize(("name", "shown"), [("text", "'1.0'"), ("forgets", "None")])
def test_what_is_not_a_number_is_refused(name, shown):
    with pytest.raises(AttemptFailedError, match=f"Reward 'mine' returned {shown} for .* it must return a number") as e:
        terms(name)
    assert ("return statement" in str(e.value)) == (name == "forgets")


def test_numbers_of_every_library_are_numbers():
    import torch

    for value in (1, True, 1.0, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0)):
        assert checked_score("mine", value, ANSWER) == 1.0
    for value in (np.ones(1), "1", [1], 1j):
        with pytest.raises(AttemptFailedError, match="must return a number"):
            checked_score("mine", value, ANSWER)


def test_what_cannot_be_called_or_found_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"two_arguments\(prompt: 'str'.* Write `def two_arguments\(answer\)`"):
        make_reward("two_arguments")
    with pytest.raises(ConfigError, match="reward_functions:NOT_A_FUNCTION is of type int, not a function"):
        make_reward("NOT_A_FUNCTION")
    has_no = r"names 'reward_functions:lenght', but reward_functions has no 'lenght'\. Did you mean 'length'\? It has: "
    with pytest.raises(PluginError, match=has_no):
        make_reward("lenght")
    with pytest.raises(PluginError, match="reward function cannot be imported from 'no_such_module:f': ModuleNotFound"):
        FunctionReward(FunctionRewardConfig(path="no_such_module:f", in_process=True))


def test_a_file_in_the_working_directory_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "my_local_rewards.py").write_text("def one(answer):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    reward = FunctionReward(FunctionRewardConfig(path="my_local_rewards:one", in_process=True))
    monkeypatch.delitem(sys.modules, "my_local_rewards")
    assert run(reward.score(ANSWER)) == 1.0


def test_a_file_can_be_named_by_its_path_whatever_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "score_beside.py").write_text("SCORE = 0.25\n")
    (tmp_path / "my rewards.py").write_text(
        "from score_beside import SCORE\n\ndef quarter(answer):\n    return SCORE\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (str(tmp_path), "~", "$HOME"):
        reward = FunctionReward(FunctionRewardConfig(path=f"{folder}/my rewards.py:quarter", in_process=True))
        assert run(reward.score(ANSWER)) == 0.25


def test_a_file_is_imported_once_as_long_as_it_stays_as_it_is(tmp_path):
    file = tmp_path / "counted.py"
    file.write_text("def one(answer):\n    return 1.0\n\ndef two(answer):\n    return 2.0\n")
    one, two = (load_function(f"{file}:{name}", "reward function") for name in ("one", "two"))
    assert one.__globals__ is two.__globals__
    file.write_text("def one(answer):\n    return 11.0\n")
    assert load_function(f"{file}:one", "reward function")(ANSWER) == 11.0


def test_what_is_wrong_with_a_file_is_said_with_its_place_and_a_way_out(tmp_path):
    (tmp_path / "nine.py").touch()
    missing = r"names the file .*none\.py, which does not exist\. Did you mean 'nine\.py'\? Python files in"
    with pytest.raises(PluginError, match=missing):
        load_function(f"{tmp_path}/none.py:f", "reward function")
    (tmp_path / "broken.py").write_text("import math\n\nRATE = 1 / 0\n")
    with pytest.raises(PluginError, match=r"ZeroDivisionError: division by zero \(.*broken\.py:3\)"):
        load_function(f"{tmp_path}/broken.py:f", "tool 'x'")
    with pytest.raises(
        PluginError, match=r"No module named 'not_there'.* give the file itself: `path/to/not_there\.py"
    ):
        load_function("not_there:f", "tool 'x'")


def test_the_same_name_works_in_every_setting_that_takes_a_function(tmp_path):
    named = f"{tmp_path}/mine.py:one"
    assert FunctionRewardConfig(path=named).path == named
    assert HarnessConfig(agent=named).agent == named
    run_of = {"model": {"path": "m"}, "data": {"train": "t.jsonl", "eval": "e.jsonl"}, "steps": 1}
    for rewards, term in (({"mine": named}, "mine"), (named, "one")):
        environment = {"name": "tools", "tools": {"one": named}, "rewards": rewards}
        source = {"name": "rollouts", "environment": environment, "held_out": {"success": {"reward": term}}}
        loaded = load_config({**run_of, "source": source})
        assert loaded.config.source.environment.rewards[term].path == named
        sft = load_config({**run_of, "evaluation": {"generate": {"rewards": rewards}}})
        assert sft.config.evaluation.generate.rewards[term].path == named


def test_a_module_of_a_folder_is_no_other_one_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "of_a_folder.py").write_text("def one(answer):\n    return 1.0\n")
    assert load_function(f"{tmp_path}/of_a_folder:one", "reward function")(ANSWER) == 1.0
    with pytest.raises(PluginError, match=r"but 'json' is already .*json/__init__\.py"):
        load_function(f"{tmp_path}/json:dumps", "reward function")


def test_a_reward_that_cannot_be_built_is_named() -> None:
    registry = load_config({"model": {"path": "m"}, "data": {"train": "d.jsonl"}, "steps": 1}).host.registry
    configs = {
        "right": ExactMatchConfig(),
        "short": FunctionRewardConfig(path="reward_functions:lenght", in_process=True),
    }
    with pytest.raises(PluginError, match=r"^reward 'short': The reward function names 'reward_functions:lenght'"):
        make_rewards(configs, registry)


def test_modules_beside_a_function_take_no_modules_place_in_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("json", "colorsys", "torch"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('not this one')\n")
        monkeypatch.delitem(sys.modules, name, raising=False) if name == "colorsys" else None
    (tmp_path / "mine.py").write_text("def one(answer):\n    return 1.0\n")
    reward = FunctionReward(FunctionRewardConfig(path=f"{tmp_path}/mine.py:one", in_process=True))
    import colorsys

    assert not str(colorsys.__file__).startswith(str(tmp_path))
    assert run(reward.score(ANSWER)) == 1.0


@pytest.mark.usefixtures("hung_threads")
def test_a_function_that_many_threads_still_run_is_called_again_when_some_have_ended(monkeypatch):
    monkeypatch.setattr(calls, "MAX_ABANDONED", 2)
    monkeypatch.setattr(calls, "_LOOK_S", 0.01)
    monkeypatch.setattr(calls, "_abandoned", defaultdict(list))

    def hung() -> int:
        return sum(thread.name == "call-hangs" for thread in threading.enumerate())

    for _ in range(4):
        with pytest.raises(AttemptFailedError, match=r"Reward 'mine' .*:hangs did not return within 0\.05 s"):
            terms("hangs", timeout_s=0.05)
    assert hung() == 2, "the last two calls have waited for a place"
    assert terms("length") == {"mine": 4.0}

    async def waiting() -> dict[str, float]:
        asked = asyncio.ensure_future(reward_terms({"mine": make_reward("hangs")}, ANSWER))
        await asyncio.sleep(0.02)
        assert not asked.done()
        reward_functions.release.set()
        return await asked

    assert run(waiting()) == {"mine": 1.0}


def test_settings_of_worker_processes_are_refused_where_there_are_none():
    config = FunctionRewardConfig(path="a:f", in_process=True, workers=2)
    [problem] = config.problems(None)  # type: ignore[arg-type]
    assert problem.key == "workers"
