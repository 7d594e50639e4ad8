"""Agents of every kind: functions that block or await, programs, what they return, and how they end."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from harness_programs import assert_gone
from harness_runs import Harness, attempt, client
from rl_attempts import core_registry, encode
from run_helpers import wait_for

from spurline.errors import PluginError
from spurline_agents.agents import Session
from spurline_agents.configs import HarnessConfig
from spurline_agents.environment import HarnessEnvironment
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.rewards.configs import ExactMatchConfig
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory
from spurline_text.testing.inputs import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
QUESTION: Any = [{"role": "user", "content": "hello"}]

PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
task = json.load(sys.stdin)
def ask():
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": task["messages"]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request: [*encode(TOKENIZER, "1 2 3"), TOKENIZER.eos_token_id])


def unused(session: Session) -> float:
    raise AssertionError("the command is the agent")


def program(tmp_path: Path, code: str, **settings: Any) -> Trajectory:
    """An attempt whose agent is this program, after a beginning that reads the task and can `ask()`."""
    (tmp_path / "agent.py").write_text(PROGRAM + code)
    return attempt(unused, engine(), command=(sys.executable, str(tmp_path / "agent.py")), **settings)


def returning(value: Any) -> Any:
    """An agent that asks once and returns this."""

    def agent(session: Session) -> Any:
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as api:
            api.chat.completions.create(model="policy", messages=QUESTION)
        return value

    return agent


@pytest.mark.parametrize(
    ("value", "terms"),
    [
        (2, {"reward": 2.0}),
        (True, {"reward": 1.0}),
        ({"right": 1, "short": -0.5}, {"right": 1.0, "short": -0.5}),
    ],
)
def test_a_number_or_numbers_by_name_are_the_rewards(value: Any, terms: dict[str, float]) -> None:
    assert attempt(returning(value), engine()).rewards == terms


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "return statement"),
        ("good", "'good' as 'reward'"),
        (float("nan"), "finite"),
        (10**400, "finite"),
        ({}, "no reward"),
        ({"right": None}, "None as 'right'"),
    ],
)
def test_anything_else_fails_the_attempt(value: Any, message: str) -> None:
    with pytest.raises(AttemptFailedError, match=message):
        attempt(returning(value), engine())


@pytest.mark.parametrize(("value", "right"), [(None, 1.0), ("1 2 3", 1.0), ("3 2 1", 0.0)])
def test_with_rewards_of_the_config_the_agent_returns_its_answer(value: Any, right: float) -> None:
    trajectory = attempt(returning(value), engine(), rewards={"right": ExactMatchConfig()})
    assert trajectory.rewards == {"right": right}
    assert trajectory.info["response"] == (value or "1 2 3")
    assert trajectory.info["reference"] == "1 2 3"


def test_a_number_where_rewards_are_configured_is_refused() -> None:
    with pytest.raises(AttemptFailedError, match="or remove `rewards`"):
        attempt(returning(1.0), engine(), rewards={"right": ExactMatchConfig()})


def test_an_agent_that_never_asks_has_nothing_to_train_on() -> None:
    with pytest.raises(AttemptFailedError, match=r"without an answer of the model.*base_url"):
        attempt(lambda session: 1.0, engine())


@pytest.mark.parametrize("blocks", [True, False])
def test_what_an_agent_raises_is_what_the_attempt_raises(blocks: bool) -> None:
    def plain(session: Session) -> float:
        raise KeyError("lost")

    async def awaiting(session: Session) -> float:
        return plain(session)

    with pytest.raises(KeyError, match="lost"):
        attempt(plain if blocks else awaiting, engine())


def make(settings: dict[str, Any]) -> HarnessEnvironment:
    return HarnessEnvironment(HarnessConfig(**settings), core_registry(), TOKENIZER, None)  # type: ignore[arg-type]


def test_an_agent_that_cannot_be_imported_is_named_before_any_attempt() -> None:
    with pytest.raises(PluginError, match=r"environment's agent cannot be imported from 'no_such_module:solve'"):
        make({"agent": "no_such_module:solve"})
    with pytest.raises(PluginError, match="names the program 'no-such-program'"):
        make({"command": ("no-such-program",)})


@pytest.mark.parametrize("settings", [{}, {"agent": "a:b", "command": ("x",)}])
def test_exactly_one_of_agent_and_command_is_needed(settings: dict[str, Any]) -> None:
    [problem] = HarnessConfig(**settings).problems(None)  # type: ignore[arg-type]
    assert problem.key == "agent"
    assert "given" in problem.message


def test_an_address_that_no_agent_can_connect_to_needs_a_public_url() -> None:
    [problem] = HarnessConfig(agent="a:b", host="0.0.0.0").problems(None)  # type: ignore[arg-type]
    assert problem.key == "public_url"


def test_the_session_tells_what_is_asked() -> None:
    seen: list[Session] = []

    async def agent(session: Session) -> float:
        seen.append(session)
        async with client(session) as api:
            await api.completions.create(model=session.model, prompt="x")
        return 1.0

    async def run() -> None:
        async with Harness(agent, engine()) as harness:
            await harness.attempt(sample=3)
            await harness.attempt({"prompt": "2+2=", "reference": 4})
            await harness.attempt({"number": 7})

    asyncio.run(run())
    chat, text, other = seen
    assert chat.messages == [{"role": "user", "content": "Sort: 3 1 2"}]
    assert (chat.prompt, chat.reference, chat.sample, chat.uid) == (None, "1 2 3", 3, "train:0@0")
    assert (text.messages, text.prompt, text.reference) == ((), "2+2=", "4")
    assert (other.messages, other.prompt, other.reference, other.row) == ((), None, None, {"number": 7})
    assert len({session.base_url for session in seen}) == 3


def test_an_agent_left_behind_on_its_thread_finds_no_session() -> None:
    begun, go = threading.Event(), threading.Event()
    raised: list[BaseException] = []
    ended = threading.Event()

    def agent(session: Session) -> float:
        begun.set()
        go.wait(60)
        try:
            with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as api:
                api.chat.completions.create(model="policy", messages=QUESTION)
        except openai.NotFoundError as error:
            raised.append(error)
        ended.set()
        return 1.0

    made = engine()

    async def run() -> None:
        async with Harness(agent, made) as harness:
            running = asyncio.ensure_future(harness.attempt())
            assert await asyncio.to_thread(begun.wait, 60)
            running.cancel()
            await asyncio.wait([running], timeout=60)
            assert running.cancelled()
            go.set()
            assert await asyncio.to_thread(ended.wait, 60)

    asyncio.run(run())
    assert len(raised) == 1
    assert made.requests == []


@pytest.mark.processes
def test_a_program_is_told_its_task_and_prints_its_rewards_last(tmp_path: Path) -> None:
    code = """
print("thinking")
print(json.dumps({"right": float(ask() == task["reference"]), "sample": task["sample"]}))
print()
"""
    trajectory = program(tmp_path, code)
    assert trajectory.rewards == {"right": 1.0, "sample": 0.0}
    assert len(trajectory.turns) == 1


@pytest.mark.processes
def test_a_program_may_leave_its_task_unread(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "print('{}')")
    with pytest.raises(AttemptFailedError, match="without an answer"):
        attempt(unused, engine(), command=command)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('no luck')", r"exit code 1\. no luck"),
        ("ask(); print('done')", "not JSON.*'done'"),
        ("ask()", "return statement"),
        ("print('x' * 3_000_000, file=sys.stderr); os.kill(os.getpid(), 9)", r"exit code 137 \(SIGKILL\)\. x+$"),
    ],
)
def test_a_program_that_fails_fails_its_attempt(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(AttemptFailedError, match=message):
        program(tmp_path, code)


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleeps), subprocess.Popen(sleeps, start_new_session=True)]
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writer, b"%d" % os.getpid())
        time.sleep(600)
    os._exit(0)
pids = [os.getpid(), *(child.pid for child in children), int(os.read(reader, 20))]
open(task["row"]["file"] + "~", "w").write(json.dumps(pids))
os.rename(task["row"]["file"] + "~", task["row"]["file"])
"""
"""Leaves behind a child, one in a session of its own, and a daemon without parent; none heeds SIGTERM."""


@pytest.mark.processes
def test_a_cancelled_program_ends_with_all_that_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spurline_agents.agents.TERM_TIMEOUT_S", 0.2)
    (tmp_path / "agent.py").write_text(PROGRAM + STUBBORN + "time.sleep(600)")
    file = tmp_path / "pids"

    async def run() -> None:
        async with Harness(unused, engine(), command=(sys.executable, str(tmp_path / "agent.py"))) as harness:
            running = asyncio.ensure_future(harness.attempt({"file": str(file)}))
            await asyncio.to_thread(wait_for, file.exists, "the program's start")
            running.cancel()
            await asyncio.wait([running], timeout=60)
            assert running.cancelled()

    asyncio.run(run())
    assert_gone(json.loads(file.read_text()))


@pytest.mark.processes
def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    (tmp_path / "agent.py").write_text(PROGRAM + STUBBORN + 'print("1.0")')

    async def run() -> None:
        async with Harness(unused, engine(), command=(sys.executable, str(tmp_path / "agent.py"))) as harness:
            with pytest.raises(AttemptFailedError, match="without an answer"):
                await harness.attempt({"file": str(file)})

    asyncio.run(run())
    assert_gone(json.loads(file.read_text()))
