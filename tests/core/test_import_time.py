"""Validating a config stays light: no torch, no transformers, within a second or so."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

HEAVY = ("torch", "transformers", "datasets", "ray", "vllm", "pandas", "plotly", "peft")

IMPORT = "import spurline; spurline.load_config; spurline.__version__"
FAIL = """
import spurline
from spurline.errors import ConfigError
try:
    spurline.load_config({"modl": {}, "collator": "pakced"})
except ConfigError as error:
    assert "packed" in str(error)
else:
    raise AssertionError("no error")
"""
SCHEMA = """
from spurline.config.loading import config_model
from spurline.plugins.host import PluginHost
config_model(PluginHost.load([])).model_json_schema()
"""
LISTING = (
    "from spurline.plugins.host import installed_commands, installed_plugins; installed_plugins(); installed_commands()"
)


@pytest.mark.parametrize("code", [IMPORT, FAIL, SCHEMA, LISTING], ids=["import", "fail", "schema", "list"])
def test_no_heavy_library_is_imported(code: str) -> None:
    report = f"\nimport sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
