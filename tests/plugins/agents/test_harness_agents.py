"""Functions and programs as agents: what they get and return, and that nothing outlives a program."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from every_run import SOAK
from harness_requests import QUESTION, TOKENIZER
from harness_runs import Harness, attempt, client
from living_processes import is_alive
from rl_attempts import core_registry, encode
from run_helpers import wait_for

from spurline.errors import ConfigError, PluginError
from spurline_agents import supervisor
from spurline_agents.agents import Session, agent_variables
from spurline_agents.configs import HarnessConfig
from spurline_agents.environment import HarnessEnvironment
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.rewards.configs import ExactMatchConfig
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory

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


BASH = ("/bin/sh", "-c")


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
    [(2, {"reward": 2.0}), (True, {"reward": 1.0}), ({"right": 1, "short": -0.5}, {"right": 1.0, "short": -0.5})],
)
def test_a_number_or_numbers_by_name_are_the_rewards(value: Any, terms: dict[str, float]) -> None:
    assert attempt(returning(value), engine()).rewards == terms


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "return statement"),
        ("good", "'reward' returned 'good'"),
        (float("nan"), "finite"),
        (10**400, "finite"),
        ({}, "no reward"),
        ({"right": None}, "'right' returned None"),
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
    with pytest.raises(AttemptFailedError, match=r"without an answer from the model.*base_url"):
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


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "agent"),
        ({"agent": "a:b", "command": ("x",)}, "agent"),
        ({"agent": "a:b", "host": "0.0.0.0"}, "public_url"),
        ({"agent": "a:b", "pass_env": ("PATH",)}, "pass_env"),
        ({"agent": "a:b", "memory_gb": 1.0}, "memory_gb"),
    ],
)
def test_settings_that_mean_nothing_are_named(settings: dict[str, Any], key: str) -> None:
    [problem] = HarnessConfig(**settings).problems(None)  # type: ignore[arg-type]
    assert problem.key == key


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
    assert len({session.api_key for session in seen}) == 3


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
        except openai.AuthenticationError as error:
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


def assert_gone(pids: Iterable[int]) -> None:
    for pid in pids:
        wait_for(lambda pid=pid: not is_alive(pid), f"the end of process {pid}", 30)


@pytest.mark.processes
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_all_that_a_program_has_started_ends_with_it_and_with_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr("spurline_agents.agents.TERM_TIMEOUT_S", 0.2)
    (tmp_path / "agent.py").write_text(PROGRAM + STUBBORN + ("time.sleep(600)" if is_cancelled else 'print("1.0")'))
    file = tmp_path / "pids"

    async def run() -> None:
        async with Harness(unused, engine(), command=(sys.executable, str(tmp_path / "agent.py"))) as harness:
            running = asyncio.ensure_future(harness.attempt({"file": str(file)}))
            await asyncio.to_thread(wait_for, file.exists, "the program's start")
            if is_cancelled:
                running.cancel()
            await asyncio.wait([running], timeout=60)
            assert running.cancelled() or "without an answer" in str(running.exception())

    asyncio.run(run())
    assert_gone(json.loads(file.read_text()))


def said_by(*command: str, **settings: Any) -> str:
    """How the attempt of a program that fails is said to have failed."""
    with pytest.raises(AttemptFailedError) as raised:
        attempt(unused, engine(), command=command, **settings)
    return str(raised.value)


@pytest.mark.processes
def test_a_program_gets_harmless_variables_and_those_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "OPENAI_ORG_ID")
    for name in (*secrets, "OPENWEATHER_KEY", "LC_TIME", "LANG", "HTTP_PROXY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:password@proxy:80")
    monkeypatch.setenv("all_proxy", "me:password@proxy:80")
    file = tmp_path / "variables"
    said_by(*BASH, f"env > {file}; exit 1", pass_env=("OPENWEATHER_KEY",))
    given = dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line)
    assert not given.keys() & {*secrets, "HTTPS_PROXY", "all_proxy"}
    assert given.keys() >= {"PATH", "LC_TIME", "LANG", "HTTP_PROXY", "OPENWEATHER_KEY"}
    assert given["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")


def test_no_variable_that_is_passed_by_default_has_the_name_of_a_secret() -> None:
    endings = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS")
    names = {f"{beginning}{ending}": "x" for beginning in ("", "LC_", "HF_", "XDG_", "PYTHON") for ending in endings}
    assert set(agent_variables((), names)) <= {f"LC_{ending}" for ending in endings}


def test_a_variable_to_pass_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match=r"source\.environment\.pass_env.*not set: NO_SUCH_KEY"):
        attempt(unused, engine(), command=("true",), pass_env=("PATH", "NO_SUCH_KEY"))


def test_a_value_in_the_config_is_refused() -> None:
    with pytest.raises(ValueError, match="pass_env"):
        HarnessConfig(command=("true",), pass_env=("KEY=value",))


@pytest.mark.processes
def test_a_program_that_cannot_be_executed_says_why(tmp_path: Path) -> None:
    file = tmp_path / "agent"
    file.write_text("no program\n")
    file.chmod(0o755)
    assert "exit code 127. " + f"{file} cannot be run: [Errno 8]" in said_by(str(file))


@pytest.mark.processes
def test_each_process_of_a_program_may_take_so_much_memory() -> None:
    code = "import sys\ntry: bytearray(2**30)\nexcept MemoryError: sys.exit(5)"
    assert "exit code 5" in said_by(sys.executable, "-I", "-S", "-c", code, memory_gb=0.5)


def supervised(*command: str, grace_s: float = 5.0, **settings: Any) -> subprocess.Popen[bytes]:
    arguments = (supervisor.__file__, str(os.getpid()), str(grace_s), "0", *command)
    return subprocess.Popen([sys.executable, "-I", "-S", *arguments], start_new_session=True, **settings)


@pytest.mark.processes
def test_of_what_a_program_prints_only_the_end_is_kept(tmp_path: Path) -> None:
    code = (
        "import os\nfor _ in range(64): os.write(1, b'x' * 2**20)\nos.write(1, b'\\n0.5\\n'); os.write(2, b'y' * 10**6)"
    )
    printed, complaints = tmp_path / "out", tmp_path / "err"
    with printed.open("wb") as out, complaints.open("wb") as err:
        assert supervised(sys.executable, "-I", "-S", "-c", code, stdout=out, stderr=err).wait(60) == 0
    assert printed.stat().st_size == supervisor.STDOUT_KEPT
    assert printed.read_bytes().endswith(b"x\n0.5\n")
    assert complaints.stat().st_size == supervisor.STDERR_KEPT


@pytest.mark.processes
def test_a_program_that_is_asked_to_end_has_time_for_it(tmp_path: Path) -> None:
    file = tmp_path / "begun"
    process = supervised(*BASH, f"trap 'sleep 0.2; exit 7' TERM; echo > {file}; while :; do sleep 0.02; done")
    wait_for(file.exists, "the program's start")
    process.terminate()
    assert process.wait(30) == 7


BOMB = """
import os, sys, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def multiply(levels):
    os.write(file, b"%d\\n" % os.getpid())
    for _ in range(2 if levels else 0):
        if os.fork() == 0:
            os.setsid()
            multiply(levels - 1)
    # Half of them leave their children without a parent.
    if levels % 2 == 0:
        time.sleep(600)
    os._exit(0)
multiply(6)
"""


@pytest.mark.processes
def test_processes_that_multiply_are_ended_to_the_last(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    process = supervised(sys.executable, "-I", "-S", "-c", BOMB, str(file), grace_s=0.1)
    wait_for(lambda: file.exists() and file.read_text().count("\n") > 30, "the processes")
    process.terminate()
    process.wait(60)
    assert_gone(map(int, file.read_text().split()))


LEAVES = """
import json, os, subprocess, sys, time
sleeps = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleeps, start_new_session=True) for _ in range(2)]
if os.fork() == 0:
    # Its child has no parent any more when the supervisor dies.
    children.append(subprocess.Popen(sleeps, start_new_session=True))
    open(sys.argv[1] + "~", "w").write(json.dumps([os.getppid(), *(child.pid for child in children)]))
    os.rename(sys.argv[1] + "~", sys.argv[1])
    os._exit(0)
os.wait()
if len(sys.argv) > 2:
    os.kill(os.getppid(), 9)
time.sleep(600)
"""


def run_of(*program: str, **settings: Any) -> subprocess.Popen[bytes]:
    """A process that stands for a run, with a supervisor of this program."""
    code = (
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-I', '-S', {supervisor.__file__!r}, str(os.getpid()), '0.01', '0', "
        f"*{program!r}], start_new_session=True)"
    )
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], **settings)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal of Linux")
def test_a_run_that_is_killed_leaves_nothing_of_its_programs(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    process = run_of(sys.executable, "-I", "-S", "-c", LEAVES, str(file))
    wait_for(file.exists, "the program's start")
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert_gone(json.loads(file.read_text()))


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_what_a_killed_supervisor_leaves_is_found_and_ended(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    said = said_by(sys.executable, "-I", "-S", "-c", LEAVES, str(file), "kill")
    assert "ended with its supervisor, which was killed by SIGKILL" in said
    assert_gone(json.loads(file.read_text()))


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal of Linux")
def test_a_program_ends_with_its_supervisor(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    process = supervised(*BASH, f"echo $$ > {file}~; mv {file}~ {file}; exec sleep 600")
    wait_for(file.exists, "the program's start")
    process.kill()
    process.wait(30)
    assert_gone([int(file.read_text())])


def marked(value: str) -> list[int]:
    """Processes that have this value in their environment."""
    found: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OPENAI_BASE_URL") == value:
                found.append(process.pid)
    return found


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only there descendants are found")
def test_whenever_a_program_is_told_to_end_or_its_run_dies_nothing_is_left(tmp_path: Path) -> None:
    draws = random.Random(0)
    for number in range(300 if SOAK else 4):
        value = f"http://{tmp_path.name}/{number}"
        environment = {**os.environ, "OPENAI_BASE_URL": value}
        program = [sys.executable, "-I", "-S", "-c", BOMB, str(tmp_path / "pids")]
        if number % 2:
            process = supervised(*program, grace_s=0.01, env=environment)
        else:
            process = run_of(*program, env=environment)
        # From before the program is there to when it has multiplied.
        time.sleep(draws.uniform(0, 0.2))
        process.send_signal(signal.SIGTERM if number % 2 else signal.SIGKILL)
        process.wait(60)
        wait_for(lambda value=value: not marked(value), "the end of all processes", 60)
