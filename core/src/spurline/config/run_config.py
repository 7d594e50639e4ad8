"""The sections that core itself owns, and `RunConfig`, the whole file.

Fields marked with `Component(kind)` hold the settings of one component; loading replaces their type by a union of the
configs that core and the enabled plugins registered for that kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from spurline.config.paths import PathSetting
from spurline.config.section import (
    Component,
    NamedSection,
    OnResume,
    SchemaOfOneOrMany,
    Section,
    as_list,
)
from spurline.errors import Problem
from spurline.protocols.backend import BackendConfig
from spurline.protocols.collator import CollatorConfig
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.loss import LossConfig
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.protocols.prefetch import PrefetchConfig
from spurline.protocols.report_panel import ReportPanelConfig
from spurline.protocols.reward import RewardTable
from spurline.protocols.source import SourceConfig
from spurline.protocols.tokenization import TokenizationConfig
from spurline.protocols.tracker import TrackerConfig

FREE = OnResume.FREE


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and gradient clipping."""

    learning_rate: float = Field(default=2e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the first and second moment estimates."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay for matrices; biases, norms and other vectors get none."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; null turns clipping off."""


class ScheduleConfig(NamedSection):
    """Learning rate as a function of the optimizer step; a bare string is short for its `name`."""

    name: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after warm-up."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of linear warm-up from zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all optimizer steps; used when `warmup_steps` is not given."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate that the decay ends at, one step after the last, as a share of the peak (linear and cosine)."""


class CriticConfig(Section):
    """A second model of the run's architecture, with a value head, trained on the returns of rollouts.

    `critic: {}` takes all defaults. Its weights start as the policy's do; the learning rate is constant after warm-up.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_names(cls, value: Any) -> Any:
        """The defaults of these kinds are the policy's: a critic has its own."""
        if not isinstance(value, Mapping):
            return value
        completed = dict(cast("Mapping[str, Any]", value))
        for setting, name in (("loss", "value"), ("minibatches", "by_prompt")):
            given = completed.setdefault(setting, {})
            if isinstance(given, Mapping) and "name" not in given:
                completed[setting] = {"name": name, **cast("Mapping[str, Any]", given)}
        return completed

    loss: Annotated[LossConfig, Component("loss")]
    """Error of its values, reduced to the mean over tokens; default is `value`."""
    minibatches: Annotated[MiniBatchesConfig, Component("minibatches")]
    """How a batch is cut into the critic's optimizer steps; default is `by_prompt`, with a size of its own."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """AdamW settings."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of the critic in which the learning rate rises from zero."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        idle = run.source.without_critic
        if idle is not None:
            yield Problem("", f"would be trained for nothing: {idle} uses no critic. Remove it, or choose gae.")
        if self.loss.trains_on != "returns":
            yield Problem(
                "loss",
                f"is {self.loss.name}, which is no error of values: it would read the critic's values as logprobs. Set "
                'loss: value, or remove the line. A loss of your own says `trains_on = "returns"` in its config.',
            )


class ReductionConfig(NamedSection):
    """Which losses of an optimizer step count the same; a bare string is short for its `name`."""

    name: Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_norm"] = "token_mean"
    """All tokens, all sequences or all prompts whatever their length; `fixed_norm` divides by a constant instead of by
    how many tokens there are (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""
    length: int | None = Field(default=None, gt=0)
    """`fixed_norm` only: tokens to divide by for each trajectory, usually the longest response allowed."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.name == "fixed_norm" and self.length is None:
            yield Problem(
                "length",
                "is required by fixed_norm: the tokens to divide by for each trajectory. Write "
                "`reduction: {name: fixed_norm, length: 512}`, with the longest response you allow.",
            )
        if self.name != "fixed_norm" and self.length is not None:
            yield Problem(
                "length",
                f"is for fixed_norm and has no meaning with {self.name}. Set reduction.name: fixed_norm, or remove it.",
            )


DatasetList = Annotated[
    tuple[Annotated[DatasetConfig, Component("dataset", shorthand="path")], ...],
    BeforeValidator(as_list),
    SchemaOfOneOrMany(),
]
"""Datasets; a single one may be written without a list around it."""


class DataConfig(Section):
    """Which rows to train and evaluate on, and which of their tokens carry loss."""

    train: DatasetList = Field(min_length=1)
    """Training datasets; several are mixed by their weights."""
    eval: DatasetList = ()
    """Held-out datasets, never trained on."""
    train_on: Literal["last_assistant", "all_assistants"] = "last_assistant"
    """Chat rows: put loss on the last assistant turn, or on every one. The end-of-turn token is part of a turn."""
    max_length: int = Field(default=2048, gt=1)
    """Tokens a sample may have."""
    too_long: Literal["truncate", "split", "drop", "error"] | None = None
    """A sample over `max_length` keeps its first tokens, is cut into several samples, is left out and counted, or stops
    the run; null splits raw text (format `text`) and truncates everything else. Prompts to generate from are no
    samples: they are used whole, except that with `error` one over `max_length` stops the run."""
    on_ignored: Literal["error", "warn"] = "error"
    """What to do about a row of which the chat template leaves out tools, tool calls, reasoning or a whole message, so
    that other text would be trained than the row says: stop the run, or train on what is left and count it."""
    shuffle: bool = True
    """Permute the samples anew in each epoch; off keeps file order."""


CHAT_TEMPLATES = ("chatml", "gemma", "llama3", "zephyr")
"""Bundled chat templates, as files `data/templates/NAME.jinja`."""


class ModelConfig(Section):
    """The causal language model to train, as Hugging Face `transformers` loads it."""

    path: Annotated[str, PathSetting(reads=True)] = Field(min_length=1)
    """Hub name or local folder with `config.json`, weights and tokenizer."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    tokenizer: Annotated[str | None, PathSetting(reads=True)] = None
    """Hub name or folder of the tokenizer; default is `path`."""
    chat_template: Annotated[str | None, PathSetting(reads=True, names=CHAT_TEMPLATES)] = None
    """Replaces the tokenizer's chat template: a Jinja file, or the name of a bundled one (`chatml`, `llama3`,
    `gemma`, `zephyr`)."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` takes only the architecture from `path` and draws fresh weights from `seed`."""
    trust_remote_code: bool = False
    """Run Python code that ships with a hub model."""
    config_overrides: dict[str, Any] = {}
    """Fields of the model's own config to change, such as `{attention_dropout: 0.0}`."""


class CheckpointConfig(Section):
    """When to save, and what to keep."""

    every_steps: Annotated[int | None, FREE] = Field(default=None, gt=0)
    """Save each time this many steps are done; null saves only at the end and on SIGINT or SIGTERM."""
    keep_last: Annotated[int, FREE] = Field(default=2, ge=1)
    """Complete checkpoints to keep; older ones are removed after a newer one is safe."""
    export_hf: Annotated[bool, FREE] = False
    """Also write a Hugging Face folder to RUN_DIR/model when training ends."""


class GenerationEvalConfig(Section):
    """Generate answers to held-out prompts and score them."""

    rewards: RewardTable = Field(min_length=1)
    """Named scores, each a reward component or function: `{exact_match: exact_match}` logs `eval/exact_match`."""
    max_new_tokens: int = Field(default=128, gt=0)
    """Longest answer in tokens."""
    max_samples: int | None = Field(default=200, gt=0)
    """Use the first N prompts of the evaluation data; null uses all."""
    batch_size: int = Field(default=64, gt=0)
    """Prompts generated together."""


class EvaluationConfig(Section):
    """Held-out loss and, if asked for, scores of generated answers."""

    every_steps: int | None = Field(default=None, gt=0)
    """Evaluate each time this many steps are done; it always runs once at the end."""
    batch_size: int | None = Field(default=None, gt=0)
    """Samples per evaluation batch; default is the training `batch_size`."""
    generate: GenerationEvalConfig | None = None
    """Score generated answers; null computes the loss only."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if not run.data.eval and (self.generate is not None or self.every_steps is not None):
            yield Problem("", "needs held-out data, and `data.eval` is empty. Set data.eval, or remove this section.")
        if self.generate is not None and not run.backend.generates:
            yield Problem(
                "generate",
                f"asks for answers, and backend '{run.backend.name}' does not generate. Remove evaluation.generate, "
                "which leaves the held-out loss, or set backend.name: local.",
            )


class ReportConfig(Section):
    """The HTML page written to RUN_DIR/report.html."""

    enabled: bool = True
    """Write the page when the run ends."""
    panels: tuple[Annotated[ReportPanelConfig, Component("report_panel")], ...] | None = None
    """Panels in page order; null shows every panel of core and of the enabled plugins."""


class RunConfig(Section):
    """One training run: the whole configuration file."""

    plugins: tuple[str, ...] = ()
    """Plugins to enable, in the order their hooks are called."""
    run_dir: Annotated[Path, FREE, PathSetting()] = Path("runs/default")
    """Folder for metrics, checkpoints and the report; one run at a time. Relative to the working directory."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, data order, dropout and sampling."""
    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """Training and evaluation rows."""
    batch_size: int = Field(default=32, gt=0)
    """Samples per optimizer step, over all devices."""
    steps: Annotated[int | None, OnResume.MAY_GROW] = Field(default=None, gt=0)
    """Training steps; give this or `epochs`."""
    epochs: Annotated[float | None, OnResume.MAY_GROW] = Field(default=None, gt=0, allow_inf_nan=False)
    """Passes over the mixed training data; rounded up to whole batches, the last of which wraps into the next epoch."""
    source: Annotated[SourceConfig, Component("source")]
    """Where batches come from."""
    tokenization: Annotated[TokenizationConfig, Component("tokenization")]
    """How rows become tokens."""
    collator: Annotated[CollatorConfig, Component("collator")]
    """How samples are laid out in a batch."""
    prefetch: Annotated[PrefetchConfig, Component("prefetch")]
    """When batches are built: on demand, or ahead of need."""
    minibatches: Annotated[MiniBatchesConfig, Component("minibatches")]
    """How a batch is cut into optimizer steps."""
    loss: Annotated[LossConfig, Component("loss")]
    """The objective per token."""
    reduction: ReductionConfig = ReductionConfig()
    """Which losses of an optimizer step count the same: all tokens, or all samples whatever their length."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    critic: CriticConfig | None = None
    """The critic of an advantage that needs one, `gae`; null for none."""
    backend: Annotated[BackendConfig, Component("backend")]
    """Where and how forward, backward and the optimizer run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    trackers: Annotated[tuple[Annotated[TrackerConfig, Component("tracker")], ...], FREE] = ()
    """Where metrics go besides RUN_DIR/metrics.jsonl and the terminal."""
    report: Annotated[ReportConfig, FREE] = ReportConfig()
    """The HTML report."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if (self.steps is None) == (self.epochs is None):
            both = "both given" if self.steps is not None else "both missing"
            yield Problem("steps", f"and 'epochs' are {both}. Set exactly one, for example `epochs: 3`.")
        names = [tracker.name for tracker in self.trackers]
        for position, name in enumerate(names):
            if name in names[:position]:
                yield Problem(f"trackers.{position}", f"lists '{name}' a second time. Remove one.")

    def total_steps(self, samples_per_epoch: int, samples_per_step: int | None = None) -> int:
        """Number of loop steps of this run for data with so many samples per epoch.

        samples_per_step: `batch_size`, unless the source counts its steps otherwise.
        """
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        # A billionth of a batch absorbs binary rounding of fractional epochs, e.g. 0.1 * 30 samples.
        return max(1, math.ceil(self.epochs * samples_per_epoch / (samples_per_step or self.batch_size) - 1e-9))
