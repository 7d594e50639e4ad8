"""Environment `openenv` with the library's own server in another process, and with its example server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_attempts import core_registry, in_loop, make_policy, make_task, says

from spurline.errors import PluginError
from spurline_environments.configs import OpenEnvConfig
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory, trajectory_return
from spurline_text.testing.inputs import tiny_tokenizer

openenv = pytest.importorskip("openenv")
pytest.importorskip("fastmcp")
pytestmark = pytest.mark.processes

SERVER = Path(__file__).parents[2] / "support" / "openenv_number_server.py"
LIMIT_S = 60.0


class Server:
    """A process with a server on a free port of the loopback interface."""

    def __init__(self, command: list[str], folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command, self._folder = command, folder
        self.start()

    def start(self) -> None:
        command = [word.replace("PORT", str(self.port)) for word in self._command]
        self.process = subprocess.Popen([sys.executable, *command], cwd=self._folder)
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server([str(SERVER), "PORT", "2"], tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


class RestartingEngine(ScriptedEngine):
    """An engine during whose second turn the server starts again."""

    restart: Any

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate(request)
        if request.name.endswith("turn 1"):
            await asyncio.to_thread(self.restart)
        return result


class Player:
    """One environment on one event loop."""

    def __init__(self, url: str, **settings: Any) -> None:
        from spurline_environments.openenv import OpenEnvEnvironment

        self.tokenizer = tiny_tokenizer()
        config = OpenEnvConfig(
            **{"url": url, "sessions": 2, "step_timeout_s": 10.0, "connect_timeout_s": 0.0, **settings}
        )
        self.environment = OpenEnvEnvironment(config, core_registry(), self.tokenizer, None)  # type: ignore[arg-type]

    def play(self, row: dict[str, Any], *texts: str) -> Coroutine[Any, Any, Trajectory]:
        task = make_task(row)
        return self.environment.run(task, make_policy(ScriptedEngine(says(self.tokenizer, *texts)), task))


def test_texts_become_the_only_field_of_the_action_and_rewards_are_those_of_turns(server: Server) -> None:
    player = Player(server.url)
    found = in_loop(
        player.environment, player.play({"prompt": "A game.", "seed": 3, "number": 7}, "3", '{"guess": 4}', "x", "7")
    )
    assert [float(turn.rewards[-1]) for turn in found.turns] == [-0.25, -0.25, 0.0, 1.0]
    assert trajectory_return(found) == 0.5
    contents = [message["content"] for message in found.info["messages"]]
    assert contents[0] == "A game.\n\nGuess. 3"
    assert contents[2::2] == ["no", "no", "error: invalid literal for int() with base 10: 'x'", "yes"]
    assert found.info["ended"] == "done"
    assert found.info["metrics"]["episode/invalid_actions"] == 1
    to_action: Any = player.environment.to_action
    with pytest.raises(ValueError, match="invalid literal"):
        to_action("[" * 3000)


def test_sessions_are_kept_and_no_more_are_open_than_allowed(server: Server) -> None:
    player = Player(server.url)

    async def many() -> None:
        found = await asyncio.gather(*(player.play({"number": number % 10}, str(number % 10)) for number in range(12)))
        assert [trajectory_return(each) for each in found] == [1.0] * 12
        # The server refuses a third session.
        assert len(player.environment._idle) == 2

    in_loop(player.environment, many())


def test_a_slow_step_and_an_error_of_the_server_cost_their_attempts_and_the_session(server: Server) -> None:
    player = Player(server.url, step_timeout_s=0.5, connect_timeout_s=10.0)

    async def failing() -> None:
        with pytest.raises(AttemptFailedError, match=r"did not answer within 0.5 s \(environment.step_timeout_s\)"):
            await player.play({"number": 7}, "99")
        player.environment.to_text, usual = lambda found: time.sleep(2.0), player.environment.to_text
        with pytest.raises(AttemptFailedError, match=r"`observation` did not return within 0.5 s"):
            await player.play({"number": 7}, "1")
        player.environment.to_text = usual
        with pytest.raises(AttemptFailedError, match="98 is broken"):
            await player.play({"number": 7}, "98")
        assert player.environment._idle == []
        found = await asyncio.gather(*(player.play({"number": 7}, "7") for _ in range(4)))
        assert [trajectory_return(each) for each in found] == [1.0] * 4

    in_loop(player.environment, failing())


def test_a_server_that_dies_costs_the_running_attempts_and_is_awaited_when_it_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server([str(SERVER), "PORT", "2"], tmp_path)
    player = Player(server.url, connect_timeout_s=20.0)

    async def dying() -> None:
        await player.play({"number": 7}, "7")
        engine, task = RestartingEngine(says(player.tokenizer, "1", "7")), make_task({"number": 7})
        engine.restart = lambda: (server.kill(), server.start())
        with pytest.raises(AttemptFailedError, match="lost in the middle of an episode"):
            await player.environment.run(task, make_policy(engine, task))
        server.kill()
        waiting = asyncio.ensure_future(player.play({"number": 7}, "7"))
        await asyncio.sleep(1.0)
        server.start()
        assert trajectory_return(await waiting) == 1.0
        server.kill()
        player.environment.config = player.environment.config.model_copy(update={"connect_timeout_s": 1.0})
        begin = time.monotonic()
        for _ in range(8):
            with pytest.raises(AttemptFailedError, match="no session with"):
                await player.play({}, "7")
        assert time.monotonic() - begin < 7.0, "each attempt waited on its own for a server that is gone"

    try:
        in_loop(player.environment, dying())
        server.kill()
        player = Player(server.url)
        with pytest.raises(PluginError, match=r"no session with .*Check that the server runs and allows 2"):
            in_loop(player.environment, player.play({}, "1"))
        assert capsys.readouterr().err.count("Does the server run?") == 1
    finally:
        server.kill()


def test_the_example_server_of_the_library_plays(tmp_path: Path) -> None:
    shown = Path(openenv.__file__).parent / "cli" / "templates" / "openenv_env"
    folder = tmp_path / "echo"
    shutil.copytree(shown, folder)
    for file in [*folder.rglob("*.py")]:
        text = file.read_text("utf-8")
        for name, value in {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo"}.items():
            text = text.replace(name, value)
        file.with_name(file.name.replace("__ENV_NAME__", "echo")).write_text(text, "utf-8")
    server = Server(["-m", "uvicorn", "echo.server.app:app", "--port", "PORT", "--log-level", "warning"], tmp_path)
    try:
        player = Player(server.url, max_turns=2, sessions=1, action="message", observation="echoed_message")
        found = in_loop(player.environment, player.play({"prompt": "Say something."}, "abc", "abcdefgh"))
        assert [message["content"] for message in found.info["messages"]] == [
            "Say something.\n\nEcho environment ready!", "abc", "abc", "abcdefgh", "abcdefgh",
        ]  # fmt: skip
        assert trajectory_return(found) == pytest.approx(1.1)
    finally:
        server.kill()
