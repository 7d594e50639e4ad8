"""Marks of settings in which a Python program may give an object in place of a path.

They act while a config is validated: whoever loads one says through the validation context what keeps objects. A config
file holds none, and neither does what a run wrote down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_COLUMNS = frozenset(
    ("messages", "conversations", "prompt", "completion", "chosen", "text", "instruction", "input_ids", "question")
)
"""Columns by which a list is known to be one of rows. No setting of a dataset is called so."""


KEPT = "in_memory"
"""Folder of kept objects, below the run directory."""


class CannotKeepError(Exception):
    """What is wrong with an object, as a predicate of the setting, without a full stop."""


class KeepsObjects(Protocol):
    """Turns objects into paths. Both raise CannotKeepError."""

    def rows(self, value: Any) -> str:
        """The path of a file with these rows."""
        ...

    def saved(self, value: Any, what: str) -> str:
        """The folder of a model or tokenizer."""
        ...


class TriesObjects(KeepsObjects, Protocol):
    """Judges the objects of a config before anything is written, with the paths that they would get.

    Factory: `Class(run_dir)`, absolute; a plugin names it with `registry.add_keeper`.
    """

    has_met: bool
    """Whether there were any objects."""

    def keeper(self) -> KeepsObjects:
        """Return what keeps the objects that were met here."""
        ...


@dataclass(frozen=True)
class ObjectSetting:
    """Mark of a path in whose place an object may be given. holds: what kind."""

    holds: Literal["rows", "model", "tokenizer"]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._read, handler(source))

    def _read(self, value: Any, info: ValidationInfo) -> Any:
        if value is None or isinstance(value, (str, Path, bool, int, float)):
            return cast("Any", value)
        keeper: KeepsObjects | None = getattr(info.context, "objects", None)
        try:
            if keeper is None:
                raise CannotKeepError(
                    "is no path. Rows and other objects are given from Python: load_config({...}); in a file, write "
                    "the path"
                )
            return keeper.rows(value) if self.holds == "rows" else keeper.saved(value, self.holds)
        except CannotKeepError as error:
            raise PydanticCustomError("object", "{problem}", {"problem": str(error)}) from None


def is_kept_model(path: str) -> bool:
    """Whether it is the folder of a model that was kept, which has no tokenizer."""
    folder = Path(path)
    return folder.parent.name == KEPT and folder.name.startswith("model-")


def is_dataset(value: object) -> bool:
    """Whether it is a dataset of Hugging Face `datasets`, which is not imported to ask."""
    return any(base.__module__.partition(".")[0] == "datasets" for base in type(value).__mro__) and not isinstance(
        value, Mapping
    )


def is_rows(value: object) -> bool:
    """Whether it is rows, and no list of datasets' settings: a dataset, or a list whose first item has a column that
    some format reads."""
    if not isinstance(value, (list, tuple)):
        return is_dataset(value)
    items = cast("list[Any]", value)
    return bool(items) and isinstance(items[0], Mapping) and not _COLUMNS.isdisjoint(cast("Any", items[0]))


def as_datasets(value: Any) -> Any:
    """Rows as the settings of a dataset, also within a list; so is what holds rows in a form that is refused, such as
    several splits or a frame of pandas, whose setting then says so. Anything else unchanged."""
    if is_rows(value) or _may_be_meant_as_rows(value):
        return [{"path": value}]
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return [{"path": item} if is_rows(item) or _may_be_meant_as_rows(item) else item for item in items]
    return value


def _may_be_meant_as_rows(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _has_splits(cast("Mapping[Any, Any]", value))
    written = (str, bytes, Path, list, tuple, BaseModel)
    return isinstance(value, Iterable) and not isinstance(value, written)


def _has_splits(value: Mapping[Any, Any]) -> bool:
    return "path" not in value and any(is_dataset(item) for item in value.values())
