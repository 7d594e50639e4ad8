"""Settings of the source of preference pairs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from spurline.config.run_config import RunConfig
from spurline.errors import Problem
from spurline.protocols.source import SourceConfig


class PreferenceSourceConfig(SourceConfig):
    """Pairs of a chosen and a rejected answer to a prompt; `batch_size` counts pairs. Its loss is `dpo`."""

    supplies = "pairs"
    compares_logprobs = True
    run_defaults: ClassVar[Mapping[str, str]] = {"loss": "dpo"}

    name: str = "preference"

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.loss.trains_on == "tokens":
            yield Problem(
                "name",
                f"is {self.name}, but loss: {run.loss.name} would train on rejected answers as on chosen ones. Set "
                "loss: dpo, or remove the line.",
            )
        if run.reduction.name == "fixed_norm":
            yield Problem(
                "name",
                f"is {self.name}, whose pairs all count the same, but reduction: fixed_norm counts tokens. Remove it.",
            )
        if run.data.too_long == "split":
            yield Problem(
                "name",
                f"is {self.name}, but data.too_long: split would cut an answer in two, and no half of it belongs to a "
                "pair. Set data.too_long to truncate, drop or error.",
            )
        for entry in (*run.data.train, *run.data.eval):
            if entry.format not in ("auto", "prompt_completion"):
                yield Problem(
                    "name",
                    f"is {self.name}, which reads prompt, chosen and rejected, but a dataset has format: "
                    f"{entry.format}. Remove it; `columns` renames columns.",
                )
        capacity = run.collator.row_capacity
        if capacity is not None and run.data.max_length <= capacity < 2 * run.data.max_length:
            yield Problem(
                "name",
                f"is {self.name}, and a pair may have twice data.max_length: {2 * run.data.max_length} tokens, but "
                f"collator.max_tokens is {capacity}. Set data.max_length: {capacity // 2}, or raise "
                "collator.max_tokens.",
            )
