"""What the contract suites of backends share: the backend under test beside the local one, and what they are given."""

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

from spurline.builtin.configs import ByPromptConfig, CrossEntropyConfig, PackedCollatorConfig, PaddedCollatorConfig
from spurline.builtin.packed_collator import PackedCollator
from spurline.builtin.padded_collator import PaddedCollator
from spurline.builtin.rl_configs import ValueLossConfig
from spurline.config.loading import LoadedConfig, load_config
from spurline.config.run_config import CriticConfig, OptimizerConfig
from spurline.data.batch import TrainingBatch
from spurline.losses.cross_entropy import CrossEntropy
from spurline.protocols.backend import Backend
from spurline.protocols.backend_config import BackendConfig
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.reduction import token_mean
from spurline.testing.data import PAD, make_view

GRADIENT_ROUNDINGS = 8
"""Roundings of its largest terms by which a gradient may differ between layouts; 6,000 random ones had up to 5.4."""

LENGTHS = (5, 17, 9, 30, 3, 12, 8, 21, 14, 6, 11, 2)


class BackendSuite:
    """Base of the suites; its attributes are what a subclass sets."""

    backend_settings: Mapping[str, Any] = {"name": "local"}
    plugins: tuple[str, ...] = ()
    gradient_tolerance = 1e-5
    step_tolerance = 1e-6
    dropout = 0.2
    """Of the attention, where random numbers must be drawn; 0 for a backend that has no dropout."""
    has_critic = True
    """Whether it trains a critic; False for a backend that refuses one."""

    @contextmanager
    def backend(self, model: Path, *, critic: bool = False) -> Iterator[tuple[Backend, ParallelLayout]]:
        """The backend under test on this model, closed afterwards. critic: whether the run has one."""
        loaded = backend_run(model, self.backend_settings, self.plugins, critic)
        backend: Backend = loaded.host.registry.create(
            "backend", loaded.config.backend, run=loaded.config, total_updates=8
        )
        try:
            yield backend, cast("BackendConfig", loaded.config.backend).layout()
        finally:
            backend.close()

    @contextmanager
    def local(self, model: Path, *, critic: bool = False) -> Iterator[Backend]:
        """Core's local backend on the same model."""
        loaded = backend_run(model, {"name": "core/local", "device": "cpu"}, self.plugins, critic)
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
    """Judge each parameter by the norm of the difference over the norm of the expected gradient.

    Takes (name, tensor) pairs. A gradient sums terms as large as the largest gradient of the model. Where they cancel
    (queries and keys of a token that attends to one token have none), their rounding errors stay, and bound the
    difference instead.
    """
    left, right = dict(got), dict(wanted)
    assert left.keys() == right.keys()
    norms = {name: float(expected.double().norm()) for name, expected in right.items()}
    for name, expected in right.items():
        rounding = GRADIENT_ROUNDINGS * torch.finfo(expected.dtype).eps * max(norms.values())
        difference = float((left[name].double() - expected.double()).norm())
        assert difference <= max(tolerance * norms[name], rounding), (
            f"gradient of {name}: differs by {difference:.3g}, its norm is {norms[name]:.3g}"
        )


def assert_weights_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, same bits."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), f"weight {name} differs"


def weights_of(backend: Backend) -> dict[str, Tensor]:
    """A copy of the policy's weights."""
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.named_weights()}


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that two equal runs share."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def backend_run(
    model: Path, backend: Mapping[str, Any], plugins: tuple[str, ...] = (), critic: bool = False
) -> LoadedConfig:
    """A run with this backend and no data."""
    loaded = load_config(
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
    if not critic:
        return loaded
    # Past the check that a source reads its values: no source is needed here.
    optimizer = OptimizerConfig(learning_rate=1e-2)
    section = CriticConfig(loss=ValueLossConfig(), minibatches=ByPromptConfig(), optimizer=optimizer, warmup_steps=2)
    return replace(loaded, config=loaded.config.model_copy(update={"critic": section}))


def with_dropout(model: Path, folder: Path, dropout: float) -> Path:
    """A copy of the model that drops attention weights in training."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": dropout}), encoding="utf-8")
    return folder


def alternate_units(batch: TrainingBatch, layout: ParallelLayout) -> TrainingBatch:
    """Two units per rank, each with every other row of the rank; padding rows keep units of their own."""
    rows = torch.arange(batch.num_rows)
    units = 2 * (rows // (batch.num_rows // layout.data)) + rows % 2
    return replace(batch, unit_ids=torch.where(batch.is_padding_row, batch.num_rows * 2 + rows, units))


def minibatch(
    layout_name: str, layout: ParallelLayout, seed: int = 0, lengths: tuple[int, ...] = LENGTHS
) -> tuple[TrainingBatch, Objective]:
    """Random samples of these lengths, `packed` or `padded`, and the mean of their cross-entropy."""
    samples = make_view(lengths, seed)
    collator = (
        PackedCollator(PackedCollatorConfig(max_tokens=64), PAD, layout)
        if layout_name == "packed"
        else PaddedCollator(PaddedCollatorConfig(), PAD, layout)
    )
    batch = collator.collate(samples, training=True)
    batch, normalizer = token_mean(batch)
    return batch, Objective(CrossEntropy(CrossEntropyConfig()), normalizer)
