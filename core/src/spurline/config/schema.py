"""Make the JSON schema of the config accept the short ways to write a setting, as loading does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class SchemaOfShorthand:
    """Mark of a component's union: a bare string is valid too, any or one of `names`."""

    def __init__(self, names: Sequence[str] | None) -> None:
        self._names = names

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        union = handler(core_schema)
        # `oneOf` would refuse a mapping without `name`, which fits several components; loading takes the default.
        choices: list[Any] = union.pop("oneOf", None) or [union]
        text: dict[str, Any] = {"type": "string"}
        if self._names is not None:
            text["enum"] = list(self._names)
        return {"anyOf": [text, *choices]}


class SchemaOfOneOrMany:
    """Mark of a list that may be written as its only item."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        many = handler(core_schema)
        return {"anyOf": [many, many["items"]]} if "items" in many else many
