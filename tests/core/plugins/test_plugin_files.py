"""Plugins in a file that the config names."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from spurline import load_config
from spurline.config.loading import LoadedConfig
from spurline.errors import PluginError
from spurline.plugins.host import PluginHost

CODE = """
from spurline.plugins import API_VERSION, Plugin, hookimpl
from spurline.protocols.prefetch import PrefetchConfig
from beside import NAME

class MineConfig(PrefetchConfig):
    name: str = NAME

class Mine:
    pass

@hookimpl
def register_components(registry):
    registry.add(MineConfig, f"{__name__}:Mine")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with a config, which lists a plugin in a file beside it."""
    (tmp_path / "my_plugin.py").write_text(CODE)
    (tmp_path / "beside.py").write_text("NAME = 'slow'")
    (tmp_path / "run.yaml").write_text(
        "plugins: [./my_plugin.py]\nmodel: {path: m}\ndata: {train: rows.jsonl}\nsteps: 3\nprefetch: slow\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_plugin", "beside", "colorsys"):
        sys.modules.pop(name, None)


def load(folder: Path) -> LoadedConfig:
    return load_config(folder / "run.yaml")


def test_a_file_beside_the_config_is_a_plugin_whose_version_is_its_content(bare: None, folder: Path) -> None:
    loaded = load(folder)
    assert loaded.config.plugins == (str(folder / "my_plugin.py"),)
    assert loaded.host.registry.factory("prefetch", loaded.config.prefetch).__name__ == "Mine"
    version = loaded.host.versions()["my_plugin.py"]
    assert load(folder).host.plugins["my_plugin"].module is loaded.host.plugins["my_plugin"].module
    (folder / "my_plugin.py").write_text(CODE.replace("class Mine:", "class Mine:\n    new = True"))
    changed = load(folder)
    assert changed.host.versions()["my_plugin.py"] != version
    assert changed.host.registry.factory("prefetch", changed.config.prefetch).new


@pytest.mark.processes
def test_another_process_loads_the_file_again_and_reads_its_pickles(bare: None, folder: Path) -> None:
    config = load(folder).config
    code = (
        "import pickle, sys; pickle.loads(sys.stdin.buffer.read())\n"
        "from spurline.plugins.host import PluginHost\n"
        f"host = PluginHost.load({list(config.plugins)!r})\n"
        "print(host.registry.get('prefetch', 'slow').config().name)"
    )
    mine = load(folder).host.registry.factory("prefetch", config.prefetch)()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(mine), env=environment, capture_output=True)
    assert run.stdout.decode().strip() == "slow", run.stderr.decode()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("PLUGIN = Plugin('other', api=0)\n", r"written for plugin interface 0, .*\nChanged since interface 0:\n- "),
        ("1 / 0\n", r"ZeroDivisionError: division by zero \(\S*my_plugin\.py, line 15\)"),
        ("import no_such_module\n", r"No module named 'no_such_module' \(\S*my_plugin\.py, line 15\)"),
        ("1 +\n", r"SyntaxError: invalid syntax \(my_plugin\.py, line 15\)(?! \()"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(bare: None, folder: Path, change: str, told: str) -> None:
    (folder / "my_plugin.py").write_text(CODE + change)
    with pytest.raises(PluginError, match=rf"(?s)run\.yaml:1: plugins: .*{told}"):
        load(folder)


def test_files_that_are_missing_or_share_a_name_are_refused(
    bare: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = folder / "my_plugin.py"
    (folder / "colorsys.py").write_text(CODE)
    (folder / "more").mkdir()
    (folder / "more/other.py").write_text(f"{CODE}\nPLUGIN = Plugin('my_plugin', api=API_VERSION)")
    # The installed module has not been imported.
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    installed = find_spec("colorsys")
    assert installed is not None
    for names, told in (
        ([f"{folder}/my_plugins.py"], "cannot be read: No such file or directory. Did you mean 'my_plugin.py'?"),
        ([f"{folder}/colorsys.py"], f"has the name of the module {installed.origin}. Rename the file."),
        ([f"{mine}", f"{folder}/more/other.py"], f"Two plugins are named 'my_plugin': {mine} and {folder}/more/"),
    ):
        with pytest.raises(PluginError, match=re.escape(told)):
            PluginHost.load(names)
