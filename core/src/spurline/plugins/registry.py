"""Map the kind and name of a component to its config class and its factory.

Core and plugins fill the registry through the same `register_components` hook. Config classes are imported at once.
Factories are `"module:attribute"` strings that are imported on first use, so that a config is validated without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from spurline.config.section import ComponentConfig
from spurline.errors import SAME_NAME, PluginError, SpurlineError, listing, suggestion
from spurline.plugins.official import DEFAULT_PLUGINS

CORE = "core"
"""Name of core among the plugins. A component of core that a plugin replaces stays reachable as `core/NAME`."""


@dataclass(frozen=True)
class Kind:
    """A kind of component, owned by the plugin that defines it.

    Attributes:
        name: The `kind` of its config classes.
        config: Base class of its config classes.
        protocol: `"module:Class"`, the Protocol or base class that its implementations satisfy.
        plugin: The plugin that defines the kind.
        distribution: The pip distribution that contains the plugin.
    """

    name: str
    config: type[ComponentConfig]
    protocol: str
    plugin: str
    distribution: str


@dataclass(frozen=True)
class Registration:
    """One registered component, with the plugin that added it and the pip distribution of that plugin."""

    kind: str
    name: str
    config: type[ComponentConfig]
    factory: str
    plugin: str
    distribution: str
    replaces_builtin: bool = False
    default: bool = False

    @property
    def is_builtin(self) -> bool:
        """Return whether the component belongs to core or a default plugin, so that other plugins may replace it."""
        return self.plugin == CORE or self.plugin in DEFAULT_PLUGINS


@dataclass(frozen=True)
class TopLevelSection:
    """A top-level key of the config that a plugin reads.

    Attributes:
        annotation: Type of the section, with its marks.
        optional: If True, the section is None if the file leaves it out. If False, it then has its defaults.
        plugin: The plugin that adds the section.
        held: `"module:function"` that returns a context manager for the run to enter, or None if the section has none.
    """

    annotation: Any
    optional: bool
    plugin: str
    held: str | None = None


class Registry:
    """All kinds, components and config sections of one run, from core and from the enabled plugins."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self.sections: dict[str, TopLevelSection] = {}
        self.keeper: str | None = None
        self._entries: dict[tuple[str, str], Registration] = {}
        self._builtin_defaults: dict[str, str] = {}
        self._plugin_defaults: dict[str, Registration] = {}

    def insert(self, entry: Registration) -> None:
        """Add one component. Raises PluginError for an unknown kind, a config class of another kind or a taken name."""
        kind = self.kinds.get(entry.kind)
        if kind is None:
            raise PluginError(
                f"{entry.distribution} registers '{entry.name}' under the unknown kind '{entry.kind}'."
                f"{suggestion(entry.kind, self.kinds)} Kinds: {listing(self.kinds)}. Enable the plugin that defines "
                "the kind, or use registry.add_to, which skips the component if that plugin is not enabled."
            )
        if not issubclass(entry.config, kind.config):
            base = f"from {kind.config.__module__} import {kind.config.__name__}"
            raise PluginError(
                f"{entry.distribution}: {entry.config.__name__} has the kind '{entry.kind}', but is not a "
                f"{kind.config.__name__}. Derive it from that class: `{base}`."
            )
        if entry.is_builtin:
            self._entries[(entry.kind, f"{entry.plugin}/{entry.name}")] = entry
        self._check_name(entry, self._entries.get((entry.kind, entry.name)))
        self._entries[(entry.kind, entry.name)] = entry
        if entry.default:
            self._claim_default(entry)

    def _check_name(self, entry: Registration, present: Registration | None) -> None:
        if present is None:
            if entry.replaces_builtin:
                names = self.names(entry.kind)
                raise PluginError(
                    f"{entry.distribution} registers {entry.kind} '{entry.name}' with replaces_builtin=True, but no "
                    f"{entry.kind} has that name.{suggestion(entry.name, names)} Available: {listing(names)}."
                )
            return
        if present.plugin == entry.plugin:
            raise PluginError(f"{entry.distribution} registers {entry.kind} '{entry.name}' twice.")
        if present.is_builtin and entry.replaces_builtin:
            return
        replacing = f", or pass replaces_builtin=True to registry.add to replace the component of {present.plugin}"
        hint = replacing if present.is_builtin else ""
        raise PluginError(
            f"Two plugins claim {entry.kind} '{entry.name}': {present.distribution} (plugin '{present.plugin}') "
            f"and {entry.distribution} (plugin '{entry.plugin}'). Enable one of them{hint}."
        )

    def _claim_default(self, entry: Registration) -> None:
        if entry.is_builtin:
            self._builtin_defaults[entry.kind] = entry.name
            return
        rival = self._plugin_defaults.get(entry.kind)
        if rival is not None:
            both = f"{rival.distribution} ('{rival.name}') and {entry.distribution} ('{entry.name}')"
            raise PluginError(
                f"Two components claim to be the default {entry.kind}: {both}. Enable only one of the plugins, or "
                "remove default=True from one of them."
            )
        self._plugin_defaults[entry.kind] = entry

    def get(self, kind: str, name: str) -> Registration:
        """Return the component `name`, a plain name or `OWNER/NAME`. Raises PluginError if there is none."""
        entry = self._entries.get((kind, name))
        if entry is None:
            names = self.names(kind)
            raise PluginError(
                f"No {kind} is named '{name}'.{suggestion(name, names, SAME_NAME)} Available: {listing(names)}."
            )
        return entry

    def names(self, kind: str) -> list[str]:
        """Return the names for the config. `OWNER/NAME` is among them only if a plugin has replaced NAME."""
        entries = {name: self._entries[(kind, name)] for name in self.all_names(kind)}
        return [name for name, entry in entries.items() if name == entry.name or entries[entry.name] is not entry]

    def all_names(self, kind: str) -> list[str]:
        """Return every accepted name, each `OWNER/NAME` alias included."""
        return sorted(name for (entry_kind, name) in self._entries if entry_kind == kind)

    def default(self, kind: str) -> str | None:
        """Return the name of the kind's default component, if any. A plugin's default overrides the built-in one."""
        claimed = self._plugin_defaults.get(kind)
        return claimed.name if claimed is not None else self._builtin_defaults.get(kind)

    def entries(self, plugin: str | None = None) -> Iterator[Registration]:
        """Yield the registrations of all plugins, or of one plugin, in order and without `OWNER/NAME` aliases."""
        for (_, name), entry in self._entries.items():
            if name == entry.name and plugin in (None, entry.plugin):
                yield entry

    def factory(self, kind: str, config: ComponentConfig) -> Callable[..., Any]:
        """Import and return the factory of the component `config.name`."""
        entry = self.get(kind, config.name)
        return resolve(entry.factory, f"{kind} '{entry.name}' of {entry.distribution}")

    def create(self, kind: str, config: ComponentConfig, **dependencies: Any) -> Any:
        """Build the component `config.name`. The docstring of its protocol lists the dependencies under Factory."""
        return self.factory(kind, config)(config, **dependencies)


class ComponentRegistrar:
    """The registry that a plugin's `register_components(registry)` receives, bound to that plugin."""

    def __init__(self, registry: Registry, plugin: str, distribution: str) -> None:
        self._registry = registry
        self._plugin = plugin
        self._distribution = distribution
        self.hookspecs: list[ModuleType] = []
        """Modules that the plugin has passed to `add_hookspecs`."""
        self._waiting: list[Registration] = []
        self._of_optional_kinds: list[tuple[str, str, str, str | None]] = []

    def add_kind(self, config: type[ComponentConfig], protocol: str) -> None:
        """Define a kind of component. Every plugin may add components to it.

        Mark each setting that chooses such a component: `critic_of_style: Annotated[StyleConfig, Component("style")]`.

        Args:
            config: Base class of the configs of the components. Its ClassVar `kind` is the name of the kind. Its module
                must not import torch.
            protocol: `"module:Class"` of the Protocol or base class of implementations. Under Factory, that class's
                docstring lists the arguments that `registry.create` passes in addition to the config.

        Raises:
            PluginError: If another plugin has a kind of that name, or the class sets no `kind`.
        """
        call = f"{self._distribution}: registry.add_kind({config.__name__}, {protocol!r})"
        if not config.kind:
            raise PluginError(f'{call} names no kind. Give {config.__name__} one: `kind: ClassVar[str] = "mine"`.')
        if protocol.count(":") != 1:
            raise PluginError(f"{call} is malformed. Write the protocol as 'module:Class'.")
        kind = Kind(config.kind, config, protocol, self._plugin, self._distribution)
        present = self._registry.kinds.setdefault(kind.name, kind)
        if present is not kind:
            raise PluginError(
                f"Two plugins claim the kind '{kind.name}': {present.distribution} (plugin '{present.plugin}') and "
                f"{kind.distribution} (plugin '{kind.plugin}'). Enable one of them."
            )

    def add_section(self, name: str, annotation: Any, *, optional: bool = False, held: str | None = None) -> None:
        """Add a top-level section to the config. `run.config.section(ClusterConfig)` reads it.

        The section may have any name that is free. A section that is declared as `Plugin.config` has the plugin's name.

        Args:
            name: The key in the file. With a dot, as in `evaluation.generate`, it is a key within a section of core.
            annotation: A Section, or `Annotated[Section, OnResume.FREE]` with its marks. Its module must not import
                torch.
            optional: If True, the section is None if the file leaves it out. If False, it then has its defaults.
            held: `"module:function"`, called with the run's config after its data is read and before any weights load.
                The run enters the context manager that it returns, and leaves it after all components are closed.

        Raises:
            PluginError: If a plugin already has a section of that name.
        """
        added = TopLevelSection(annotation, optional, self._plugin, held)
        present = self._registry.sections.setdefault(name, added)
        if present is not added:
            adds = f"{self._distribution} adds the config section '{name}'"
            raise PluginError(f"{adds}, which plugin '{present.plugin}' has. Enable one of them.")

    def add_keeper(self, factory: str) -> None:
        """Set the class that saves the rows, models and tokenizers that a Python program passes instead of paths.

        Args:
            factory: `"module:Class"` of a `spurline.config.objects.KeepsObjects`. The last call counts.
        """
        self._registry.keeper = factory

    def add_hookspecs(self, module: ModuleType) -> None:
        """Define further hooks: the functions of a module that are marked with `spurline.plugins.hookspec`.

        Every plugin may then implement them. Call a hook with `host.hooks.NAME(argument=value)` on the loop's thread.
        """
        self.hookspecs.append(module)

    def add(
        self,
        config: type[ComponentConfig],
        factory: str,
        *,
        name: str | None = None,
        replaces_builtin: bool = False,
        default: bool = False,
    ) -> None:
        """Offer a component.

        Args:
            config: The component's config class, derived from the base class of the kind, such as `LossConfig`. Its
                module must not import torch.
            factory: `"module:Class"`, called as `Class(config, **dependencies)`. The kind's Protocol lists the
                dependencies.
            name: Value of `name:` in the config file. If None, the config class's field `name` gives it.
            replaces_builtin: Whether to replace the component of this name that core or a default plugin has. The
                replaced component stays available as `OWNER/NAME`, such as `core/packed`.
            default: Whether this is the default of the kind.

        Raises:
            PluginError: If another plugin has the name, or the class has no kind or name.
        """
        name = name or config.model_fields["name"].default
        call = f"{self._distribution}: registry.add({config.__name__}, {factory!r})"
        if not config.kind:
            raise PluginError(
                f"{call} has no kind. Derive {config.__name__} from the base class of its kind: "
                "`from spurline.protocols.loss import LossConfig` for a loss, and so on."
            )
        if not isinstance(name, str) or "/" in name:
            raise PluginError(
                f'{call} has no usable name. Give {config.__name__} one without a slash, as in `name: str = "mine"`.'
            )
        if factory.count(":") != 1:
            raise PluginError(f"{call} is malformed. Write the factory as 'module:Class'.")
        entry = Registration(
            config.kind, name, config, factory, self._plugin, self._distribution, replaces_builtin, default
        )
        # The plugin with the component to replace may come later in the list of plugins.
        waits = replaces_builtin and name not in self._registry.all_names(entry.kind)
        if entry.kind in self._registry.kinds and not waits:
            self._registry.insert(entry)
        else:
            self._waiting.append(entry)

    def add_to(self, kind: str, config: str, factory: str, *, name: str | None = None) -> None:
        """Offer a component of a kind that another plugin defines. If that plugin is not enabled, do nothing.

        For example, a plugin may offer a report panel, and also work where reports are not installed.

        Args:
            kind: Name of the kind.
            config: `"module:Class"` of the component's config class. It is imported only if the kind is defined.
            factory: The same as in `add`.
            name: The same as in `add`.

        Raises:
            PluginError: If the config class does not exist, or another plugin has the name.
        """
        self._of_optional_kinds.append((kind, config, factory, name))

    def finish(self, *, replacing: bool = True) -> None:
        """Insert components that waited for other plugins. Insert replacing components only if `replacing` is true."""
        waiting = [entry for entry in self._waiting if replacing or not entry.replaces_builtin]
        self._waiting = [entry for entry in self._waiting if entry not in waiting]
        for entry in waiting:
            self._registry.insert(entry)
        optional, self._of_optional_kinds = self._of_optional_kinds, []
        for kind, config, factory, name in optional:
            if kind in self._registry.kinds:
                found = resolve(config, f"{kind} of {self._distribution}")
                self.add(cast("type[ComponentConfig]", found), factory, name=name)


def resolve(reference: str, what: str) -> Callable[..., Any]:
    """Import and return `"module:attribute"`. Raises PluginError, in which `what` names the object."""
    module_name, _, attribute = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except SpurlineError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise PluginError(f"The {what} cannot be imported from '{reference}': {told}.") from error
    if not hasattr(module, attribute):
        raise PluginError(f"The {what} names '{reference}', but {module_name} has no '{attribute}'.")
    return getattr(module, attribute)
