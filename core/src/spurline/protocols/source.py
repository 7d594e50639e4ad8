"""Kind `source`: where the batches of a run come from."""

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


class SamplingSettings(Protocol):
    """How responses are sampled, for code that asks the trained model later.

    Attributes:
        temperature: Divisor of the logits; 0 is greedy.
        top_p: Probability that the likeliest tokens hold from which one is drawn; 1 keeps all tokens.
        top_k: Number of likeliest tokens from which one is drawn; 0 keeps all tokens.
        max_new_tokens: Tokens of the longest response of one turn.
        stop: Texts that end a response, besides the model's own end tokens.
    """

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def stop(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Facts of a source's settings that the rest of a run may ask for."""

    without_critic: str | None
    """The source in words for messages, if it has no use for a critic; None when a critic's values are read."""
    supplies: Literal["samples", "pairs", "rollouts"] = "samples"
    """Rows of its batches: samples of the data, pairs of answers, or generated turns with advantages."""
    makes_attempts: bool = False
    """True if it can make attempts at any prompts with the weights as they are, for evaluations."""
    reads_streams: bool = False
    """True if its training data is made of streams (`StreamedDataset`) instead of datasets."""
    compares_logprobs: bool = False
    """True if logprobs of the update are compared with earlier ones, so that the run must have no dropout."""
    num_prompts: int | None = None
    """Prompts whose rollouts make up the batch of one step; None when the run's `batch_size` counts samples."""
    carried: Collection[str] = ()
    """Columns of the data's rows that its batches and groups have, for losses and advantages that read one."""
    reward_terms: Collection[str] | None = None
    """Names of the reward terms of every attempt; None where only the attempts themselves tell."""
    context_tokens: int | None = None
    """Tokens of prompt and response that the settings of its engine allow; None where they set no limit."""
    most_turns: int = 1
    """Responses that one attempt may hold; 1 where nothing is generated."""
    sampling: SamplingSettings | None = None
    """How responses are sampled; None where nothing is generated."""
    sampling_temperature: float = 1.0
    """Temperature that the tokens of its batches were sampled at; 1 when they were not."""
    uses_reference: bool = False
    """True if it asks the reference model itself, whatever the loss does."""
    transport: str | None = None
    """Name of the `weight_sync` that was chosen for its engines; None where none was."""
    has_colocated_engines: bool = False
    """True if its engines have the devices of the backend by turns with it."""
    engines_elsewhere: bool = False
    """True if its engines may be on other machines than this process."""
    update_limit_s: float | None = None
    """Seconds that an engine may take for one bucket of weights before it is ended; None where nothing ends it."""
    sends_adapters: bool | None = None
    """True if its engines are to be sent adapters alone; None leaves it to what they can take."""
    replays_experts: bool = False
    """True if its batches bring the experts that the engine chose, so that models compute with these."""


MODEL_DROPOUT = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop")
"""Names of dropout in the configs of Hugging Face's decoder models."""


class SourceConfig(ComponentConfig):
    """Settings of a source.

    The class attributes are read before there are settings; `facts` says what the settings mean for the rest of a run.
    """

    kind: ClassVar[str] = "source"
    run_defaults: ClassVar[Mapping[str, str]] = {}
    """Top-level component settings and the names they take with this source when the file has none."""

    decorates: ClassVar[str | None] = None
    """Setting that holds the source which this one decorates: the run takes that one's `run_defaults`."""

    @property
    def facts(self) -> SourceFacts:
        """Return what the rest of the run may ask; a subclass returns `replace(super().facts, ...)`."""
        return SourceFacts(without_critic=f"the source '{self.name}'")

    def problems(self, run: Any) -> Iterable[Problem]:
        """Refuse dropout in a run that compares logprobs.

        An update with dropout differs from what it is compared with before any weight has changed: probability ratios
        are not 1 and margins between answers are noise. Dropout of the model's own `config.json` is not known here.
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
                    f"is {self.name}, which compares logprobs of the update with some computed without dropout, but "
                    f"{setting} is {rate:g}, so that they would differ before anything is learned. Set it to 0.",
                )


class DecoratedSourceConfig(SourceConfig):
    """Base of the settings of a source that decorates another, whose facts and run defaults are the inner source's."""

    decorates: ClassVar[str | None] = "of"

    of: Annotated[SourceConfig, Component("source")]
    """The source that is decorated."""

    @property
    def facts(self) -> SourceFacts:
        # The inner source refuses dropout itself.
        return replace(self.of.facts, compares_logprobs=False)


@dataclass(frozen=True)
class SourceContext:
    """Everything a source may build on.

    Attributes:
        config: The `RunConfig`.
        host: Enabled plugins. Create further components with `host.registry.create(kind, config, ...)`, and call hooks
            with `host.hooks`.
        tokenizer: The tokenizer of the model.
        layout: The requirements of the backend's parallelism for batches.
        row_limit: Most rows to look at of each dataset (`spurline plan` on large data); None reads all.
        progress: Is told what takes time.
    """

    config: Any
    host: HostView
    tokenizer: PreTrainedTokenizerBase
    layout: ParallelLayout
    row_limit: int | None = None
    progress: Progress = silent


@dataclass(frozen=True)
class FirstPrompt:
    """A prompt in the form that the model gets.

    Attributes:
        uid: Name of the prompt.
        token_ids: Tokens of the rendered prompt; empty if only the environment knows them.
        notes: Lines about its row, and about how answers are made and rewarded.
    """

    uid: str
    token_ids: Sequence[int]
    notes: Sequence[str] = ()


class BatchSource(ABC):
    """Supply one TrainingBatch per loop step; SFT, synchronous and async RL differ only here.

    Factory: `Class(config, context=SourceContext)`. It reads its data there, but starts nothing.
    A source with state between steps also implements `Stateful`; its state may hold a fingerprint of the data, so that
    a resume on other data is refused (`refuse_other_data`).

    total_steps: loop steps of the whole run; every source sets it.
    pure: True when `build(step)` is a pure function of (config, step) and changes no state, so that it may run ahead on
    another thread.
    reads_only_data: True when `build` needs no weights, though steps must be asked for in order: `spurline plan` builds
    the first.
    records: names of what it writes in the run directory; set aside with the metrics when a run begins again.
    """

    total_steps: int
    records: tuple[str, ...] = ()
    pure: bool = False
    reads_only_data: bool = False

    @abstractmethod
    def summary(self) -> Mapping[str, object]:
        """Return JSON-able facts about the data for plan and report; see `spurline.data.token_store`."""

    def start(self, step: int, backend: Backend) -> None:  # noqa: B027 - many have nothing to start
        """Start what builds batches; called once, after the checkpoint was loaded. step: the first to run."""

    def longest(self) -> Longest | None:
        """Return the longest sequence of all samples or prompts; None where it is not known beforehand.

        Compared with the model's positions before training.
        """
        return None

    def preview(self) -> Sequence[str]:
        """Return lines about what the model gets to see, for `spurline plan`; none where the batches show it."""
        return ()

    def first_prompts(self, count: int) -> Sequence[FirstPrompt]:
        """Return the first prompts of training, for people to look at; none where the batches show what is trained."""
        return ()

    @abstractmethod
    def build(self, step: int) -> TrainingBatch:
        """Return the batch of this 1-based step."""

    @abstractmethod
    def epoch(self, step: int) -> float:
        """Return the passes over the data completed when this step is done."""

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        """Act on the update of a step, such as by publishing weights, and return metrics."""
        return {}

    def flush(self) -> None:  # noqa: B027 - many write nothing
        """Force what was written into the run directory to disk. Called before each checkpoint, which covers it."""

    def evaluation(self) -> HeldOutEvaluation | None:
        """Return the evaluation of `data.eval` if it is not the loss on its tokens, else None.

        Called once, and only if there is held-out data.
        """
        return None

    def held_out(self, datasets: Sequence[DatasetConfig]) -> Samples | None:
        """Return the samples of held-out data if a sample is more than the tokens of one row, else None."""
        return None

    def sample_keys(self) -> NDArray[np.uint64] | None:
        """Return a hash of each training sample or prompt, equal for equal ones, to compare held-out data with.

        None if the training data is not read before training.
        """
        return None

    def given_up(self) -> Sequence[str]:
        """Return a line for each prompt that was given up, with the location of its row and the error."""
        return ()

    def close(self) -> None:  # noqa: B027 - many have nothing to stop
        """Stop all work of the source."""


def _of_inner(name: str) -> Any:
    """Make a method that asks the inner source of a decorator."""

    def ask(self: DecoratedSource, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    return ask


class DecoratedSource(BatchSource):
    """A source around another one, `inner`, which answers all that a subclass does not override; most override `build`.

    Its state is the state of the inner source. A subclass with more state overrides `state_dict` and `load_state_dict`
    and includes the inner state. It is not `pure` then, since its state would count batches that were built ahead.
    """

    def __init__(self, config: DecoratedSourceConfig, context: SourceContext) -> None:
        self.inner: BatchSource = context.host.registry.create("source", config.of, context=context)
        self.total_steps = self.inner.total_steps
        keeps_state = type(self).state_dict is not DecoratedSource.state_dict
        self.pure = self.inner.pure and not keeps_state
        self.records = self.inner.records
        # A pure source needs no weights, so neither does a decorator with state around it.
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
        """Return these samples as one batch; repeats are allowed."""
        ...

    def fingerprint(self) -> str:
        """Return a text that changes with any token, mask or boundary of a sample."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return JSON-able facts; see `spurline.data.token_store`."""
        ...

    def keys(self) -> NDArray[np.uint64]:
        """Return a hash of each of the first million samples, equal for equal samples."""
        ...

    def location(self, number: int) -> str:
        """Return the location of the row of a sample."""
        ...

    def answered(self) -> Sequence[DatasetToTokenize]:
        """Return the datasets as rows of a prompt with its answer, for held-out generation."""
        ...
