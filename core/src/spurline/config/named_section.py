"""Sections that a bare string may stand for, such as `schedule: constant` or `reduction: token_mean`."""

from __future__ import annotations

from typing import Any

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from spurline.config.section import Section
from spurline.config.shorthand import expand_shorthand


class NamedSection(Section):
    """A section with a field `name` of fixed choices, which a bare string is short for, in the JSON schema too."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return expand_shorthand(value, "name")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        section = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [{"type": "string", "enum": section["properties"]["name"]["enum"]}, section]}
