"""Build the final config model: core's sections plus one typed section per plugin and per selectable component.

In: RunConfig (with `Component` marks) and a filled registry. Out: a RunConfig subclass in which every marked field is a
union of the registered configs, told apart by `name`. Pure pydantic; nothing is validated here.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Mapping
from copy import copy as copy_object
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BeforeValidator, Discriminator, Field, Tag, create_model
from pydantic.fields import FieldInfo

from spurline.config.run_config import RunConfig
from spurline.config.section import Component, ComponentConfig, Section
from spurline.errors import PluginError
from spurline.registry import Registry


def assemble(registry: Registry, plugin_sections: Mapping[str, type[Section]]) -> type[RunConfig]:
    """The config model of a run with these components and plugin sections.

    plugin_sections: plugin name -> its Section; optional in the file when all its fields have defaults.
    Raises PluginError when a plugin's name is already a core setting.
    """
    fields: dict[str, Any] = {}
    for name, section in plugin_sections.items():
        if name in RunConfig.model_fields:
            raise PluginError(f"Plugin '{name}' has the name of a core setting; its config section needs another name.")
        default = Field(default_factory=dict, validate_default=True, description=section.__doc__)
        fields[name] = (section, default)
    return cast("type[RunConfig]", _specialize(RunConfig, registry, fields))


def _specialize(model: type[Section], registry: Registry, extra: Mapping[str, Any] | None = None) -> type[Section]:
    """A subclass of `model` whose marked fields are unions over the registry; `model` itself when none is marked."""
    replaced: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        mark = _component_mark(field)
        annotation = _component_union(mark, registry) if mark else _replace(field.annotation, registry)
        if mark is None and annotation is field.annotation:
            continue
        replaced[name] = (annotation, _with_default(field, mark, registry))
    if not replaced and not extra:
        return model
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **replaced, **(extra or {}))


def _component_mark(field: FieldInfo) -> Component | None:
    return next((item for item in field.metadata if isinstance(item, Component)), None)


def _with_default(field: FieldInfo, mark: Component | None, registry: Registry) -> FieldInfo:
    """The same field, with the kind's default component where the field itself has none."""
    copy = copy_object(field)
    copy.metadata = [item for item in field.metadata if not isinstance(item, Component)]
    if mark is not None and field.is_required():
        default = registry.default(mark.kind)
        if default is not None:
            copy.default = {"name": default}
            copy.validate_default = True
    elif isinstance(field.default, Section):
        # The default instance has the unspecialised type: rebuild it from its values.
        copy.default = field.default.model_dump(exclude_unset=True)
        copy.validate_default = True
    return copy


def _replace(annotation: Any, registry: Registry) -> Any:
    """Specialise Section types and marked types anywhere inside a type expression."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return _specialize(annotation, registry)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        mark = next((item for item in arguments[1:] if isinstance(item, Component)), None)
        if mark is not None:
            return _component_union(mark, registry)
        inner = _replace(arguments[0], registry)
        return annotation if inner is arguments[0] else Annotated[(inner, *arguments[1:])]
    if not arguments or origin is None:
        return annotation
    new = tuple(_replace(argument, registry) for argument in arguments)
    if all(a is b for a, b in zip(new, arguments, strict=True)):
        return annotation
    return functools.reduce(operator.or_, new) if origin in (Union, types.UnionType) else origin[new]


def _component_union(mark: Component, registry: Registry) -> Any:
    """Union of the kind's configs, chosen by `name`; a bare string is short for `{shorthand: string}`."""
    default = registry.default(mark.kind)
    names = registry.all_names(mark.kind)
    if not names:
        return ComponentConfig
    members = [Annotated[_named_config(registry, mark.kind, name), Tag(name)] for name in names]
    union: Any = functools.reduce(operator.or_, members)
    return Annotated[
        union,
        Discriminator(_chosen_name(default), custom_error_type="unknown_component", custom_error_message=mark.kind),
        BeforeValidator(_expand(mark.shorthand)),
    ]


@functools.cache
def _config_with_name(config: type[ComponentConfig], name: str) -> type[ComponentConfig]:
    literal = Literal[name]  # type: ignore[valid-type]
    description = ComponentConfig.model_fields["name"].description
    return create_model(
        config.__name__,
        __base__=config,
        __doc__=config.__doc__,
        name=(literal, Field(name, description=description)),
    )


def _named_config(registry: Registry, kind: str, name: str) -> Any:
    return _config_with_name(registry.get(kind, name).config, name)


def _chosen_name(default: str | None) -> Callable[[Any], str | None]:
    def choose(value: Any) -> str | None:
        if isinstance(value, Mapping):
            return cast("Mapping[str, Any]", value).get("name", default)
        return getattr(value, "name", None)

    return choose


def _expand(shorthand: str) -> Callable[[Any], Any]:
    def expand(value: Any) -> Any:
        return {shorthand: value} if isinstance(value, str) else value

    return expand
