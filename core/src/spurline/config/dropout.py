"""Dropout in runs that compare logprobs of the update with earlier ones.

Logprobs to compare with are computed without dropout. An update with dropout then differs from them before any weight
has changed: probability ratios are not 1 and margins between answers are noise. Dropout that the model's own
`config.json` brings is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spurline.errors import Problem

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig

MODEL_SETTINGS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop")
"""What decoder models of Hugging Face call their dropout."""


def dropout_problems(run: RunConfig) -> Iterable[Problem]:
    """Dropout that is switched on, under the `name` of the source that compares."""
    overrides = run.model.config_overrides
    found = {f"model.config_overrides.{name}": overrides.get(name) for name in MODEL_SETTINGS}
    found["backend.lora.dropout"] = getattr(getattr(run.backend, "lora", None), "dropout", None)
    for setting, rate in found.items():
        if isinstance(rate, (int, float)) and rate > 0:
            yield Problem(
                "name",
                f"is {run.source.name}, which compares logprobs of the update with some computed without dropout, but "
                f"{setting} is {rate:g}, so that they would differ before anything is learned. Set it to 0.",
            )
