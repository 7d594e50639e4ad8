"""Kind `source`: supply the batches of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from spurline.config.section import Component, ComponentConfig
from spurline.errors import Problem
from spurline.progress import Progress, silent
from spurline.protocols.stateful import Stateful

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from spurline.data.batch import TrainingBatch
    from spurline.protocols.backend import Backend
    from spurline.protocols.collator import ParallelLayout
    from spurline.protocols.dataset import DatasetConfig, Longest
    from spurline.protocols.held_out import HeldOutEvaluation
    from spurline.protocols.host import HostView
    from spurline.protocols.tokenization import DatasetToTokenize


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Facts about a source that the rest of a run may ask for."""

    without_critic: str | None
    """None if the source can use a critic. Otherwise, the part that uses none, in words: `the advantage 'grpo'`."""
    supplies: Literal["samples", "pairs", "labels", "rollouts"] = "samples"
    """Rows of the batches: samples of the data, pairs of answers, answers with labels, or generated turns with
    advantages."""
    columns: Collection[str] = ()
    """Token columns of the batches, except those of every batch (`spurline.data.batch.TOKEN_COLUMNS`) and `carried`. A
    loss that needs another column is refused before anything loads."""
    makes_attempts: bool = False
    """True if the source can make attempts at any prompts with the present weights, for evaluations."""
    reads_streams: bool = False
    """True if the training data consists of streams instead of datasets."""
    compares_logprobs: bool = False
    """True if the update compares its logprobs with earlier logprobs. The run must then have no dropout."""
    num_prompts: int | None = None
    """Prompts in one step, each with several rollouts, or None if the run's `batch_size` counts samples."""
    carried: Collection[str] = ()
    """Columns of the data's rows that are copied to batches and groups, for losses and advantages."""
    reward_terms: Collection[str] | None = None
    """Names of the reward terms of every attempt, or None if they are not known beforehand."""
    context_tokens: int | None = None
    """Tokens of prompt and response together that the settings of the engine allow, or None without a limit."""
    sampling: Any = None
    """How responses are sampled, as a `SamplingConfig` of `spurline_rl.configs`, or None if nothing is generated."""
    sampling_temperature: float = 1.0
    """Temperature at which the tokens of the batches were sampled, or 1 if they were not sampled."""
    roles: Collection[str] = ()
    """Roles of the untrained models that the source itself uses, such as `reference`, whether or not the loss does."""
    transport: str | None = None
    """Name of the `weight_sync` for the source's engines, or None without one."""
    has_colocated_engines: bool = False
    """True if the engines and the backend use the same devices in turn."""
    engines_elsewhere: bool = False
    """True if the engines may be on other machines than this process."""
    update_limit_s: float | None = None
    """Seconds in which an engine must receive one bucket of weights. A slower engine is ended. None sets no limit."""
    sends_adapters: bool | None = None
    """True if the engines receive only adapters, or None if it depends on the engines."""
    replays_experts: bool = False
    """True if batches have the column `routed_experts`, so that models use the experts that the engine chose."""


MODEL_DROPOUT = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop")
"""Names of dropout in the configs of Hugging Face's decoder models."""


class SourceConfig(ComponentConfig):
    """Settings of a source. Class attributes are read before a config is validated, `facts` afterwards."""

    kind: ClassVar[str] = "source"
    run_defaults: ClassVar[Mapping[str, str]] = {}
    """Default components of a run with this source, by top-level setting."""

    decorates: ClassVar[str | None] = None
    """If this source wraps another one, the setting that has the config of the wrapped source. The run also uses that
    source's `run_defaults`."""

    @property
    def facts(self) -> SourceFacts:
        """Return the facts that the rest of the run may ask for. A subclass returns `replace(super().facts, ...)`."""
        return SourceFacts(without_critic=f"the source '{self.name}'")

    def problems(self, run: Any) -> Iterable[Problem]:
        """Refuse dropout in a run that compares logprobs.

        With dropout, logprobs differ before any weight has changed: probability ratios are not 1, and margins between
        answers are noise. Dropout in the model's own `config.json` is not known here.
        """
        if not self.facts.compares_logprobs:
            return
        overrides = run.model.config_overrides
        found = {f"model.config_overrides.{name}": overrides.get(name) for name in MODEL_DROPOUT}
        found |= {f"backend.{path}": rate for path, rate in run.backend.facts.dropout_rates.items()}
        for setting, rate in found.items():
            if isinstance(rate, (int, float)) and rate > 0:
                yield Problem(
                    "name",
                    f"is {self.name}, which compares logprobs of the update with logprobs without dropout, but "
                    f"{setting} is {rate:g}. The two would differ before anything is learned. Set {setting} to 0.",
                )


class DecoratedSourceConfig(SourceConfig):
    """Base config of a source that wraps another source, `of`. Its facts are the facts of that inner source."""

    decorates: ClassVar[str | None] = "of"

    of: Annotated[SourceConfig, Component("source")]
    """The source that this source wraps."""

    @property
    def facts(self) -> SourceFacts:
        # The inner source itself refuses dropout.
        return replace(self.of.facts, compares_logprobs=False)


@dataclass(frozen=True)
class SourceContext:
    """Everything that a source gets from its run.

    Attributes:
        config: The `RunConfig`.
        host: Enabled plugins. Create further components with `host.registry.create(kind, config, ...)`, and call hooks
            with `host.hooks`.
        tokenizer: The tokenizer of the model.
        layout: What the parallelism of the backend requires of batches.
        row_limit: Number of rows to read of each dataset, for `spurline plan`; None reads all.
        progress: Called when slow work begins.
    """

    config: Any
    host: HostView
    tokenizer: PreTrainedTokenizerBase
    layout: ParallelLayout
    row_limit: int | None = None
    progress: Progress = silent


@dataclass(frozen=True)
class FirstPrompt:
    """A prompt as the model gets it.

    Attributes:
        uid: Name of the prompt.
        token_ids: Tokens of the prompt. They are empty if only the environment knows them.
        notes: Lines about the prompt's row, and about how answers are made and rewarded.
    """

    uid: str
    token_ids: Sequence[int]
    notes: Sequence[str] = ()


class BatchSource(ABC):
    """Supplies one TrainingBatch per loop step. SFT, synchronous RL and asynchronous RL differ only in the source.

    Factory: `Class(config, context=SourceContext)`. The factory reads the data, but starts nothing.
    A source with state between steps also implements `Stateful`. Its state may include a fingerprint of the data, so
    that a resume with other data is refused (`refuse_other_data`).

    Attributes:
        total_steps: Loop steps of the whole run. Every source sets it.
        pure: Whether `build(step)` is a pure function of (config, step) and changes no state. If so, it may be called
            ahead of time on another thread.
        reads_only_data: Whether `build` needs no weights, even if it is not pure. `spurline plan` then builds the first
            batch.
        records: Names of the files and folders that the source writes in the run directory.
    """

    total_steps: int
    records: tuple[str, ...] = ()
    pure: bool = False
    reads_only_data: bool = False

    @abstractmethod
    def summary(self) -> Mapping[str, object]:
        """Return facts about the data as JSON values, for plan and report (see `spurline.data.token_store`)."""

    def start(self, step: int, backend: Backend) -> None:  # noqa: B027 - many have nothing to start
        """Prepare to build batches from this step on. The run calls this once, after a checkpoint was loaded."""

    def longest(self) -> Longest | None:
        """Return the longest sequence of all samples or prompts, or None if it is not known beforehand.

        The run compares it with the model's number of positions before training.
        """
        return None

    def preview(self) -> Sequence[str]:
        """Return lines about the model's inputs, for `spurline plan`, or none if the first batch is enough."""
        return ()

    def first_prompts(self, count: int) -> Sequence[FirstPrompt]:
        """Return the first prompts of training, to be shown to the user, or none if the source has no prompts."""
        return ()

    @abstractmethod
    def build(self, step: int) -> TrainingBatch:
        """Return the batch of this 1-based step."""

    @abstractmethod
    def epoch(self, step: int) -> float:
        """Return the number of passes over the data after this step."""

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        """Act on the update of a step, such as by publishing weights, and return metrics."""
        return {}

    def flush(self) -> None:  # noqa: B027 - many write nothing
        """Force the files in the run directory to disk. The run calls this before each checkpoint."""

    def evaluation(self) -> HeldOutEvaluation | None:
        """Return the source's own evaluation of `data.eval`. None selects the default evaluation.

        The run calls this once, and only if there is held-out data.
        """
        return None

    def held_out(self, datasets: Sequence[DatasetConfig]) -> Samples | None:
        """Return the samples of held-out data. If this is None, the run makes one sample of each row."""
        return None

    def sample_keys(self) -> NDArray[np.uint64] | None:
        """Return a hash of each training sample or prompt, with which the run finds copies in the held-out data.

        Return None if the training data is not read before training.
        """
        return None

    def given_up(self) -> Sequence[str]:
        """Return a line for each prompt that was given up, with the location of its row and the error."""
        return ()

    def close(self) -> None:  # noqa: B027 - many have nothing to stop
        """Stop all work of the source."""


def _of_inner(name: str) -> Any:
    """Make a method that calls the same method of the inner source."""

    def ask(self: DecoratedSource, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    return ask


class DecoratedSource(BatchSource):
    """A source that wraps another source, `inner`. Methods that a subclass does not override call the inner source.

    Its state is the state of the inner source. A subclass with more state overrides `state_dict` and `load_state_dict`,
    and includes the inner state. Such a subclass is not `pure`: batches that are built ahead would change its state.
    """

    def __init__(self, config: DecoratedSourceConfig, context: SourceContext) -> None:
        self.inner: BatchSource = context.host.registry.create("source", config.of, context=context)
        self.total_steps = self.inner.total_steps
        keeps_state = type(self).state_dict is not DecoratedSource.state_dict
        self.pure = self.inner.pure and not keeps_state
        self.records = self.inner.records
        # A pure source needs no weights, so a decorator around it needs none either.
        self.reads_only_data = self.inner.reads_only_data or self.inner.pure

    summary = _of_inner("summary")
    longest = _of_inner("longest")
    preview = _of_inner("preview")
    first_prompts = _of_inner("first_prompts")
    start = _of_inner("start")
    build = _of_inner("build")
    epoch = _of_inner("epoch")
    after_update = _of_inner("after_update")
    flush = _of_inner("flush")
    evaluation = _of_inner("evaluation")
    held_out = _of_inner("held_out")
    sample_keys = _of_inner("sample_keys")
    given_up = _of_inner("given_up")
    close = _of_inner("close")

    def __getattr__(self, name: str) -> Any:
        """Return further attributes of the inner source, such as its attempts at prompts for evaluations."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def state_dict(self) -> dict[str, object]:
        return self.inner.state_dict() if isinstance(self.inner, Stateful) else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if isinstance(self.inner, Stateful):
            self.inner.load_state_dict(state)


class Samples(Protocol):
    """Tokenized data from which batches are drawn.

    Samples are counted from 0, dataset after dataset. Pure: any batch can be made at any time, on any thread.
    """

    def sizes(self) -> tuple[int, ...]:
        """Return the number of samples from each dataset."""
        ...

    def batch(self, numbers: NDArray[np.int64], *, training: bool) -> TrainingBatch:
        """Return these samples as one batch. Repeats are allowed."""
        ...

    def fingerprint(self) -> str:
        """Return a text that changes with any token, mask or boundary of a sample."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return facts as JSON values (see `spurline.data.token_store`)."""
        ...

    def keys(self) -> NDArray[np.uint64]:
        """Return a hash of each of the first million samples. Equal samples have equal hashes."""
        ...

    def location(self, number: int) -> str:
        """Return the location of the row of a sample."""
        ...

    def answered(self) -> Sequence[DatasetToTokenize]:
        """Return datasets whose rows are prompts with answers, for held-out generation."""
        ...
