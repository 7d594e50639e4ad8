"""Environment and dataset `verifiers` with the library itself: its tasksets, servers and clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rl_attempts import core_registry, decode, extends, in_loop, make_policy, make_task, says, tokenizer_with

from spurline.errors import ConfigError, DataError
from spurline_agents.configs import VerifiersConfig, VerifiersRowsConfig
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory

pytest.importorskip("verifiers.v1")
# The library asks git for its own version.
pytestmark = pytest.mark.processes

TASKS = str(Path(__file__).parents[2] / "support" / "number_tasks.py")
GAME = str(Path(TASKS).with_name("number_game.py"))
ROW = {"prompt": "What is 6 + 1?", "answer": 7, "system_prompt": "Be brief."}


class Player:
    """One environment on one event loop."""

    def __init__(self, taskset: str = f"{TASKS}:NumberTasks", **settings: Any) -> None:
        from spurline_agents.verifiers import VerifiersEnvironment

        self.tokenizer = tokenizer_with("chatml")
        config = VerifiersConfig(taskset=taskset, **settings)
        self.environment = VerifiersEnvironment(config, core_registry(), self.tokenizer, None)  # type: ignore[arg-type]

    def play(self, row: dict[str, Any], *texts: str, sample: int = 0) -> Coroutine[Any, Any, Trajectory]:
        task = make_task(row, sample=sample)
        policy = make_policy(ScriptedEngine(says(self.tokenizer, *texts)), task, max_new_tokens=256)
        return self.environment.run(task, policy)


def test_an_episode_gives_weighted_rewards_metrics_and_the_tokens_that_were_sampled() -> None:
    player = Player()

    async def several() -> list[Trajectory]:
        plays = (player.play(ROW, text, sample=sample) for sample, text in enumerate(["7", "seven", "8"]))
        return await asyncio.gather(*plays)

    found = in_loop(player.environment, several())
    assert [dict(each.rewards) for each in found] == [
        {"right": 2.0, "wordy": -0.0}, {"right": 0.0, "wordy": -0.5}, {"right": 0.0, "wordy": -0.0},
    ]  # fmt: skip
    [turn] = found[1].turns
    assert decode(player.tokenizer, turn.response_ids.tolist()) == f"seven{player.tokenizer.eos_token}"
    assert "Be brief." in found[1].info["prompt"]
    assert "What is 6 + 1?" in found[1].info["prompt"]
    assert found[1].info["metrics"] == {"tools/calls": 0, "turns/forked": 0, "verifiers/turns": 1.0}


@pytest.mark.parametrize("taskset", ["number_game", f"{GAME}:ShortTasks", "plain.py:ShortTasks"])
def test_an_environment_of_the_library_talks_over_several_turns_in_one_conversation(
    taskset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text(Path(GAME).read_text("utf-8").replace("__all__", "exported"), "utf-8")
    player = Player(taskset, env={"player": {"max_turns": 3}})
    found = in_loop(player.environment, player.play(ROW, "3", "9", "7"))
    assert [message["content"] for message in found.info["messages"][2:]] == ["3", "higher", "9", "lower", "7"]
    assert found.info["conversations"] == 1
    assert all(extends(before, after) for before, after in zip(found.turns, found.turns[1:], strict=False))
    assert found.rewards == {"right": 2.0, "wordy": -0.0}


def test_what_hangs_or_fails_costs_its_attempt() -> None:
    player = Player()

    async def failing() -> None:
        with pytest.raises(AttemptFailedError, match="98 is broken"):
            await player.play({**ROW, "answer": 98}, "7")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(player.play({**ROW, "answer": 99}, "7"), 0.5)
        blocking = asyncio.ensure_future(player.play({**ROW, "answer": 97}, "97"))
        await asyncio.sleep(0.3)
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - begun < 1.0, "the library blocks the run"
        assert (await blocking).rewards["right"] == 2.0
        with pytest.raises(DataError, match=r"rows.jsonl:1: the row is no task of .*: answer: Field required"):
            await player.play({"prompt": "What?"}, "7")

    in_loop(player.environment, failing())


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_slow_start_is_made_once_and_what_is_cancelled_is_waited_for(goes_on: bool) -> None:
    player, seen = Player(), list[str]()
    library: Any = player.environment._env
    serving = library.serving

    @asynccontextmanager
    async def slow_serving() -> AsyncIterator[None]:
        try:
            seen.append("start")
            await asyncio.sleep(1.0)
            async with serving():
                yield
        finally:
            await asyncio.sleep(0.2)
            seen.append("stop")

    async def hanging_episode(*given: Any, **named: Any) -> None:
        try:
            await asyncio.sleep(30.0)
        finally:
            await asyncio.sleep(0.2)
            seen.append("cleaned")

    async def tried() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(player.play(ROW, "7"), 0.3)
        if goes_on:
            assert (await player.play(ROW, "7")).rewards["right"] == 2.0
            library.run_episode = hanging_episode
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(player.play(ROW, "7"), 0.3)
            assert seen == ["start", "cleaned"]

    library.serving = slow_serving
    in_loop(player.environment, tried())
    assert seen == (["start", "cleaned", "stop"] if goes_on else ["start", "stop"])
    player.environment._thread.join(timeout=10.0)
    assert not player.environment._thread.is_alive()


def test_an_episode_without_a_turn_costs_its_attempt() -> None:
    player, trace = Player(), SimpleNamespace(agent=SimpleNamespace(trainable=True))

    async def silent_episode(*given: Any, **named: Any) -> Any:
        return SimpleNamespace(ok=True, traces=[trace])

    player.environment._env.run_episode = silent_episode
    with pytest.raises(AttemptFailedError, match="ended without an answer from the model"):
        in_loop(player.environment, player.play(ROW))


def test_the_dataset_has_the_tasks_that_the_environment_plays() -> None:
    from spurline_agents.verifiers import VerifiersRows

    settings = {"taskset": f"{TASKS}:NumberTasks", "arguments": {"count": 5}, "constants": {"environment": "sums"}}
    rows = VerifiersRows(VerifiersRowsConfig(**settings, skip=1, limit=2), core_registry())
    assert [rows[number]["prompt"] for number in range(len(rows))] == ["What is 1 + 1?", "What is 2 + 1?"]
    assert rows[0] == {
        "idx": 1, "prompt": "What is 1 + 1?", "system_prompt": "Be brief.", "answer": 2, "level": "easy",
        "environment": "sums",
    }  # fmt: skip
    assert rows.fingerprint() == VerifiersRows(VerifiersRowsConfig(**settings, skip=1, limit=2), None).fingerprint()  # type: ignore[arg-type]
    other = VerifiersRows(VerifiersRowsConfig(taskset=f"{TASKS}:AddingTasks"), None)  # type: ignore[arg-type]
    assert [row["prompt"] for row in map(other.__getitem__, range(len(other)))] == ["What is 2 + 3?"]
    player = Player()
    assert in_loop(player.environment, player.play(dict(rows[1]), "3")).rewards["right"] == 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arguments": {"count": "x"}}, r"arguments\.count is refused by verifiers: Input should be a valid integer"),
        ({"arguments": {"cuont": 3}}, r"arguments\.cuont is not a setting of verifiers\. Did you mean 'count'\?"),
        ({"env": {"agnt": {}}}, r"environment\.env\.agnt is not a setting of verifiers\. Did you mean 'agent'\?"),
        ({"env": {"agent": {"max_turn": 2}}}, r"env\.agent\.max_turn is not a setting .* Did you mean 'max_turns'\?"),
        ({"taskset": "no-such-tasks"}, r"no-such-tasks.*or be given as `file\.py:Class`"),
    ],
)
def test_settings_that_the_library_refuses_are_named_as_the_config_names_them(
    settings: dict[str, Any], message: str
) -> None:
    from spurline_agents.verifiers import VerifiersRows

    with pytest.raises(ConfigError, match=message):
        Player(**settings)
    if "env" not in settings:
        config = VerifiersRowsConfig(**{"taskset": f"{TASKS}:NumberTasks", **settings})
        with pytest.raises(ConfigError, match=message):
            len(VerifiersRows(config, None))  # type: ignore[arg-type]


def test_a_taskset_that_cannot_load_its_tasks_says_why() -> None:
    from spurline_agents.verifiers import VerifiersRows

    rows = VerifiersRows(VerifiersRowsConfig(taskset="harbor", arguments={"require_image": True}), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"taskset harbor is refused by verifiers: .*Harbor CLI"):
        len(rows)


def test_tools_of_a_taskset_are_called_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(TASKS).parent)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=":")
    monkeypatch.syspath_prepend(folder)
    player = Player("number_tasks:AddingTasks")
    calls = (
        f'<tool_call>{{"name": "{name}", "arguments": {{"a": 2, "b": 3}}}}</tool_call>' for name in ("sum", "adder_add")
    )
    found = in_loop(player.environment, player.play({"prompt": "What is 2 + 3?", "answer": 5}, *calls, "5"))
    roles = [message["role"] for message in found.info["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert found.info["messages"][2]["content"] == "error: there is no tool 'sum'. Tools: adder_add."
    assert found.info["messages"][4]["content"] == "5"
    assert found.rewards["right"] == 2.0
    assert all(extends(before, after) for before, after in zip(found.turns, found.turns[1:], strict=False))
