"""Build the config model of a run from the sections of core and plugins.

The model is a subclass of RunConfig. A field with a `Component` mark gets a new type, the union of all config classes
that are registered for the mark's kind. The setting `name` chooses among them. Nothing is validated here.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy as copy_object
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BeforeValidator, Discriminator, Field, Tag, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from spurline.config.run_config import DataEvaluationConfig, EvaluationPart, RunConfig
from spurline.config.section import Component, ComponentConfig, SchemaOfShorthand, Section, expand_shorthand, summary_of
from spurline.errors import PluginError, suggestion
from spurline.plugins.registry import Registry, TopLevelSection

_UNKNOWN = "unknown_component"
"""Type of the validation error for an unknown component."""


def assemble(registry: Registry, plugin_sections: Mapping[str, type[Section]]) -> type[RunConfig]:
    """Return the config model for the components and sections in `registry` and the sections in `plugin_sections`.

    `plugin_sections` maps top-level keys to section classes. Raises PluginError if a section cannot be added.
    """
    builder = _Builder(registry)
    fields: dict[str, dict[str, Any]] = {"": {}}
    sections = {name: TopLevelSection(section, False, name) for name, section in plugin_sections.items()}
    for name, declared in {**registry.sections, **sections}.items():
        owner, _, key = name.rpartition(".")
        model = _section_model(owner)
        marked = declared.annotation
        section = get_args(marked)[0] if get_origin(marked) is Annotated else marked
        adds = f"Plugin '{declared.plugin}' adds the config section '{name}'"
        if model is None:
            open_ones = [field for field in RunConfig.model_fields if _section_model(field)]
            raise PluginError(f"{adds}, but there is no section '{owner}'.{suggestion(owner, open_ones)}")
        if key in model.model_fields or (name in sections and name in registry.sections):
            raise PluginError(f"{adds}, which exists already. Give it another name.")
        if model is DataEvaluationConfig and not issubclass(section, EvaluationPart):
            raise PluginError(f"{adds}, which is not an EvaluationPart. Derive {section.__name__} from that class.")
        annotation = builder.replaced(marked | None) if declared.optional else builder.replaced(marked)
        default: Any = {"default": None} if declared.optional else {"default_factory": dict, "validate_default": True}
        described = Field(**default, description=summary_of(section))
        fields.setdefault(owner, {})[key] = (annotation, described)
    own = fields.pop("")
    for owner, extra in fields.items():
        field = RunConfig.model_fields[owner]
        model = builder.specialized(cast("type[Section]", field.annotation), extra)
        own[owner] = (_annotated(model, field.metadata) if field.metadata else model, builder.with_default(field))
    return cast("type[RunConfig]", builder.specialized(RunConfig, own))


def _section_model(owner: str) -> type[Section] | None:
    """Return the class of core's section `owner`, or None if core lacks it. An empty `owner` means RunConfig."""
    if not owner:
        return RunConfig
    field = RunConfig.model_fields.get(owner)
    annotation: object = None if field is None else field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


class _Builder:
    """Puts a union of registered configs in place of each type with a `Component` mark, in sections of any depth."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._open: list[tuple[str, str]] = []
        self._kinds = set[str]()
        self._built = defaultdict[tuple[str, str], list[tuple[set[str], list[tuple[str, str]], type[Section]]]](list)

    def specialized(self, model: type[Section], extra: Mapping[str, Any] | None = None) -> type[Section]:
        """Return a subclass with unions for marked fields, and with `extra` fields, or `model` if nothing changes."""
        replaced: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            if extra and name in extra:
                continue
            mark = _component_mark(field.metadata)
            annotation = self._union(mark) if mark else self.replaced(field.annotation)
            if mark is None and annotation is field.annotation:
                continue
            replaced[name] = (annotation, self.with_default(field, mark))
        if not replaced and not extra:
            return model
        return _subclass(model, {**replaced, **(extra or {})})

    def with_default(self, field: FieldInfo, mark: Component | None = None) -> FieldInfo:
        """Return a copy of the field whose default fits its new type.

        A component field defaults to the default component of its kind, even if the field declares another default. The
        declared default applies only if Python code instantiates the class of the section.
        """
        copy = copy_object(field)
        copy.metadata = [item for item in field.metadata if not isinstance(item, Component)]
        if mark is not None and (field.is_required() or isinstance(field.default, ComponentConfig)):
            default = self._registry.default(mark.kind)
            if default is not None:
                copy.default = {"name": default}
                copy.validate_default = True
        elif not field.is_required():
            # Sections in the default have the original types. Use their values, which are validated as the new types.
            if field.default_factory is None:
                copy.default = _values(field.default)
            else:
                copy.default_factory = lambda: _values(field.get_default(call_default_factory=True))
            copy.validate_default = True
        return copy

    def replaced(self, annotation: Any) -> Any:
        """Return a type expression in which sections are specialized and marked types are unions."""
        section: object = annotation
        if isinstance(section, type) and issubclass(section, Section):
            return self.specialized(section)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            mark = _component_mark(arguments[1:])
            if mark is not None:
                return self._union(mark)
            inner = self.replaced(arguments[0])
            return annotation if inner is arguments[0] else _annotated(inner, arguments[1:])
        if not arguments or origin is None:
            return annotation
        new = [self.replaced(argument) for argument in arguments]
        if all(a is b for a, b in zip(new, arguments, strict=True)):
            return annotation
        return _generic(Union, new) if origin in (Union, types.UnionType) else _generic(origin, new)

    def _union(self, mark: Component) -> Any:
        """Return the union of the kind's configs. It accepts a bare string as the value of the mark's `shorthand`."""
        self._kinds.add(mark.kind)
        default = self._registry.default(mark.kind)
        names = self._registry.all_names(mark.kind)
        if not names:
            # `config.error_messages` extends this error with the name of a plugin that has such components.
            refused = BeforeValidator(functools.partial(_refuse_component, mark=mark))
            return _annotated(ComponentConfig, [refused, _written_in_short(mark)])
        # A component may contain components of its kind, but not of its own name, since the type would be infinite.
        configs = {name: self._open_up(mark.kind, name) for name in names if (mark.kind, name) not in self._open}
        members = [_annotated(_config_with_name(config, name), [Tag(name)]) for name, config in configs.items()]
        discriminator = Discriminator(
            _chosen_name(default),
            custom_error_type=_UNKNOWN,
            # `config.error_messages` parses this text. A context would be a dict, but the annotation must be hashable.
            custom_error_message=f"{mark.kind} {mark.shorthand}",
        )
        return _annotated(
            _generic(Union, members),
            [
                discriminator,
                _written_in_short(mark),
                SchemaOfShorthand(list(configs) if mark.shorthand == "name" else None),
            ],
        )

    def _open_up(self, kind: str, name: str) -> type[Section]:
        """Specialize a component's config, once for the components around it that its own parts leave out."""
        for kinds, left_out, built in self._built[kind, name]:
            if left_out == [entry for entry in self._open if entry[0] in kinds]:
                self._kinds |= kinds
                return built
        around, self._kinds = self._kinds, set[str]()
        self._open.append((kind, name))
        built = self.specialized(self._registry.get(kind, name).config)
        self._open.pop()
        left_out = [entry for entry in self._open if entry[0] in self._kinds]
        self._built[kind, name].append((self._kinds, left_out, built))
        self._kinds = around | self._kinds
        return built


def _values(default: Any) -> Any:
    """Return the default as plain values. Each section becomes a mapping of its explicitly given settings."""
    if isinstance(default, Section):
        chosen = {"name"} if isinstance(default, ComponentConfig) else set[str]()
        return {name: _values(getattr(default, name)) for name in default.model_fields_set | chosen}
    if isinstance(default, (tuple, list)):
        return (list if isinstance(default, list) else tuple)(map(_values, cast("Sequence[Any]", default)))
    if isinstance(default, dict):
        return {key: _values(value) for key, value in cast("Mapping[Any, Any]", default).items()}
    return default


def _written_in_short(mark: Component) -> BeforeValidator:
    return BeforeValidator(functools.partial(expand_shorthand, setting=mark.shorthand))


def _refuse_component(value: object, *, mark: Component) -> object:
    raise PydanticCustomError(_UNKNOWN, "{kind} {shorthand}", {"kind": mark.kind, "shorthand": mark.shorthand})


def _component_mark(metadata: Sequence[Any]) -> Component | None:
    return next((item for item in metadata if isinstance(item, Component)), None)


@functools.cache
def _config_with_name(config: type[Section], name: str) -> type[Section]:
    field = Field(name, description=ComponentConfig.model_fields["name"].description)
    return _subclass(config, {"name": (_generic(Literal, [name]), field)})


def _subclass(base: type[Section], fields: Mapping[str, Any]) -> type[Section]:
    create: Any = create_model
    # Without this, pydantic would search for the source of the class to read docstrings, but the class has no source.
    keywords = {"use_attribute_docstrings": False}
    model = create(base.__name__, __base__=base, __doc__=base.__doc__, __cls_kwargs__=keywords, **fields)
    return cast("type[Section]", model)


def _annotated(inner: Any, marks: Sequence[Any]) -> Any:
    return _generic(Annotated, [inner, *marks])


def _generic(origin: Any, arguments: Sequence[Any]) -> Any:
    return origin[tuple(arguments)]


def _chosen_name(default: str | None) -> Callable[[Any], str | None]:
    def choose(value: Any) -> str | None:
        given = cast("Mapping[str, Any]", value).get("name", default) if isinstance(value, Mapping) else None
        name = given if isinstance(value, Mapping) else getattr(value, "name", None)
        return name if isinstance(name, str) else None

    return choose
