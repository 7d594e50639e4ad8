"""Kind `source`: where the batches of a run come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from spurline.config.section import ComponentConfig
from spurline.errors import Problem
from spurline.protocols.stateful import refuse_other_data

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from spurline.config.run_config import RunConfig
    from spurline.data.batch import TrainingBatch
    from spurline.plugins.host import PluginHost
    from spurline.protocols.backend import Backend
    from spurline.protocols.collator import ParallelLayout
    from spurline.protocols.tokenization import DatasetToTokenize


MODEL_DROPOUT = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop")
"""What decoder models of Hugging Face call their dropout."""


class SourceConfig(ComponentConfig):
    """Settings of a source."""

    kind: ClassVar[str] = "source"
    supplies: ClassVar[Literal["samples", "pairs", "rollouts"]] = "samples"
    """What the rows of its batches are: samples of the data, pairs of answers, or generated turns with advantages."""
    reads_streams: ClassVar[bool] = False
    """Whether its training data is made of streams (`StreamedDataset`) instead of datasets."""
    compares_logprobs: ClassVar[bool] = False
    """Whether logprobs of the update are compared with earlier ones, so that the run must have no dropout."""
    run_defaults: ClassVar[Mapping[str, str]] = {}
    """Top-level component settings and the names they take with this source when the file has none."""

    @property
    def num_prompts(self) -> int | None:
        """Prompts whose rollouts make up the batch of one step; None when the run's `batch_size` counts samples."""
        return None

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


@dataclass(frozen=True)
class SourceContext:
    """Everything a source may build on.

    host: enabled plugins; create further components with `host.registry.create(kind, config, ...)`, fire hooks with
    `host.hooks`. layout: what the backend's parallelism asks of batches. row_limit: look at no more rows than this of
    each dataset (`spurline plan` on large data); None reads all.
    """

    config: RunConfig
    host: PluginHost
    tokenizer: PreTrainedTokenizerBase
    layout: ParallelLayout
    row_limit: int | None = None


class BatchSource(ABC):
    """Supply one TrainingBatch per loop step; SFT, synchronous and async RL differ only here.

    Factory: `Class(config, context=SourceContext)`. It reads its data there, but starts nothing.
    A source with state between steps also implements `Stateful`; its state may hold a fingerprint of the data, so that
    a resume on other data is refused (`refuse_other_data`).
    """

    total_steps: int
    """Loop steps of the whole run."""

    pure: bool = False
    """True when `build(step)` is a pure function of (config, step), so that it may run ahead on another thread."""

    reads_only_data: bool = False
    """True when `build` needs no weights, though steps must be asked for in order: `spurline plan` builds the first."""

    @abstractmethod
    def summary(self) -> Mapping[str, object]:
        """JSON-able facts about the data for `spurline plan` and the report; see `spurline.data.token_store`."""

    def start(self, step: int, backend: Backend) -> None:  # noqa: B027 - many have nothing to start
        """Called once, after the checkpoint was loaded, before the batch of `step` (the first to run) is built."""

    @abstractmethod
    def build(self, step: int) -> TrainingBatch:
        """The batch of this 1-based step."""

    @abstractmethod
    def epoch(self, step: int) -> float:
        """Passes over the data completed when this step is done."""

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        """Called after the update of a step; RL publishes weights here. Returns metrics."""
        return {}

    def evaluation(self) -> HeldOutEvaluation | None:
        """How `data.eval` is measured, where that is not the loss on its tokens, else None.

        The run asks once, and only when there is held-out data.
        """
        return None

    def held_out(self) -> Samples | None:
        """The samples of `data.eval`, where a sample is not one row's tokens, else None; for the loss on them.

        The run asks once, and only when there is held-out data and no `evaluation`.
        """
        return None

    def given_up(self) -> Sequence[str]:
        """A line for each prompt given up, with the place of the row and the error, for summary.json and the report."""
        return ()

    def close(self) -> None:  # noqa: B027 - many have nothing to stop
        """Stop all work of the source."""


class HeldOutEvaluation(ABC):
    """Measures a backend on held-out data. Draws no random numbers that training could miss."""

    other_data: ClassVar[str]
    """What a person reads when a resume finds other held-out data than the checkpoint was evaluated on."""

    @abstractmethod
    def summary(self) -> Mapping[str, Any]:
        """JSON-able facts about the data; see `spurline.data.token_store`."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the held-out data does."""

    @abstractmethod
    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics, whose names begin with `eval/`, and sample answers: prompt, response, reference and scores."""

    def state_dict(self) -> dict[str, object]:
        """What a resume must find again: the held-out data."""
        return {"data": self.fingerprint()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Compare with the data of the checkpoint. Raises CheckpointError when they differ."""
        refuse_other_data(state, self.fingerprint(), self.other_data)


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

    def answered(self) -> Sequence[DatasetToTokenize]:
        """The datasets as rows of a prompt with its answer, for held-out generation."""
        ...
