"""Build every component of a run: data before weights, so that mistakes are found early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import RunConfig
from spurline.config.section import sections_within
from spurline.data.batch import TOKEN_COLUMNS
from spurline.errors import ConfigError, listing
from spurline.plugins.registry import Registry, resolve
from spurline.progress import Progress, silent, waiting
from spurline.protocols.backend import Backend, Role
from spurline.protocols.evaluation import EvaluationContext
from spurline.protocols.loss import Loss
from spurline.protocols.minibatches import MiniBatches
from spurline.protocols.source import BatchSource, SourceContext
from spurline.protocols.tracker import Tracker
from spurline.run.checkpoints.hook_state import HookStates
from spurline.run.evaluations.evaluation import ScheduledEvaluation, build_evaluations
from spurline.run.evaluations.watched import check_watched
from spurline.trackers.configs import ConsoleTrackerConfig, JsonlTrackerConfig
from spurline.trackers.readout import quantity
from spurline.update.reduction import make_reduction
from spurline.update.update import Recipe, Update, columns_from_source


@dataclass(frozen=True)
class Done:
    """Progress that a run has already made when it starts: the last finished step, and the optimizer steps by role."""

    step: int = 0
    updates: Mapping[Role, int] = field(default_factory=dict["Role", int])


@dataclass(frozen=True)
class DataComponents:
    """Components that are built before any weight is loaded."""

    context: SourceContext
    source: BatchSource
    minibatches: MiniBatches
    loss: Loss
    evaluations: tuple[ScheduledEvaluation, ...]
    """If there is an evaluation of `data.eval`, it comes first."""

    def total_updates(self, done: Done = Done()) -> int:
        """Return the number of the policy's optimizer steps in the whole run, including `done`."""
        left = max(0, self.source.total_steps - done.step)
        return done.updates.get("policy", 0) + left * self.minibatches.steps_per_batch()


@dataclass(frozen=True)
class Components:
    """Every component of a run."""

    data: DataComponents
    backend: Backend
    trackers: dict[str, Tracker]
    """The trackers by name, in the order in which they are called."""
    notes: tuple[str, ...] = ()
    """Notes to show the user at the start."""
    hook_states: HookStates = field(default_factory=HookStates)
    """State that hooks of plugins pass to `Run.keep_state`."""


def build_data(
    loaded: LoadedConfig, stack: ExitStack, row_limit: int | None = None, progress: Progress = silent
) -> DataComponents:
    """Build tokenizer, source, mini-batches, loss and evaluations. The stack closes them."""
    config, registry = loaded.config, loaded.host.registry
    loss: Loss = registry.create("loss", config.loss)
    _check_columns(config, registry, "loss", loss)
    if config.trained_critic is not None:
        _check_columns(config, registry, "critic.loss", registry.create("loss", config.trained_critic.loss))
    progress("loading the tokenizer")
    tokenizer = config.tokenization.load_tokenizer(config.model)
    progress("reading the data")
    context = SourceContext(config, loaded.host, tokenizer, config.backend.layout(), row_limit, progress)
    source: BatchSource = registry.create("source", config.source, context=context)
    stack.callback(source.close)
    return DataComponents(
        context=context,
        source=source,
        minibatches=registry.create("minibatches", config.minibatches, run=config, layout=context.layout),
        loss=loss,
        evaluations=build_evaluations(EvaluationContext(context, source, loss), stack),
    )


def _check_columns(config: RunConfig, registry: Registry, setting: str, loss: Loss) -> None:
    """Raise ConfigError if the source's batches lack a column that the loss needs."""
    has = {*config.source.facts.columns, *config.source.facts.carried}
    missing = columns_from_source(loss) - {*TOKEN_COLUMNS, *has}
    if missing:
        raise ConfigError.at(
            f"{setting}.name",
            f"is {loss.config.name}, which needs {listing(missing)}, but the batches of source '{config.source.name}' "
            f"have of such columns: {listing(has)}. Choose another loss or source. source.carry passes numbers of the "
            "rows on, and your own source names its columns in SourceFacts.columns.",
        )


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`. A component is None if `attempt` has collected its error."""

    trackers: dict[str, Tracker] | None
    data: DataComponents | None
    notes: Mapping[str, Sequence[str]]
    """Notes for the user, by subject: `data`, `steps` and `backend`."""


def prepare(
    loaded: LoadedConfig,
    stack: ExitStack,
    row_limit: int | None = None,
    progress: Progress = silent,
    done: Done = Done(),
    attempt: Callable[[Callable[[], Any]], Any] = lambda part: part(),
) -> Prepared:
    """Build and check everything that needs no weights. A run does this first, and `spurline plan` does only this.

    Args:
        loaded: The config.
        stack: Closes the components.
        row_limit: Rows of each dataset that are read; None reads all.
        progress: Called when slow work begins.
        done: Progress of the run that is resumed.
        attempt: Called with a function for each part of the work. By default, it calls the function. `spurline plan`
            passes an `attempt` that collects a part's error and returns None, so that all parts are tried.
    """
    config = loaded.config
    trackers = attempt(lambda: build_trackers(loaded))
    # Check the model before the data, which may take hours to tokenize.
    attempt(lambda: config.backend.check_trainable(config))
    data: DataComponents | None = attempt(lambda: build_data(loaded, stack, row_limit, progress))
    notes = {"backend": attempt(lambda: config.backend.notes(config)) or ()}
    if data is not None:
        lengths = attempt(lambda: config.backend.check_lengths(loaded, data.source, data.evaluations)) or ()
        templates = attempt(lambda: config.tokenization.notes(config.model, data.context.tokenizer)) or ()
        notes |= {"data": (*lengths, *templates), "steps": config.schedule.notes(data.total_updates(done))}
        attempt(lambda: check_watched(config, data.evaluations))
    return Prepared(trackers, data, notes)


_REMARKS = {
    "kernels": "fused kernels compute {}",
    "attention": "attention is computed by {}",
    "pads": "attention is computed on padded rows, which takes longer, since {}",
    "reads": "this model reads {}, with padding, since packed rows would mix sequences (docs/models.md)",
    "draws": "this model's config asks for dropout ({}), so gradients depend on how a batch is cut. Set these to 0 "
    "under model.config_overrides to train without dropout",
}
"""What a run says at its start about a fact of its backend."""


def build_components(
    loaded: LoadedConfig, prepared: Prepared, stack: ExitStack, progress: Progress = silent, done: Done = Done()
) -> Components:
    """Add the backend to prepared components. The stack closes it, and `progress` gets a line for each slow part."""
    data, trackers = prepared.data, prepared.trackers
    assert data is not None, "the data was not built"
    assert trackers is not None, "the trackers were not built"
    for _, section in sections_within(loaded.config):
        section.await_services(loaded.config, progress)
    # Reserve resources before anything loads. Otherwise ranks could take the part of a cluster that engines need.
    for name, section in loaded.host.registry.sections.items():
        if section.held is not None:
            stack.enter_context(resolve(section.held, f"section '{name}'")(loaded.config))
    ranks = loaded.config.backend.rank_request()
    starting = "" if ranks is None else f"starting {ranks.count} ranks and "
    drawing = "drawing weights" if loaded.config.model.init == "random" else "loading weights"
    with waiting(progress, f"{starting}{drawing}"):
        backend = build_backend(loaded, stack, data.total_updates(done))
    facts = backend.facts()
    if "parameters" in facts:
        progress(f"{quantity(int(facts['parameters']))} parameters, on {facts.get('device', 'its devices')}")
    for name, text in _REMARKS.items():
        if name in facts:
            progress(text.format(facts[name]))
    notes = (note for subject in ("data", "steps", "backend") for note in prepared.notes[subject])
    return Components(data, backend, trackers, tuple(notes))


def build_backend(loaded: LoadedConfig, stack: ExitStack, total_updates: int) -> Backend:
    """Return only the backend, with its initial weights. The stack closes it."""
    config, registry = loaded.config, loaded.host.registry
    backend: Backend = registry.create(
        "backend", config.backend, run=config, registry=registry, total_updates=total_updates
    )
    stack.callback(backend.close)
    return backend


def build_update(components: Components, loaded: LoadedConfig, done: Done = Done()) -> Update:
    config, registry, data = loaded.config, loaded.host.registry, components.data
    policy = Recipe(
        minibatches=data.minibatches,
        loss=data.loss,
        reduce=make_reduction(config.reduction),
        temperature=config.source.facts.sampling_temperature,
    )
    critic = None
    if config.trained_critic is not None:
        minibatches = config.trained_critic.minibatches
        critic = Recipe(
            minibatches=registry.create("minibatches", minibatches, run=config, layout=data.context.layout),
            loss=registry.create("loss", config.trained_critic.loss),
        )

    def stepped(update: int, role: Role) -> None:
        loaded.host.hooks.on_optimizer_step(update=update, role=role)

    return Update(components.backend, policy, critic, stepped, done.updates)


def build_trackers(loaded: LoadedConfig) -> dict[str, Tracker]:
    """Return trackers by name, not started: metrics.jsonl, the terminal, and then the trackers of the config.

    Raises ConfigError if a tracker's library is missing.
    """
    # The config may list one of the first two with other settings.
    listed = (JsonlTrackerConfig(), ConsoleTrackerConfig(), *loaded.config.trackers)
    configs = {config.name: config for config in listed}
    return {name: loaded.host.registry.create("tracker", config) for name, config in configs.items()}


def summarize_run(components: Components, loaded: LoadedConfig) -> dict[str, Any]:
    """Return facts about data, model and versions, for summary.json."""
    data: dict[str, Any] = {"train": dict(components.data.source.summary())}
    for evaluation in components.data.evaluations:
        data[evaluation.label] = dict(evaluation.held_out.summary())
    return {
        "data": data,
        **components.backend.facts(),
        "versions": loaded.host.versions(),
        "total_steps": components.data.source.total_steps,
        "records": list(components.data.source.records),
    }
