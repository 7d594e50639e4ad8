"""A plugin whose loss fails on one of several ranks: it raises, stands still, or ends its process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from spurline.errors import DataError
from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline.protocols.loss import TokenLossInputs
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy

PLUGIN = Plugin("failing_losses", api=API_VERSION)


class FailingLossConfig(CrossEntropyConfig):
    """Cross-entropy that fails on one rank."""

    name: str = "fails"
    how: Literal["value", "data", "sleep", "kill"] = "value"
    """The failure."""
    rank: int = 1
    """The rank that fails."""
    after: int = Field(default=2, ge=0)
    """Calls of that rank that go well."""


class FailingLoss(CrossEntropy):
    calls = 0
    """Calls in this process, which makes the loss again for each step."""

    def __init__(self, config: FailingLossConfig) -> None:
        super().__init__(config)
        self._settings = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        FailingLoss.calls += 1
        if dist.get_rank() == self._settings.rank and FailingLoss.calls > self._settings.after:
            fail(self._settings.how)
        return super().token_loss(inputs)


def fail(how: str) -> None:
    """Raise an error of Python or of ours, stand still, or end the process: `value`, `data`, `sleep` or `kill`.

    What stands still makes the file that the variable STANDS_STILL names, if it is set.
    """
    _HOW[how]()


def _raises_a_value_error() -> None:
    raise ValueError("broken on purpose")


def _raises_an_error_of_ours() -> None:
    raise DataError("rows.jsonl:3: prompt is empty. Remove the row.")


def _stands_still() -> None:
    if told := os.environ.get("STANDS_STILL"):
        Path(told).touch()
    time.sleep(600)


_HOW: dict[str, Callable[[], None]] = {
    "value": _raises_a_value_error,
    "data": _raises_an_error_of_ours,
    "sleep": _stands_still,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(FailingLossConfig, "failing_losses:FailingLoss")
