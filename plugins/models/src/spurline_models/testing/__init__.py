"""Tiny models, and contract tests for losses, sources, optimizers and schedules.

`spurline_rl.testing` has the tests for backends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.testing.lazy import lazy_names

if TYPE_CHECKING:
    from spurline_models.testing.inputs import write_tiny_model as write_tiny_model
    from spurline_models.testing.inputs import write_tiny_moe_model as write_tiny_moe_model
    from spurline_models.testing.loss_contract import LossContract as LossContract
    from spurline_models.testing.optimizer_contract import OptimizerContract as OptimizerContract
    from spurline_models.testing.optimizer_contract import ScheduleContract as ScheduleContract
    from spurline_models.testing.source_contract import SourceContract as SourceContract

_NAMES = {
    "loss_contract": ("LossContract",),
    "optimizer_contract": ("OptimizerContract", "ScheduleContract"),
    "source_contract": ("SourceContract",),
    "inputs": ("write_tiny_model", "write_tiny_moe_model"),
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
