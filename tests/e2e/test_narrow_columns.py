"""Ids and positions are narrow on the host; what is trained is what wide ones train, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import Config, read_metrics, train
from safetensors.torch import load_file

from spurline.data.batch import MAY_BE_WIDE
from spurline_models.local.backend import LocalBackend


@pytest.fixture
def pairs_config(base_config: Config) -> Config:
    rows = Path(base_config["data"]["train"]).with_name("pairs.jsonl")
    pair = '{{"prompt": "say {0}", "chosen": " {0}", "rejected": " no {0}"}}\n'
    rows.write_text("".join(pair.format(number) for number in range(40)))
    return base_config | {"source": "preference", "data": {"train": str(rows), "max_length": 64}}


@pytest.mark.parametrize("of", ["base_config", "pairs_config", "rl_config"])
@pytest.mark.parametrize("plugins", [[], ["collation_fast"]])
def test_narrow_and_wide_columns_train_the_same_bits(
    of: str, plugins: list[str], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Config = request.getfixturevalue(of) | {"plugins": plugins, "steps": 2, "report": {"enabled": False}}
    seen: set[torch.dtype] = set()

    def widened(method: Callable[..., Any], *, wide: bool) -> Callable[..., Any]:
        def call(self: LocalBackend, batch: Any, *more: Any, **named: Any) -> Any:
            columns = {name: batch.tokens[name].long() for name in MAY_BE_WIDE} if wide else {}
            batch = replace(batch, tokens={**batch.tokens, **columns})
            seen.update(batch.tokens[name].dtype for name in MAY_BE_WIDE)
            return method(self, batch, *more, **named)

        return call

    results: list[Any] = []
    for wide in (False, True):
        with monkeypatch.context() as patch:
            for name in ("update", "logprobs"):
                patch.setattr(LocalBackend, name, widened(getattr(LocalBackend, name), wide=wide))
            seen.clear()
            result = train(config | {"run_dir": str(tmp_path / str(wide))})
        assert seen == {torch.int64 if wide else torch.int32}
        assert result.checkpoint is not None
        losses = [(line["loss"], line["grad_norm"]) for line in read_metrics(tmp_path / str(wide))]
        results.append((losses, load_file(result.checkpoint / "backend" / "model.safetensors")))
    (narrow_losses, narrow), (wide_losses, wide_weights) = results
    assert narrow_losses == wide_losses
    assert all(torch.equal(narrow[name], wide_weights[name]) for name in narrow)
