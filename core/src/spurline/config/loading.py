"""Load a config in two phases: import its plugins, and then validate the file, including the sections of plugins.

An error lists every problem of the file, with line, key path and suggested fix.
"""

from __future__ import annotations

import shlex
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from spurline.config.assembly import assemble
from spurline.config.document import Document, apply_overrides, plain, read_document
from spurline.config.error_messages import Explainer
from spurline.config.hidden import hide_secrets
from spurline.config.objects import KeepsObjects
from spurline.config.paths import ConfigPlace, expanded
from spurline.config.run_config import RunConfig
from spurline.config.section import BARE, expand_shorthand, sections_within
from spurline.errors import ConfigError, PluginError, Problem, line_of
from spurline.plugins.host import InstalledPlugin, PluginHost, declared_components, installed_plugins, is_file
from spurline.plugins.official import section_names
from spurline.plugins.registry import Registry, resolve
from spurline.protocols.source import SourceConfig


@dataclass(frozen=True)
class LoadedConfig:
    """A validated configuration.

    Attributes:
        config: The settings, frozen.
        host: The loaded plugins.
        origin: File name to use in messages.
        file: Path of the config file, or None if a mapping was loaded.
        overrides: The values of `--set`, as given.
    """

    config: RunConfig
    host: PluginHost
    origin: str
    file: Path | None = None
    overrides: tuple[str, ...] = ()

    def resolved(self) -> dict[str, Any]:
        """Return every setting, defaults included, as JSON values with secrets hidden."""
        return hide_secrets(self.config.model_dump(mode="json"))

    def settled(self, recorded: Mapping[str, Any]) -> LoadedConfig:
        """Return this config with `Section.settled`. `recorded` is an earlier result of `resolved`, or {}."""
        return replace(self, config=self.config.settled(self.config, recorded))

    def train_command(self, *options: str) -> str | None:
        """Return the command line that trains this config, with `options` at its end, or None if there is no file."""
        if self.file is None:
            return None
        sets = [word for override in self.overrides for word in ("--set", override)]
        return shlex.join(["spurline", "train", str(self.file), *sets, *options])


def as_loaded(config: LoadedConfig | Path | str | Mapping[str, Any]) -> LoadedConfig:
    """Return a loaded config unchanged, and load a path or mapping with `load_config`."""
    return config if isinstance(config, LoadedConfig) else load_config(config)


def load_config(
    source: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    available: Mapping[str, InstalledPlugin] | None = None,
    recorded: bool = False,
) -> LoadedConfig:
    """Load and validate a configuration.

    Args:
        source: Path of a YAML or TOML file, or a mapping of the same shape. A mapping may contain rows, functions, a
            model and a tokenizer in place of their paths. All of these except functions are saved below the `run_dir`.
        overrides: `key.path=value` strings.
        available: Installed plugins by name. If None, they are read from package metadata.
        recorded: Whether `source` is the config that a run recorded, which includes every default. If so, the checks
            between sections are skipped, since they passed when the run started.

    Raises:
        ConfigError: If the config is invalid. The text lists all problems.
        PluginError: If a plugin cannot be loaded.
    """
    file = None if isinstance(source, Mapping) else Path(source)
    document = Document("config", plain(source)) if file is None else read_document(file)
    apply_overrides(document, overrides)
    folder = None if file is None else file.absolute().parent
    host = _loaded_plugins(document, available, ConfigPlace(folder))
    model = config_model(host)
    sources = dict(_sources("source", document.values.get("source"), host.registry))
    values = _with_defaults_of_source(document.values, sources)
    values = _without_absent_sections(values, host.registry, only_null=not recorded)
    keeper = _keeper(host.registry, document.values) if file is None and not recorded else None
    place = ConfigPlace(folder, recorded, None if recorded else document.values, keeper)
    # Close it when the host is freed, since every copy of the config refers to the host.
    weakref.finalize(host, place.freed.close)
    try:
        config = model.model_validate(values, context=place)
        problems = [
            Problem(".".join(filter(None, (path, problem.key))), problem.message)
            for path, section in sections_within(config)
            if not recorded
            for problem in section.problems(config)
        ]
        if problems:
            raise _config_error(problems, document)
    except ValidationError as error:
        known = installed_plugins() if available is None else available
        declared = declared_components()
        unlisted = {name: declared.get(name, ()) for name in sorted(set(known) - set(host.plugins))}
        raise _config_error(Explainer(model, host.registry, unlisted, sources).problems(error), document) from None
    return LoadedConfig(config, host, document.origin, file, tuple(overrides))


def _without_absent_sections(values: Mapping[str, Any], registry: Registry, *, only_null: bool) -> dict[str, Any]:
    """Return the values without sections of plugins that are not enabled. The record of a run may have such sections.

    With `only_null`, leave out such a section only if it is null.
    """
    kept = dict(values)
    for owner, _, key in (name.rpartition(".") for name in section_names() if name not in registry.sections):
        section = kept.get(owner) if owner else kept
        if isinstance(section, Mapping) and key in section and not (only_null and section[key] is not None):
            rest = {name: value for name, value in cast("Mapping[str, Any]", section).items() if name != key}
            kept = kept | {owner: rest} if owner else rest
    return kept


def _keeper(registry: Registry, values: Mapping[str, Any]) -> KeepsObjects | None:
    """Return the object that saves a program's objects below the run_dir of `values`, or None if no plugin adds one."""
    if registry.keeper is None:
        return None
    run_dir = str(values.get("run_dir", RunConfig.model_fields["run_dir"].default))
    # If run_dir is invalid, validation reports it later.
    with suppress(PydanticCustomError):
        run_dir = expanded(run_dir)
    return resolve(registry.keeper, "class that saves the objects of a Python program")(Path(run_dir).absolute())


def _with_defaults_of_source(values: Mapping[str, Any], sources: Mapping[str, type[SourceConfig]]) -> dict[str, Any]:
    """Return the values, completed by the components that the sources use by default. The outer source counts first."""
    completed = dict(values)
    defaults = [item for config in sources.values() for item in config.run_defaults.items()]
    for setting, default in dict(reversed(defaults)).items():
        given = completed.setdefault(setting, {})
        if isinstance(given, Mapping) and BARE not in given:
            completed[setting] = {"name": default, **given}
    return completed


def _sources(key: str, value: Any, registry: Registry) -> Iterator[tuple[str, type[SourceConfig]]]:
    """Yield (key path, config class) of the source with these settings, and of each source that it wraps."""
    source: Any = expand_shorthand(value, "name")
    settings: Mapping[str, Any] = cast("Mapping[str, Any]", source) if isinstance(source, Mapping) else {}
    name: Any = settings.get("name")
    if isinstance(name, str) and name in registry.all_names("source"):
        config = cast("type[SourceConfig]", registry.get("source", name).config)
        yield key, config
        if config.decorates is not None:
            yield from _sources(f"{key}.{config.decorates}", settings.get(config.decorates), registry)


def _config_error(problems: Sequence[Problem], document: Document) -> ConfigError:
    """Return the error for these problems in file order, with a note on each setting that `--set` gave."""
    ordered = sorted(problems, key=lambda problem: line_of(problem.key, document.lines) or 0)
    told = [Problem(each.key, f"{each.message}{_note_of_override(each.key, document)}") for each in ordered]
    return ConfigError(told, document.origin, document.lines)


def _note_of_override(key: str, document: Document) -> str:
    override = document.override_of(key)
    return f" (from --set {override})" if override is not None else ""


def _loaded_plugins(
    document: Document, available: Mapping[str, InstalledPlugin] | None, place: ConfigPlace
) -> PluginHost:
    """Load the plugins, and make the paths of files absolute, since other processes load the same plugins."""
    names = _plugin_names(document)
    try:
        names = [place.find(expanded(name)) or name if is_file(name) else name for name in names]
        if names:
            document.values["plugins"] = names
        return PluginHost.load(names, available)
    except (PluginError, PydanticCustomError) as error:
        line = document.lines.get("plugins")
        where = f"{document.origin}:{line}" if line else document.origin
        note = _note_of_override("plugins", document)
        raise PluginError(f"{where}: plugins: {error}{note}") from error.__cause__


def config_model(host: PluginHost) -> type[RunConfig]:
    """Return the pydantic model of the whole file for these plugins."""
    configs = {name: plugin.declaration.config for name, plugin in host.plugins.items()}
    return assemble(host.registry, {name: config for name, config in configs.items() if config is not None})


def _plugin_names(document: Document) -> list[str]:
    names = document.values.get("plugins", [])
    if isinstance(names, list) and all(isinstance(name, str) for name in cast("list[Any]", names)):
        return cast("list[str]", names)
    listed = "names of plugins and paths of files, such as [collation_fast, ./mine.py]"
    problem = Problem("plugins", f"must be a list of {listed}; it is {names!r}.")
    raise _config_error([problem], document)
