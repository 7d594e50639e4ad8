"""Validating a config and reading rows stay light with all plugins: no torch, no transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

HEAVY = ("torch", "transformers", "datasets", "ray", "vllm", "pandas", "plotly", "peft")
EXAMPLES = Path(__file__).parents[2] / "examples"
LOAD = f"import spurline; spurline.load_config({str(EXAMPLES / 'sft_sort.yaml')!r}, ['steps=3'])"

SCHEMA = """
from spurline.config.loading import config_model
from spurline.plugins.host import PluginHost
config_model(PluginHost.load([])).model_json_schema()
"""

ROWS = f"""
from pathlib import Path
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.hf_dataset import HfDataset
rows = HfDataset(HfDatasetConfig(path={str(EXAMPLES / "data" / "sort_eval.jsonl")!r}))
assert rows[7]["messages"] and rows.fingerprint()
"""


@pytest.mark.parametrize("code", [LOAD, SCHEMA, ROWS], ids=["load", "schema", "rows"])
def test_no_heavy_library_is_imported(code: str) -> None:
    report = f"\nimport sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
