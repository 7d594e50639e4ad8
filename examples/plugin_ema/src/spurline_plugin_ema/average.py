"""Average the weights over all optimizer steps of a run, evaluate the average, and export it at the end.

In: hooks of the loop. Out: metrics `ema/...` beside `eval/...`, RUN_DIR/ema_model, state in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spurline import Run
from spurline.plugins import hookimpl
from spurline.protocols.backend import LendsParameters, Role
from spurline_plugin_ema.config import EmaConfig


class Average:
    """The hook implementations for one run, and their state."""

    def __init__(self, run: Run, settings: EmaConfig) -> None:
        # `EmaConfig.problems` has refused other backends.
        assert isinstance(run.backend, LendsParameters), f"{type(run.backend).__name__} lends no parameters"
        self._run = run
        self._settings = settings
        self._backend = run.backend
        # The backend lends its own tensors, and the next step changes them. So this makes a copy.
        # The copy is at least fp32, since half precision would lose most of the small change of each step.
        self._weights = {
            name: value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for name, value in self._backend.trained_parameters().items()
        }
        self._updates = 0

    def state_dict(self) -> dict[str, object]:
        weights = {name: value.cpu().numpy() for name, value in self._weights.items()}
        return {"updates": self._updates, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = state["updates"]
        for name, value in self._weights.items():
            value.copy_(torch.from_numpy(state["weights"][name]))

    @hookimpl
    def on_optimizer_step(self, role: Role) -> None:
        if role == "policy":
            for name, value in self._backend.trained_parameters().items():
                self._weights[name].lerp_(value.to(self._weights[name]), 1 - self._settings.decay)
            self._updates += 1

    @hookimpl
    def on_eval_end(self) -> None:
        with self._backend.swapped("policy", self._weights):
            self._run.evaluate("ema")

    @hookimpl
    def on_run_end(self, error: BaseException | None) -> None:
        finished = self._run.is_done
        if error is None and finished and self._settings.export:
            with self._backend.swapped("policy", self._weights):
                self._run.export(self._run.directory.path / "ema_model", replace=True)
