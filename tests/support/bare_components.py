"""A plugin with one small component of each kind that a run needs and core does not have.

With it a config loads and a run trains where core alone is installed: rows are lines of a file, tokens their bytes, and
the model is a table with a logit for each byte. The tests of core have it in the place of the default plugin `models`.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from spurline.config.paths import PathSetting
from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume, Section
from spurline.data.batch import TrainingBatch
from spurline.data.token_store import Tokenized, TokenStoreBuilder, summarize
from spurline.digests import FileDigest
from spurline.errors import DataError, NonFiniteLossError, Problem
from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline.plugins.host import COMMAND_GROUP, ENTRY_POINT_GROUP, InstalledPlugin
from spurline.plugins.registry import Registry
from spurline.protocols.backend import BackendConfig, LossSums, Role
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.evaluation import EvaluationConfig, EvaluationContext, MeasuresSamples
from spurline.protocols.loss import LossConfig, Objective, TokenLossInputs
from spurline.protocols.optimizer import OptimizerConfig
from spurline.protocols.order import SampleFacts
from spurline.protocols.schedule import ScheduleConfig
from spurline.protocols.source import BatchSource, SourceConfig, SourceContext
from spurline.protocols.stateful import refuse_other_data
from spurline.protocols.tokenization import DatasetToTokenize, TokenizationConfig
from spurline.protocols.tracker import RunInfo, TrackerConfig

NAME = "models"
"""A default plugin, so that configs need not list it."""
DISTRIBUTION = "bare-components"
BARE = InstalledPlugin(NAME, "bare_components", DISTRIBUTION, "1.2.3")
PLUGIN = Plugin(NAME, api=API_VERSION)
PAD = 0
VOCABULARY = 256


def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of the plugin and its command, as if it was installed."""
    found = {ENTRY_POINT_GROUP: (NAME, BARE.module), COMMAND_GROUP: ("shout", f"{BARE.module}:shout")}[group]
    return [importlib.metadata.EntryPoint(*found, group)._for(SimpleNamespace(name=DISTRIBUTION, version=BARE.version))]  # type: ignore[attr-defined]


metadata_of_environment = importlib.metadata.entry_points


def metadata_with(found: Callable[[str], Sequence[importlib.metadata.EntryPoint]]) -> Callable[..., Any]:
    """Return a stand-in for `importlib.metadata.entry_points` that finds these plugins and commands."""

    def entry_points(**chosen: Any) -> Any:
        group = chosen.get("group")
        return found(group) if group in (ENTRY_POINT_GROUP, COMMAND_GROUP) else metadata_of_environment(**chosen)

    return entry_points


def shout(words: str = "LOUD") -> None:
    """Print words in capitals."""
    print(words.upper())


class LinesConfig(DatasetConfig):
    """Lines of a text file."""

    name: str = "lines"
    path: Annotated[str, OnResume.FREE, PathSetting(reads=True)] = Field(min_length=1)
    """The file."""
    split: str = "train"
    """All of it, or `train[:N]` for the first lines."""

    @property
    def place(self) -> str:
        return self.path


class Lines:
    def __init__(self, config: LinesConfig, *, registry: Registry) -> None:
        self.label = Path(config.path).name
        if not Path(config.path).is_file():
            raise DataError(f"{config.path} does not exist.")
        lines = Path(config.path).read_text(encoding="utf-8").splitlines()
        self._lines = lines[: int(config.split[7:-1]) if ":" in config.split else None]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return {"text": self._lines[row]}

    def location(self, row: int) -> str:
        return f"{self.label}:{row + 1}"

    def fingerprint(self) -> str:
        return "\n".join(self._lines)


class BytesConfig(TokenizationConfig):
    """A token for each byte; the first has no loss."""

    name: str = "bytes"

    def load_tokenizer(self, model: Any) -> Any:
        return None


class Bytes:
    def __init__(self, config: BytesConfig, tokenizer: Any, data: Any) -> None:
        self._most = data.max_length

    def tokenize(self, datasets: Sequence[DatasetToTokenize]) -> Tokenized:
        builder = TokenStoreBuilder([each.dataset.label for each in datasets])
        for number, each in enumerate(datasets):
            for row in range(len(each.dataset)):
                tokens = [*each.dataset[row]["text"].encode()][: self._most]
                builder.add(tokens, [0, *[1] * (len(tokens) - 1)], source=number, row=row)
        return Tokenized(builder.build())


class Held:
    """The samples of some datasets. See `Samples`."""

    def __init__(self, configs: Sequence[DatasetConfig], context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
        create = registry.create
        rows = [DatasetToTokenize(create("dataset", each, registry=registry), each) for each in configs]
        tokenization = create("tokenization", run.tokenization, tokenizer=context.tokenizer, data=run.data)
        self.tokenized = tokenization.tokenize(rows)
        self._collator = create("collator", run.collator, pad_token_id=PAD, layout=context.layout)

    def sizes(self) -> tuple[int, ...]:
        return self.tokenized.store.sizes()

    def batch(self, numbers: NDArray[np.int64], *, training: bool) -> TrainingBatch:
        return self._collator.collate(self.tokenized.store.view(numbers), training=training)

    def fingerprint(self) -> str:
        return self.tokenized.store.fingerprint

    def summary(self) -> dict[str, Any]:
        return summarize(self.tokenized)


class TextConfig(SourceConfig):
    """Lines, `batch_size` of them a step, in the order that `data.order` says."""

    name: str = "text"
    keep: Annotated[int | None, OnResume.BY_NAME] = None
    """A setting that a resume may change by name."""


class RepeatedConfig(TextConfig):
    """Another source, which does the same."""

    name: str = "repeated"


class Text(BatchSource):
    pure = True

    def __init__(self, config: TextConfig, context: SourceContext) -> None:
        run = context.config
        self._held, self._size = Held(run.data.train, context), run.batch_size
        weights = tuple(each.weight for each in run.data.train)
        no_columns: Any = None
        facts = SampleFacts(self._held.sizes(), weights, self._size, no_columns, self._held.tokenized.store.lengths)
        self._per_epoch = facts.samples_per_epoch
        self._order = context.host.registry.create("order", run.data.order, samples=facts, seed=run.seed)
        self.total_steps = run.total_steps(self._per_epoch)

    def summary(self) -> Mapping[str, object]:
        return self._held.summary()

    def build(self, step: int) -> TrainingBatch:
        numbers = self._order.positions((step - 1) * self._size, step * self._size)
        return self._held.batch(numbers, training=True)

    def epoch(self, step: int) -> float:
        return step * self._size / self._per_epoch

    def state_dict(self) -> dict[str, object]:
        return {"data": self._held.fingerprint()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        refuse_other_data(state, self._held.fingerprint(), "The training data is another one.")


class LogLikelihoodConfig(LossConfig):
    """Negative log-likelihood."""

    is_nll = True
    name: str = "log_likelihood"


class LogLikelihood:
    needs: frozenset[str] = frozenset()

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return -inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        return {}

    def describe(self) -> str:
        return "the mean negative log-likelihood of the tokens"


class ScaleConfig(Section):
    """A section within a component."""

    factor: Annotated[float, OnResume.BY_NAME] = 1.0
    """A factor."""


class SquaredConfig(LossConfig):
    """Its square."""

    name: str = "squared"
    scale: ScaleConfig = ScaleConfig()
    """How much of it."""


class Squared(LogLikelihood):
    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        assert isinstance(self.config, SquaredConfig)
        return self.config.scale.factor * inputs.logprobs.square()


class BesideReferenceConfig(LossConfig):
    """The log-likelihood of the reference model minus the one of the policy."""

    name: str = "beside_reference"

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"reference"})


class BesideReference(LogLikelihood):
    needs = frozenset({"reference_logprobs"})

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return inputs.columns["reference_logprobs"] - inputs.logprobs


class HeldOutConfig(EvaluationConfig):
    """Mean loss on held-out lines."""

    name: str = "held_out"
    batch_size: int | None = None
    """Samples of a batch."""


class HeldOut(MeasuresSamples):
    def __init__(self, config: HeldOutConfig, context: EvaluationContext) -> None:
        self._held = Held(config.data, context.run)
        self.samples: Any = self._held

    def summary(self) -> Mapping[str, Any]:
        return self._held.summary()

    def fingerprint(self) -> str:
        return self._held.fingerprint()

    def metrics(self) -> set[str]:
        return {"loss"}

    def evaluate(self, backend: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
        batch = self._held.batch(np.arange(sum(self._held.sizes()), dtype=np.int64), training=False)
        sums = backend.evaluate(batch, Objective(LogLikelihood(LogLikelihoodConfig()), 1.0))
        return {"loss": sums.loss / sums.weight}, [{"prompt": "", "response": "held out"}]


class DescentConfig(OptimizerConfig):
    """Gradient descent with momentum."""

    name: str = "descent"
    momentum: Annotated[float, OnResume.BY_NAME] = Field(default=0.9, ge=0, lt=1)
    """Share of the earlier steps."""
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], OnResume.BY_NAME] = (0.9, 0.95)
    """Numbers in a list."""


def make_descent(config: DescentConfig, named_parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*named_parameters.values()], lr=config.learning_rate, momentum=config.momentum)


class FlatConfig(ScheduleConfig):
    """The peak all the time."""

    name: str = "flat"


class FallingConfig(ScheduleConfig):
    """Falls from the peak to a share of it."""

    name: str = "falling"
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """The share."""


class Flat:
    def __init__(self, config: ScheduleConfig) -> None:
        self._floor = config.min_ratio if isinstance(config, FallingConfig) else 1.0

    def factor(self, step: int, total: int) -> float:
        return max(self._floor, 1 - (1 - self._floor) * (step - 1) / total)


class PartConfig(Section):
    """A part of a backend that may be left out."""

    size: int = Field(default=1, gt=0)
    """A number."""
    names: tuple[str, ...] | Literal["all"] = "all"
    """Some names, or all."""


class TableConfig(BackendConfig):
    """A table of logits in this process."""

    name: str = "table"
    rows_per_microbatch: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Rows at once."""
    max_tokens_per_microbatch: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Tokens at once."""
    precision: Annotated[Literal["fp32", "fp64"], OnResume.BY_NAME] = "fp32"
    """The dtype of the table."""
    part: PartConfig | None = None
    """A part; null leaves it out."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.rows_per_microbatch is not None and self.max_tokens_per_microbatch is not None:
            yield Problem("rows_per_microbatch", "and max_tokens_per_microbatch exclude each other. Remove one.")


class OtherTableConfig(TableConfig):
    """Another backend, which does the same."""

    name: str = "other_table"


class Table:
    """A `Backend`. The logprob of a token depends on its byte alone, not on the context."""

    is_next_lost: ClassVar[bool] = False
    """If set, the loss of the next update is not finite."""

    def __init__(self, config: TableConfig, *, run: RunConfig, registry: Registry, total_updates: int) -> None:
        kind = torch.float64 if config.precision == "fp64" else torch.float32
        start = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(run.seed % 2**31), dtype=kind) / 100
        self.table = torch.nn.Parameter(start.clone())
        self._start, self._total, self._done = start, total_updates, 0
        self._optimizer = registry.create("optimizer", run.optimizer, named_parameters={"table": self.table})
        self._schedule, self._peak = registry.create("schedule", run.schedule), run.optimizer.learning_rate
        self._most_norm = run.optimizer.max_grad_norm

    def update(self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy") -> Mapping[str, float]:
        loss, sums = self._sums(batch, objective)
        if type(self).is_next_lost or not math.isfinite(sums.loss):
            raise NonFiniteLossError("loss is nan")
        self._optimizer.zero_grad()
        (loss / objective.normalizer).backward()
        norm = torch.nn.utils.clip_grad_norm_([self.table], self._most_norm or math.inf)
        self._done += 1
        rate = self._peak * self._schedule.factor(self._done, self._total)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        times = {"time/forward_backward": 0.001, "time/optimizer": 0.001}
        tokens = {"tokens": float(batch.tokens["segment_ids"].gt(0).sum()), "loss_tokens": float(sums.tokens)}
        return {"loss": sums.loss / objective.normalizer, "grad_norm": float(norm), "lr": rate, **tokens, **times}

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> LossSums:
        with torch.no_grad():
            return self._sums(batch, objective)[1]

    def logprobs(self, batch: TrainingBatch, role: Role = "policy", *, temperature: float = 1.0) -> Tensor:
        table = self._start if role == "reference" else self.table.detach()
        values = torch.log_softmax(table / temperature, 0)[batch.tokens["input_ids"]]
        return batch.drop_padding_rows(torch.where(batch.tokens["loss_weights"] > 0, values, 0.0).float())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table.detach()

    def write_weights(self, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
        save_file({"table": self.table.detach().to(dtype)}, folder / "model.safetensors")

    def facts(self) -> Mapping[str, int | str]:
        return {"parameters": VOCABULARY, "trainable_parameters": VOCABULARY, "device": "cpu"}

    def save(self, path: Path) -> Mapping[str, FileDigest]:
        momentum = self._optimizer.state[self.table].get("momentum_buffer", torch.zeros(0))
        counted = torch.tensor([self._done])
        save_file({"table": self.table.detach(), "momentum": momentum, "done": counted}, path / "table.safetensors")
        return {}

    def load(self, path: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
        found = load_file(path / "table.safetensors")
        with torch.no_grad():
            self.table.copy_(found["table"])
        self._done = int(found["done"])
        if len(found["momentum"]):
            self._optimizer.state[self.table]["momentum_buffer"] = found["momentum"]

    def close(self) -> None:
        return None

    def _sums(self, batch: TrainingBatch, objective: Objective) -> tuple[Tensor, LossSums]:
        """The weighted sum of the losses, differentiable and as numbers."""
        has_loss = batch.tokens["loss_weights"] > 0
        columns = {name: column[has_loss] for name, column in batch.tokens.items()}
        rows = torch.nonzero(has_loss)[:, 0]
        _, segments = torch.unique(rows * 10_000 + columns["segment_ids"], return_inverse=True)
        logprobs = torch.log_softmax(self.table / objective.temperature, 0)[columns["input_ids"]]
        inputs = TokenLossInputs(logprobs, segments, int(segments.max()) + 1 if len(segments) else 0, columns)
        weights = columns["loss_weights"]
        total = (weights * objective.loss.token_loss(inputs)).sum()
        return total, LossSums(float(total.detach()), float(weights.sum()), len(weights))


class NotedConfig(TrackerConfig):
    """Keeps the metrics it gets."""

    name: str = "noted"


class Noted:
    told: ClassVar[list[tuple[int, Mapping[str, float]]]] = []

    def __init__(self, config: NotedConfig) -> None:
        self.told.clear()

    def start(self, info: RunInfo) -> None:
        return None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append((step, metrics))

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None


FACTORIES: Mapping[type, str] = {
    LinesConfig: "Lines",
    BytesConfig: "Bytes",
    TextConfig: "Text",
    LogLikelihoodConfig: "LogLikelihood",
    HeldOutConfig: "HeldOut",
    DescentConfig: "make_descent",
    FlatConfig: "Flat",
    TableConfig: "Table",
}
"""The defaults of their kinds."""
FURTHER: Mapping[type, str] = {
    RepeatedConfig: "Text",
    SquaredConfig: "Squared",
    BesideReferenceConfig: "BesideReference",
    FallingConfig: "Flat",
    OtherTableConfig: "Table",
    NotedConfig: "Noted",
}


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    for config, factory in FACTORIES.items():
        registry.add(config, f"bare_components:{factory}", default=True)
    for config, factory in FURTHER.items():
        registry.add(config, f"bare_components:{factory}")
