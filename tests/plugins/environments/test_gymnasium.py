"""Environment `gymnasium`: plain classes, and environments that are registered in the library."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rl_attempts import core_registry, decode, encode, extends, make_policy, make_task, run, says
from ruamel.yaml import YAML
from tool_families import FAMILIES, tokenizer_of
from transformers import PreTrainedTokenizerBase

from spurline.errors import PluginError
from spurline_agents.configs import VerifiersConfig
from spurline_environments.configs import GymnasiumConfig, OpenEnvConfig
from spurline_environments.gymnasium import GymnasiumEnvironment
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.testing import EnvironmentContract
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import trajectory_return
from spurline_text.testing.inputs import tiny_tokenizer


class Higher:
    """Find a number from 0 to 9. It is drawn from the seed, or given as the row's column `number`."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus
        self.closed = False
        MADE.append(self)

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        self.number = options.get("number", seed % 10)
        return "Guess.", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if text == "hang":
            RELEASE.wait(30.0)
        guess = int(text) if text.isdigit() else -1
        hint = "yes" if guess == self.number else "higher" if guess < self.number else "lower"
        return hint, (1.0 + self.bonus if hint == "yes" else -0.1), hint == "yes", False, {}

    def close(self) -> None:
        self.closed = True


class JustTexts:
    def reset(self, seed: int) -> str:
        return f"seed {seed}"

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.5, False, True, {}


MADE: list[Higher] = []
RELEASE = threading.Event()
ROW = {"prompt": "A game.", "number": 7}


def play(row: dict[str, Any], *texts: str, sample: int = 0, tokenizer: Any = None, **settings: Any) -> Any:
    tokenizer = tokenizer or tiny_tokenizer()
    MADE.clear()
    config = GymnasiumConfig(**{"path": Higher, **settings})
    environment = GymnasiumEnvironment(config, core_registry(), tokenizer, None)  # type: ignore[arg-type]
    task = make_task(row, sample=sample)
    return run(environment.run(task, make_policy(ScriptedEngine(says(tokenizer, *texts)), task, max_new_tokens=200)))


def test_each_turn_gets_the_reward_of_its_step_and_the_return_is_their_sum() -> None:
    found = play(ROW, "3", "9", "7", arguments={"bonus": 1.0})
    assert [turn.rewards[-1] for turn in found.turns] == pytest.approx([-0.1, -0.1, 2.0])
    assert trajectory_return(found) == pytest.approx(1.8)
    assert [message["content"] for message in found.info["messages"]] == [
        "A game.\n\nGuess.", "3", "higher", "9", "lower", "7", "yes",
    ]  # fmt: skip
    assert found.info["ended"] == "terminated"
    assert all(extends(before, after) for before, after in zip(found.turns, found.turns[1:], strict=False))
    assert MADE[0].closed


def test_seeds_come_from_the_column_or_from_the_prompt_and_are_those_of_all_its_attempts() -> None:
    play({"seed": 11}, "1", max_turns=1)
    assert MADE[0].seed == 11
    play({"name": "a"}, "1", max_turns=1)
    derived = MADE[0].seed
    play({"name": "a"}, "1", max_turns=1, sample=3)
    assert MADE[0].seed == derived < 2**31


def test_episodes_end_at_max_turns_and_at_a_truncation_and_rows_need_no_prompt() -> None:
    assert play(ROW, "1", "2", max_turns=2).info["ended"] == "max_turns"
    found = play({"seed": 5}, "x", path=JustTexts)
    assert found.info["ended"] == "truncated"
    assert [message["content"] for message in found.info["messages"]] == ["seed 5", "x"]
    # The context has room, but no tokenizer takes half of a surrogate pair.
    broken = play(ROW, "1", observation=lambda text: text.replace("higher", "\ud83d"))
    assert (broken.info["ended"], len(broken.turns)) == ("refused", 1)


@pytest.mark.parametrize("slow", ["step", "action", "observation"])
def test_a_step_or_a_function_that_hangs_costs_its_attempt(slow: str) -> None:
    RELEASE.clear()

    def hang(text: str) -> str:
        RELEASE.wait(3.0)
        return text

    functions: dict[str, Any] = {} if slow == "step" else {slow: hang}
    name = "step" if slow == "step" else "hang"
    with pytest.raises(AttemptFailedError, match=rf"`{name}` of in-memory.*Higher did not return within 0.2 s"):
        play(ROW, "hang", step_timeout_s=0.2, **functions)
    assert not MADE[0].closed, "a thread still uses it"
    RELEASE.set()


def test_an_environment_that_cannot_be_closed_costs_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: Higher) -> None:
        raise OSError("the window is gone")

    monkeypatch.setattr(Higher, "close", close)
    with pytest.warns(UserWarning, match="not closed: OSError: the window is gone"):
        assert trajectory_return(play(ROW, "7")) == 1.0


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_reasoning_is_no_part_of_the_action_and_what_looks_like_a_call_is(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    thoughtful = [family.answer.replace("42", guess).replace("THOUGHT", family.thought[0]) for guess in "97"]
    found = play(ROW, *thoughtful, tokenizer=tokenizer)
    assert [turn.rewards[-1] for turn in found.turns] == pytest.approx([-0.1, 1.0])
    assert found.info["messages"][2]["content"] == "lower"
    assert found.info["response"] == "7"
    assert [decode(tokenizer, turn.response_ids)[: len(thoughtful[0])] for turn in found.turns] == thoughtful
    called = family.call.replace("THOUGHT", "")
    actions: list[str] = []
    play(ROW, called, tokenizer=tokenizer, max_turns=1, action=lambda text: actions.append(text) or text)
    assert actions == [str(tokenizer.decode(encode(tokenizer, called), skip_special_tokens=True))]


def test_episodes_need_no_known_format_of_calls() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + tokenizer.chat_template
    assert trajectory_return(play(ROW, "<think>so</think>7", tokenizer=tokenizer)) == 1.0


def test_functions_turn_texts_into_actions_and_what_is_no_action_is_told_to_the_model() -> None:
    found = play(
        ROW, "seven", "<7>", action=lambda text: str(int(text.strip("<>"))), observation=lambda text: text.upper()
    )
    assert found.info["messages"][2]["content"].startswith("error: invalid literal for int()")
    assert found.info["messages"][0]["content"] == "A game.\n\nGUESS."
    assert found.info["metrics"] == {"episode/turns": 2, "episode/invalid_actions": 1}
    assert [turn.rewards[-1] for turn in found.turns] == [0.0, 1.0]


class TestContract(EnvironmentContract):
    def make_environment(self, tokenizer: PreTrainedTokenizerBase) -> GymnasiumEnvironment:
        config = GymnasiumConfig(path=Higher, max_turns=2)  # type: ignore[arg-type]
        return GymnasiumEnvironment(config, core_registry(), tokenizer, None)  # type: ignore[arg-type]

    def row(self) -> dict[str, Any]:
        return ROW


def test_the_page_shows_a_class_that_plays(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments-of-others.md").read_text("utf-8")
    file = tmp_path / "higher.py"
    file.write_text(re.findall(r'```python title="higher.py"\n(.*?)```', page, re.S)[0], "utf-8")
    settings = YAML(typ="safe", pure=True).load(re.findall(r"```yaml\n(.*?)```", page, re.S)[0])["source"][
        "environment"
    ]
    found = play({"seed": 5}, "0", "80", "40", **{**settings, "path": f"{file}:Higher", "arguments": {"most": 60}})
    contents = [message["content"] for message in found.info["messages"]]
    assert contents[0] == "I think of a number from 1 to 60. Guess it."
    assert contents[2::2] == ["Higher.", "Lower.", "Right."]
    assert trajectory_return(found) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("library", "module", "kind", "settings"),
    [
        ("gymnasium", "spurline_environments.gymnasium", "GymnasiumEnvironment", {"id": "FrozenLake-v1"}),
        ("openenv", "spurline_environments.openenv", "OpenEnvEnvironment", {"url": "http://127.0.0.1:1"}),
        ("verifiers", "spurline_agents.verifiers", "VerifiersEnvironment", {"taskset": "wordle"}),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra_that_installs_it(
    library: str, module: str, kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    configs = {"gymnasium": GymnasiumConfig, "openenv": OpenEnvConfig, "verifiers": VerifiersConfig}
    make = getattr(importlib.import_module(module), kind)
    with pytest.raises(PluginError, match=rf'pip install "spurline-\w+\[{library}\]"'):
        make(configs[library](**settings), core_registry(), tiny_tokenizer(), None)


def test_registered_environments_take_numbers_for_discrete_actions() -> None:
    pytest.importorskip("gymnasium")
    settings = {"path": None, "id": "FrozenLake-v1", "arguments": {"is_slippery": False}}
    # Right, right, down, down, down, right: the way over the default map.
    found = play({"seed": 1}, "2", "north", "2", "1", "1", "1", "2", **settings)
    assert found.info["ended"] == "terminated"
    assert trajectory_return(found) == 1.0
    assert [message["content"] for message in found.info["messages"][1::2]] == ["2", "north", "2", "1", "1", "1", "2"]
    assert found.info["messages"][4]["content"] == "error: write one number from 0 to 3."
    with pytest.raises(PluginError, match="action space Box"):
        play({"seed": 1}, "2", path=None, id="Pendulum-v1")
