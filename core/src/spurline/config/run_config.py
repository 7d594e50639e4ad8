"""Define the sections that core owns, and `RunConfig`, the whole file.

A field with the mark `Component(kind)` holds the settings of one component. Loading replaces its type by a union of the
configs that core and the enabled plugins have registered for the kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field

from spurline.config.objects import ObjectSetting, is_kept_model
from spurline.config.paths import PathSetting
from spurline.config.section import Component, NamedSection, OnResume, SchemaOfShorthand, Section, expand_shorthand
from spurline.errors import Problem, listing, suggestion
from spurline.protocols.backend import BackendConfig
from spurline.protocols.collator import CollatorConfig
from spurline.protocols.dataset import DatasetConfig as DatasetConfig
from spurline.protocols.dataset import DatasetList as DatasetList
from spurline.protocols.evaluation import EvaluationConfig
from spurline.protocols.loss import LossConfig
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.protocols.optimizer import OptimizerConfig, pattern_problem
from spurline.protocols.order import OrderConfig
from spurline.protocols.prefetch import PrefetchConfig
from spurline.protocols.schedule import ScheduleConfig
from spurline.protocols.source import SourceConfig
from spurline.protocols.tokenization import TokenizationConfig
from spurline.protocols.tracker import TrackerConfig

SectionT = TypeVar("SectionT", bound=Section)


class CriticConfig(Section):
    """Settings of a critic: a second trained model, which has the policy's architecture and a value head.

    A plugin whose algorithm needs a critic derives its section from this class. `RunConfig.trained_critic` finds it.
    """

    loss: Annotated[LossConfig, Component("loss")]
    """Loss of the critic's values. Its mean over tokens is minimised."""
    minibatches: Annotated[MiniBatchesConfig, Component("minibatches")]
    """How a batch is cut into the critic's optimizer steps."""
    optimizer: Annotated[OptimizerConfig, Component("optimizer")]
    """How the critic's gradients become new weights."""
    warmup_steps: Annotated[int, OnResume.BY_NAME] = Field(default=0, ge=0)
    """Number of the critic's optimizer steps in which its learning rate rises from zero. After that it is constant."""


class ReductionConfig(NamedSection):
    """How the token losses of an optimizer step are averaged. A bare string is short for its `name`."""

    name: Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_norm"] = "token_mean"
    """`token_mean`, `sequence_mean` and `prompt_mean` weigh all tokens, sequences or prompts equally. `fixed_norm`
    divides by a constant instead of the number of tokens (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""
    length: Annotated[int | None, OnResume.BY_NAME] = Field(default=None, gt=0)
    """Only for `fixed_norm`, which divides by this number of tokens times the number of trajectories. Usually the
    maximum response length."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.name == "fixed_norm" and self.length is None:
            yield Problem("length", "is required by fixed_norm. Set it to the longest response that you allow.")
        if self.name != "fixed_norm" and self.length is not None:
            yield Problem("length", f"has no meaning with {self.name}. Set reduction.name: fixed_norm, or remove it.")


class DataConfig(Section):
    """Rows to train and evaluate on, and which of their tokens carry loss."""

    train: DatasetList = Field(min_length=1)
    """Training datasets. Several datasets are mixed by their weights."""
    eval: Annotated[DatasetList, OnResume.FREE] = ()
    """Held-out datasets, never trained on."""
    train_on: Literal["last_assistant", "all_assistants"] = "last_assistant"
    """Chat rows: put loss on the last assistant turn, or on every one. The end-of-turn token is part of a turn."""
    max_length: int = Field(default=2048, gt=1)
    """Maximum number of tokens in a sample."""
    too_long: Literal["truncate", "split", "drop", "error"] | None = None
    """A sample over `max_length` is cut to its first tokens (`truncate`) or into several samples (`split`), is left out
    and counted (`drop`), or stops the run (`error`). If null, samples in format `text` are split, and all others are
    truncated. Prompts to generate from are not cut, but with `error`, a prompt over `max_length` stops the run."""
    on_ignored: Literal["error", "warn"] = "error"
    """The reaction if the chat template leaves out tools, tool calls, reasoning or a whole message of a row: stop the
    run (`error`), or train on the rest of the row and count the row (`warn`)."""
    order: Annotated[OrderConfig, Component("order")] = OrderConfig(name="uniform")
    """The order of the samples: shuffled in each epoch (`uniform`), in file order (`sequential`), by length, by
    difficulty or by reward."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        shares = [dataset.share for dataset in self.train if dataset.share is not None]
        given, leaves_rest = sum(shares), len(shares) < len(self.train)
        if shares and not (given < 1 if leaves_rest else math.isclose(given, 1)):
            wanted = "less than 1, since a dataset has no share" if leaves_rest else "1"
            yield Problem("train", f"has shares with the sum {given:g}. The sum must be {wanted}.")


CHAT_TEMPLATES = ("chatml", "gemma", "llama3", "zephyr")
"""Bundled chat templates. The plugin `text` has a file `chats/templates/NAME.jinja` for each."""


class WeightsConfig(Section):
    """A causal language model, as Hugging Face `transformers` loads it."""

    path: Annotated[str, PathSetting(reads=True), ObjectSetting("model"), OnResume.BY_NAME] = Field(min_length=1)
    """Hub name or local folder with `config.json`, weights and tokenizer. A Python program may give a model instead."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` takes only the architecture from `path` and draws fresh weights from `seed`."""
    trust_remote_code: bool = False
    """Run Python code that ships with a hub model."""
    config_overrides: dict[str, Any] = {}
    """Fields of the model's own config to change, such as `{attention_dropout: 0.0}`."""
    head: Literal["vocabulary", "score"] = "vocabulary"
    """`score` gives the model a head with one output instead of its vocabulary, as in transformers'
    `...ForSequenceClassification` with one label. If the folder has no such head (`score.weight`), it begins with 0."""


class FrozenModelConfig(WeightsConfig):
    """A model that is not trained. It must have the tokens of the trained model, and may have another architecture."""


class ModelConfig(WeightsConfig):
    """The causal language model to train."""

    tokenizer: Annotated[str | None, PathSetting(reads=True), ObjectSetting("tokenizer"), OnResume.BY_NAME] = None
    """Hub name or folder of the tokenizer. The default is `path`. A Python program may give a tokenizer instead."""
    chat_template: Annotated[str | None, PathSetting(reads=True, names=CHAT_TEMPLATES), OnResume.BY_NAME] = None
    """Replaces the tokenizer's chat template: a Jinja file, or the name of a bundled one (`chatml`, `llama3`,
    `gemma`, `zephyr`)."""
    allow_extrapolation: bool = False
    """Allow sequences that are too long for the model's rotary positions even with its rope scaling. A model with
    learned position embeddings cannot be extended in this way."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained, in policy and critic. A pattern is a glob for the whole
    name, as in `*embed_tokens*` or `model.layers.[0-3].*`, or `re:` and a regular expression for a part of it."""
    router_aux_loss: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["config"] | None, OnResume.BY_NAME
    ] = None
    """Coefficient of the sequence-wise balance loss of DeepSeek-V3 (arXiv:2412.19437), which trains the routers of a
    mixture of experts to use all experts evenly. `config` uses the value `router_aux_loss_coef` of the model's config.
    Null adds no balance loss."""
    frozen: Annotated[dict[str, FrozenModelConfig], OnResume.BY_NAME] = {}
    """Models that are not trained, by the role in which losses, sources and rewards use them, such as `teacher`. The
    role `reference` is the trained model as it was when the run began, unless it is given here."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        missing = sorted(run.frozen_roles - self.frozen.keys() - {"reference"})
        for role in missing:
            yield Problem(
                "frozen",
                f"has no model with the role '{role}', which this run uses.{suggestion(role, self.frozen)} Add it:\n"
                f"model:\n  frozen:\n    {role}:\n      path: FOLDER_OR_HUB_NAME",
            )
        if self.head != run.loss.head:
            yield Problem(
                "head",
                f"is {self.head}, and loss '{run.loss.name}' trains a model with head: {run.loss.head}. Change one of "
                "them.",
            )
        elif self.head == "score" and (run.asks_for_answers or run.checkpoint.export_adapter):
            what = "checkpoint.export_adapter" if run.checkpoint.export_adapter else "the evaluation by answers"
            yield Problem("head", f"is score, and {what} needs a vocabulary. Remove it.")
        for role in sorted(self.frozen):
            if role in {"policy", "critic", "old", "rollout"}:
                yield Problem(f"frozen.{role}", "has a name with another meaning. Choose another name.")
            elif role not in run.frozen_roles and not missing:
                yield Problem(f"frozen.{role}", "is a model that nothing in this run uses. Use its role, or remove it.")
        if is_kept_model(self.path) and self.tokenizer is None:
            yield Problem("tokenizer", "is required with a model object. Give a tokenizer, or its name or folder.")
        if self.router_aux_loss is not None and not run.backend.facts.balances_experts:
            yield Problem(
                "router_aux_loss",
                f"is not supported by backend '{run.backend.name}' with these settings. Remove it, or choose backend "
                "local or fsdp, without backend.compile, and with backend.context: 1.",
            )
        if self.freeze and not run.backend.facts.freezes:
            yield Problem(
                "freeze",
                f"is not supported by backend '{run.backend.name}'. Remove it, or choose backend local or fsdp.",
            )
        elif self.freeze and run.backend.facts.trains_adapters:
            yield Problem(
                "freeze",
                "has no meaning with backend.lora, which freezes all weights. Remove it. Choose layers with "
                "backend.lora.target_modules.",
            )
        for number, pattern in enumerate(self.freeze):
            problem = pattern_problem(pattern)
            if problem is not None:
                yield Problem(f"freeze.{number}", problem)


_LOWER_IS_BETTER = {"loss", "nll", "perplexity", "ppl", "kl", "error", "failed"}


class WatchedMetricConfig(Section):
    """A metric of the held-out evaluation, and whether larger or smaller values are better."""

    metric: str = Field(min_length=1)
    """Metric of the held-out evaluation, such as `eval/loss` or `eval/exact_match`."""
    mode: Literal["max", "min"] | None = None
    """The better direction. By default, smaller values are better for losses, perplexity, KL and errors, and larger
    values for all other metrics."""

    @property
    def lower_is_better(self) -> bool:
        """Return whether a smaller value is better, by `mode`, or else by the metric's name."""
        if self.mode is not None:
            return self.mode == "min"
        return not _LOWER_IS_BETTER.isdisjoint(self.metric.replace("_", "/").split("/"))

    def metric_problems(self, run: RunConfig, section: str) -> Iterable[Problem]:
        """Yield the problem if the run does not measure the metric. `section` is the key of this section."""
        name = self.metric.split("/")[1] if self.metric.count("/") > 1 else ""
        evaluation = run.evaluations.get(name, run.evaluation if run.data.eval else None)
        if not self.metric.startswith("eval/"):
            yield Problem("metric", f"is {self.metric}, but held-out metrics begin with eval/, as in eval/loss.")
        elif evaluation is None:
            yield Problem(
                "metric",
                f"is {self.metric}, which no evaluation measures. Set data.eval, or write eval/NAME/METRIC for one of "
                f"`evaluations`.{suggestion(name, run.evaluations)} Names: {listing(run.evaluations)}.",
            )
        elif evaluation.every_steps is None:
            yield Problem(
                "",
                f"needs {self.metric} during training, but the run evaluates only once, at its end. Set "
                f"evaluation.every_steps, or remove {section}.",
            )


class KeepBestConfig(WatchedMetricConfig):
    """The metric of the best checkpoint. A bare string is short for its `metric`."""


class StopWhenConfig(WatchedMetricConfig):
    """When to end a run before its last step. This is checked after each evaluation of the metric."""

    patience: int | None = Field(default=None, ge=1)
    """End after this many evaluations in a row without a new best value. Null disables this."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Gain that `patience` asks for: a value is a new best only if it is better than the old one by more than this."""
    reaches: float | None = Field(default=None, allow_inf_nan=False)
    """End when the metric is as good as this or better. Null disables this."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.patience is None and self.reaches is None:
            yield Problem("", "never stops. Set `patience` (in evaluations) or `reaches` (a value of the metric).")
        if self.patience is None and self.min_delta:
            yield Problem("min_delta", "has no meaning without patience. Set patience too, or remove min_delta.")
        yield from self.metric_problems(run, "stop_when")


class CheckpointConfig(Section):
    """When to save, and what to keep."""

    retired: ClassVar[tuple[str, ...]] = ("verify",)
    every_minutes: float | None = Field(default=15.0, gt=0, allow_inf_nan=False)
    """Save after a step if this many minutes have passed since the last checkpoint. Null disables this."""
    every_steps: int | None = Field(default=None, gt=0)
    """Also save each time this many steps are done. A run always saves at its end, and on SIGINT or SIGTERM."""
    keep_last: int = Field(default=2, ge=1)
    """Number of complete checkpoints to keep. Older ones are removed after a newer one is completely written."""
    keep_best: Annotated[
        KeepBestConfig | None, BeforeValidator(partial(expand_shorthand, setting="metric")), SchemaOfShorthand(None)
    ] = None
    """Also keep the checkpoint with the best value of this metric. Each evaluation with a better value saves one."""
    export_hf: bool = False
    """Also write a Hugging Face folder to RUN_DIR/model when training ends."""
    export_adapter: bool = False
    """Also write the adapter that `backend.lora` trains to RUN_DIR/adapter when training ends, as a PEFT folder."""
    # `async` is a keyword of Python, so the field cannot be declared in the usual way.
    __annotations__["async"] = bool
    vars()["async"] = Field(
        default=False,
        description="Copy the state to the host's memory after the step, and write the checkpoint while training goes "
        "on. The copy takes memory during the whole run.",
    )

    @property
    def is_async(self) -> bool:
        return bool(getattr(self, "async"))

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.export_adapter and not run.backend.facts.trains_adapters:
            yield Problem(
                "export_adapter", "needs adapters to export. Set backend.lora, or export_hf for the whole model."
            )
        elif self.export_adapter and run.model.init == "random":
            yield Problem("export_adapter", "needs pretrained weights (model.init is random). Set export_hf instead.")
        if self.is_async and not run.backend.facts.takes_snapshots:
            yield Problem(
                "async", f"is not supported by backend '{run.backend.name}'. Remove it, or choose backend local."
            )
        if self.keep_best is not None:
            for problem in self.keep_best.metric_problems(run, "keep_best"):
                yield Problem(f"keep_best.{problem.key}".removesuffix("."), problem.message)


class EvaluationPart(Section):
    """Base of a section within `evaluation` that a plugin adds, such as `evaluation.generate`.

    The section adds a measurement of `data.eval`. Its fields are the settings of the evaluation component `component`.
    """

    component: ClassVar[str]
    """Name of the component of kind `evaluation`. Its factory also takes `datasets=Sequence[DatasetToTokenize]`."""
    generates: ClassVar[bool] = False
    """True if the component asks the backend to generate answers."""


class DataEvaluationConfig(Section):
    """Evaluation of `data.eval`: the held-out loss, and measurements that plugins add. See also `evaluations`."""

    every_steps: int | None = Field(default=None, gt=0)
    """Evaluate each time this many steps are done. The run always evaluates once at its end."""
    at_start: bool = False
    """Also measure the model before its first step, as step 0."""
    batch_size: int | None = Field(default=None, gt=0)
    """Samples per evaluation batch. The default is the training `batch_size`."""

    @property
    def parts(self) -> Sequence[EvaluationPart]:
        """Return the sections that plugins have added within this section and that the config sets."""
        return [value for _, value in self if isinstance(value, EvaluationPart)]

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if not run.data.eval and (self.parts or self.every_steps is not None or self.at_start):
            yield Problem("", "needs held-out data, and `data.eval` is empty. Set data.eval, or remove this section.")


_METRICS_OF_DATA_EVAL = ("loss", "rewards", "time")


class RunConfig(Section):
    """One training run: the whole configuration file."""

    plugins: Annotated[tuple[str, ...], OnResume.BY_NAME] = ()
    """Plugins to enable besides the default ones, in the order in which their hooks are called: names of installed
    plugins, and paths of files, such as `./mine.py`, relative to the config file. `-NAME` leaves out a default plugin.
    """
    run_dir: Annotated[Path, OnResume.FREE, PathSetting()] = Path("runs/default")
    """Folder for metrics, checkpoints and the report of one run. A relative path begins at the working directory."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, data order, dropout and sampling."""
    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """Training and evaluation rows."""
    batch_size: int = Field(default=32, gt=0)
    """Samples per optimizer step, over all devices."""
    steps: Annotated[int | None, OnResume.MAY_GROW] = Field(default=None, gt=0)
    """Number of training steps. Give this or `epochs`."""
    epochs: Annotated[float | None, OnResume.MAY_GROW] = Field(default=None, gt=0, allow_inf_nan=False)
    """Passes over the mixed training data. If the last batch is not full, the next samples of the order fill it."""
    source: Annotated[SourceConfig, Component("source")]
    """The component that supplies the batches."""
    tokenization: Annotated[TokenizationConfig, Component("tokenization"), OnResume.FREE]
    """How rows become tokens."""
    collator: Annotated[CollatorConfig, Component("collator"), OnResume.TO_ROUNDING]
    """How samples are laid out in a batch."""
    prefetch: Annotated[PrefetchConfig, Component("prefetch"), OnResume.FREE]
    """When batches are built: on demand, or ahead of need."""
    minibatches: Annotated[MiniBatchesConfig, Component("minibatches")]
    """How a batch is cut into optimizer steps."""
    loss: Annotated[LossConfig, Component("loss")]
    """The objective per token."""
    reduction: ReductionConfig = ReductionConfig()
    """How the token losses of an optimizer step are averaged."""
    optimizer: Annotated[OptimizerConfig, Component("optimizer")]
    """How gradients become new weights."""
    schedule: Annotated[ScheduleConfig, OnResume.BY_NAME, Component("schedule")]
    """Learning rate by optimizer step."""
    backend: Annotated[BackendConfig, Component("backend")]
    """The component that runs forward, backward and the optimizer."""
    evaluation: Annotated[DataEvaluationConfig, OnResume.FREE] = DataEvaluationConfig()
    """Held-out evaluation on `data.eval`."""
    evaluations: Annotated[dict[str, Annotated[EvaluationConfig, Component("evaluation")]], OnResume.FREE] = {}
    """Further evaluations by name, each with its own data, steps and settings. Metrics are `eval/NAME/...`."""
    stop_when: Annotated[StopWhenConfig | None, OnResume.FREE] = None
    """End the run early, by a metric of its evaluations. Null trains all steps."""
    checkpoint: Annotated[CheckpointConfig, OnResume.FREE] = CheckpointConfig()
    """When to save checkpoints, and what to keep."""
    trackers: Annotated[tuple[Annotated[TrackerConfig, Component("tracker")], ...], OnResume.FREE] = ()
    """Destinations for metrics in addition to RUN_DIR/metrics.jsonl and the terminal."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if (self.steps is None) == (self.epochs is None):
            both = "both given" if self.steps is not None else "both missing"
            yield Problem("steps", f"and epochs are {both}. Set exactly one, for example `epochs: 3`.")
        for name in self.evaluations:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in _METRICS_OF_DATA_EVAL:
                allowed = f"letters, digits, dots, dashes and underscores, but not {listing(_METRICS_OF_DATA_EVAL)}"
                yield Problem(f"evaluations.{name}", f"is not a valid name. Rename it, with {allowed}.")
        names = [tracker.name for tracker in self.trackers]
        for position, name in enumerate(names):
            if name in names[:position]:
                yield Problem(f"trackers.{position}", f"lists '{name}' a second time. Remove one.")

    def find_section(self, kind: type[SectionT]) -> SectionT | None:
        """Return the top-level section of this class, which a plugin has added.

        The result is None if the plugin is not enabled, or if the section is optional and the file leaves it out.
        """
        return next((value for _, value in self if isinstance(value, kind)), None)

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the top-level section of this class. Raises LookupError if there is none."""
        found = self.find_section(kind)
        if found is None:
            raise LookupError(f"This run has no section {kind.__name__}.")
        return found

    @property
    def trained_critic(self) -> CriticConfig | None:
        """Return the settings of the critic that is trained beside the policy, or None without a critic."""
        return self.find_section(CriticConfig)

    @property
    def frozen_roles(self) -> frozenset[str]:
        """Return the roles of the untrained models that the loss or the source uses."""
        facts = self.source.facts
        supplied = {"reference"} - self.model.frozen.keys() if "reference_logprobs" in facts.columns else set[str]()
        return (self.loss.roles - supplied).union(facts.roles)

    @property
    def asks_for_answers(self) -> bool:
        """Return whether an evaluation asks the backend to generate answers."""
        return any(each.generates for each in (*self.evaluation.parts, *self.evaluations.values()))

    def total_steps(self, samples_per_epoch: int, samples_per_step: int | None = None) -> int:
        """Return the number of loop steps for data with this many samples per epoch.

        `samples_per_step` is `batch_size` by default.
        """
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        # Subtract a billionth of a batch, since a product such as 0.1 * 30 may come out slightly above the true value.
        return max(1, math.ceil(self.epochs * samples_per_epoch / (samples_per_step or self.batch_size) - 1e-9))
