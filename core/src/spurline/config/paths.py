"""Expand `~` and `$VAR` in path settings, and find files relative to the config file.

A path setting has a mark, as in `Annotated[Path, PathSetting()]`. The mark converts the value during validation. The
validation context, a `ConfigPlace`, contains the folder of the config file. The path of something to read becomes
absolute if it exists, so that the config that a run records is valid in any working directory.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from spurline.config.objects import KeepsObjects

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class ConfigPlace:
    """The validation context of a config.

    Attributes:
        folder: The folder of the config file, where relative paths begin, or None if the config is not a file.
        recorded: Whether a run recorded these settings. If so, their paths are not changed.
        file: All settings as the user wrote them; None for the record of a run, which includes the defaults.
        objects: Saves the objects that a program gives in place of paths. If None, such objects are refused.
        freed: Closed when the config and its copies are freed.
    """

    folder: Path | None = None
    recorded: bool = False
    file: Mapping[str, Any] | None = None
    objects: KeepsObjects | None = None
    freed: ExitStack = field(default_factory=ExitStack)

    def homes(self) -> list[Path]:
        """Return the folders in which a relative path is searched for, in order."""
        return [Path.cwd()] if self.folder is None else [self.folder, Path.cwd()]

    def find(self, path: str) -> str | None:
        """Return the absolute path of the file, folder or glob, or None if it does not exist."""
        found = (str(home / path) for home in self.homes())
        return next((each for each in found if os.path.lexists(each) or glob.glob(each, recursive=True)), None)


@dataclass(frozen=True)
class PathSetting:
    """Mark of a setting that holds a path. `~`, `$VAR` and `${VAR}` are expanded; an unknown variable is an error.

    Attributes:
        reads: Whether the setting names something to read. A relative path is then searched for in the folder of the
            config file and in the working directory, and becomes absolute. If it is not found, it stays as it is, since
            it may be a hub name. If `reads` is False, a relative path begins at the working directory.
        names: Words that are not paths, such as names of bundled templates. A file of that name is given as `./NAME`.
    """

    reads: bool = False
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._read, handler(source))

    def _read(self, value: Any, info: ValidationInfo) -> Any:
        place: ConfigPlace | None = info.context
        if not isinstance(value, (str, Path)) or (place is not None and place.recorded):
            return str(value) if isinstance(value, Path) else value
        path = expanded(str(value))
        # An empty path would match the folder itself.
        if place is None or not self.reads or not path or path in self.names:
            return path
        return place.find(path) or path


def expanded(path: str) -> str:
    """Return the path with `~`, `~USER`, `$VAR` and `${VAR}` replaced.

    Raises PydanticCustomError for an unknown user or variable.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise PydanticCustomError("path", "the environment variable {name} is not set", {"name": name})
        return os.environ[name]

    complete = os.path.expanduser(_VARIABLE.sub(value_of, path))
    if complete.startswith("~"):
        raise PydanticCustomError("path", "there is no such user")
    return complete


def shown_path(path: str) -> str:
    """Return a path to show to users: relative if it is below the working directory, else unchanged."""
    inside = Path(path)
    return str(inside.relative_to(Path.cwd())) if inside.is_absolute() and inside.is_relative_to(Path.cwd()) else path
