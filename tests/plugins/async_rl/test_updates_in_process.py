"""Core's engine in_process takes weights over the transport of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backend_batches import run_config

from spurline.config.run_config import ModelConfig
from spurline_async_rl.weights.buckets import InProcessSync
from spurline_async_rl.weights.configs import InProcessSyncConfig
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.engines.in_process.engine import InProcessEngine
from spurline_rl.protocols.weight_sync import WeightSync
from spurline_rl.testing import EngineUpdateContract
from spurline_text.tokenizer import load_tokenizer


class TestInProcess(EngineUpdateContract):
    settings: dict[str, Any] = {}

    def make_engine(self, model: Path) -> Any:
        config = InProcessEngineConfig(device="cpu", **self.settings)
        model_config = ModelConfig(path=str(model))
        return InProcessEngine(
            config, run=run_config(model, model=model_config), tokenizer=load_tokenizer(model_config)
        )

    def make_sync(self) -> WeightSync:
        sync = InProcessSync(InProcessSyncConfig())
        sync.max_bucket_bytes = 20_000
        return sync


class TestInProcessDeterministic(TestInProcess):
    settings = {"deterministic": True}


class TestKeptKeysAndValues(TestInProcess):
    settings = {"kv_cache": "keep"}

    @pytest.mark.parametrize("temperature", [1.0])
    @pytest.mark.xfail(strict=True, reason="keep is approximate: later tokens come from neither version")
    def test_tokens_before_an_update_match_the_old_weights_and_those_after_it_the_new_ones(
        self, models: Any, temperature: float
    ) -> None:
        super().test_tokens_before_an_update_match_the_old_weights_and_those_after_it_the_new_ones(models, temperature)
