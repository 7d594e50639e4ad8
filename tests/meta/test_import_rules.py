"""The layers hold, and what must be light is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "ray", "vllm", "numpy")


def test_layers_hold() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import spurline",
        "from spurline import load_config; load_config({'model': {'path': 'x'}, 'data': {'train': 'x'}, 'steps': 1})",
        "from spurline.cli import main; exits(lambda: main(['--help']))",
        "from spurline.cli import main; exits(lambda: main(['plan', 'examples/sft_sort.yaml', '--set', 'sead=1']))",
        "from spurline.cli import main; exits(lambda: main(['plugins']))",
    ],
)
def test_answers_that_need_no_model_import_no_heavy_library(code: str) -> None:
    program = f"""
import sys
def exits(call):
    try: call()
    except SystemExit: pass
{code}
print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("HEAVY []"), result.stdout[-300:]
