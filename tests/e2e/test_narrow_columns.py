"""Tokens and positions of a batch are int32 or int64 on the host: what is trained has the same bits."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import assert_same_weights, deterministic, read_metrics, write_pairs

from spurline import Run, load_config
from spurline.data.batch import MAY_BE_WIDE, TOKEN_COLUMNS, TrainingBatch
from spurline.data.collators import layout
from spurline.plugins.hookspecs import hookimpl

WIDE = TOKEN_COLUMNS | dict.fromkeys(MAY_BE_WIDE, torch.int64)


class Dtypes:
    """Notes the dtypes of tokens and positions in the batches that are trained on."""

    def __init__(self) -> None:
        self.found: set[torch.dtype] = set()

    @hookimpl(wrapper=True)
    def train_step(self, step: int, batch: TrainingBatch) -> Generator[None, Any, Any]:
        self.found |= {batch.tokens[name].dtype for name in MAY_BE_WIDE}
        return (yield)


def preference_data(config: dict[str, Any], folder: Path) -> None:
    config["source"], config["steps"] = "preference", 3
    config["data"] = {"train": str(write_pairs(folder / "pairs.jsonl", 12, seed=0)), "max_length": 64}


@pytest.mark.parametrize("kind", ["sft", "preference", "rollouts"])
@pytest.mark.parametrize("plugins", [[], ["collation_fast"]], ids=["core", "fast"])
def test_training_on_narrow_and_on_wide_columns_gives_the_same_bits(
    kind: str, plugins: list[str], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = request.getfixturevalue("rl_config" if kind == "rollouts" else "base_config")
    config |= {"steps": 2, "checkpoint": {"every_steps": 2}}
    if kind == "preference":
        preference_data(config, tmp_path)
    for width, dtype in (("narrow", torch.int32), ("wide", torch.int64)):
        # Wide ones come from the collators of core, as those of any plugin may be.
        one = {**config, "run_dir": str(tmp_path / width), "plugins": plugins if width == "narrow" else []}
        if width == "wide":
            monkeypatch.setattr(layout, "TOKEN_COLUMNS", WIDE)
        loaded, dtypes = load_config(one), Dtypes()
        loaded.host.attach(dtypes, "dtypes")
        Run(loaded).train()
        assert dtypes.found == {dtype}
    narrow, wide = (deterministic(read_metrics(str(tmp_path / width))) for width in ("narrow", "wide"))
    assert [line["loss"] for line in narrow] == [line["loss"] for line in wide]
    assert [line["grad_norm"] for line in narrow] == [line["grad_norm"] for line in wide]
    assert_same_weights(tmp_path / "narrow", tmp_path / "wide")
