"""Python objects in place of paths in a config: rows, rewards, tools and environments."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import subprocess
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from run_helpers import Config

from spurline import load_config
from spurline.config.loading import LoadedConfig
from spurline.errors import ConfigError, PluginError
from spurline.files import remove_unfinished
from spurline_environments.tools import Toolbox
from spurline_rl.functions import load_function
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.function import FunctionReward

ROWS = [{"prompt": "1 + 1", "completion": "2"}, {"prompt": "grüße", "completion": "4"}]
Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loading(train: object = ROWS, rewards: object = None, **more: object) -> LoadedConfig:
        config = {"run_dir": str(tmp_path / "run"), "model": {"path": "m"}, "data": {"train": train}, "steps": 1}
        if rewards is not None:
            config["source"] = rollouts({"name": "single_turn", "rewards": rewards})
        return load_config(config | more)

    return loading


def rollouts(environment: object) -> dict[str, Any]:
    return {"name": "rollouts", "environment": environment, "prompts_per_step": 1, "sampling": {"max_new_tokens": 4}}


def rewards_of(loaded: LoadedConfig) -> Config:
    source: Any = loaded.config.source
    return source.environment.rewards


def answer() -> Answer:
    return Answer("p", "abc", "abc", {})


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "in_memory").iterdir())


@pytest.mark.parametrize(
    "train",
    [ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS), {"path": ROWS}, [{"path": ROWS}], [ROWS]],
    ids=["list", "tuple", "Dataset", "path", "listed path", "listed rows"],
)
def test_rows_are_written_once_below_the_run_directory_under_a_name_of_their_content(
    load: Load, tmp_path: Path, train: object
) -> None:
    path = Path(load(train).config.data.train[0].place)
    assert path.parent == tmp_path / "run" / "in_memory"
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    before = path.stat()
    assert load(train).config.data.train[0].place == str(path)
    assert path.stat().st_ino == before.st_ino
    other = load([*ROWS, ROWS[0]]).config.data.train[0].place
    assert files(tmp_path) == sorted([path.name, Path(other).name])


def test_rows_and_files_are_mixed_and_settings_stand_beside_rows(load: Load) -> None:
    data = {"train": [ROWS, {"path": [{"frage": "a", "antwort": "b"}], "weight": 2.0}, "rows.jsonl"], "eval": ROWS}
    train = load(data=data).config.data.train
    assert [entry.weight for entry in train] == [1.0, 2.0, 1.0]
    assert train[2].place == "rows.jsonl"


def test_arrays_of_numpy_become_lists(load: Load) -> None:
    place = load([{"input_ids": np.arange(3), "labels": [np.int64(1)]}]).config.data.train[0].place
    assert json.loads(Path(place).read_text()) == {"input_ids": [0, 1, 2], "labels": [1]}


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"path": []}, r"data\.train\.0\.path is an empty list"),
        ({"path": [1, 2]}, r"row 0 is of type int"),
        ([{"prompt": {1, 2}}], r"row 0 cannot be written.*type set"),
        ([*ROWS, {"prompt": float("nan")}], r"row 2 cannot be written.*None for NaN"),
        ([{"pth": "rows.jsonl"}], r"data\.train\.0\.pth is not a setting"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), r"dataset\['train'\]"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), r"name: hf_stream"),
        ({"path": datasets.Dataset.from_list(ROWS).to_pandas()}, r"type DataFrame.*frame\.to_dict\('records'\)"),
        (datasets.Dataset.from_list(ROWS).to_pandas(), r"path is of type DataFrame"),
        ((row for row in ROWS), r"path is of type generator"),
    ],
)
def test_what_is_no_rows_is_refused_with_the_way_out(load: Load, tmp_path: Path, train: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(train)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_cannot_hold_rows(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\nsteps: 1\ndata: {train: [{prompt: a, completion: b}]}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:3: data\.train\.0\.path .*from Python, with load_config"):
        load_config(file)


@pytest.mark.parametrize("spell", [lambda f: f, lambda f: {"longest": f}, lambda f: {"name": "function", "path": f}])
def test_a_closure_is_a_reward_and_is_called_in_this_process(load: Load, spell: Callable[..., object]) -> None:
    seen: list[str] = []

    def longest(answer: Answer) -> float:
        seen.append(answer.response)
        return len(answer.response)

    loaded = load(rewards=spell(longest))
    [(term, config)] = rewards_of(loaded).items()
    assert (term, config.in_process) == ("longest", True)
    assert asyncio.run(FunctionReward(config).score(answer())) == 3
    assert seen == ["abc"]
    written = loaded.resolved()["source"]["environment"]["rewards"]["longest"]
    assert written["path"] == "in-memory:longest"


def test_configs_keep_their_own_function_when_its_cell_runs_again(load: Load) -> None:
    loaded = [load(rewards={"it": lambda answer, number=number: number}) for number in (1.0, 2.0)]
    scores = [asyncio.run(FunctionReward(rewards_of(each)["it"]).score(answer())) for each in loaded]
    assert scores == [1.0, 2.0]
    assert loaded[0].resolved() == loaded[1].resolved()


def test_what_cannot_be_called_as_a_reward_is_told_with_the_way_out(load: Load) -> None:
    def two(prompt: str, response: str) -> float:
        return 0.0

    with pytest.raises(PluginError, match=r"in-memory:longest.*my_functions\.py:longest"):
        load_function("in-memory:longest", "reward function")
    loaded = load(rewards=two)
    with pytest.raises(ConfigError, match=r"is defined as two\(prompt.*called with one argument"):
        FunctionReward(rewards_of(loaded)["two"])
    for option, said in (({"in_process": False}, r"f\.in_process is false"), ({"workers": 2}, "worker processes")):
        with pytest.raises(ConfigError, match=said):
            load(rewards={"f": {"name": "function", "path": lambda answer: 1.0, **option}})


def test_tools_are_functions_too(load: Load) -> None:
    def double(number: int) -> int:
        """Twice the number."""
        return 2 * number

    environment = {"name": "tools", "rewards": "exact_match", "tools": [double, "calculator"]}
    loaded = load(source=rollouts(environment))
    config: Any = loaded.config.source
    schemas = Toolbox(config.environment.tools, 1).schemas()
    assert {each["function"]["name"] for each in schemas} == {"double", "calculator"}


class Counting:
    """An environment that is written like one of a plugin."""

    def __init__(self, config: Any, registry: object, tokenizer: object, data: object) -> None:
        self.turns, self.tokenizer = config.max_turns, tokenizer

    async def run(self, task: object, policy: object) -> Any:
        return "class"


class Ready:
    """An environment as an object."""

    async def run(self, task: object, policy: object) -> Any:
        return "object"


async def attempt(task: object, policy: object) -> Any:
    return "function"


def environment_of(load: Load, given: object) -> Any:
    loaded = load(source=rollouts(given))
    config: Any = loaded.config.source
    assert loaded.resolved()["source"]["environment"]["path"].startswith(("in-memory:", "/"))
    registry = loaded.host.registry
    return registry.create("environment", config.environment, registry=registry, tokenizer="t", data=None)


@pytest.mark.parametrize(("given", "said"), [(Counting, "class"), (Ready(), "object"), (attempt, "function")])
def test_an_environment_is_a_class_an_object_or_an_async_function(load: Load, given: Any, said: str) -> None:
    assert asyncio.run(environment_of(load, given).run(None, None)) == said
    assert asyncio.run(environment_of(load, {"name": "custom", "path": given}).run(None, None)) == said


def test_an_environment_is_named_by_its_file_too(load: Load, tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(f"from __future__ import annotations\n\n{inspect.getsource(Counting)}")
    given = {"name": "custom", "path": f"{tmp_path / 'games.py'}:Counting", "max_turns": 3}
    made = environment_of(load, given)
    assert (made.turns, made.tokenizer) == (3, "t")
    assert environment_of(load, given["path"]).turns == 1


class _RunsWithoutPolicy(Ready):
    async def run(self, task: object) -> Any: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (_RunsWithoutPolicy(), r"is defined as run\(task.*called with \(task, policy\)"),
        (partial(attempt, 1, 2), r"is defined as partial\(\).*called with \(task, policy\)"),
        (dict, "no signature"),
        (lambda task, policy: None, r"is defined as <lambda>\(task, policy\).*called with \(config, registry"),
        (type("Empty", (Counting,), {"run": None}), r"makes a Empty, which has no `async def run\(task, policy\)`"),
    ],
)
def test_what_is_no_environment_says_how_one_is_written(load: Load, given: object, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        environment_of(load, given)


def test_a_closure_goes_with_the_config_that_it_was_given_to(spurline_tiny_model: Path, tmp_path: Path) -> None:
    class Held:
        """Stands for a model that a reward uses."""

    held = Held()
    gone = weakref.ref(held)

    def reward(answer: object, held: Held = held) -> float:
        return 1.0

    rows = [{"prompt": "say 1"}]
    source = {"name": "rollouts", "prompts_per_step": 1, "environment": {"name": "single_turn", "rewards": reward}}
    model = {"path": str(spurline_tiny_model)}
    loaded = load_config({"run_dir": tmp_path, "model": model, "data": {"train": rows}, "source": source, "steps": 1})
    del reward, held, source
    gc.collect()
    assert gone() is not None
    del loaded
    gc.collect()
    assert gone() is None


@pytest.mark.processes
def test_a_model_that_a_kill_left_half_saved_is_cleared_away(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    left, link = tmp_path / f".model.{process.pid}.tmp", tmp_path / f".link.{process.pid}.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (tmp_path / "kept").mkdir()
    link.symlink_to(tmp_path / "kept")
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
