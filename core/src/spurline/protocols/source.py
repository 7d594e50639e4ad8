"""Kind `source`: where the batches of a run come from."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from spurline.config.section import Component, ComponentConfig
from spurline.errors import Problem
from spurline.progress import Progress, silent
from spurline.protocols.stateful import Stateful

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from spurline.config.run_config import RunConfig
    from spurline.data.batch import TrainingBatch
    from spurline.plugins.host import PluginHost
    from spurline.protocols.backend import Backend
    from spurline.protocols.collator import ParallelLayout
    from spurline.protocols.dataset import DatasetConfig
    from spurline.protocols.evaluation import HeldOutEvaluation
    from spurline.protocols.rollout_engine import ColocatedEngine
    from spurline.protocols.tokenization import DatasetToTokenize
    from spurline.rl.configs import SamplingConfig


@dataclass(frozen=True)
class Longest:
    """The longest sequence that the data makes.

    tokens: of a sample, or of a prompt with a whole response. where: its row. prompt_tokens: of the prompt, where a
    response of up to `tokens - prompt_tokens` follows; None for a sample. setting: key path of what bounds `tokens`.
    """

    tokens: int
    where: str
    setting: str
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class LargestUpdate:
    """The most that one optimizer step may hold. row_length: tokens of its longest row. tokens: of all its rows."""

    row_length: int
    tokens: int


MODEL_DROPOUT = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop")
"""What decoder models of Hugging Face call their dropout."""


class SourceConfig(ComponentConfig):
    """Settings of a source."""

    kind: ClassVar[str] = "source"
    supplies: ClassVar[Literal["samples", "pairs", "rollouts"]] = "samples"
    """What the rows of its batches are: samples of the data, pairs of answers, or generated turns with advantages."""
    makes_attempts: ClassVar[bool] = False
    """Whether its source can make attempts at any prompts with the weights as they are, for evaluations."""
    reads_streams: ClassVar[bool] = False
    """Whether its training data is made of streams (`StreamedDataset`) instead of datasets."""
    compares_logprobs: ClassVar[bool] = False
    """Whether logprobs of the update are compared with earlier ones, so that the run must have no dropout."""
    run_defaults: ClassVar[Mapping[str, str]] = {}
    """Top-level component settings and the names they take with this source when the file has none."""

    decorates: ClassVar[str | None] = None
    """Setting that holds the source which this one decorates: the run takes that one's `run_defaults`."""

    @property
    def num_prompts(self) -> int | None:
        """Prompts whose rollouts make up the batch of one step; None when the run's `batch_size` counts samples."""
        return None

    @property
    def carried(self) -> Collection[str]:
        """Columns of the data's rows that its batches and groups have, for losses and advantages that read one."""
        return ()

    @property
    def reward_terms(self) -> Collection[str] | None:
        """Names of the reward terms of every attempt; None where only the attempts themselves tell."""
        return None

    @property
    def context_tokens(self) -> int | None:
        """Tokens of prompt and response that the settings of its engine allow; None where they set no limit."""
        return None

    @property
    def most_turns(self) -> int:
        """Responses that one attempt may hold; 1 where nothing is generated."""
        return 1

    @property
    def samples_by(self) -> SamplingConfig | None:
        """How responses are sampled, for whoever asks the trained model later; None where nothing is generated."""
        return None

    @property
    def uses_reference(self) -> bool:
        """Whether it asks the reference model itself, whatever the loss does."""
        return False

    def largest_update(self, run: RunConfig, prompt_tokens: int, context: int | None) -> LargestUpdate | None:
        """What responses as long as they may get make of an optimizer step; None where the batches themselves tell.

        prompt_tokens: of the longest prompt. context: tokens that the model can see; None without a limit.
        """
        return None

    def generation_memory(self, run: RunConfig, prompt_tokens: int, context: int | None) -> dict[str, int]:
        """Bytes by part that generating takes on the trainer's device; {} where nothing is generated there."""
        return {}

    def colocated_engine(self, run: RunConfig, prompt_tokens: int, context: int | None) -> ColocatedEngine | None:
        """The engine that has the trainer's devices by turns with it, if there is one. Arguments as above."""
        return None

    def generation_notes(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Sequence[str]:
        """Sentences about where it generates, for `spurline plan`."""
        return ()

    @property
    def sampling_temperature(self) -> float:
        """Temperature that its tokens were sampled at; 1 when they were not."""
        return 1.0

    @property
    def without_critic(self) -> str | None:
        """What has no use for a critic, in words for messages; None when a critic's values are read."""
        return f"the source '{self.name}'"

    @property
    def transport(self) -> str | None:
        """Name of the `weight_sync` that was chosen for its engines; None where none was."""
        return None

    @property
    def has_colocated_engines(self) -> bool:
        """Whether its engines have the devices of the backend by turns with it."""
        return False

    @property
    def engines_elsewhere(self) -> bool:
        """Whether its engines may be on other machines than this process."""
        return False

    @property
    def update_limit_s(self) -> float | None:
        """Seconds that one of its engines may take for one bucket of weights before it is ended; None where nothing
        ends it."""
        return None

    @property
    def sends_adapters(self) -> bool | None:
        """Whether its engines are to be sent adapters alone; None leaves it to what they can take."""
        return None

    @property
    def replays_experts(self) -> bool:
        """Whether its batches bring the experts that the engine chose, so that models compute with these."""
        return False

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        """Dropout that is switched on in a run that compares logprobs.

        An update with dropout differs from what it is compared with before any weight has changed: probability ratios
        are not 1 and margins between answers are noise. Dropout of the model's own `config.json` is not known here.
        """
        if not self.compares_logprobs:
            return
        overrides = run.model.config_overrides
        found = {f"model.config_overrides.{name}": overrides.get(name) for name in MODEL_DROPOUT}
        found |= {f"backend.{path}": rate for path, rate in run.backend.dropout_rates.items()}
        for setting, rate in found.items():
            if isinstance(rate, (int, float)) and rate > 0:
                yield Problem(
                    "name",
                    f"is {self.name}, which compares logprobs of the update with some computed without dropout, but "
                    f"{setting} is {rate:g}, so that they would differ before anything is learned. Set it to 0.",
                )


def where_decorated(source: Mapping[str, Any], text: str) -> str:
    """Name settings of a decorated source where they stand.

    Args:
        source: The resolved section `source`.
        text: A message, in which `source.NAME` is a setting of a source that nothing decorates.

    Returns:
        The message with `source.of.NAME` where the source in `of` has the setting and its decorator has not.
    """

    def placed(match: re.Match[str]) -> str:
        path, section = "source", source
        while match[1] not in section and isinstance(section.get("of"), Mapping):
            path, section = f"{path}.of", section["of"]
        return f"{path}.{match[1]}" if match[1] in section else match[0]

    return re.sub(r"\bsource\.(\w+)", placed, text)


class DecoratedSourceConfig(SourceConfig):
    """Base of the settings of a source that decorates another: what the run asks is what the inner source says."""

    decorates: ClassVar[str | None] = "of"

    of: Annotated[SourceConfig, Component("source")]
    """The source that is decorated."""

    @property
    def supplies(self) -> Literal["samples", "pairs", "rollouts"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.supplies

    @property
    def makes_attempts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.makes_attempts

    @property
    def reads_streams(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.reads_streams

    @property
    def carried(self) -> Collection[str]:
        return self.of.carried

    @property
    def reward_terms(self) -> Collection[str] | None:
        return self.of.reward_terms

    @property
    def num_prompts(self) -> int | None:
        return self.of.num_prompts

    @property
    def sampling_temperature(self) -> float:
        return self.of.sampling_temperature

    @property
    def without_critic(self) -> str | None:
        return self.of.without_critic

    @property
    def transport(self) -> str | None:
        return self.of.transport

    @property
    def has_colocated_engines(self) -> bool:
        return self.of.has_colocated_engines

    @property
    def engines_elsewhere(self) -> bool:
        return self.of.engines_elsewhere

    @property
    def update_limit_s(self) -> float | None:
        return self.of.update_limit_s

    @property
    def sends_adapters(self) -> bool | None:
        return self.of.sends_adapters

    @property
    def replays_experts(self) -> bool:
        return self.of.replays_experts

    @property
    def context_tokens(self) -> int | None:
        return self.of.context_tokens

    @property
    def most_turns(self) -> int:
        return self.of.most_turns

    @property
    def samples_by(self) -> SamplingConfig | None:
        return self.of.samples_by

    @property
    def uses_reference(self) -> bool:
        return self.of.uses_reference

    def largest_update(self, run: RunConfig, prompt_tokens: int, context: int | None) -> LargestUpdate | None:
        return self.of.largest_update(run, prompt_tokens, context)

    def generation_memory(self, run: RunConfig, prompt_tokens: int, context: int | None) -> dict[str, int]:
        return self.of.generation_memory(run, prompt_tokens, context)

    def colocated_engine(self, run: RunConfig, prompt_tokens: int, context: int | None) -> ColocatedEngine | None:
        return self.of.colocated_engine(run, prompt_tokens, context)

    def generation_notes(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Sequence[str]:
        return self.of.generation_notes(run, prompt_tokens, context)


@dataclass(frozen=True)
class SourceContext:
    """Everything a source may build on.

    host: enabled plugins; create further components with `host.registry.create(kind, config, ...)`, fire hooks with
    `host.hooks`. layout: what the backend's parallelism asks of batches. row_limit: look at no more rows than this of
    each dataset (`spurline plan` on large data); None reads all. progress: told what takes time.
    """

    config: RunConfig
    host: PluginHost
    tokenizer: PreTrainedTokenizerBase
    layout: ParallelLayout
    row_limit: int | None = None
    progress: Progress = silent


@dataclass(frozen=True)
class FirstPrompt:
    """What the model is given before it generates. token_ids: of the rendered prompt; none where only the environment
    knows it. notes: lines about its row and what it is answered with."""

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
        """JSON-able facts about the data for `spurline plan` and the report; see `spurline.data.token_store`."""

    def start(self, step: int, backend: Backend) -> None:  # noqa: B027 - many have nothing to start
        """Called once, after the checkpoint was loaded, before the batch of `step` (the first to run) is built."""

    def longest(self) -> Longest | None:
        """The longest sequence of all samples, or of the prompts looked at; None where it is not known beforehand.

        Compared with the model's positions before training.
        """
        return None

    def preview(self) -> Sequence[str]:
        """Lines about what the model gets to see, for `spurline plan`; none where the batches show it."""
        return ()

    def first_prompts(self, count: int) -> Sequence[FirstPrompt]:
        """The first prompts of training, for people to look at; none where the batches show what is trained."""
        return ()

    @abstractmethod
    def build(self, step: int) -> TrainingBatch:
        """The batch of this 1-based step."""

    @abstractmethod
    def epoch(self, step: int) -> float:
        """Passes over the data completed when this step is done."""

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        """Called after the update of a step; RL publishes weights here. Returns metrics."""
        return {}

    def flush(self) -> None:  # noqa: B027 - many write nothing
        """Make what was written into the run directory durable; called before each checkpoint, which covers it."""

    def evaluation(self) -> HeldOutEvaluation | None:
        """How `data.eval` is measured, where that is not the loss on its tokens, else None.

        The run asks once, and only when there is held-out data.
        """
        return None

    def held_out(self, datasets: Sequence[DatasetConfig]) -> Samples | None:
        """The samples of held-out data, where a sample is not one row's tokens, else None; for evaluations of it."""
        return None

    def sample_keys(self) -> NDArray[np.uint64] | None:
        """Return hashes that are equal for equal samples, or prompts, of the training data, as far as it is read before
        training; None where it is not. Held-out data is compared with them."""
        return None

    def given_up(self) -> Sequence[str]:
        """A line for each prompt given up, with the place of the row and the error, for summary.json and the report."""
        return ()

    def close(self) -> None:  # noqa: B027 - many have nothing to stop
        """Stop all work of the source."""


class DecoratedSource(BatchSource):
    """A source around another one, `inner`, which answers all that a subclass does not override; most override `build`.

    Its state is the inner source's. One with a state of its own overrides `state_dict` and `load_state_dict` and keeps
    both; then it is not `pure`, since batches built ahead would be in the checkpoint.
    """

    def __init__(self, config: DecoratedSourceConfig, context: SourceContext) -> None:
        self.inner: BatchSource = context.host.registry.create("source", config.of, context=context)
        self.total_steps = self.inner.total_steps
        keeps_state = type(self).state_dict is not DecoratedSource.state_dict
        self.pure = self.inner.pure and not keeps_state
        self.records = self.inner.records
        # What a pure source builds needs no weights, nor does what a decorator with state makes of it.
        self.reads_only_data = self.inner.reads_only_data or self.inner.pure

    def summary(self) -> Mapping[str, object]:
        return self.inner.summary()

    def longest(self) -> Longest | None:
        return self.inner.longest()

    def preview(self) -> Sequence[str]:
        return self.inner.preview()

    def first_prompts(self, count: int) -> Sequence[FirstPrompt]:
        return self.inner.first_prompts(count)

    def start(self, step: int, backend: Backend) -> None:
        self.inner.start(step, backend)

    def build(self, step: int) -> TrainingBatch:
        return self.inner.build(step)

    def epoch(self, step: int) -> float:
        return self.inner.epoch(step)

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        return self.inner.after_update(step, backend)

    def flush(self) -> None:
        self.inner.flush()

    def evaluation(self) -> HeldOutEvaluation | None:
        return self.inner.evaluation()

    def held_out(self, datasets: Sequence[DatasetConfig]) -> Samples | None:
        return self.inner.held_out(datasets)

    def sample_keys(self) -> NDArray[np.uint64] | None:
        return self.inner.sample_keys()

    @property
    def generates_with_copies(self) -> bool:
        """See `spurline.rl.held_out.MakesAttempts`."""
        return bool(getattr(self.inner, "generates_with_copies", False))

    def make_attempts(self, prompts: Sequence[Any], held_out: Any) -> Sequence[Any]:
        """See `spurline.rl.held_out.MakesAttempts`. Asked only where the inner config says that it makes any."""
        inner: Any = self.inner
        return inner.make_attempts(prompts, held_out)

    def longest_held_out(self, prompts: Any) -> Longest | None:
        """See `spurline.rl.held_out.MakesAttempts`."""
        inner: Any = self.inner
        return inner.longest_held_out(prompts)

    def given_up(self) -> Sequence[str]:
        return self.inner.given_up()

    def close(self) -> None:
        self.inner.close()

    def state_dict(self) -> dict[str, object]:
        return self.inner.state_dict() if isinstance(self.inner, Stateful) else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if isinstance(self.inner, Stateful):
            self.inner.load_state_dict(state)


class Samples(Protocol):
    """Tokenized data that batches are drawn from, whatever makes up one sample.

    Samples are counted from 0, dataset after dataset. Pure: any batch can be made at any time, on any thread.
    """

    def sizes(self) -> tuple[int, ...]:
        """Number of samples from each dataset."""
        ...

    def batch(self, numbers: NDArray[np.int64], *, training: bool) -> TrainingBatch:
        """These samples as one batch; repeats are allowed."""
        ...

    def fingerprint(self) -> str:
        """Changes when any token, mask or border of a sample does."""
        ...

    def summary(self) -> dict[str, Any]:
        """JSON-able facts; see `spurline.data.token_store`."""
        ...

    def keys(self) -> NDArray[np.uint64]:
        """Return a hash of each sample, equal for equal ones; of the first million."""
        ...

    def location(self, number: int) -> str:
        """Return where the row of a sample is."""
        ...

    def answered(self) -> Sequence[DatasetToTokenize]:
        """The datasets as rows of a prompt with its answer, for held-out generation."""
        ...
