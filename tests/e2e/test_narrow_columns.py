"""Ids and positions are narrow on the host; what is trained is what wide ones train, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import Config, Trained, assert_same_weights, train, write_pairs

from spurline.data.batch import MAY_BE_WIDE
from spurline_models.local.backend import LocalBackend


@pytest.fixture
def pairs_config(base_config: Config, tmp_path: Path) -> Config:
    rows = write_pairs(tmp_path / "pairs.jsonl", 40, seed=0)
    return base_config | {"source": "preference", "data": {"train": str(rows), "max_length": 64}}


@pytest.mark.parametrize(
    ("kind", "plugins"),
    [
        ("base_config", []),
        ("base_config", ["collation_fast"]),
        ("pairs_config", ["collation_fast"]),
        ("rl_config", ["collation_fast"]),
    ],
)
def test_narrow_and_wide_columns_train_the_same_bits(
    kind: str, plugins: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Config = request.getfixturevalue(kind) | {"plugins": plugins, "steps": 2, "report": {"enabled": False}}
    seen: set[torch.dtype] = set()

    def widened(method: Callable[..., Any], *, wide: bool) -> Callable[..., Any]:
        def call(self: LocalBackend, batch: Any, *more: Any, **named: Any) -> Any:
            columns = {name: batch.tokens[name].long() for name in MAY_BE_WIDE} if wide else {}
            batch = replace(batch, tokens={**batch.tokens, **columns})
            seen.update(batch.tokens[name].dtype for name in MAY_BE_WIDE)
            return method(self, batch, *more, **named)

        return call

    runs: list[Trained] = []
    for name, wide, dtype in (("narrow", False, torch.int32), ("wide", True, torch.int64)):
        with monkeypatch.context() as patch:
            for method in ("update", "logprobs"):
                patch.setattr(LocalBackend, method, widened(getattr(LocalBackend, method), wide=wide))
            seen.clear()
            runs.append(train(config, name=name))
        assert seen == {dtype}
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in runs[0].lines] == [line[name] for line in runs[1].lines]
    assert_same_weights(*runs)
