"""A run small enough to repeat: a two-layer model on 64 chat rows."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reward_functions import in_process
from ruamel.yaml import YAML
from run_helpers import Config, KillableProcess, Spurline, WriteConfig
from warm_children import WarmChildren, WarmRuns

from spurline.cli import main
from spurline.run.evaluations.evaluation import DataEvaluation

START_LINES = re.compile(
    r"^(spurline \S+|  (run|model|data|training|device|plugins) +.*|  \[ *[\d.]+ s\] .*)\n", re.MULTILINE
)

REWARDS = '''
def early_letters(answer):
    """Share of the response's characters that are in the first half of the alphabet."""
    letters = [letter for letter in answer.response.lower() if letter.isalpha()]
    return sum(letter < "n" for letter in letters) / max(1, len(letters))

def brevity(answer):
    return -len(answer.response) / 10

def always_one(answer):
    return 1.0

def fails_on_some_rows(answer):
    if answer.prompt.rstrip().endswith("7") or "7" in answer.prompt:
        raise KeyError("seven")
    return early_letters(answer)
'''


@pytest.fixture(scope="session")
def warm_runs(forked_children: WarmChildren) -> Iterator[WarmRuns]:
    """Starts `spurline` in processes that need no imports."""
    runs = WarmRuns(forked_children)
    yield runs
    runs.close()


@pytest.fixture
def base_config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> Config:
    """A valid config of a six-step run."""
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "max_length": 128},
        "batch_size": 8,
        "steps": 6,
        "optimizer": {"learning_rate": 1e-3},
        "collator": {"name": "packed", "max_tokens": 256},
        "checkpoint": {"every_steps": 2},
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
    }


@pytest.fixture
def rl_config(base_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Four prompts of four samples per step; two optimizer steps."""
    module = tmp_path / "modules" / "run_rewards.py"
    module.parent.mkdir()
    module.write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(module.parent))
    monkeypatch.setenv("PYTHONPATH", str(module.parent), prepend=os.pathsep)
    # Each test writes the module again, in a folder of its own.
    monkeypatch.delitem(sys.modules, "run_rewards", raising=False)
    for name in ("batch_size", "collator"):
        del base_config[name]
    base_config["source"] = {
        "name": "rollouts",
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "environment": {
            "name": "single_turn",
            "rewards": {"early": in_process("run_rewards:early_letters"), "brevity": in_process("run_rewards:brevity")},
        },
        "engine": {"name": "in_process", "deterministic": True},
        "sampling": {"max_new_tokens": 6},
        "reward_weights": {"brevity": 0.1},
    }
    base_config["minibatches"] = {"name": "by_prompt", "prompts_per_minibatch": 2}
    base_config["schedule"] = "constant"
    return base_config


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Write a config as YAML; returns its path."""

    def write(config: Config) -> Path:
        path = tmp_path / "run.yaml"
        YAML(typ="safe", pure=True).dump(config, path)
        return path

    return write


@pytest.fixture
def spurline(capsys: pytest.CaptureFixture[str], write_config: WriteConfig) -> Spurline:
    """Run the command line in this process: (exit code, stdout, stderr without the lines of the start).

    A mapping among the words is written as YAML, and its path takes its place.
    """

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as raised:
            main([str(write_config(word) if isinstance(word, dict) else word) for word in arguments])
        output = capsys.readouterr()
        return int(raised.value.code or 0), output.out, START_LINES.sub("", output.err)

    return run


@pytest.fixture
def give_scores(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let evaluations of held-out data measure these scores one after the other.

    name: the metric, without `eval/`. told: whether the evaluation says beforehand what it measures.
    """

    def give(*scores: float, name: str = "score", told: bool = False) -> None:
        left = iter(scores)
        monkeypatch.setattr(DataEvaluation, "metrics", lambda _: (name,) if told else None)
        monkeypatch.setattr(DataEvaluation, "evaluate", lambda *_: ({"loss": 1.0, name: next(left)}, []))

    return give


@pytest.fixture
def killable_process(warm_runs: WarmRuns, write_config: WriteConfig) -> Callable[..., KillableProcess]:
    """Start to train a config in a process that can be killed. Options are those of `WarmRuns.start`."""
    return lambda config, **options: KillableProcess(
        warm_runs, write_config(config), Path(config["run_dir"]), **options
    )
