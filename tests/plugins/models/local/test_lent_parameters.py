"""Trained parameters, read and swapped: adapters and critics too, and always back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from backend_batches import lay_out, local_backend, make_samples, write_model_folder
from torch import Tensor

from spurline.errors import ModelError, RunFailedError
from spurline.protocols.loss import Objective
from spurline_models.configs import LoraConfig
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy

OBJECTIVE = Objective(CrossEntropy(CrossEntropyConfig()), 9.0)
BATCH = lay_out(make_samples([9, 12, 5]))
LORA = {"lora": LoraConfig(rank=2)}


def copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_adapters_are_the_trained_parameters_of_a_model_that_has_them(tmp_path: Path) -> None:
    backend = local_backend(write_model_folder(tmp_path / "model"), **LORA)
    names = backend.trained_parameters().keys()
    assert names
    assert all("lora_" in name for name in names)
    reference = backend.logprobs(BATCH, "reference")
    backend.update(BATCH, OBJECTIVE)
    zeros = {name: torch.zeros_like(value) for name, value in backend.trained_parameters().items()}
    with backend.swapped("policy", zeros):
        assert torch.equal(backend.logprobs(BATCH), reference), "adapters of zeros are no adapters"


def test_some_parameters_may_be_swapped_and_swaps_may_be_nested(tmp_path: Path) -> None:
    backend = local_backend(write_model_folder(tmp_path / "model"))
    before = copied(backend.trained_parameters())
    first, second = list(before)[:2]
    with backend.swapped("policy", {first: before[first] + 1}):
        with backend.swapped("policy", {first: before[first] + 2, second: before[second] + 2}):
            assert torch.equal(backend.trained_parameters()[first], before[first] + 2)
        assert torch.equal(backend.trained_parameters()[first], before[first] + 1)
        assert backend.is_swapped
    assert same(backend.trained_parameters(), before)
    assert not backend.is_swapped


def test_swapped_parameters_are_neither_trained_nor_saved_nor_loaded(tmp_path: Path) -> None:
    backend = local_backend(write_model_folder(tmp_path / "model"))
    backend.save(tmp_path / "saved")
    for attempt in (
        lambda: backend.update(BATCH, OBJECTIVE),
        lambda: backend.save(tmp_path / "wrong"),
        lambda: backend.snapshot(),
        lambda: backend.load(tmp_path / "saved"),
    ):
        with pytest.raises(RunFailedError, match=r"while its parameters are swapped"), backend.swapped("policy", {}):
            attempt()
    assert not (tmp_path / "wrong").exists()


def test_names_and_shapes_that_do_not_fit_are_refused_before_anything_changes(tmp_path: Path) -> None:
    backend = local_backend(write_model_folder(tmp_path / "model"))
    before = copied(backend.trained_parameters())
    name = next(iter(before))
    for wrong, message in (
        (
            {name: before[name] + 1, f"{name}s": torch.zeros(1)},
            f"no trained parameter '{name}s'. Did you mean '{name}'",
        ),
        ({name: torch.zeros(3, 1)}, rf"'{name}' has shape \[.*\], and its new values have"),
    ):
        with pytest.raises(ModelError, match=message), backend.swapped("policy", wrong):
            pytest.fail("it was entered")
    for role in ("reference", "critic"):
        with pytest.raises(ModelError, match=role):
            backend.trained_parameters(role)  # type: ignore[arg-type]
    assert same(backend.trained_parameters(), before)
