"""The contract of backends catches wrong gradients, a step that should not count, and gradients judged too mildly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline.errors import NonFiniteLossError
from spurline_models.local.backend import LocalBackend
from spurline_rl.testing import BackendContract
from spurline_rl.testing.backend_cases import assert_gradients_close


class Local(BackendContract):
    backend_settings = {"name": "local", "device": "cpu"}


def test_gradients_a_thousandth_too_large_under_a_loss_that_is_right(spurline_tiny_model: Path) -> None:
    class Scaled(Local):
        @contextmanager
        def backend(self, model: Path, *, critic: bool = False) -> Iterator[Any]:
            with super().backend(model, critic=critic) as (backend, layout):
                assert isinstance(backend, LocalBackend)
                for parameter in backend._policy.parameters.values():
                    parameter.register_hook(lambda gradient: gradient * 1.001)
                yield backend, layout

    with pytest.raises(AssertionError, match="grad_norm"):
        Scaled().test_loss_and_gradient_norm_follow_the_local_backend_over_several_steps(spurline_tiny_model)
    with pytest.raises(AssertionError, match="gradient of"):
        Scaled().test_gradients_equal_the_local_backend_per_parameter(spurline_tiny_model)


def test_a_refused_step_that_counts(spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = LocalBackend.update

    def counting(self: LocalBackend, *arguments: Any, **named: Any) -> Any:
        try:
            return update(self, *arguments, **named)
        except NonFiniteLossError:
            self._policy.updates += 1
            raise

    monkeypatch.setattr(LocalBackend, "update", counting)
    with pytest.raises(AssertionError):
        Local().test_a_step_that_is_not_finite_names_its_samples_and_changes_nothing(spurline_tiny_model)


def test_gradients_that_cancel_are_judged_by_their_rounding_and_all_others_by_themselves() -> None:
    # Rounding of float32 is 1.2e-7; the largest gradient is 2.
    large, small, cancelled = torch.tensor([2.0]), torch.tensor([1e-2]), torch.tensor([0.0])
    expected = {"large": large, "small": small, "cancelled": cancelled}
    assert_gradients_close(expected | {"cancelled": cancelled + 1e-6}, expected, 3e-6)
    for wrong in ({"cancelled": cancelled + 3e-6}, {"small": small + 3e-6}, {"large": large * 1.00001}):
        with pytest.raises(AssertionError, match=next(iter(wrong))):
            assert_gradients_close(expected | wrong, expected, 3e-6)
