"""Define the base classes of config sections, the marks of their fields, and the short forms of settings.

A bare string may stand for a component or a named section, and a single item for a list of one: `collator: packed` is
`{name: packed}`, `data.train: rows.jsonl` is `[{path: rows.jsonl}]`. The JSON schema accepts the same short forms.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from spurline.config.paths import ConfigPlace
from spurline.errors import Problem

if TYPE_CHECKING:
    from spurline.progress import Progress


def _types_in(annotation: Any) -> list[Any]:
    arguments = get_args(annotation)
    return [part for argument in arguments for part in _types_in(argument)] if arguments else [annotation]


class Section(BaseModel):
    """A mapping in the config file. Unknown keys are errors, and values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
    retired: ClassVar[tuple[str, ...]] = ()
    """Settings of earlier versions. They are ignored in the records of runs and when a run is resumed.

    Retire a setting only if it never changed training, or if other checks refuse checkpoints that were made with it.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, value: Any, info: ValidationInfo) -> Any:
        place = info.context
        if not isinstance(value, Mapping) or not isinstance(place, ConfigPlace) or not place.recorded:
            return cast("Any", value)
        return {key: item for key, item in cast("Mapping[str, Any]", value).items() if key not in cls.retired}

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number, or in a list or dict of numbers. pydantic would take them as 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        items: Any = [value]
        if holds := isinstance(value, (list, tuple)):
            items = cast("Sequence[Any]", value)
        elif holds := isinstance(value, Mapping) and get_origin(annotation) is dict:
            items = cast("Mapping[str, Any]", value).values()
        if any(isinstance(item, bool) for item in items):
            types = _types_in(annotation)
            if any(each in (int, float) for each in types) and not any(each in (bool, Any) for each in types):
                text = "must hold numbers, not true or false" if holds else "it must be a number, not true or false"
                raise PydanticCustomError("number_from_bool", text)
        return cast("Any", value)

    def problems(self, run: Any) -> Iterable[Problem]:
        """Yield the problems of this section, conflicts with other sections included. Keys are relative to the section.

        `run` is the `RunConfig`. Its type cannot be given here, since RunConfig is made of sections.
        """
        return ()

    def choices(self, run: Any) -> Mapping[str, Any]:
        """Return values for the settings that are `auto` and whose values depend on the machine.

        A run settles them at its start and records the values. A resumed run keeps the recorded values.
        """
        return {}

    def settled(self, run: Any, recorded: Mapping[str, Any]) -> Self:
        """Return this section with its `choices` and those of sections in it, with `recorded` values where present.

        Values that were recorded of another component are not taken.
        """
        if recorded.get("name") != getattr(self, "name", None):
            recorded = {}
        values = {name: recorded.get(name, value) for name, value in self.choices(run).items()}
        for name in type(self).model_fields:
            part = getattr(self, name)
            if isinstance(part, Section) and (now := part.settled(run, recorded.get(name) or {})) is not part:
                values[name] = now
        return self.model_copy(update=values) if values else self

    def await_services(self, run: Any, progress: Progress) -> None:
        """Wait until the services that this section names, such as servers, answer. By default, do nothing.

        A run calls this at its start, after the data is read and before the model loads. Raises UserError if a service
        does not answer in time.
        """


def summary_of(section: type[BaseModel]) -> str:
    """Return the docstring of a section, or of the nearest base that has one."""
    return inspect.getdoc(section) or ""


def sections_within(value: Any, path: str = "") -> Iterator[tuple[str, Section]]:
    """Yield (key path, section) for the value, if it is a section, and then for all sections inside it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Section):
        yield path, value
        items = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, tuple):
        items = enumerate(cast("tuple[Any, ...]", value))
    elif isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
    for key, item in items:
        yield from sections_within(item, f"{path}.{key}" if path else str(key))


class ComponentConfig(Section):
    """Settings of one component. `name` says which implementation the registry builds."""

    kind: ClassVar[str] = ""
    """Kind of the component, set by the base class of the kind."""
    goes_with: ClassVar[str] = ""
    """Other settings that go with this component, such as `loss: ppo`. Messages suggest them together."""
    missing_settings: ClassVar[Mapping[str, str]] = {}
    """Messages, by key, about settings that other components of the kind have. Each says why this component lacks the
    setting, and what to do instead."""

    name: str = Field(min_length=1)
    """The component to use."""

    @classmethod
    def defaults_beside(cls, given: Mapping[str, Any], file: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return defaults that depend on other sections of the file.

        Args:
            given: Settings of this section as the user wrote them.
            file: All settings of the file as the user wrote them.
        """
        return {}

    @model_validator(mode="before")
    @classmethod
    def _take_defaults(cls, value: Any, info: ValidationInfo) -> Any:
        place: object = info.context
        if not isinstance(value, Mapping) or not isinstance(place, ConfigPlace) or place.file is None:
            return cast("Any", value)
        given = cast("Mapping[str, Any]", value)
        return {**cls.defaults_beside(given, place.file), **given}


@dataclass(frozen=True)
class Component:
    """Mark a field as the config of a component: `Annotated[ComponentConfig, Component("collator")]`.

    Attributes:
        kind: The kind that supplies the choices.
        shorthand: The setting that a bare string sets. For example, `collator: packed` sets `name`.
    """

    kind: str
    shorthand: str = "name"


class OnResume(Enum):
    """Mark of a field: whether a run that resumes a checkpoint may change it, as in `Annotated[int, OnResume.FREE]`.

    The mark of a section also applies to its fields without a mark. Everything in a FREE section is free. If neither
    a field nor a section around it has a mark, the field is REFUSED.
    """

    FREE = "free"
    """Training does not depend on the setting: paths, logging, evaluation, memory, time-outs."""
    TO_ROUNDING = "to rounding"
    """The setting changes the order in which numbers are summed: micro-batches, layout, kernels. The resumed run
    computes the same up to rounding. If the model uses dropout, the random numbers change too."""
    MAY_GROW = "may grow"
    """The setting is a number of steps or epochs, and may grow. Any other change is treated as BY_NAME."""
    BY_NAME = "by name"
    """The setting is a hyper-parameter. A change needs `--allow-change KEY`."""
    REFUSED = "refused"
    """The setting decides which data or which model is trained."""


BARE = "(as written)"
"""If `--set` adds a setting to a bare string, such as `packed` in `collator: packed`, the string gets this key. Only
the config model, which is built later, knows which setting the string stands for."""


def expand_shorthand(value: Any, setting: str) -> Any:
    """Return a bare string as `{setting: string}`, and any other value unchanged."""
    if isinstance(value, str):
        return {setting: value}
    if isinstance(value, Mapping) and BARE in value:
        settings = cast("Mapping[str, Any]", value)
        return {setting: settings[BARE], **{key: item for key, item in settings.items() if key != BARE}}
    return cast("Any", value)


def as_list(value: Any) -> Any:
    """Return a string or mapping as a list of one, null as an empty list, and any other value unchanged."""
    if value is None:
        return []
    return [value] if isinstance(value, (str, dict)) else value


class NamedSection(Section):
    """A section with a field `name` of fixed choices. A bare string is short for the section with that name."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return expand_shorthand(value, "name")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        section = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [{"type": "string", "enum": section["properties"]["name"]["enum"]}, section]}


class SchemaOfShorthand:
    """Mark of a setting that may be written as a string: one of `names`, or any string if `names` is None."""

    def __init__(self, names: Sequence[str] | None) -> None:
        self._names = names

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        union = handler(core_schema)
        # A mapping without `name` selects the default. `oneOf` would refuse it, since it matches several choices.
        choices: list[Any] = union.pop("oneOf", None) or [union]
        text: dict[str, Any] = {"type": "string"}
        if self._names is not None:
            text["enum"] = list(self._names)
        return {"anyOf": [text, *choices]}


class SchemaOfOneOrMany:
    """Mark of a list that may be written as a single item."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        many = handler(core_schema)
        return {"anyOf": [many, many["items"]]} if "items" in many else many
