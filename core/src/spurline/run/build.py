"""Build every component of a run, in the order in which mistakes are cheapest to find: data before weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import RunConfig
from spurline.data.tokenizer import load_tokenizer
from spurline.protocols.backend import Backend
from spurline.protocols.loss import Loss
from spurline.protocols.minibatches import MiniBatches
from spurline.protocols.source import BatchSource, HeldOutEvaluation, SourceContext
from spurline.protocols.tracker import Tracker, TrackerConfig
from spurline.run.evaluation import Evaluation
from spurline.trackers.configs import ConsoleTrackerConfig, JsonlTrackerConfig
from spurline.update.reduction import make_reduction
from spurline.update.update import Recipe, Update

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DataComponents:
    """What is built before any weight is loaded."""

    context: SourceContext
    source: BatchSource
    minibatches: MiniBatches
    loss: Loss
    evaluation: HeldOutEvaluation | None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.context.tokenizer

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.source.total_steps * self.minibatches.steps_per_batch()


@dataclass(frozen=True)
class Components:
    """Every component of a run."""

    data: DataComponents
    backend: Backend
    tracker_names: tuple[str, ...]
    trackers: tuple[Tracker, ...]

    def named_trackers(self) -> list[tuple[str, Tracker]]:
        """Trackers with the names the config gives them, in the order they are called."""
        return list(zip(self.tracker_names, self.trackers, strict=True))


def build_data(loaded: LoadedConfig, stack: ExitStack, row_limit: int | None = None) -> DataComponents:
    """Tokenizer, source, mini-batches, loss and evaluation. The stack closes them."""
    config, registry = loaded.config, loaded.host.registry
    context = SourceContext(config, loaded.host, load_tokenizer(config.model), config.backend.layout(), row_limit)
    source: BatchSource = registry.create("source", config.source, context=context)
    stack.callback(source.close)
    loss: Loss = registry.create("loss", config.loss)
    return DataComponents(
        context=context,
        source=source,
        minibatches=registry.create("minibatches", config.minibatches, run=config, layout=context.layout),
        loss=loss,
        evaluation=_evaluation(context, source, loss),
    )


def _evaluation(context: SourceContext, source: BatchSource, loss: Loss) -> HeldOutEvaluation | None:
    if not context.config.data.eval:
        return None
    own = source.evaluation()
    return Evaluation(context, loss, source.held_out()) if own is None else own


def build_components(loaded: LoadedConfig, stack: ExitStack) -> Components:
    """All components; the stack closes them in reverse order."""
    names, trackers = build_trackers(loaded)
    data = build_data(loaded, stack)
    backend = build_backend(loaded, stack, data.total_updates)
    return Components(data, backend, names, trackers)


def build_backend(loaded: LoadedConfig, stack: ExitStack, total_updates: int) -> Backend:
    """The backend alone, with freshly initialised or pretrained weights; the stack closes it."""
    backend: Backend = loaded.host.registry.create(
        "backend", loaded.config.backend, run=loaded.config, total_updates=total_updates
    )
    stack.callback(backend.close)
    return backend


def build_update(components: Components, loaded: LoadedConfig) -> Update:
    """What trains on each batch."""
    config, registry, data = loaded.config, loaded.host.registry, components.data
    policy = Recipe(
        minibatches=data.minibatches,
        loss=data.loss,
        reduce=make_reduction(config.reduction),
        temperature=config.source.sampling_temperature,
    )
    critic = None
    if config.critic is not None:
        minibatches = config.critic.minibatches
        critic = Recipe(
            minibatches=registry.create("minibatches", minibatches, run=config, layout=data.context.layout),
            loss=registry.create("loss", config.critic.loss),
        )
    return Update(components.backend, policy, critic)


def build_trackers(loaded: LoadedConfig) -> tuple[tuple[str, ...], tuple[Tracker, ...]]:
    """Names and trackers, not started; raises ConfigError when the library of one is missing."""
    configs = _tracker_configs(loaded.config)
    trackers: list[Tracker] = [loaded.host.registry.create("tracker", config) for config in configs]
    return tuple(config.name for config in configs), tuple(trackers)


def _tracker_configs(config: RunConfig) -> list[TrackerConfig]:
    """metrics.jsonl first, then the terminal, then what the config lists."""
    configs: list[TrackerConfig] = list(config.trackers)
    chosen = {tracker.name for tracker in configs}
    always = [tracker for tracker in (JsonlTrackerConfig(), ConsoleTrackerConfig()) if tracker.name not in chosen]
    return [*always, *configs]
