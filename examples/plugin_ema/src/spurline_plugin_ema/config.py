"""Settings of the plugin. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume, Section
from spurline.errors import Problem


class EmaConfig(Section):
    """The config's top-level section `ema`: an exponential moving average of the policy's weights."""

    decay: float = Field(default=0.999, gt=0, lt=1)
    """Weight of the old average in each update. The new weights of the model get the weight 1 - decay."""
    export: Annotated[bool, OnResume.FREE] = True
    """Write RUN_DIR/ema_model, a Hugging Face folder, when the run finishes."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if not run.backend.facts.lends_parameters:
            yield Problem(
                "",
                f"averages the trained parameters, and backend '{run.backend.name}' does not lend them. Set "
                "backend.name: local, or remove ema from `plugins`.",
            )
