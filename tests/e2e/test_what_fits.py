"""The table of what fits comes from the estimator of `spurline plan`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "what_fits.py"


@pytest.fixture(scope="module")
def what_fits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("what_fits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_smallest_model_has_its_published_size_and_fits_as_estimated(
    what_fits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_fits, "MODELS", {"Qwen3-0.6B": what_fits.MODELS["Qwen3-0.6B"]})
    [found] = what_fits.measure().values()
    # 596,049,920 parameters: weights and two moments in fp32 and the rounded weights are 14 bytes each; gradients come
    # while activations and logits of 4,096 positions go.
    assert 14 * 596_049_920 / 2**30 < found["SFT, all weights"] < 18
    assert found["SFT, LoRA"] < found["SFT, all weights"]
    assert found["RL, all weights"] > found["SFT, all weights"]


def test_the_page_on_many_gpus_shows_what_the_program_prints(
    what_fits: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (SCRIPT.parents[1] / "docs" / "many-gpus.md").read_text(encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["what_fits.py", "--many"])
    every = what_fits.MODELS
    # The README's table, which is checked too, has the others; the soak measures all of both.
    measured = every if os.environ.get("SPURLINE_SOAK") else dict(list(every.items())[1::2])
    monkeypatch.setattr(what_fits, "MODELS", measured)
    what_fits.main()
    head, line, *rows = capsys.readouterr().out.strip().splitlines()
    shown = page.partition(f"{head}\n{line}\n")[2].partition("\n\n")[0].splitlines()
    assert [row.split("|")[1].strip() for row in shown] == list(every)
    assert [row for row in shown if row.split("|")[1].strip() in measured] == rows
    assert len(rows) >= 3
