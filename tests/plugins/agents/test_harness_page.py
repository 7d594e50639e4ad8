"""What docs/harness.md shows works as it is shown."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness_runs import LIMIT_S
from rl_attempts import SORT_ROW, make_policy, make_task, says
from ruamel.yaml import YAML

from spurline import load_config
from spurline.plugins.host import PluginHost
from spurline_agents.environment import HarnessEnvironment
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory
from spurline_text.testing.inputs import tiny_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "harness.md").read_text("utf-8")
FILES: dict[str, str] = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.S))
SETTINGS: list[dict[str, Any]] = [
    YAML(typ="safe", pure=True).load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, in the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def play(settings: Mapping[str, Any], row: Mapping[str, Any], *texts: str) -> tuple[Trajectory, ScriptedEngine]:
    """One attempt at the row with the environment of these settings and a model that says these texts."""
    whole: Any = {"run_dir": "run", "model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1, **settings}
    config: Any = load_config(whole).config
    registry = PluginHost.load(["agents"]).registry
    tokenizer = tiny_tokenizer()
    engine, task = ScriptedEngine(says(tokenizer, *texts)), make_task(row)

    async def run() -> Trajectory:
        environment: HarnessEnvironment = registry.create(
            "environment", config.source.environment, registry=registry, tokenizer=tokenizer, data=None
        )
        try:
            return await asyncio.wait_for(environment.run(task, make_policy(engine, task)), LIMIT_S)
        finally:
            closing = environment.close()
            if closing is not None:
                await closing

    return asyncio.run(run()), engine


def test_the_page_shows_what_these_tests_look_at() -> None:
    assert list(FILES) == ["my_agent.py", "count_agent.py", "shop_agent.py"]
    assert len(SETTINGS) == 3


def test_the_function_is_an_agent_of_two_turns(folder: Path) -> None:
    trajectory, _ = play(SETTINGS[0], SORT_ROW, "3 2 1", "1 2 3")
    assert trajectory.rewards == {"right": 1.0, "length": -0.06}
    assert (len(trajectory.turns), trajectory.info["conversations"]) == (2, 1)


@pytest.mark.processes
def test_the_program_is_an_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `python` need not be on the path of whoever runs the tests.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    trajectory, _ = play(SETTINGS[1], SORT_ROW, "it is 1 2 3")
    assert trajectory.rewards == {"brief": -11.0, "right": 1.0}


def test_the_agent_with_tools_looks_the_price_up(folder: Path) -> None:
    settings = {"plugins": ["agents"], "source": {"name": "rollouts", "environment": {"name": "harness"}}}
    settings["source"]["environment"]["agent"] = "shop_agent:shop"  # type: ignore[index]
    call = '<tool_call>{"name": "price", "arguments": {"fruit": "apple"}}</tool_call>'
    trajectory, engine = play(settings, {"fruit": "apple"}, call, "3")
    assert trajectory.rewards == {"reward": 1.0}
    assert len(engine.requests) == 2
    assert trajectory.info["messages"][2]["content"] == "3"


def test_the_settings_for_other_machines_are_valid(folder: Path) -> None:
    environment = SETTINGS[2]["source"]["environment"]
    local = {**environment, "host": "127.0.0.1", "port": 0}
    local.pop("public_url")
    settings = {**SETTINGS[2], "source": {"name": "rollouts", "environment": local}}
    play(settings, SORT_ROW, "1", "2")
    whole: Any = {"run_dir": "run", "model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1, **SETTINGS[2]}
    assert load_config(whole).config


def test_every_setting_and_code_that_the_page_names_exists() -> None:
    from spurline_agents.configs import HarnessConfig

    package = Path(sys.modules[HarnessEnvironment.__module__].__file__ or "").parent
    code = "".join(path.read_text("utf-8") for path in package.glob("*.py"))
    for number, name in re.findall(r"^\| (\d{3}) \| `(\w+)`", PAGE, re.M):
        assert f'code="{name}"' in code, (number, name)
    named = {"max_turns", "max_body_bytes", "request_timeout_s", "ignore_sampling"}
    assert named <= HarnessConfig.model_fields.keys()
    assert all(name in PAGE for name in named)
