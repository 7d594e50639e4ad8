"""Turn pydantic's validation errors into problems with a fix, one for each key path as the user wrote it."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from spurline.config.run_config import RunConfig
from spurline.config.section import Component, ComponentConfig
from spurline.errors import SAME_NAME, Problem, listing, suggestion
from spurline.plugins.official import OFFICIAL, how_to_enable, plugin_of_kind, plugin_with
from spurline.plugins.registry import Registry
from spurline.protocols.source import SourceConfig

_PROBLEMS_TOLD = 50
_CHARACTERS_TOLD = 300
"""Maximum number of characters of a value that a message shows."""


@dataclass(frozen=True)
class Explainer:
    """Explains the errors of one config.

    Attributes:
        model: The config model that raised the error.
        registry: The components of the enabled plugins.
        unlisted: The installed plugins that are not enabled, each with the components that its metadata declares.
        sources: The sources of the file by their key paths.
    """

    model: type[BaseModel]
    registry: Registry
    unlisted: Mapping[str, Collection[str]]
    sources: Mapping[str, type[BaseModel]]

    def problems(self, error: ValidationError) -> list[Problem]:
        """Return one Problem for each key path. If a value may have several types, its message joins all errors."""
        messages: dict[str, list[str]] = {}
        all_details = error.errors(include_url=False)
        # Explain only the first problems, since the search for the nearest name takes milliseconds for each.
        told = all_details[:_PROBLEMS_TOLD]
        for details in told:
            place = details["loc"]
            # If the only item of a list is invalid, pydantic also calls the list too short. Report only the item's
            # error.
            inner = [each for each in told if each["loc"][: len(place)] == place]
            if details["type"] == "too_short" and len(inner) > 1:
                continue
            path, owner = _locate(self.model, place)
            message = self._message(details, path, owner)
            known = messages.setdefault(".".join(path), [])
            if message not in known:
                known.append(message)
        problems = [Problem(key, " Or: ".join(alternatives)) for key, alternatives in messages.items()]
        if rest := len(all_details) - len(told):
            problems.append(Problem("", f"has {rest} more problems, which are not listed here."))
        return problems

    def _message(self, details: ErrorDetails, path: list[str], owner: type[BaseModel] | None) -> str:
        """Return what is wrong with the value at a key path. `owner` is the section that contains the last key."""
        kind, value = details["type"], details["input"]
        if kind == "extra_forbidden" and owner is not None:
            return self._unknown_key(path, owner)
        if kind == "unknown_component":
            return self._unknown_component(details)
        if kind == "missing":
            field = owner.model_fields.get(path[-1]) if owner is not None else None
            described = f" {field.description}" if field is not None and field.description else ""
            return self._missing_component(path) or f"is required.{described}"
        if kind == "literal_error":
            expected = str(details.get("ctx", {}).get("expected", ""))
            choices = [part.strip().strip("'") for part in expected.replace(" or ", ", ").split(",")]
            return f"is {_shown(value)}; it must be {expected}.{suggestion(str(value), choices, SAME_NAME)}"
        if kind in ("model_type", "dict_type"):
            if callable(value):
                return "is a Python object. Write it in a file, and give file and name: `my_rewards.py:is_right`."
            return f"is {_shown(value)}; it must be a mapping, written `key: value`. Write {{}} for the defaults."
        if kind == "object":
            return f"{details['msg']}."
        if kind == "too_short":
            return "is empty; give at least one."
        if kind == "tuple_type":
            example = f", such as [{value}]" if isinstance(value, str) else ""
            return f"is {_shown(value)}; it must be a list{example}."
        if value is None:
            return "is null. Give it a value, or leave the line out if there is a default."
        shown = "" if isinstance(value, (dict, list, tuple)) else f"is {_shown(value)}: "
        return f"{shown}{details['msg'][0].lower()}{details['msg'][1:]}."

    def _unknown_key(self, path: list[str], owner: type[BaseModel]) -> str:
        key, name = path[-1], _component_name(owner)
        if plugin := self._plugin_of_section(path):
            return plugin
        if issubclass(owner, ComponentConfig) and key in owner.missing_settings:
            return f"is not a setting of '{name}'. {owner.missing_settings[key]}"
        names = list(owner.model_fields)
        hint = suggestion(key, names) or self._found_elsewhere(path, owner)
        of = f" of '{name}'" if name else ""
        settings = [known for known in names if known != "name"] if name else names
        plugins = " A plugin's section needs that plugin in `plugins`." if len(path) == 1 else ""
        return f"is not a setting{of}.{hint} Settings: {listing(settings)}.{plugins}"

    def _plugin_of_section(self, path: list[str]) -> str:
        """Return how to enable the plugin that has this section, or an empty string if no known plugin has it."""
        key = ".".join(path)
        plugin = key if key in self.unlisted else self._plugin_with("section", key)
        if plugin is None:
            return ""
        how = how_to_enable(plugin, is_installed=plugin in self.unlisted)
        return f"is a section of the plugin '{plugin}', which is not enabled: {how}."

    def _found_elsewhere(self, path: list[str], owner: type[BaseModel]) -> str:
        """Return where a setting of this name exists: in components of the same kind, else in other sections."""
        key = path[-1]
        kind = owner.kind if issubclass(owner, ComponentConfig) else ""
        registry = self.registry
        wrapped = [place for place, config in self.sources.items() if key in config.model_fields]
        if kind == SourceConfig.kind and wrapped:
            return f" It exists as {wrapped[0]}.{key}."
        having = [name for name in registry.names(kind) if key in registry.get(kind, name).config.model_fields]
        if having:
            return f" It is a setting of {' and '.join(having)}: set `name: {having[0]}`."
        found = [place for place in _places(lambda name, _: name == key, self.model) if place != ".".join(path)]
        # The user most likely meant one of the settings with the shortest paths.
        depth = min((place.count(".") for place in found), default=0)
        homes = [place for place in found if place.count(".") == depth]
        return f" It exists as {' and '.join(map(self._in_source, homes[:3]))}." if homes else ""

    def _in_source(self, place: str) -> str:
        """Return the key path of a setting, in the source that a source of the file wraps if only that one has it."""
        head, _, rest = place.partition(".")
        having = [path for path, config in self.sources.items() if rest.partition(".")[0] in config.model_fields]
        return f"{having[0]}.{rest}" if head == "source" and having else place

    def _missing_component(self, path: list[str]) -> str:
        """Return which plugin has a required component, or an empty string for any other setting."""
        field = RunConfig.model_fields.get(path[0]) if len(path) == 1 else None
        mark = next((item for item in field.metadata if isinstance(item, Component)), None) if field else None
        if mark is None or self.registry.default(mark.kind) is not None:
            return ""
        names = self.registry.names(mark.kind)
        others = f" Others: {listing(names)}." if names else ""
        return f"is required, and {self._no_plugin_has(mark.kind, 'default ' if names else '')}{others}"

    def _no_plugin_has(self, kind: str, which: str = "") -> str:
        plugin, wanted = plugin_of_kind(kind), _with_article(f"{which}{kind}")
        if plugin is None or any(self.registry.entries(plugin)):
            return f"no enabled plugin has {wanted}."
        how = how_to_enable(plugin, is_installed=plugin in self.unlisted)
        return f"no enabled plugin has {wanted}. The plugin '{plugin}' has {'one' if which else 'some'}: {how}."

    def _plugin_with(self, kind: str, name: str) -> str | None:
        """Return the plugin that has this component or section, though it is not enabled, or None if it is unknown."""
        declaring = (plugin for plugin, components in self.unlisted.items() if f"{kind}/{name}" in components)
        return next(declaring, None) or plugin_with(kind, name)

    def _unknown_component(self, details: ErrorDetails) -> str:
        # `config.assembly` puts kind and shorthand into the message.
        kind, shorthand = details["msg"].split(" ")
        value: object = details["input"]
        given: Mapping[str, Any] = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
        name: Any = given.get("name")
        names = self.registry.names(kind)
        plugin = self._plugin_with(kind, name) if isinstance(name, str) else None
        if not names and plugin is None:
            return f"is given, but {self._no_plugin_has(kind)}"
        if not isinstance(name, str):
            short = f"its {shorthand}, or a mapping with `name:`"
            return f"must be {_with_article(kind)}: {short}. Available: {listing(names)}."
        others = [other for other in names if other != name]
        if name in names:
            return f"is '{name}', which cannot contain itself. Choose another {kind}: {listing(others)}."
        if plugin is not None:
            how = how_to_enable(plugin, is_installed=plugin in self.unlisted)
            without = f" Available without it: {listing(names)}." if names else ""
            return f"is '{name}', which the plugin '{plugin}' has: {how}.{without}"
        others_of_name = [entry.config for entry in self.registry.entries() if entry.name == name]
        hint = "".join(self._of_another_kind(name, config) for config in others_of_name)
        hint = hint or suggestion(name, self.registry.all_names(kind), SAME_NAME)
        # Plugins that are not listed are not imported, so one of them may have this component.
        strangers = sorted(set(self.unlisted) - OFFICIAL.keys())
        further = f" Installed, but not listed under plugins: {listing(strangers)}." if strangers else ""
        return f"is '{name}', but no {kind} has that name.{hint} Available: {listing(names)}.{further}"

    def _of_another_kind(self, name: str, config: type[ComponentConfig]) -> str:
        """Return where a component of another kind belongs, and which settings go with it."""
        places = _places(lambda _, members: config.kind in [getattr(each, "kind", "") for each in members], self.model)
        place = min(places, key=lambda place: place.count("."), default="")
        setting = f": set {self._in_source(place)}: {name}" if place else ""
        beside = f", and {config.goes_with}" if config.goes_with else ""
        return f" '{name}' is {_with_article(config.kind)}{setting}{beside}."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _CHARACTERS_TOLD else f"{text[:_CHARACTERS_TOLD]}..."


def _with_article(kind: str) -> str:
    words = kind.replace("_", " ")
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _component_name(owner: type[BaseModel]) -> str | None:
    field = owner.model_fields.get("name") if issubclass(owner, ComponentConfig) else None
    return field.default if field is not None and isinstance(field.default, str) else None


def _places(fits: Callable[[str, Sequence[Any]], bool], section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the distinct key paths of all settings for which `fits(name, types of the value)` is true."""
    found: list[str] = []
    for name, field in section.model_fields.items():
        annotation = _field_type(field)
        if _as_model(annotation) is None:
            annotation = _item_type(annotation)
        members = [member for _, member in _tagged_members(annotation)] or [annotation]
        if fits(name, members):
            found.append(f"{prefix}{name}")
        for inner in filter(None, map(_as_model, members)):
            found += _places(fits, inner, f"{prefix}{name}.{_name_within(field)}")
    return list(dict.fromkeys(found))


def _locate(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the user's key path for pydantic's `location` of an error, and the section that has the last key."""
    path: list[str] = []
    current: Any = model
    owner: type[BaseModel] | None = None
    for part in location:
        tagged = dict(_tagged_members(current))
        if isinstance(part, str) and part in tagged:
            current = tagged[part]
            continue
        types_of_value = [member for member in _members(current) if member is not types.NoneType]
        if isinstance(part, str) and not tagged and len(types_of_value) > 1:
            # This part names the type that pydantic tried, and is not a key in the file.
            current = next((each for each in types_of_value if getattr(each, "__name__", "") == part), None)
            continue
        path.append(str(part))
        owner = section = _as_model(current)
        if section is None:
            current = _item_type(current)
        else:
            field = section.model_fields.get(str(part))
            current = _field_type(field) if field is not None else None
    return path, owner


def _name_within(field: Any) -> str:
    """Return `NAME.` for a mapping whose keys the user chooses, or an empty string for any other setting."""
    return "NAME." if any(get_origin(_strip(member)) is dict for member in _members(_field_type(field))) else ""


def _field_type(field: Any) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _strip(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    inner = _strip(annotation)
    return get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)


def _tagged_members(annotation: Any) -> Iterator[tuple[str, Any]]:
    for member in _members(annotation):
        if get_origin(member) is Annotated:
            inner, *marks = get_args(member)
            tag = next((mark.tag for mark in marks if isinstance(mark, Tag)), None)
            if tag is not None:
                yield tag, inner
            else:
                yield from _tagged_members(inner)


def _as_model(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        bare = _strip(member)
        if isinstance(bare, type) and issubclass(bare, BaseModel):
            return bare
    return None


def _item_type(annotation: Any) -> Any:
    for member in _members(annotation):
        inner = _strip(member)
        arguments = [argument for argument in get_args(inner) if argument is not Ellipsis]
        if get_origin(inner) in (tuple, list, dict) and arguments:
            return arguments[-1]
    return None
