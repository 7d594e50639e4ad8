"""The contracts of import-linter in pyproject.toml hold, and what must be light is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "numba", "peft", "ray", "vllm", "numpy")
LIGHT = sorted(
    ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    for source in (ROOT / "core/src", *ROOT.glob("plugins/*/src"))
    for path in source.rglob("*.py")
    if path.name == "plugin.py"
    or path.stem.endswith("configs")
    or {"config", "plugins"} & {*path.relative_to(source).parts[1:2]}
)
"""Modules that are imported to read a config: those of the config and the plugin host, `plugin.py` and `configs.py`."""


def test_arrows_between_and_within_packages_point_one_way() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout


def test_modules_that_a_config_is_made_of_import_no_heavy_library() -> None:
    # Not a contract of import-linter: for types they may name what they configure.
    assert {"spurline.config.run_config", "spurline_rl.plugin", "spurline_rl.losses.configs"} <= {*LIGHT}
    program = f"""
import importlib, sys
for name in {LIGHT!r}:
    importlib.import_module(name)
    for heavy in {HEAVY!r}:
        if heavy in sys.modules:
            sys.exit(f"{{name}} imports {{heavy}}")
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import spurline",
        "from spurline import load_config; load_config({'model': {'path': 'x'}, 'data': {'train': 'x'}, 'steps': 1})",
        "from spurline.cli import main; exits(lambda: main(['--help']))",
        "from spurline.cli import main; exits(lambda: main(['plan', 'examples/sft_sort.yaml', '--set', 'sead=1']))",
        "from spurline.cli import main; exits(lambda: main(['plugins']))",
        "from spurline.cli import main; exits(lambda: main(['schema']))",
        "from spurline.cli import main; exits(lambda: main(['simulate', '--help']))",
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
