"""What every backend must satisfy: it computes what core's local backend computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from spurline.builtin.configs import CrossEntropyConfig, PackedCollatorConfig, PaddedCollatorConfig
from spurline.builtin.packed_collator import PackedCollator
from spurline.builtin.padded_collator import PaddedCollator
from spurline.config.loading import LoadedConfig, load_config
from spurline.data.batch import TrainingBatch
from spurline.losses.cross_entropy import CrossEntropy
from spurline.protocols.backend import Backend
from spurline.protocols.backend_config import BackendConfig
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.reduction import token_mean
from spurline.testing.data import PAD, make_view

LENGTHS = (5, 17, 9, 30, 3, 12, 8, 21, 14, 6, 11, 2)


class BackendContract:
    """Subclass with `backend_settings`, the config's `backend:` section, and `plugins` to enable."""

    backend_settings: Mapping[str, Any] = {"name": "local"}
    plugins: tuple[str, ...] = ()
    gradient_tolerance = 1e-5
    step_tolerance = 1e-6
    dropout = 0.2
    """Of the attention, where random numbers must be drawn; 0 for a backend that has no dropout."""

    def test_loss_and_gradient_norm_follow_the_local_backend_over_several_steps(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            for step in range(4):
                got = backend.update(*_minibatch("packed", layout, step))
                wanted = local.update(*_minibatch("packed", layout, step))
                for name in ("loss", "grad_norm"):
                    assert got[name] == pytest.approx(wanted[name], rel=self.step_tolerance), (step, name)
                assert got["lr"] == wanted["lr"]

    def test_gradients_equal_the_local_backend_per_parameter(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = _minibatch("packed", layout)
            assert_gradients_close(
                backend.gradients(batch, objective), local.gradients(batch, objective), self.gradient_tolerance
            )

    def test_a_wrong_gradient_scale_would_be_caught(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = _minibatch("packed", layout)
            wrong = Objective(objective.loss, objective.normalizer * 1.001)
            with pytest.raises(AssertionError, match="gradient"):
                assert_gradients_close(
                    backend.gradients(batch, wrong), local.gradients(batch, objective), self.gradient_tolerance
                )

    def test_packed_and_padded_rows_give_the_same_gradients(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            packed = dict(backend.gradients(*_minibatch("packed", layout)))
            padded = backend.gradients(*_minibatch("padded", layout))
            assert_gradients_close(padded, packed.items(), self.gradient_tolerance)

    @pytest.mark.parametrize("lengths", [(5, 9, 3, 12), LENGTHS], ids=["few", "many"])
    def test_rows_whose_units_alternate_give_the_gradients_of_the_uncut_batch(
        self, tiny_model: Path, lengths: tuple[int, ...]
    ) -> None:
        # The few fit into one micro-batch of 40 tokens, which then holds them in another order; the many need several.
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = _minibatch("padded", layout, lengths=lengths)
            alternating = _alternate_units(batch, layout)
            assert_gradients_close(
                backend.gradients(alternating, objective), local.gradients(batch, objective), self.gradient_tolerance
            )

    def test_gradients_leave_the_model_untouched(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            before = _weights(backend)
            dict(backend.gradients(*_minibatch("packed", layout)))
            assert_weights_equal(_weights(backend), before)

    def test_saving_and_loading_continues_bit_for_bit(self, tiny_model: Path, tmp_path: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            backend.update(*_minibatch("packed", layout, 0))
            (tmp_path / "saved").mkdir()
            backend.save(tmp_path / "saved")
            expected = [_deterministic(backend.update(*_minibatch("packed", layout, step))) for step in (1, 2)]
            weights = _weights(backend)
        with self.backend(tiny_model) as (backend, layout):
            backend.load(tmp_path / "saved")
            got = [_deterministic(backend.update(*_minibatch("packed", layout, step))) for step in (1, 2)]
            assert got == expected
            assert_weights_equal(_weights(backend), weights)

    def test_weights_have_their_hugging_face_names_and_values(self, tiny_model: Path) -> None:
        from transformers import AutoModelForCausalLM

        expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
        with self.backend(tiny_model) as (backend, _):
            assert_weights_equal(_weights(backend), expected)

    def test_logprobs_are_the_models_own_at_loss_positions(self, tiny_model: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        with self.backend(tiny_model) as (backend, layout), torch.no_grad():
            batch, _ = _minibatch("padded", layout)
            logprobs = backend.logprobs(batch)
            real = batch.without_padding_rows()
            assert logprobs.shape == real.tokens["input_ids"].shape
            for row in range(real.num_rows):
                count = int(real.segments["length"][row][0])
                tokens = real.tokens["input_ids"][row : row + 1, :count]
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
                expected = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
                trained = real.tokens["loss_weights"][row, 1:count] != 0
                torch.testing.assert_close(logprobs[row, 1:count][trained], expected[trained], atol=2e-5, rtol=1e-5)

    def test_facts_count_the_parameters(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, _):
            facts = backend.facts()
            assert facts["parameters"] == facts["trainable_parameters"]
            assert facts["parameters"] == sum(tensor.numel() for tensor in _weights(backend).values())

    def test_evaluation_changes_nothing(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            before = _weights(backend)
            batch, objective = _minibatch("packed", layout)
            first, second = backend.evaluate(batch, objective), backend.evaluate(batch, objective)
            assert first == second
            assert first.tokens == batch.num_loss_tokens
            assert_weights_equal(_weights(backend), before)

    def test_an_update_is_bit_identical_after_an_evaluation(self, tiny_model: Path, tmp_path: Path) -> None:
        model = _with_dropout(tiny_model, tmp_path / "model", self.dropout)
        metrics: list[list[dict[str, float]]] = []
        for evaluated in (False, True):
            with self.backend(model) as (backend, layout):
                seen = [_deterministic(backend.update(*_minibatch("packed", layout, 0)))]
                if evaluated:
                    backend.evaluate(*_minibatch("padded", layout, 7))
                seen += [_deterministic(backend.update(*_minibatch("packed", layout, step))) for step in (1, 2)]
            metrics.append(seen)
        assert metrics[1] == metrics[0], "evaluation drew random numbers, or left something behind"

    @contextmanager
    def backend(self, model: Path) -> Iterator[tuple[Backend, ParallelLayout]]:
        """The backend under test on this model, closed afterwards."""
        loaded = _config(model, self.backend_settings, self.plugins)
        backend: Backend = loaded.host.registry.create(
            "backend", loaded.config.backend, run=loaded.config, total_updates=8
        )
        try:
            yield backend, cast("BackendConfig", loaded.config.backend).layout()
        finally:
            backend.close()

    @contextmanager
    def local(self, model: Path) -> Iterator[Backend]:
        """Core's local backend on the same model."""
        loaded = _config(model, {"name": "core/local", "device": "cpu"}, self.plugins)
        backend: Backend = loaded.host.registry.create(
            "backend", loaded.config.backend, run=loaded.config, total_updates=8
        )
        try:
            yield backend
        finally:
            backend.close()

    @pytest.fixture
    def tiny_model(self, spurline_tiny_model: Path) -> Path:
        """Folder of the tiny model; override for another architecture."""
        return spurline_tiny_model


def assert_gradients_close(got: Any, wanted: Any, tolerance: float) -> None:
    """Per parameter: norm of the difference over norm of the expected gradient. Takes (name, tensor) pairs."""
    left, right = dict(got), dict(wanted)
    assert left.keys() == right.keys()
    for name, expected in right.items():
        difference = float((left[name].double() - expected.double()).norm())
        scale = float(expected.double().norm())
        assert difference <= tolerance * max(scale, 1e-12), (
            f"gradient of {name}: relative difference {difference / scale}"
        )


def assert_weights_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, same bits."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), f"weight {name} differs"


def _weights(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.named_weights()}


def _deterministic(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def _config(model: Path, backend: Mapping[str, Any], plugins: tuple[str, ...]) -> LoadedConfig:
    return load_config(
        {
            "plugins": list(plugins),
            "model": {"path": str(model)},
            "data": {"train": "unused.jsonl"},
            "steps": 8,
            "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
            "schedule": {"name": "linear", "warmup_steps": 2},
            "backend": dict(backend),
        }
    )


def _with_dropout(model: Path, folder: Path, dropout: float) -> Path:
    """A copy of the model that drops attention weights in training."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": dropout}), encoding="utf-8")
    return folder


def _alternate_units(batch: TrainingBatch, layout: ParallelLayout) -> TrainingBatch:
    """Two units per rank, each with every other row of the rank; padding rows keep units of their own."""
    rows = torch.arange(batch.num_rows)
    units = 2 * (rows // (batch.num_rows // layout.data)) + rows % 2
    return replace(batch, unit_ids=torch.where(batch.is_padding_row, batch.num_rows * 2 + rows, units))


def _minibatch(
    layout_name: str, layout: ParallelLayout, seed: int = 0, lengths: tuple[int, ...] = LENGTHS
) -> tuple[TrainingBatch, Objective]:
    samples = make_view(lengths, seed)
    collator = (
        PackedCollator(PackedCollatorConfig(max_tokens=64), PAD, layout)
        if layout_name == "packed"
        else PaddedCollator(PaddedCollatorConfig(), PAD, layout)
    )
    batch = collator.collate(samples, training=True)
    batch, normalizer = token_mean(batch)
    return batch, Objective(CrossEntropy(CrossEntropyConfig()), normalizer)
