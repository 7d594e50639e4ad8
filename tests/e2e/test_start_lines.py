"""A start is light: configs and rows are read without torch, and the first lines are out before it is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Config, WriteConfig, train

from spurline import progress
from spurline.cli import main

HEAVY = ("torch", "transformers", "datasets", "ray", "vllm", "pandas", "plotly", "peft")
EXAMPLES = Path(__file__).parents[2] / "examples"
WITHOUT_HEAVY = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY!r}))
from spurline.cli import main
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.hf_dataset import HfDataset

rows = HfDataset(HfDatasetConfig(path={str(EXAMPLES / "data" / "sort_eval.jsonl")!r}))
assert rows[7]["messages"] and rows.fingerprint()
main(sys.argv[1:])
"""


@pytest.mark.processes
def test_a_config_rows_and_the_banner_need_no_heavy_library(write_config: WriteConfig, base_config: Config) -> None:
    command = [sys.executable, "-c", WITHOUT_HEAVY, "train", str(write_config(base_config))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    before, _, after = result.stderr.partition("loading PyTorch")
    for expected in ("spurline ", base_config["run_dir"], base_config["model"]["path"], "chat.jsonl", "on cpu, fp32"):
        assert expected in before
    assert "plugins  none" in before
    assert "torch" in after


def test_a_start_says_what_takes_time(
    write_config: WriteConfig, base_config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(write_config(base_config | {"plugins": ["collation_fast"]}))])
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("  plugins  collation_fast ") for line in lines)
    done = [line.split("] ")[1] for line in lines if line.startswith("  [")]
    assert done[:5] == [
        "loading PyTorch and transformers",
        "loading the tokenizer",
        "reading the data",
        "tokenizing chat",
        "loading weights",
    ]
    assert done[5] == "41.4k parameters, on cpu"


def test_what_takes_long_to_start_is_said_again_until_it_is_done(
    base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline_models.local.backend import LocalBackend

    said: list[str] = []
    again = threading.Event()
    start = LocalBackend.__init__

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("still loading weights ("):
            again.set()

    def start_slowly(*arguments: Any, **named: Any) -> None:
        assert again.wait(60)
        start(*arguments, **named)

    monkeypatch.setattr(progress, "REPEAT_S", 0.01)
    monkeypatch.setattr(LocalBackend, "__init__", start_slowly)
    train(base_config, progress=say)
    assert said.index("loading weights") < said.index("41.4k parameters, on cpu")
    assert not any(text.startswith("still") for text in said[said.index("41.4k parameters, on cpu") :])


def test_runs_from_python_are_silent(base_config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    train(base_config, progress=said.append)
    assert "loading weights" in said
    assert capsys.readouterr().err == ""
