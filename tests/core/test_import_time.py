"""Validating a config stays light: no torch, no transformers, within a second or so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

HEAVY = ("torch", "transformers", "datasets", "ray", "vllm", "pandas", "plotly", "peft")
EXAMPLES = Path(__file__).parents[2] / "examples"

IMPORT = "import spurline; spurline.load_config; spurline.__version__"
LOAD = f"import spurline; spurline.load_config({str(EXAMPLES / 'sft_sort.yaml')!r}, ['steps=3'])"
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

ROWS = f"""
from pathlib import Path
from spurline.data.text_configs import HfDatasetConfig
from spurline.data.datasets.hf_dataset import HfDataset
rows = HfDataset(HfDatasetConfig(path={str(EXAMPLES / "data" / "sort_eval.jsonl")!r}))
assert rows[7]["messages"] and rows.fingerprint()
"""


@pytest.mark.parametrize(
    "code", [IMPORT, LOAD, FAIL, SCHEMA, LISTING, ROWS], ids=["import", "load", "fail", "schema", "list", "rows"]
)
def test_no_heavy_library_is_imported(code: str) -> None:
    report = f"\nimport sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
