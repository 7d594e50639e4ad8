"""Mark settings for which a Python program may give an object in place of a path.

While a config is validated, a marked setting passes the object to the keeper in the validation context. The keeper
writes the object below the run directory, and its path becomes the value of the setting.
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
"""Column names that distinguish a list of rows from a list of dataset settings."""

KEPT = "in_memory"
"""Name of the folder, below the run directory, into which the keeper writes objects."""


class CannotKeepError(Exception):
    """Raised if an object cannot be saved. The text follows the setting's name in a message, and has no full stop."""


class KeepsObjects(Protocol):
    """A keeper: writes objects below a run directory. Both methods raise CannotKeepError if they cannot save an object.

    Factory: `Class(run_dir)`, with an absolute path. A plugin registers the class with `registry.add_keeper`.
    """

    def rows(self, value: Any) -> str:
        """Write rows to a file, and return its path."""
        ...

    def saved(self, value: Any, what: str) -> str:
        """Save a model or a tokenizer, as `what` says, and return its folder."""
        ...


@dataclass(frozen=True)
class ObjectSetting:
    """Mark of a path setting that also accepts an object of this kind."""

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
                    "is not a path. Pass rows and other objects from Python, with load_config({...}); in a file, "
                    "write the path"
                )
            return keeper.rows(value) if self.holds == "rows" else keeper.saved(value, self.holds)
        except CannotKeepError as error:
            raise PydanticCustomError("object", "{problem}", {"problem": str(error)}) from None


def is_kept_model(path: str) -> bool:
    """Return whether a path is the folder of a model that the keeper saved. Such a folder has no tokenizer."""
    folder = Path(path)
    return folder.parent.name == KEPT and folder.name.startswith("model-")


def is_dataset(value: object) -> bool:
    """Return whether a value is a dataset of Hugging Face `datasets`, without importing that library."""
    return any(base.__module__.partition(".")[0] == "datasets" for base in type(value).__mro__) and not isinstance(
        value, Mapping
    )


def as_datasets(value: Any) -> Any:
    """Turn rows, given alone or as items of a list, into dataset settings. Return any other value unchanged."""
    if _means_rows(value):
        return [{"path": value}]
    if isinstance(value, (list, tuple)):
        return [{"path": item} if _means_rows(item) else item for item in cast("list[Any]", value)]
    return value


def _means_rows(value: Any) -> bool:
    """Return whether a value is rows, and not a path, dataset settings, or a list of these.

    Forms that the keeper refuses, such as a pandas frame, count as rows too, so that the keeper's error is raised.
    """
    if isinstance(value, Mapping):
        given = cast("Mapping[Any, Any]", value)
        return "path" not in given and any(is_dataset(item) for item in given.values())
    if isinstance(value, (list, tuple)):
        first = next(iter(cast("list[Any]", value)), None)
        return isinstance(first, Mapping) and not _COLUMNS.isdisjoint(cast("Any", first))
    return is_dataset(value) or (isinstance(value, Iterable) and not isinstance(value, (str, bytes, Path, BaseModel)))
