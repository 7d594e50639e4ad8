"""What every test shares: one CPU thread, no network, a cache of its own, and examples that are the same in every run.

`--reverse` runs the tests last to first: none may depend on another.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Once a process has used a cluster with a token, which is Ray's choice for one it starts, it can join none without.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Its workers cost more than they compile here.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["SPURLINE_CACHE"] = tempfile.mkdtemp(prefix="spurline-test-cache-")
atexit.register(shutil.rmtree, os.environ["SPURLINE_CACHE"], ignore_errors=True)

import pytest  # noqa: E402 - transformers reads the environment when a test imports it
from config_models import assemble_once  # noqa: E402
from every_run import SOAK  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.configuration import set_hypothesis_home_dir  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

from spurline import load_config  # noqa: E402
from spurline.config import loading  # noqa: E402
from spurline.errors import ConfigError  # noqa: E402

if TYPE_CHECKING:
    from config_files import Failing
    from fake_plugins import FakePlugins
    from longest_first import LongestFirst
    from warm_children import WarmChildren

if sys.version_info < (3, 12):
    # Under coverage a thread begins by setting its trace function, and Python 3.11 refuses that while another thread is
    # at it: the thread would never run.
    set_trace = sys.settrace

    def set_trace_in_turn(function: Any) -> None:
        while True:
            try:
                return set_trace(function)
            except RuntimeError:
                time.sleep(0)

    sys.settrace = set_trace_in_turn


# How fast examples are made says something about the machine, not about the test. Found failures are printed as a
# decorator to paste; a database of them would make the next run another one.
settings.register_profile(
    "spurline",
    deadline=None,
    print_blob=True,
    database=None,
    derandomize=not SOAK,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("spurline")
set_hypothesis_home_dir(os.environ["SPURLINE_CACHE"])
if not SOAK:
    # Otherwise examples would hold constants of the modules that earlier tests have imported.
    assert callable(providers._get_local_constants)
    providers._get_local_constants = lambda: providers._local_constants


loading.assemble = assemble_once


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reverse", action="store_true", help="run the tests in reverse order")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestFirst | None:
    # Where core's tests run alone, xdist is not installed.
    from longest_first import LongestFirst

    return LongestFirst(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--reverse"):
        items.reverse()


@pytest.fixture(scope="session")
def forked_children() -> Generator[WarmChildren, None, None]:
    # Tests of core alone come here too, where the packages that it and `warm_vllm` import are not installed.
    from warm_children import WarmChildren

    children = WarmChildren()
    yield children
    children.close()


@pytest.fixture(scope="module", autouse=True)
def warm_children(request: pytest.FixtureRequest, forked_children: WarmChildren) -> Generator[None, None, None]:
    """Engines and ranks need no imports, except in long runs and on GPUs, where they start as those of the product."""
    with pytest.MonkeyPatch.context() as patch:
        if not SOAK and "gpu" not in request.path.parts and find_spec("spurline_concurrency"):
            patch.setattr("spurline_concurrency.child.subprocess", forked_children)
        yield


@pytest.fixture(scope="module")
def warm_workers(forked_children: WarmChildren) -> Generator[None, None, None]:
    """Processes that `multiprocessing` spawns in this module need no imports, except in long runs."""
    with pytest.MonkeyPatch.context() as patch:
        if not SOAK:
            patch.setattr(util, "spawnv_passfds", forked_children.spawn)
        yield


@pytest.fixture(scope="module")
def warm_vllm() -> Generator[None, None, None]:
    """Engines of vLLM of this module need no imports, except in long runs."""
    from warm_vllm import warm_context

    with pytest.MonkeyPatch.context() as patch:
        if not SOAK:
            patch.setattr("vllm.v1.engine.utils.get_mp_context", warm_context)
        yield


@pytest.fixture
def plugins() -> Iterator[FakePlugins]:
    """Plugins that exist only in memory, gone after the test."""
    # Loads the default plugins.
    from fake_plugins import FakePlugins

    with FakePlugins() as fakes:
        yield fakes


STARTED: list[str] = []
"""Programs that the test under way has started."""


def note_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        program = str(arguments[1]) if arguments else event
        # What `platform` asks once in a process, whichever test comes first.
        if program != "['uname', '-p']":
            STARTED.append(program)


sys.addaudithook(note_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    STARTED.clear()
    outcome = yield
    # Tests of the contract kit are other people's too, who have no such marker.
    own = not getattr(item, "function", item).__module__.startswith("spurline.testing")
    # On a GPU, Triton starts compilers.
    may_start = any(item.get_closest_marker(name) for name in ("processes", "slow", "gpu"))
    if STARTED and own and not may_start:
        pytest.fail(f"The test has no marker `processes`, but started {STARTED[0]}")
    return outcome


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Lines of the error that loading this text gives, the file being called run.yaml."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, *overrides: str, name: str = "run.yaml") -> list[str]:
        Path(name).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config(name, overrides)
        return str(caught.value).splitlines()

    return load


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the config, beside the one that commands are run in, which is `work`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    for name in ("configs", "work", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("test_paths_"):
            del sys.modules[name]
