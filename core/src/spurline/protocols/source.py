"""What a batch source is given when it is built.

Kind `source`: where the batches of a run come from. SFT, synchronous and async RL differ only here.

Held-out evaluation as a run sees it, whatever it measures.

Tokenized data as sources and evaluation draw batches from it, whatever makes up one sample.

Dropout in runs that compare logprobs of the update with earlier ones.

Logprobs to compare with are computed without dropout. An update with dropout then differs from them before any weight
has changed: probability ratios are not 1 and margins between answers are noise. Dropout that the model's own
`config.json` brings is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig
from spurline.errors import Problem

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


class SourceConfig(ComponentConfig):
    """Settings of a source."""

    kind: ClassVar[str] = "source"
    supplies: ClassVar[Literal["samples", "pairs", "rollouts"]] = "samples"
    """What the rows of its batches are: samples of the data, pairs of answers, or generated turns with advantages."""
    run_defaults: ClassVar[Mapping[str, str]] = {}
    """Top-level component settings and the names they take with this source when the file has none."""


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


class BatchSource(Protocol):
    """Supply one TrainingBatch per loop step.

    Factory: `Class(config, context=SourceContext)`. It reads its data there, but starts nothing.
    A source with state between steps also implements `Stateful`; its state may hold a fingerprint of the data, so that
    a resume on other data is refused.
    """

    total_steps: int
    """Loop steps of the whole run."""

    pure: bool
    """True when `build(step)` is a pure function of (config, step), so that it may run ahead on another thread."""

    def summary(self) -> Mapping[str, object]:
        """JSON-able facts about the data for `spurline plan` and the report; see `spurline.data.summary`."""
        ...

    def start(self, step: int, backend: Backend) -> None:
        """Called once, after the checkpoint was loaded, before the batch of `step` (the first to run) is built."""
        ...

    def build(self, step: int) -> TrainingBatch:
        """The batch of this 1-based step."""
        ...

    def epoch(self, step: int) -> float:
        """Passes over the data completed when this step is done."""
        ...

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        """Called after the update of a step; RL publishes weights here. Returns metrics."""
        ...

    def close(self) -> None:
        """Stop all work of the source."""
        ...


@runtime_checkable
class GivesUpPrompts(Protocol):
    """A source that leaves prompts out after repeated failures, and can say which and why."""

    def given_up(self) -> Sequence[str]:
        """One line for each so far, with the place of the row and the error; for summary.json and the report."""
        ...


class HeldOutEvaluation(Protocol):
    """Measures a backend on held-out data. Draws no random numbers that training could miss."""

    def summary(self) -> Mapping[str, Any]:
        """JSON-able facts about the data; see `spurline.data.summary`."""
        ...

    def state_dict(self) -> dict[str, object]:
        """What a resume must find again: the held-out data."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Compare with the data of the checkpoint. Raises CheckpointError when they differ."""
        ...

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics, whose names begin with `eval/`, and sample answers: prompt, response, reference and scores."""
        ...


@runtime_checkable
class EvaluatesItself(Protocol):
    """A source whose held-out data is measured in its own way, not by the loss on tokens."""

    def evaluation(self) -> HeldOutEvaluation:
        """The evaluation of `data.eval`; asked for once, and only when there is held-out data."""
        ...


class Samples(Protocol):
    """Samples counted from 0, dataset after dataset. Pure: any batch can be made at any time, on any thread."""

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
        """JSON-able facts; see `spurline.data.summary`."""
        ...

    def answered(self) -> Sequence[DatasetToTokenize]:
        """The datasets as rows of a prompt with its answer, for held-out generation."""
        ...


@runtime_checkable
class ReadsHeldOut(Protocol):
    """A source that reads `data.eval` in its own way, because its samples are not one row's tokens."""

    def held_out(self) -> Samples:
        """The samples of `data.eval`; asked for once, and only when there is held-out data."""
        ...


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
