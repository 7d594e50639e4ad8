"""Two-phase loading: read `plugins`, load them, then validate everything against the model they complete.

In: a file path or a mapping, and `key=value` overrides. Out: `LoadedConfig`, the frozen config with the plugin host it
was validated against. Errors list every problem at once, with file, line, key path and nearest fix.
"""

from __future__ import annotations

import re
import shlex
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from spurline.config.assembly import assemble
from spurline.config.document import Document, apply_overrides, plain, read_document
from spurline.config.error_messages import explain
from spurline.config.functions import forget
from spurline.config.hidden import hide_secrets
from spurline.config.objects import TriesObjects, is_rows
from spurline.config.paths import ConfigPlace, expanded
from spurline.config.run_config import RunConfig
from spurline.config.section import BARE, as_list, expand_shorthand, sections_within
from spurline.errors import ConfigError, PluginError, Problem, UserError, line_of
from spurline.plugins.host import InstalledPlugin, PluginHost, installed_plugins
from spurline.plugins.official import section_names
from spurline.plugins.registry import Registry, resolve
from spurline.protocols.source import SourceConfig, where_decorated


@dataclass(frozen=True)
class LoadedConfig:
    """A validated configuration.

    config: frozen values. host: the loaded plugins. origin: file name for messages.
    file: where it was read from, None for a mapping. overrides: what was set besides, as given.
    """

    config: RunConfig
    host: PluginHost
    origin: str
    file: Path | None = None
    overrides: tuple[str, ...] = ()

    def resolved(self) -> dict[str, Any]:
        """Every setting, defaults included, as plain JSON-able values to be written down; secrets are hidden."""
        return hide_secrets(self.config.model_dump(mode="json"))

    def train_command(self, *options: str) -> str | None:
        """The command line that trains this config, with further options; None when it came from no file."""
        if self.file is None:
            return None
        sets = [word for override in self.overrides for word in ("--set", override)]
        return shlex.join(["spurline", "train", str(self.file), *sets, *options])


def as_loaded(config: LoadedConfig | Path | str | Mapping[str, Any]) -> LoadedConfig:
    """Return a loaded config as it is, and load what `load_config` takes."""
    return config if isinstance(config, LoadedConfig) else load_config(config)


def load_config(
    source: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    available: Mapping[str, InstalledPlugin] | None = None,
    recorded: bool = False,
) -> LoadedConfig:
    """Load and validate a configuration.

    source: path of a YAML or TOML file, or a mapping of the same shape, in which rows, functions, a model and a
    tokenizer may stand for their paths; all but functions are written below its run_dir, once the config is valid.
    overrides: `key.path=value` strings. available: installed plugins; read from package metadata when None.
    recorded: this is what a run wrote down, every default spelled out; it passed the checks across sections when it
    started, and they are not made again.
    Raises ConfigError listing all problems, PluginError when a plugin cannot be loaded, UserError for other arguments.
    """
    _check_arguments(source, overrides)
    document = Document("config", plain(source)) if isinstance(source, Mapping) else read_document(Path(source))
    apply_overrides(document, overrides)
    host = _loaded_plugins(document, available)
    model = config_model(host)
    values = _with_defaults_of_source(document.values, host.registry)
    values = _without_absent_sections(values, host.registry, only_null=not recorded)
    folder = None if isinstance(source, Mapping) else Path(source).absolute().parent
    trial = _trial(host.registry, document.values) if isinstance(source, Mapping) and not recorded else None
    place = ConfigPlace(folder, recorded, None if recorded else document.values, trial)
    # A closure may hold a model: it goes with the last copy of this config, all of which have the host.
    weakref.finalize(host, forget, place.functions)
    try:
        config = model.model_validate(values, context=place)
        problems = [] if recorded else list(_cross_field_problems(config))
        if problems:
            raise _config_error(problems, document)
        if trial is not None and trial.has_met:
            config = model.model_validate(values, context=replace(place, objects=trial.keeper()))
    except ValidationError as error:
        known = installed_plugins() if available is None else available
        unlisted = sorted(set(known) - set(host.plugins))
        raise _config_error(explain(error, model, host.registry, unlisted=unlisted), document) from None
    file = None if isinstance(source, Mapping) else Path(source)
    return LoadedConfig(config, host, document.origin, file, tuple(overrides))


def _check_arguments(source: object, overrides: object) -> None:
    if not isinstance(source, (str, PathLike, Mapping)):
        raise UserError(
            "load_config takes the path of a config file or a mapping of settings, and Run also what load_config "
            f"returned. This is {type(source).__name__}."
        )
    texts = cast("Sequence[Any]", overrides) if isinstance(overrides, Sequence) else [None]
    if isinstance(overrides, str) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"overrides is a list of texts, such as ['steps=5'], and not {overrides!r}.")


def _without_absent_sections(values: Mapping[str, Any], registry: Registry, *, only_null: bool) -> dict[str, Any]:
    """The values less sections of plugins that are not here: a run writes down every default.

    only_null: keep those that say something.
    """
    kept = dict(values)
    for owner, _, key in (name.rpartition(".") for name in section_names() if name not in registry.sections):
        section = kept.get(owner) if owner else kept
        if isinstance(section, Mapping) and key in section and not (only_null and section[key] is not None):
            rest = {name: value for name, value in cast("Mapping[str, Any]", section).items() if name != key}
            kept = kept | {owner: rest} if owner else rest
    return kept


def _trial(registry: Registry, values: Mapping[str, Any]) -> TriesObjects | None:
    """What judges objects that stand for paths; None where no plugin keeps them."""
    if registry.keeper is None:
        return None
    return resolve(registry.keeper, "what keeps objects of a Python program")(_run_dir(values))


def _run_dir(values: Mapping[str, Any]) -> Path:
    """Of a run with these settings, absolute; as it is written where it is none."""
    run_dir = values.get("run_dir", RunConfig.model_fields["run_dir"].default)
    # What is no path, or has a variable that is not set, is told by its own rules.
    with suppress(PydanticCustomError):
        return Path(expanded(str(run_dir))).absolute()
    return Path(str(run_dir)).absolute()


def _with_defaults_of_source(values: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """The file's values, with the components that the chosen source takes where the file names none."""
    completed = dict(values)
    for setting, default in _run_defaults(values.get("source"), registry).items():
        given = completed.setdefault(setting, {})
        if isinstance(given, Mapping) and BARE not in given:
            completed[setting] = {"name": default, **given}
    return completed


def _run_defaults(value: Any, registry: Registry) -> Mapping[str, str]:
    """What the source of these settings asks of the run; one that decorates another asks what that one does."""
    source: Any = expand_shorthand(value, "name")
    settings: Mapping[str, Any] = cast("Mapping[str, Any]", source) if isinstance(source, Mapping) else {}
    name: Any = settings.get("name")
    if not isinstance(name, str) or name not in registry.all_names("source"):
        return {}
    config = cast("type[SourceConfig]", registry.get("source", name).config)
    inner: Mapping[str, str] = (
        {} if config.decorates is None else _run_defaults(settings.get(config.decorates), registry)
    )
    return {**inner, **config.run_defaults}


def _config_error(problems: Sequence[Problem], document: Document) -> ConfigError:
    """The error for these problems, in file order, those of overridden settings saying so."""
    told: list[Problem] = []
    for problem in sorted(problems, key=lambda problem: line_of(problem.key, document.lines) or 0):
        note = f"{_dataset_note(problem.key, document)}{_note_of_override(problem.key, document)}"
        told.append(Problem(problem.key, f"{problem.message}{note}"))
    return ConfigError(told, document.origin, document.lines)


def _note_of_override(key: str, document: Document) -> str:
    override = document.override_of(key)
    return f" (from --set {override})" if override is not None else ""


def _dataset_note(key: str, document: Document) -> str:
    """` (dataset rows.jsonl)` for the key of a setting of a dataset: people know it by name, not by its place."""
    match = re.match(r"data\.(train|eval)\.(\d+)(?:\.|$)", key)
    data = document.values.get("data")
    if match is None or not isinstance(data, Mapping):
        return ""
    entries: Any = as_list(cast("Mapping[str, Any]", data).get(match[1]))
    if (
        not isinstance(entries, list)
        or is_rows(cast("Any", entries))
        or int(match[2]) >= len(cast("list[Any]", entries))
    ):
        return ""
    entry: Any = expand_shorthand(entries[int(match[2])], "path")
    settings: Mapping[str, Any] = cast("Mapping[str, Any]", entry) if isinstance(entry, Mapping) else {}
    name = settings.get("label") or settings.get("path")
    return f" (dataset {name})" if isinstance(name, str) else ""


def _loaded_plugins(document: Document, available: Mapping[str, InstalledPlugin] | None) -> PluginHost:
    names = _plugin_names(document)
    try:
        return PluginHost.load(names, available)
    except PluginError as error:
        line = document.lines.get("plugins")
        place = f"{document.origin}:{line}" if line else document.origin
        others = _problems_without(document, names, available)
        note = _note_of_override("plugins", document)
        raise PluginError("\n".join([f"{place}: plugins: {error}{note}", *others])) from error.__cause__


def _problems_without(
    document: Document, names: Sequence[str], available: Mapping[str, InstalledPlugin] | None
) -> list[str]:
    """What is wrong in the rest of the file when a plugin cannot be loaded, as far as that can be told without it."""
    known = installed_plugins() if available is None else available
    usable = [name for name in dict.fromkeys(names) if name in known or name.startswith("-")]
    try:
        host = PluginHost.load(usable, available)
        model = config_model(host)
    except PluginError:
        return []
    try:
        model.model_validate({**document.values, "plugins": usable})
    except ValidationError as error:
        # Unknown names may be those of the missing plugin.
        problems = explain(error, model, host.registry, skip=("extra_forbidden", "unknown_component"))
        return [str(_config_error([problem], document)) for problem in problems]
    return []


def config_model(host: PluginHost) -> type[RunConfig]:
    """The pydantic model of the whole file for these plugins (`spurline schema` prints its JSON schema)."""
    configs = {name: plugin.declaration.config for name, plugin in host.plugins.items()}
    return assemble(host.registry, {name: config for name, config in configs.items() if config is not None})


def _plugin_names(document: Document) -> list[str]:
    names = document.values.get("plugins", [])
    if isinstance(names, list) and all(isinstance(name, str) for name in cast("list[Any]", names)):
        return cast("list[str]", names)
    problem = Problem("plugins", f"must be a list of plugin names, such as [collation_fast]; it is {names!r}.")
    raise _config_error([problem], document)


def _cross_field_problems(run: RunConfig) -> Iterator[Problem]:
    """Problems of every section, with full key paths."""
    for path, section in sections_within(run):
        for problem in section.problems(run):
            key = ".".join(part for part in (path, problem.key) if part)
            yield Problem(key, where_decorated(run.source.model_dump(), problem.message))
