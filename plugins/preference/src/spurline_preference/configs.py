"""Settings of the sources `preference` and `labels`, and of their losses. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.loss import LossConfig, TrainsOn
from spurline.protocols.source import SourceFacts
from spurline_text.configs import SampleSourceConfig

Supplies = Literal["pairs", "labels"]


class AnswerSourceConfig(SampleSourceConfig):
    """Base of the sources of answers that are better or worse."""

    supplies: ClassVar[Supplies]
    column: ClassVar[str]
    """The column of the batches that tells good answers from bad ones."""
    answers_at_once: ClassVar[int] = 1
    """Answers that must be in the same row of a batch."""

    reference: Annotated[Literal["compute", "precompute"], OnResume.TO_ROUNDING] = "compute"
    """When log-probabilities of the reference model are computed: for each batch, or once for all rows before the first
    step. `precompute` stores them, so that later runs read them. Then no reference model is in memory in training,
    unless `model.frozen.reference` names one, or a resumed run does not find the stored values."""

    @property
    def facts(self) -> SourceFacts:
        stored = ("reference_logprobs",) if self.reference == "precompute" else ()
        columns = (self.column, *stored)
        return replace(super().facts, supplies=self.supplies, columns=columns, compares_logprobs=True)

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        for reason in self._misfits(run):
            yield Problem("name", f"is {self.name}, {reason}")
        if self.reference == "precompute" and "reference" not in run.loss.roles:
            yield Problem(
                "reference",
                f"is precompute, but loss: {run.loss.name} reads no reference model. Remove the setting `reference`.",
            )

    def _misfits(self, run: RunConfig) -> Iterable[str]:
        if run.loss.trains_on == "tokens":
            yield (
                f"but loss: {run.loss.name} would train on bad answers as on good ones. Set loss: "
                f"{self.run_defaults['loss']}, or remove the setting `loss`."
            )
        if run.reduction.name == "fixed_norm":
            yield (
                f"which gives all {self.supplies} the same weight, but reduction: fixed_norm counts tokens. Remove the "
                "setting `reduction`."
            )
        if run.data.too_long == "split":
            yield "but data.too_long: split would cut an answer in two. Set data.too_long to truncate, drop or error."
        for entry in (*run.data.train, *run.data.eval):
            if entry.format not in ("auto", "prompt_completion"):
                yield (
                    f"which reads a prompt and answers, but a dataset has format: {entry.format}. Remove the format. "
                    "If columns have other names, set `columns`."
                )
        capacity, needed = run.collator.row_capacity, self.answers_at_once * run.data.max_length
        if capacity is not None and run.data.max_length <= capacity < needed:
            yield (
                f"and a pair may have {needed} tokens, twice data.max_length, but collator.max_tokens is {capacity}. "
                f"Set data.max_length: {capacity // 2}, or raise collator.max_tokens."
            )


class PreferenceSourceConfig(AnswerSourceConfig):
    """Pairs of a chosen and a rejected answer to a prompt. `batch_size` counts pairs. The default loss is `dpo`."""

    run_defaults: ClassVar[Mapping[str, str]] = {"loss": "dpo"}
    supplies: ClassVar[Supplies] = "pairs"
    column: ClassVar[str] = "pair_ids"
    answers_at_once: ClassVar[int] = 2

    name: str = "preference"


class LabelSourceConfig(AnswerSourceConfig):
    """Single answers with a label, good or bad. `batch_size` counts answers. The default loss is `kto`.

    Rows have a prompt, a completion and a label, or they are pairs, whose chosen answers are good.
    """

    run_defaults: ClassVar[Mapping[str, str]] = {"loss": "kto"}
    supplies: ClassVar[Supplies] = "labels"
    column: ClassVar[str] = "labels"

    name: str = "labels"


class AnswerLossConfig(LossConfig):
    """Base of the losses on answers that are better or worse."""

    source: ClassVar[str] = "preference"
    """The source to set if the run has another one."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if run.loss is self and run.source.facts.supplies != self.trains_on:
            yield Problem(
                "name",
                f"is {self.name}, but the source '{run.source.name}' has no {self.trains_on}. Set source: "
                f"{self.source}.",
            )


class PairLossConfig(AnswerLossConfig):
    """Base of the losses that compare the two answers of a pair."""

    trains_on: ClassVar[TrainsOn] = "pairs"

    sft_weight: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the chosen answer's mean negative log-likelihood in the loss (RPO, arXiv:2404.19733)."""


class DpoConfig(PairLossConfig):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290); for `source: preference`."""

    name: str = "dpo"
    beta: Annotated[float, OnResume.BY_NAME] = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Strength of the pull towards the reference model (the model before training)."""
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Loss function of the margin between the answers: `sigmoid` is DPO, `ipo` a squared distance (arXiv:2310.12036),
    `hinge` the loss of SLiC (arXiv:2305.10425), and `robust` an unbiased loss if some pairs are in the wrong order
    (arXiv:2403.00409)."""
    label_smoothing: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose answers are in the wrong order; for `sigmoid` (Mitchell 2023) and `robust`."""
    length_normalized: Annotated[bool, OnResume.BY_NAME] = False
    """Use means over the tokens of an answer instead of sums, so that long answers have no larger margins. `ipo` always
    does. `beta` is then usually larger."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"reference"})

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if self.label_smoothing and self.loss_type in ("ipo", "hinge"):
            yield Problem(
                "label_smoothing",
                f"is {self.label_smoothing:g}, which loss_type: {self.loss_type} does not use. Set it to 0, or "
                "loss_type: sigmoid.",
            )
        if self.length_normalized and self.loss_type == "ipo":
            yield Problem(
                "length_normalized", "is true, which loss_type: ipo does not read: it always uses means. Remove it."
            )
        if self.loss_type == "robust" and not self.label_smoothing:
            yield Problem(
                "label_smoothing",
                "is 0, with which loss_type: robust equals sigmoid. Set it to the share of pairs in the wrong order.",
            )


class SimpoConfig(PairLossConfig):
    """Simple preference optimisation, without a reference model (SimPO, Meng et al. 2024, arXiv:2405.14734)."""

    name: str = "simpo"
    beta: Annotated[float, OnResume.BY_NAME] = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Scale of rewards, which are mean log-probabilities per token. The paper uses 2 to 10."""
    gamma: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Margin that the rewards of both answers should have at least. The paper uses 0.2 to 0.8 times beta."""
    label_smoothing: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose answers are in the wrong order."""


class CpoConfig(PairLossConfig):
    """Contrastive preference optimisation, without a reference model (CPO, Xu et al. 2024, arXiv:2401.08417)."""

    name: str = "cpo"
    beta: Annotated[float, OnResume.BY_NAME] = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Scale of rewards, which are log-probabilities of whole answers."""
    label_smoothing: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose answers are in the wrong order."""
    sft_weight: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the chosen answer's mean negative log-likelihood in the loss."""


class OrpoConfig(PairLossConfig):
    """Odds ratio preference optimisation, without a reference model (ORPO, Hong et al. 2024, arXiv:2403.07691)."""

    name: str = "orpo"
    beta: Annotated[float, OnResume.BY_NAME] = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Weight of the odds ratio beside the likelihood of the chosen answer, lambda in the paper."""
    sft_weight: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the chosen answer's mean negative log-likelihood in the loss."""


class KtoConfig(AnswerLossConfig):
    """Kahneman-Tversky optimisation on good and bad answers (Ethayarajh et al. 2024, arXiv:2402.01306)."""

    trains_on: ClassVar[TrainsOn] = "labels"
    source: ClassVar[str] = "labels"

    name: str = "kto"
    beta: Annotated[float, OnResume.BY_NAME] = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Strength of the pull towards the reference model (the model before training)."""
    desirable_weight: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of good answers."""
    undesirable_weight: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of bad answers. The paper keeps desirable_weight x good : undesirable_weight x bad from 1 to 4/3."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"reference"})
