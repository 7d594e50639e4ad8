"""Paths in settings: `~` and `$VAR` expanded, and what is read found beside the config file.

A setting carries a mark, `Annotated[Path, PathSetting()]`, so that plugins' paths follow the same rules as core's. The
marks act while a config file is validated; loading says where that file is, through the validation context. What was
found is kept as an absolute path, so that the config a run writes down means the same from any folder.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from spurline.config.functions import recorded, reference_to
from spurline.config.objects import KeepsObjects

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class ConfigPlace:
    """Validation context: where relative paths begin. folder: of the config file, or None when there is none.

    recorded: a run wrote these settings down; they are expanded and absolute, and stay as they are.
    file: all settings as they are written; None where their defaults are spelled out.
    objects: keeps what a program gives in place of a path. functions: references that were made to functions.
    """

    folder: Path | None = None
    recorded: bool = False
    file: Mapping[str, Any] | None = None
    objects: KeepsObjects | None = None
    functions: list[str] = field(default_factory=list[str])

    def homes(self) -> list[Path]:
        """Folders in which something relative is looked for, in this order."""
        return [Path.cwd()] if self.folder is None else [self.folder, Path.cwd()]


@dataclass(frozen=True)
class PathSetting:
    """Mark of a setting that holds a path: `~`, `$VAR` and `${VAR}` are expanded; an unknown variable is an error.

    reads: the path names something that exists already. A relative path is then looked for in the config file's folder
    and in the working directory, and becomes absolute; it is an error if both have it. If neither has it, it stays as
    written, since it may be a hub name. Without `reads` a relative path begins at the working directory.
    names: words that are not paths here, such as names of bundled templates; a file with such a name is an error.
    """

    reads: bool = False
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._read, handler(source))

    def _read(self, value: Any, info: ValidationInfo) -> Any:
        place = _place(info)
        if not isinstance(value, (str, Path)) or (place is not None and place.recorded):
            return str(value) if isinstance(value, Path) else value
        path = expanded(str(value))
        # Nothing is no path, though its folder is there: the setting's own rules judge it.
        if place is None or not self.reads or not path:
            return path
        found = _found(path, place)
        if found is not None and path in self.names:
            raise _error(
                f"{path} is the name of what comes with Spurline, and {found} exists too. Write ./{path} for the file, "
                "or rename it to use the name"
            )
        return path if found is None else found


@dataclass(frozen=True)
class FunctionSetting:
    """Mark of a setting that names a Python function: `module:function`, or `file.py:function`.

    A file follows the rules of a path that is read. A module that lies beside the config file or in the working
    directory becomes `FOLDER/module:function`; any other is imported by its name. Text without a colon is left alone. A
    Python program may give the function itself, which becomes a reference that `load_function` knows in this process.
    method: an object that has this method may be given too.
    """

    method: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(
            recorded, return_schema=core_schema.str_schema(), when_used="json-unless-none"
        )
        return core_schema.with_info_before_validator_function(self._read, handler(source), serialization=written)

    def _read(self, value: Any, info: ValidationInfo) -> Any:
        place = _place(info)
        if callable(value) or (self.method is not None and callable(getattr(value, self.method, None))):
            reference = reference_to(value)
            if place is not None:
                place.functions.append(reference)
            return reference
        if not isinstance(value, str) or ":" not in value or (place is not None and place.recorded):
            return value
        module, _, function = expanded(value).rpartition(":")
        if place is None:
            return f"{module}:{function}"
        folder, slash, name = module.rpartition("/")
        if module.endswith(".py"):
            return f"{_found(module, place) or module}:{function}"
        if slash:
            return f"{_found(folder, place) or folder}/{name}:{function}"
        top = module.partition(".")[0]
        homes = {_home(home, top): home for home in reversed(place.homes()) if _home(home, top) is not None}
        if len(homes) > 1:
            raise _ambiguous([str(file) for file in reversed(homes)])
        return f"{next(iter(homes.values()))}/{module}:{function}" if homes else f"{module}:{function}"


def expanded(path: str) -> str:
    """The path with `~`, `~USER`, `$VAR` and `${VAR}` replaced. Raises PydanticCustomError for what is not known."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise _error(f"the environment variable {name} is not set. Set it, or write the path out")
        return os.environ[name]

    complete = os.path.expanduser(_VARIABLE.sub(value_of, path))
    if complete.startswith("~"):
        raise _error(f"there is no user {complete.partition('/')[0][1:]!r} whose folder ~ could stand for")
    return complete


def _place(info: ValidationInfo) -> ConfigPlace | None:
    return info.context if isinstance(info.context, ConfigPlace) else None


def _found(path: str, place: ConfigPlace) -> str | None:
    """Where the file, folder or glob is, absolute; None when it is nowhere. Raises when it is in two places."""
    found = dict.fromkeys(str(home / path) for home in place.homes() if _exists(str(home / path)))
    distinct = {os.path.realpath(each): each for each in reversed(found)}
    if len(distinct) > 1:
        raise _ambiguous(list(found))
    return next(iter(distinct.values()), None)


def _exists(path: str) -> bool:
    return os.path.lexists(path) or (glob.has_magic(path) and bool(glob.glob(path, recursive=True)))


def _home(folder: Path, module: str) -> Path | None:
    """Return the file of a top-level module in this folder, without symbolic links."""
    candidates = (folder / f"{module}.py", folder / module / "__init__.py")
    return next((file.resolve() for file in candidates if file.is_file()), None)


def _ambiguous(places: list[str]) -> PydanticCustomError:
    beside, here = places[0], places[-1]
    return _error(
        f"{beside} and {here} both exist, one beside the config file and one in the working directory. Write the whole "
        "path of the one you mean, or remove the other"
    )


def _error(problem: str) -> PydanticCustomError:
    return PydanticCustomError("path", "{problem}", {"problem": problem})


def shown_path(path: str) -> str:
    """A path, or what may be a hub name, as a person in the working directory writes it: short below that directory."""
    inside = Path(path)
    return str(inside.relative_to(Path.cwd())) if inside.is_absolute() and inside.is_relative_to(Path.cwd()) else path
