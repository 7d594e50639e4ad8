"""Find, check, order and load plugins, and call their hooks.

A plugin is an entry point of group `spurline.plugins` whose module defines `PLUGIN` and hookimpls, or a file that the
config lists, as in `plugins: [./mine.py]`. The host imports the plugins that the config lists, and installed plugins of
`DEFAULT_PLUGINS`. `PluginHost` is a typed facade over
pluggy. Each process of a run has its own host, made from the names of plugins. Hookimpls are checked before pluggy
registers them, since pluggy silently ignores misspelled hooks and arguments with defaults.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pluggy
import xxhash

from spurline.config.section import Section
from spurline.errors import PluginError, SpurlineError, listing, nearest, suggestion
from spurline.importing import module_of_file
from spurline.plugins import hookspecs
from spurline.plugins.calls import TRAIN_STEP, HookCalls, place_of
from spurline.plugins.changes import changes_since
from spurline.plugins.official import DEFAULT_PLUGINS, OFFICIAL, install_command, plugin_with
from spurline.plugins.registry import CORE, ComponentRegistrar, Registry

API_VERSION = 2
"""Version of the plugin interface. A plugin states the version that it was written for. `CHANGED` of
`spurline.plugins.changes` lists what each version has changed."""

ENTRY_POINT_GROUP = "spurline.plugins"
COMPONENT_GROUP = "spurline.components"
COMMAND_GROUP = "spurline.commands"
REGISTER = "register_components"
_CONTENT = "__spurline_content__"
"""Attribute of a module that was imported from a file: the path and the digest of its content."""


@dataclass(frozen=True)
class Plugin:
    """The declaration `PLUGIN` of a plugin module.

    Attributes:
        name: Name in the config's `plugins` list, and key of the plugin's config section.
        api: Version of the plugin interface that the plugin was written for. The current version is `API_VERSION`.
        config: Section subclass for the top-level key `name`, or None.
        requires: Names of plugins that must be enabled too.
    """

    name: str
    api: int
    config: type[Section] | None = None
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class InstalledPlugin:
    """A plugin as package metadata describes it, or a file with a digest as its version. It has not been imported."""

    name: str
    module: str
    distribution: str
    version: str

    @classmethod
    def of_file(cls, path: str) -> InstalledPlugin:
        """Describe the plugin in a file. Raises PluginError if the file cannot be read."""
        file = Path(path).absolute()
        try:
            content = file.read_bytes()
        except OSError as error:
            near = suggestion(file.name, [entry.name for entry in file.parent.glob("*.py")])
            raise PluginError(f"The file {file} cannot be read: {error.strerror}.{near}") from None
        return cls(path, str(file), file.name, xxhash.xxh3_64_hexdigest(content))


@dataclass(frozen=True)
class LoadedPlugin:
    """An enabled plugin."""

    declaration: Plugin
    module: ModuleType
    distribution: str
    version: str

    @property
    def hooks(self) -> list[str]:
        return [hook for _, hook, _ in _hookimpls(self.module)]


def installed_plugins() -> dict[str, InstalledPlugin]:
    """Return every installed plugin by name, from package metadata.

    Raises PluginError if two distributions install a plugin under the same name.
    """
    entries = _by_name(ENTRY_POINT_GROUP, "plugin")
    return {name: InstalledPlugin(name, entry.value, *distribution_of(entry)) for name, entry in entries.items()}


def declared_components() -> dict[str, list[str]]:
    """Return what each installed plugin declares as its components, as `KIND/NAME`, from package metadata.

    Entry points of group `spurline.components` have the module of the plugin as their value.
    """
    plugins = {plugin.module: name for name, plugin in installed_plugins().items()}
    found: dict[str, list[str]] = {name: [] for name in plugins.values()}
    for entry in importlib.metadata.entry_points(group=COMPONENT_GROUP):
        if entry.value in plugins:
            found[plugins[entry.value]].append(entry.name)
    return found


class PluginHost:
    """The plugins of one run: their components in `registry`, their hooks as methods of `hooks`."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.plugins: dict[str, LoadedPlugin] = {}
        self.calls = HookCalls()
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._hookspecs: dict[str, Callable[..., Any]] = {}
        self._add_hookspecs(hookspecs, "spurline")

    @property
    def hooks(self) -> Any:
        """Return the hooks, to be called with keywords: `host.hooks.on_step_end(step=3, metrics={...})`."""
        return self._manager.hook

    @classmethod
    def load(cls, names: Sequence[str], available: Mapping[str, InstalledPlugin] | None = None) -> PluginHost:
        """Load core, the default plugins that are installed, and the named plugins, in this order.

        Args:
            names: Names of plugins as in the config, or paths of files. `-NAME` leaves out a default plugin.
            available: Installed plugins by name. If None, they are read from package metadata. Default plugins are
                always read from package metadata too.

        Raises:
            PluginError: If a plugin is missing, or incompatible with this core.
        """
        host = cls()
        core = InstalledPlugin(CORE, "spurline.builtin", "spurline", importlib.metadata.version("spurline"))
        host.plugins[CORE] = _import_plugin(core)
        installed = installed_plugins()
        defaults = {name: installed[name] for name in DEFAULT_PLUGINS if name in installed}
        known = installed if available is None else {**defaults, **available}
        known |= {name: InstalledPlugin.of_file(name) for name in names if is_file(name)}
        for name in _loaded_names(names, known):
            loaded = _import_plugin(known[name])
            rival = host.plugins.setdefault(loaded.declaration.name, loaded)
            if rival is not loaded:
                both = f"{rival.module.__file__} and {loaded.module.__file__}"
                raise PluginError(f"Two plugins are named '{loaded.declaration.name}': {both}. Rename one.")
        host._check_relations(names)
        host._register()
        return host

    def attach(self, implementations: object, name: str) -> None:
        """Register more hookimpls for this run. They are called before the hookimpls of plugins.

        Args:
            implementations: An object with methods that are marked `@hookimpl`.
            name: A name for the object. Errors of its hookimpls name the plugin whose hook called `attach`. If no hook
                called it, they name the part of `name` before a slash.

        Raises:
            PluginError: If the name is taken, or a hook is implemented wrongly.
        """
        if self._manager.has_plugin(name):
            raise PluginError(
                f"'{name}' is attached already. Give each object a name of its own, detach the first one, or load the "
                "config again for another run."
            )
        check_hookimpls(implementations, name, self._hookspecs, may_replace_train_step=name.startswith(f"{CORE}/"))
        self._manager.register(self._named(implementations, self.calls.plugin or name.partition("/")[0]), name)

    def detach(self, name: str) -> None:
        """Remove the object that was attached under this name."""
        self._manager.unregister(name=name)

    @contextmanager
    def attachments(self) -> Generator[None]:
        """Return a context that removes, at its end, all objects that were attached within it."""
        before = {name for name, _ in self._manager.list_name_plugin()}
        try:
            yield
        finally:
            for name in {name for name, _ in self._manager.list_name_plugin()} - before:
                self.detach(name)

    def versions(self) -> dict[str, str]:
        """Return the version of core and of every enabled plugin, by distribution."""
        return {plugin.distribution: plugin.version for plugin in self.plugins.values()}

    def _check_relations(self, names: Sequence[str]) -> None:
        enabled = set(self.plugins) - {CORE}
        for name, plugin in self.plugins.items():
            for needed in plugin.declaration.requires:
                if needed not in enabled:
                    listed = f"Add it to the list: plugins: [{needed}, {name}]"
                    how = f"Take -{needed} out of plugins, or add -{name}" if f"-{needed}" in names else listed
                    raise PluginError(f"Plugin '{name}' requires '{needed}'. {how}.")

    def _register(self) -> None:
        registrars = {
            name: ComponentRegistrar(self.registry, name, plugin.distribution) for name, plugin in self.plugins.items()
        }
        for name, registrar in registrars.items():
            self._register_components(name, lambda implementation, given=registrar: implementation(given))
        # A plugin may add a component of a kind that a later plugin defines, so finish after all plugins registered.
        for name, registrar in registrars.items():
            self._register_components(name, lambda _, given=registrar: given.finish(replacing=False))
        for name, registrar in registrars.items():
            self._register_components(name, lambda _, given=registrar: given.finish())
            for module in registrar.hookspecs:
                self._add_hookspecs(module, self.plugins[name].distribution)
        # pluggy first calls the plugin that was registered last, so register in reverse order.
        for name, plugin in reversed(list(self.plugins.items())):
            check_hookimpls(plugin.module, name, self._hookspecs)
            self._manager.register(self._named(plugin.module, name), name)
        self._manager.check_pending()

    def _add_hookspecs(self, module: ModuleType, distribution: str) -> None:
        added = hooks_of(module)
        for name in added.keys() & self._hookspecs.keys():
            raise PluginError(f"{distribution} defines the hook '{name}', which exists already. Give it another name.")
        if not added:
            raise PluginError(
                f"{distribution}: registry.add_hookspecs({module!r}) finds no hook. Mark functions of the module with "
                "@hookspec of spurline.plugins."
            )
        self._hookspecs |= added
        self._manager.add_hookspecs(module)

    def _named(self, implementations: object, plugin: str) -> object:
        """Return hookimpls for pluggy that name the plugin in their errors. Core's hookimpls are returned unchanged."""
        if plugin == CORE:
            return implementations
        named = _NamedHooks()
        for number, (function, hook, options) in enumerate(_hookimpls(implementations)):
            if hook == REGISTER:  # `_register_components` has called it.
                continue
            call = self.calls.named(function, plugin, hook, wrapper=bool(options.get("wrapper")))
            setattr(call, f"{hookspecs.PROJECT}_impl", {**options, "specname": hook})
            setattr(named, f"{hook}_{number}", call)
        return named

    def _register_components(self, name: str, register: Callable[[Callable[..., Any]], None]) -> None:
        """Call `register` with each `register_components` of a plugin. Errors name the plugin."""
        plugin = self.plugins[name]
        for function, hook, _ in _hookimpls(plugin.module):
            if hook != REGISTER:
                continue
            _check_arguments(function, hook, name, self._hookspecs[hook])
            try:
                register(function)
            except Exception as error:
                place = f"({place_of(error, function)}){_do_without(name)}"
                if isinstance(error, PluginError):
                    error.args = (f"{error} {place}",)
                    raise
                raise PluginError(
                    f"Plugin '{name}' ({plugin.distribution} {plugin.version}) failed in {REGISTER}: "
                    f"{type(error).__name__}: {error} {place}"
                ) from error


def is_file(name: str) -> bool:
    """Return whether an entry of the config's `plugins` is the path of a file."""
    return name.endswith(".py")


def _do_without(name: str) -> str:
    """Return how to leave out a default plugin, which is loaded even if the config does not name it."""
    return f" To do without it, set plugins: [-{name}]." if name in DEFAULT_PLUGINS else ""


class _NamedHooks:
    """Takes the place of a plugin's module or an attached object in pluggy. Its attributes are hookimpls."""


def _loaded_names(names: Sequence[str], known: Mapping[str, InstalledPlugin]) -> list[str]:
    """Return the names of plugins to load: installed default plugins that are not left out, and then listed ones."""
    listed = [name for name in names if not name.startswith("-")]
    left_out = [name.removeprefix("-") for name in names if name.startswith("-")]
    for name in names:
        if names.count(name) > 1:
            raise PluginError(f"'{name}' is listed twice. Remove one.")
    for name in left_out:
        if name in listed:
            raise PluginError(f"'{name}' and '-{name}' are both listed. Remove one.")
        if name not in DEFAULT_PLUGINS:
            raise PluginError(
                f"'-{name}' leaves out a plugin that is not loaded by default.{suggestion(name, DEFAULT_PLUGINS)} "
                f"Loaded by default if installed: {listing(DEFAULT_PLUGINS)}. Remove the name from the list."
            )
    for name in listed:
        if name == CORE:
            raise PluginError(f"'{CORE}' is always enabled. Remove it from the list.")
        if name not in known:
            raise PluginError(_not_installed(name, known))
    return [*(name for name in DEFAULT_PLUGINS if name in known and name not in [*listed, *left_out]), *listed]


def _not_installed(name: str, known: Mapping[str, InstalledPlugin]) -> str:
    # Users may write the name of a package or of a component instead of the plugin's name.
    short = name.lower().removeprefix("spurline-").replace("-", "_")
    meant = next((each for each in (short, nearest(name, known), plugin_with(None, name)) if each in known), None)
    hint = f" Did you mean '{meant}'?" if meant is not None else ""
    how = "`spurline plugins` lists what is installed."
    if short in OFFICIAL and short not in known:
        listed = "" if short == name else f", and list it as {short}"
        how = f"Install it with: {install_command(short)}{listed}."
    return f"Plugin '{name}' is not installed.{hint} Installed: {listing(known)}. {how}"


def _import_plugin(installed: InstalledPlugin) -> LoadedPlugin:
    where = f"Plugin '{installed.name}' ({installed.distribution} {installed.version}, module {installed.module})"
    from_file = is_file(installed.name)
    try:
        module = _module_of_file(installed) if from_file else importlib.import_module(installed.module)
    except SpurlineError:
        raise
    except Exception as error:
        place = place_of(error)
        at = "" if isinstance(error, SyntaxError) or place.startswith(__file__) else f" ({place})"
        told = f"{type(error).__name__}: {error}{at}{_do_without(installed.name)}"
        raise PluginError(f"{where} cannot be imported: {told}") from error
    declaration = getattr(module, "PLUGIN", Plugin(module.__name__, API_VERSION) if from_file else None)
    if not isinstance(declaration, Plugin):
        raise PluginError(
            f"{where} defines no `PLUGIN = Plugin(name, api={API_VERSION}, ...)` from spurline.plugins.host."
        )
    if declaration.name != installed.name and not from_file:
        raise PluginError(f"{where} declares the name '{declaration.name}'; entry point and PLUGIN must agree.")
    if declaration.api != API_VERSION:
        newer = "Upgrade spurline" if declaration.api > API_VERSION else "Upgrade the plugin"
        raise PluginError(
            f"{where} was written for plugin interface {declaration.api}, this spurline has {API_VERSION}. {newer}."
            f"{_do_without(installed.name)}{changes_since(declaration.api)}"
        )
    return LoadedPlugin(declaration, module, installed.distribution, installed.version)


def _module_of_file(plugin: InstalledPlugin) -> ModuleType:
    """Import a file, unless it has been imported with this content.

    The module has the name of the file. Therefore other processes can unpickle its objects, since they have the same
    `sys.path`.
    """
    name = Path(plugin.module).stem
    present, content = sys.modules.get(name), (plugin.module, plugin.version)
    known = getattr(present, _CONTENT, None)
    if present is not None and known == content:
        return present
    found = importlib.util.find_spec(name) if known is None else None
    if found is not None and found.origin and Path(found.origin).resolve() != Path(plugin.module).resolve():
        raise PluginError(f"The file {plugin.module} has the name of the module {found.origin}. Rename the file.")
    module = module_of_file(Path(plugin.module), name)
    setattr(module, _CONTENT, content)
    return module


def installed_commands() -> dict[str, EntryPoint]:
    """Return the subcommands that installed plugins add to `spurline`, by name.

    Raises PluginError if two distributions install a subcommand under the same name.
    """
    return _by_name(COMMAND_GROUP, "subcommand")


def _by_name(group: str, what: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group. Raises PluginError if two distributions have one of the same name."""
    found: dict[str, EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=group):
        first, second = distribution_of(found.setdefault(entry.name, entry))[0], distribution_of(entry)[0]
        if first != second:
            raise PluginError(
                f"Two installed distributions provide the {what} '{entry.name}': {first} and {second}. Uninstall one: "
                f"pip uninstall {second}."
            )
    return found


def distribution_of(entry: EntryPoint) -> tuple[str, str]:
    """Return name and version of the distribution that installs an entry point."""
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else ("(unknown distribution)", "?")


def hooks_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in vars(module).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")}


def check_hookimpls(
    implementations: object,
    plugin: str,
    specs: Mapping[str, Callable[..., Any]],
    *,
    may_replace_train_step: bool = False,
) -> None:
    """Raise PluginError for an unknown hook or argument, an argument with a default, or a non-wrapper `train_step`.

    pluggy would ignore misspelled names.
    """
    for function, hook, options in _hookimpls(implementations):
        if hook not in specs:
            if options.get("optionalhook"):
                continue
            raise PluginError(
                f"Plugin '{plugin}' implements an unknown hook '{hook}'.{suggestion(hook, specs)} "
                f"Hooks: {listing(specs)}."
            )
        _check_arguments(function, hook, plugin, specs[hook])
        if options.get("hookwrapper"):
            raise PluginError(
                f"Plugin '{plugin}' marks '{hook}' with hookwrapper=True. Mark it with @hookimpl(wrapper=True), and "
                "return the result of `yield`."
            )
        is_wrapper = options.get("wrapper")
        if hook == TRAIN_STEP and not is_wrapper and not may_replace_train_step:
            raise PluginError(
                f"Plugin '{plugin}' implements '{hook}', but only core may. Wrap it: mark the function with "
                "@hookimpl(wrapper=True) and `return (yield)` inside."
            )


def _check_arguments(function: Callable[..., Any], hook: str, plugin: str, spec: Callable[..., Any]) -> None:
    known = list(inspect.signature(spec).parameters)
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in known:
            raise PluginError(
                f"Plugin '{plugin}': '{hook}' takes an unknown argument '{name}'.{suggestion(name, known)} "
                f"Arguments: {listing(known)}."
            )
        if parameter.default is not inspect.Parameter.empty:
            raise PluginError(
                f"Plugin '{plugin}': argument '{name}' of '{hook}' has a default value, which it would always get. "
                "Remove the default."
            )


def _hookimpls(implementations: object) -> Iterator[tuple[Callable[..., Any], str, Mapping[str, Any]]]:
    """Yield (function, hook name, pluggy's options) of each attribute that is marked with `@hookimpl`."""
    for name in dir(implementations):
        value: Any = getattr(implementations, name, None)
        options = getattr(value, f"{hookspecs.PROJECT}_impl", None)
        if isinstance(options, Mapping) and inspect.isroutine(value):
            marked = cast("Mapping[str, Any]", options)
            yield value, str(marked.get("specname") or name), marked
