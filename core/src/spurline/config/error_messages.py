"""Turn pydantic's validation errors into problems a user can act on.

In: a ValidationError, the model it came from and the registry. Out: one `Problem` per error, with the key path as the
user wrote it (union tags removed) and the nearest fix.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from spurline.config.run_config import RunConfig
from spurline.config.section import Component, ComponentConfig
from spurline.errors import Problem, listing, misspelling, nearest, suggestion
from spurline.plugins.official import OFFICIAL, how_to_enable, plugin_of_kind, plugin_with
from spurline.plugins.registry import CORE, OtherNames, Registration, Registry

_PROBLEMS_TOLD = 50
_CHARACTERS_TOLD = 300
"""Of a value in a message."""


def explain(
    error: ValidationError,
    model: type[BaseModel],
    registry: Registry,
    skip: Collection[str] = (),
    unlisted: Collection[str] = (),
) -> list[Problem]:
    """One Problem per key path; a value that fits none of several types says so in one message.

    skip: pydantic's types of errors to leave out. unlisted: plugins that are installed and not in the `plugins` list.
    """
    messages: dict[str, list[str]] = {}
    all_details = error.errors(include_url=False)
    # Looking for the name that was meant takes milliseconds for each.
    told = all_details[:_PROBLEMS_TOLD]
    for details in told:
        if _follows_from_another(details, told) or details["type"] in skip:
            continue
        path, owner = _locate(model, details["loc"])
        message = _message(details, path, owner, registry, model, unlisted)
        known = messages.setdefault(".".join(path), [])
        if message not in known:
            known.append(message)
    problems = [Problem(key, " Or: ".join(alternatives)) for key, alternatives in messages.items()]
    if len(all_details) > len(told):
        problems.append(Problem("", f"has {len(all_details) - len(told)} more problems than are told here."))
    return problems


def _follows_from_another(details: ErrorDetails, all_details: list[ErrorDetails]) -> bool:
    """A list whose only item is invalid also counts as too short; the item's own error says more."""
    location = details["loc"]
    return details["type"] == "too_short" and any(
        other is not details and other["loc"][: len(location)] == location for other in all_details
    )


def _message(
    details: ErrorDetails,
    path: list[str],
    owner: type[BaseModel] | None,
    registry: Registry,
    model: type[BaseModel],
    unlisted: Collection[str],
) -> str:
    kind = details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden" and owner is not None:
        elsewhere = " A plugin's section needs that plugin in `plugins`." if len(path) == 1 else ""
        return (
            _mispunctuated(path[-1])
            or _unlisted_section(path, unlisted)
            or _section_of_missing(path, unlisted)
            or _unknown_key(path, owner, model, registry) + elsewhere
        )
    if kind == "unknown_component":
        return _unknown_component(details, registry, model, unlisted)
    if kind == "missing":
        missing = _without_any_component(path, registry, unlisted)
        if missing:
            return missing
        field = owner.model_fields.get(path[-1]) if owner is not None else None
        return f"is required. {field.description}" if field is not None and field.description else "is required."
    if kind == "literal_error":
        expected = str(context.get("expected", ""))
        choices = [part.strip().strip("'") for part in expected.replace(" or ", ", ").split(",")]
        close = misspelling(str(details["input"]), choices)
        return f"is {_shown(details['input'])}; it must be {expected}.{close}"
    if kind in ("model_type", "dict_type") and details["input"] is None:
        return "is null, which a section cannot be. Leave it out, or write {}, for the defaults."
    if kind in ("model_type", "dict_type") and callable(details["input"]):
        return "is a Python object, which no config holds. Write it in a file, and name that: `my_rewards.py:is_right`."
    if kind in ("model_type", "dict_type"):
        section = (
            _as_model(_field_type(owner.model_fields[path[-1]])) if owner and path[-1] in owner.model_fields else None
        )
        how = _example_of(section, details["input"]) if section is not None else ""
        return f"is {_shown(details['input'])}; it must be a mapping, written `key: value`{how}."
    if kind == "object":
        return f"{details['msg']}."
    if kind == "too_short":
        return "is empty; give at least one."
    if kind == "tuple_type":
        value = details["input"]
        example = f", such as [{value}]" if isinstance(value, str) else ""
        return f"is {_shown(value)}; it must be a list{example}."
    if details["input"] is None:
        return "is null, which it cannot be. Give it a value, or leave the line out where there is a default."
    shown = "" if isinstance(details["input"], (dict, list, tuple)) else f"is {_shown(details['input'])}: "
    text = details["msg"][0].lower() + details["msg"][1:]
    return f"{shown}{text}."


def _example_of(section: type[BaseModel], value: object) -> str:
    """`, such as {reward: exact_match}` where one setting of the section is plainly meant by the value; else empty."""
    fields = section.model_fields
    required = [name for name, field in fields.items() if field.is_required()]
    if isinstance(value, bool):
        return ", or {} for the defaults" if value and not required else ""
    if isinstance(value, str):
        fitting = [name for name, field in fields.items() if _choices(field.annotation)[0] is str]
    else:
        fitting = [name for name, field in fields.items() if {*map(_strip, _choices(field.annotation))} <= {int, float}]
    meant = required or fitting
    try:
        section.model_validate(dict.fromkeys(meant, value))
    except ValidationError:
        return ""
    return f", such as {{{meant[0]}: {value}}}" if len(meant) == 1 else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _CHARACTERS_TOLD else f"{text[:_CHARACTERS_TOLD]}..."


def _mispunctuated(key: str) -> str:
    """Explain `{name:fsdp}`, which YAML reads as one word, and a key path; empty for any other key."""
    if ":" in key:
        return f"is not a setting. A space is missing after the colon: `{key.replace(':', ': ', 1)}`."
    outer, dot, inner = key.partition(".")
    return f"is not a setting. Write settings inside each other: `{outer}: {{{inner}: ...}}`." if dot else ""


def _unlisted_section(path: list[str], unlisted: Collection[str]) -> str:
    """What to say of a top-level key that is, or nearly is, the name of such a plugin; empty for any other."""
    key = path[0]
    name = key if key in unlisted else nearest(key, {*unlisted, *RunConfig.model_fields})
    if len(path) > 1 or name not in unlisted:
        return ""
    meant = "" if name == key else f" Did you mean '{name}'?"
    return (
        f"is not a setting.{meant} The plugin '{name}' is installed, but not listed under plugins. Add it: "
        f"plugins: [{name}]."
    )


def _section_of_missing(path: list[str], unlisted: Collection[str]) -> str:
    """What to say of a section of a plugin of this project that is not enabled; empty for any other key."""
    plugin = plugin_with("section", ".".join(path))
    if plugin is None:
        return ""
    return (
        f"is of the plugin '{plugin}', which is not enabled: {how_to_enable(plugin, is_installed=plugin in unlisted)}."
    )


def _without_any_component(path: list[str], registry: Registry, unlisted: Collection[str]) -> str:
    """What to say where a run needs a component and no enabled plugin has a default; empty for any other setting."""
    field = RunConfig.model_fields.get(path[0]) if len(path) == 1 else None
    mark = next((item for item in field.metadata if isinstance(item, Component)), None) if field is not None else None
    if mark is None or registry.default(mark.kind) is not None:
        return ""
    names, plugin = registry.names(mark.kind), plugin_of_kind(mark.kind)
    if not names:
        return f"is required, and {_no_plugin_has(mark.kind, unlisted)}"
    if plugin is None or any(registry.entries(plugin)):
        return ""
    return f"is required, and {_no_plugin_has(mark.kind, unlisted, 'default ')} Others: {listing(names)}."


def _no_plugin_has(kind: str, unlisted: Collection[str], which: str = "") -> str:
    plugin, wanted = plugin_of_kind(kind), _with_article(f"{which}{kind}")
    if plugin is None:
        return f"no enabled plugin has {wanted}."
    how = how_to_enable(plugin, is_installed=plugin in unlisted)
    return f"no enabled plugin has {wanted}. The plugin '{plugin}' has {'one' if which else 'some'}: {how}."


def _with_article(kind: str) -> str:
    words = kind.replace("_", " ")
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _unknown_key(path: list[str], owner: type[BaseModel], model: type[BaseModel], registry: Registry) -> str:
    key = path[-1]
    missing: Mapping[str, str] = owner.missing_settings if issubclass(owner, ComponentConfig) else {}
    told = missing.get(key) or missing.get(registry.other_names.path_of(key).rpartition(".")[2])
    if told is not None:
        return f"is not a setting of '{_component_name(owner)}'. {told}"
    names = list(owner.model_fields)
    others = registry.other_names
    hint = others.replaced.get(key) or _meant_elsewhere(path, names, model, others) or suggestion(key, names)
    having = _components_with(key, owner, registry)
    if not hint and having:
        hint = f" It is a setting of {' and '.join(having)}: add `name: {having[0]}`."
    if not hint:
        found = [place for place in _places_of(key, model, "") if place != ".".join(path)]
        # The least nested are the likeliest to be meant.
        depth = min((place.count(".") for place in found), default=0)
        homes = [place for place in found if place.count(".") == depth]
        hint = f" There is {' and '.join(homes[:3])}." if homes else ""
    chosen = _component_name(owner)
    place = f" of '{chosen}'" if chosen else ""
    settings = [name for name in names if name != "name"] if chosen else names
    return f"is not a setting{place}.{hint} Settings: {listing(settings)}."


def _meant_elsewhere(path: list[str], names: list[str], model: type[BaseModel], others: OtherNames) -> str:
    """What to say of a key that is another trainer's name for a setting that there is; empty for any other."""
    meant = others.settings.get(path[-1], "")
    place = meant.partition(":")[0]
    outer, _, name = place.rpartition(".")
    if name in names:
        return f" Write `{meant.removeprefix(f'{outer}.')}`." if ":" in meant else f" Did you mean '{name}'?"
    is_there = bool(meant) and place in _places_of(name, model, "")
    return f" There is {f'`{meant}`' if ':' in meant else meant}." if is_there else ""


def _components_with(key: str, owner: type[BaseModel], registry: Registry) -> list[str]:
    """Components of the same kind that have this setting."""
    kind = owner.kind if issubclass(owner, ComponentConfig) else ""
    return [name for name in registry.names(kind) if key in registry.get(kind, name).config.model_fields]


def _places_of(key: str, section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Key paths at which a setting of this name exists, each once."""
    found = {f"{prefix}{key}": None} if key in section.model_fields else {}
    for name, field in section.model_fields.items():
        annotation = _field_type(field)
        if _as_model(annotation) is None:
            annotation = _item_type(annotation)
        members = [member for _, member in _tagged_members(annotation)] or [annotation]
        for member in members:
            inner = _as_model(member)
            if inner is not None:
                found.update(dict.fromkeys(_places_of(key, inner, f"{prefix}{name}.{_name_within(field)}")))
    yield from found


def _component_name(owner: type[BaseModel]) -> str | None:
    field = owner.model_fields.get("name") if issubclass(owner, ComponentConfig) else None
    return field.default if field is not None and isinstance(field.default, str) else None


def _unknown_component(
    details: ErrorDetails, registry: Registry, model: type[BaseModel], unlisted: Collection[str]
) -> str:
    kind, shorthand = details["msg"].split(" ")
    value = details["input"]
    name = cast("Mapping[str, Any]", value).get("name") if isinstance(value, Mapping) else None
    names = registry.names(kind)
    if not names and (not isinstance(name, str) or plugin_with(kind, name) is None):
        return f"is given, but {_no_plugin_has(kind, unlisted)}"
    if not isinstance(name, str):
        unspaced = (
            [str(key) for key in cast("Mapping[Any, Any]", value) if ":" in str(key)]
            if isinstance(value, Mapping)
            else []
        )
        if unspaced:
            return _mispunctuated(unspaced[0])
        short = f"its {shorthand}, or a mapping with `name:`"
        return f"must be {_with_article(kind)}: {short}. Available: {listing(names)}."
    if name in names:
        others = [other for other in names if other != name]
        return f"is '{name}', which cannot hold itself. Choose another {kind}: {listing(others)}."
    if kind == "reward" and name.endswith(".py"):
        return f"is '{name}', a file, of which a function must be named too: `{name}:my_function`."
    others = [other for other in registry.all_names(kind) if other.rpartition("/")[2] == name.rpartition("/")[2]]
    if others:
        return (
            f"is '{name}', but no {kind} has that name. Did you mean '{max(others, key=lambda other: '/' in other)}'?"
        )
    elsewhere = registry.other_names.components.get(f"{kind}/{name.casefold()}", "")
    elsewhere += "".join(_of_another_kind(name, entry, model) for entry in registry.entries() if entry.name == name)
    plugin = plugin_with(kind, name)
    if plugin is not None:
        how = how_to_enable(plugin, is_installed=plugin in unlisted)
        without = f" Available without it: {listing(names)}." if names else ""
        return f"is '{name}', which the plugin '{plugin}' has: {how}.{without}"
    # Which other plugin has it cannot be known without importing it, and only listed plugins are imported. Those of
    # this project have been asked for above.
    strangers = sorted(set(unlisted) - OFFICIAL.keys())
    plugins = (
        "Installed, but not listed under plugins, so that their components are not available: "
        f"{listing(strangers)}. If it is of {strangers[0] if len(strangers) == 1 else 'one of these'}, write plugins: "
        f"[{strangers[0] if len(strangers) == 1 else 'NAME'}]."
        if strangers
        else "A component of a plugin needs that plugin in `plugins`."
    )
    return (
        f"is '{name}', but no {kind} has that name.{elsewhere or misspelling(name, names)} Available: "
        f"{listing(names)}. {plugins}"
    )


def _of_another_kind(name: str, entry: Registration, model: type[BaseModel]) -> str:
    """Where a component of this name belongs, and what goes with it there."""
    found = dict(_places_of_kind(entry.kind, model))
    if not found:
        return ""
    place = min(found, key=lambda place: place.count("."))
    within = f" (with {found[place]})" if found[place] else ""
    beside = f", and {entry.config.goes_with}" if entry.config.goes_with else ""
    return f" '{name}' is {_with_article(entry.kind)}: set {place}: {name}{within}{beside}."


def _places_of_kind(
    kind: str, section: type[BaseModel], prefix: str = "", chosen: str = ""
) -> Iterator[tuple[str, str]]:
    """Key paths that take components of this kind, each with the choice of another component that it needs."""
    for name, field in section.model_fields.items():
        annotation, place = _field_type(field), f"{prefix}{name}"
        if _as_model(annotation) is None:
            annotation = _item_type(annotation)
        tagged = dict(_tagged_members(annotation))
        if any(getattr(member, "kind", "") == kind for member in tagged.values()):
            yield place, chosen
            continue
        members = {f"{place}.name: {tag}": member for tag, member in tagged.items() if not tag.startswith(f"{CORE}/")}
        for choice, member in members.items() if tagged else [(chosen, annotation)]:
            inner = _as_model(member)
            if inner is not None:
                yield from _places_of_kind(kind, inner, f"{place}.{_name_within(field)}", chosen or choice)


def _locate(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """The user's key path for an error location, and the section that owns its last key."""
    path: list[str] = []
    current: Any = model
    owner: type[BaseModel] | None = None
    for part in location:
        tagged = dict(_tagged_members(current))
        if isinstance(part, str) and part in tagged:
            current = tagged[part]
            continue
        if isinstance(part, str) and not tagged and len(_choices(current)) > 1:
            # Which of several types pydantic tried: no part of the file.
            current = next((choice for choice in _choices(current) if getattr(choice, "__name__", "") == part), None)
            continue
        path.append(str(part))
        section = _as_model(current)
        owner = section
        if section is not None:
            field = section.model_fields.get(str(part))
            current = _field_type(field) if field is not None else None
        else:
            current = _item_type(current)
    return path, owner


def _name_within(field: Any) -> str:
    """`NAME.` for a setting that holds others by names of the user's, which stand between its key and theirs."""
    return "NAME." if any(get_origin(_strip(member)) is dict for member in _members(_field_type(field))) else ""


def _field_type(field: Any) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _strip(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    inner = _strip(annotation)
    return get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)


def _choices(annotation: Any) -> list[Any]:
    """The types a value may have; more than one only for a union that is not just "or null"."""
    return [member for member in _members(annotation) if member is not types.NoneType]


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
    """Type of the items of a tuple, list or dict annotation."""
    for member in _members(annotation):
        inner = _strip(member)
        arguments = [argument for argument in get_args(inner) if argument is not Ellipsis]
        if get_origin(inner) in (tuple, list, dict) and arguments:
            return arguments[-1]
    return None
