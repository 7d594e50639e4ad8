"""Settings of the source of preference pairs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.loss import LossConfig, TrainsOn
from spurline.protocols.source import SourceConfig, SourceFacts


class PreferenceSourceConfig(SourceConfig):
    """Pairs of a chosen and a rejected answer to a prompt. `batch_size` counts pairs. The default loss is `dpo`."""

    run_defaults: ClassVar[Mapping[str, str]] = {"loss": "dpo"}

    name: str = "preference"

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, supplies="pairs", columns=("pair_ids",), compares_logprobs=True)

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        for reason in self._misfits(run):
            yield Problem("name", f"is {self.name}, {reason}")

    def _misfits(self, run: RunConfig) -> Iterable[str]:
        if run.loss.trains_on == "tokens":
            yield (
                f"but loss: {run.loss.name} would train on rejected answers as on chosen ones. Set loss: dpo, or "
                "remove the setting `loss`."
            )
        if run.reduction.name == "fixed_norm":
            yield (
                "which gives all pairs the same weight, but reduction: fixed_norm counts tokens. Remove the setting "
                "`reduction`."
            )
        if run.data.too_long == "split":
            yield "but data.too_long: split would cut an answer in two. Set data.too_long to truncate, drop or error."
        for entry in (*run.data.train, *run.data.eval):
            if entry.format not in ("auto", "prompt_completion"):
                yield (
                    f"which reads prompt, chosen and rejected, but a dataset has format: {entry.format}. Remove the "
                    "format. If columns have other names, set `columns`."
                )
        capacity = run.collator.row_capacity
        if capacity is not None and run.data.max_length <= capacity < 2 * run.data.max_length:
            yield (
                f"and a pair may have {2 * run.data.max_length} tokens, twice data.max_length, but collator.max_tokens "
                f"is {capacity}. Set data.max_length: {capacity // 2}, or raise collator.max_tokens."
            )


class DpoConfig(LossConfig):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290); for `source: preference`."""

    trains_on: ClassVar[TrainsOn] = "pairs"

    name: str = "dpo"
    beta: Annotated[float, OnResume.BY_NAME] = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Strength of the pull towards the reference model (the model before training)."""
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss function of the margin between the answers: `sigmoid` is DPO, `ipo` a squared distance (arXiv:2310.12036),
    and `hinge` the loss of SLiC (arXiv:2305.10425)."""
    label_smoothing: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose answers are in the wrong order; only for `sigmoid` (Mitchell 2023)."""
    sft_weight: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the chosen answer's mean negative log-likelihood in the loss (RPO, arXiv:2404.19733)."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"reference"})

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if run.loss is self and run.source.facts.supplies != "pairs":
            yield Problem(
                "name", f"is {self.name}, but the source '{run.source.name}' has no pairs. Set source: preference."
            )
        if self.label_smoothing and self.loss_type != "sigmoid":
            yield Problem(
                "label_smoothing",
                f"is {self.label_smoothing:g}, which loss_type: {self.loss_type} does not use. Set it to 0, or "
                "loss_type: sigmoid.",
            )
