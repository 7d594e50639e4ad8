"""Check that PEFT, with the backend's adapter on the base model, computes the same as the backend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_models.abilities import TrainsAdapters
from spurline_models.adapters.adapter_weights import AdapterStream, write_adapter_files
from spurline_rl.testing.backend_cases import assert_weights_equal, copied, minibatch, own_logprobs, weights_of
from spurline_rl.testing.backend_runs import backend_run, opened


class AdapterContract:
    """A test suite for backends with adapters. It needs peft.

    In a subclass, set `backend_settings` (the config section `backend`) and the `plugins` to enable.

    Attributes:
        tolerance: Largest difference between the logprobs of the backend and of PEFT, in nats. The default is for fp32.
        merge_tolerance: Largest difference between a weight merged by the backend and the same weight merged by PEFT.
    """

    backend_settings: Mapping[str, Any] = {"name": "local", "lora": {"rank": 4, "alpha": 8.0}}
    plugins: tuple[str, ...] = ()
    tolerance = 2e-5
    merge_tolerance = 1e-6

    @pytest.fixture(scope="class")
    @classmethod
    def adapted_model(cls, spurline_tiny_model: Path) -> Path:
        """Return the folder of the tiny model. Override this for another architecture."""
        return spurline_tiny_model

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, adapted_model: Path) -> Iterator[tuple[Backend, ParallelLayout]]:
        """Yield the backend that all tests share. Two updates have made all its adapter matrices non-zero."""
        with opened(backend_run(adapted_model, cls.backend_settings, cls.plugins)) as (backend, layout):
            for step in range(2):
                backend.update(*minibatch("packed", layout, step))
            yield backend, layout

    def test_settings_are_plain_and_make_peft_build_the_same_tensors(
        self, trained: tuple[Backend, ParallelLayout], adapted_model: Path
    ) -> None:
        import peft

        assert backend_run(adapted_model, self.backend_settings, self.plugins).config.backend.facts.trains_adapters
        settings = _settings_of(trained[0])
        assert json.loads(json.dumps(settings)) == settings
        assert settings["base_model_name_or_path"] == str(adapted_model)
        built = peft.get_peft_model(_base(adapted_model), peft.PeftConfig.from_peft_type(**settings))
        expected = peft.get_peft_model_state_dict(built, save_embedding_layers=False)
        named = list(_adapter_of(trained[0]))
        assert len(dict(named)) == len(named), "two tensors have the same name"
        assert {name: tensor.shape for name, tensor in named} == {
            name: tensor.shape for name, tensor in expected.items()
        }
        assert all(bool((tensor != 0).any()) for _, tensor in named), "a matrix has not been trained"

    def test_peft_computes_with_the_adapter_what_the_backend_computes(
        self, trained: tuple[Backend, ParallelLayout], adapted_model: Path, tmp_path: Path
    ) -> None:
        import peft

        backend, layout = trained
        loaded = self.load(backend, adapted_model, tmp_path)
        got = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
        assert_weights_equal(got, copied(_adapter_of(backend)))
        batch, _ = minibatch("padded", layout)
        changed = 0.0
        with torch.no_grad():
            rows = backend.logprobs(batch), own_logprobs(loaded, batch), own_logprobs(_base(adapted_model), batch)
            for row, (expected, weights), (unchanged, _) in zip(*rows, strict=True):
                found = row[1 : len(expected) + 1][weights != 0]
                torch.testing.assert_close(found, expected[weights != 0], atol=self.tolerance, rtol=0)
                changed = max(changed, float((unchanged - expected).abs().max()))
        assert changed > 100 * self.tolerance, "the adapter changes the logprobs too little for a comparison"

    def test_merged_weights_are_those_that_peft_merges(
        self, trained: tuple[Backend, ParallelLayout], adapted_model: Path, tmp_path: Path
    ) -> None:
        merged: Any = self.load(trained[0], adapted_model, tmp_path / "adapter").merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        files = (tmp_path / "merged").glob("*.safetensors")
        expected = {name: tensor for file in files for name, tensor in load_file(file).items()}
        weights = weights_of(trained[0])
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name].float(), tensor, atol=self.merge_tolerance, rtol=1e-6)

    def test_the_next_update_changes_the_adapter(self, trained: tuple[Backend, ParallelLayout]) -> None:
        backend, layout = trained
        before, settings = copied(_adapter_of(backend)), _settings_of(backend)
        backend.update(*minibatch("packed", layout, 3))
        after = copied(_adapter_of(backend))
        assert after.keys() == before.keys()
        assert all(not torch.equal(after[name], before[name]) for name in before)
        assert _settings_of(backend) == settings

    def load(self, backend: Backend, base: Path, folder: Path) -> Any:
        """Return the PEFT model of the base model and the backend's adapter, in evaluation mode."""
        import peft

        folder.mkdir(exist_ok=True)
        write_adapter_files(folder, AdapterStream(_settings_of(backend), _adapter_of(backend)))
        return peft.PeftModel.from_pretrained(_base(base), str(folder)).eval()


def _base(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def _settings_of(backend: Backend) -> Mapping[str, Any]:
    assert isinstance(backend, TrainsAdapters)
    settings = backend.adapter_settings()
    assert settings is not None
    return settings


def _adapter_of(backend: Backend) -> Iterator[tuple[str, Tensor]]:
    assert isinstance(backend, TrainsAdapters)
    return backend.named_adapter_weights()
