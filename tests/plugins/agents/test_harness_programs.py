"""Programs as agents: which variables they get, how much they may print and take, and that nothing outlives them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from every_run import SOAK
from harness_programs import assert_gone
from harness_runs import attempt
from run_helpers import wait_for

from spurline.errors import ConfigError
from spurline_agents import supervisor
from spurline_agents.agents import Session
from spurline_agents.configs import HarnessConfig
from spurline_agents.variables import agent_variables
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.testing.environment_contract import ScriptedEngine

BASH = ("/bin/sh", "-c")


def unused(session: Session) -> float:
    raise AssertionError("the command is the agent")


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request: [])


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


def test_no_variable_that_is_passed_by_itself_has_the_name_of_a_secret() -> None:
    endings = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS")
    names = {f"{beginning}{ending}": "x" for beginning in ("", "LC_", "HF_", "XDG_", "PYTHON") for ending in endings}
    assert set(agent_variables((), names)) <= {f"LC_{ending}" for ending in endings}


def test_a_variable_to_pass_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match=r"source\.environment\.pass_env.*not set: NO_SUCH_KEY"):
        attempt(unused, engine(), command=("true",), pass_env=("PATH", "NO_SUCH_KEY"))


@pytest.mark.parametrize("settings", [{"pass_env": ("PATH",)}, {"memory_gb": 1.0}])
def test_what_is_for_programs_is_refused_for_functions(settings: dict[str, Any]) -> None:
    [problem] = HarnessConfig(agent="a:b", **settings).problems(None)  # type: ignore[arg-type]
    assert problem.key in settings


def test_a_value_in_the_config_is_refused() -> None:
    with pytest.raises(ValueError, match="pass_env"):
        HarnessConfig(command=("true",), pass_env=("KEY=value",))


@pytest.mark.processes
def test_a_program_that_misses_a_variable_is_told_where_to_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENWEATHER_KEY", "its-value")
    said = said_by(*BASH, "echo no OPENWEATHER_KEY, no OPENAI_API_KEY >&2; exit 3")
    assert said.endswith("not given OPENWEATHER_KEY; name what this one needs in environment.pass_env.")
    assert "its-value" not in said


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


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal of Linux")
def test_a_run_that_is_killed_leaves_nothing_of_its_programs(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    program = [sys.executable, "-I", "-S", "-c", LEAVES, str(file)]
    run = (
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-I', '-S', {supervisor.__file__!r}, str(os.getpid()), '0.1', '0', "
        f"*{program!r}], start_new_session=True)"
    )
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", run])
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
            run = (
                "import os, subprocess, sys\n"
                f"subprocess.run([sys.executable, '-I', '-S', {supervisor.__file__!r}, str(os.getpid()), '0.01', '0', "
                f"*{program!r}], start_new_session=True)"
            )
            process = subprocess.Popen([sys.executable, "-I", "-S", "-c", run], env=environment)
        # From before the program is there to when it has multiplied.
        time.sleep(draws.uniform(0, 0.2))
        process.send_signal(signal.SIGTERM if number % 2 else signal.SIGKILL)
        process.wait(60)
        wait_for(lambda value=value: not marked(value), "the end of all processes", 60)
