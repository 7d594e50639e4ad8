"""Compare the config of a checkpoint with the one that wants to resume it, setting by setting.

In: the stored settings and a validated config. Out: each `Difference` with what the marks of the fields (`OnResume`)
say about it. Nothing is allowed or refused here; `spurline.run.checkpoints.changes` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeGuard, cast

from spurline.config.hidden import hide_secrets
from spurline.config.run_config import RunConfig
from spurline.config.section import ComponentConfig, NamedSection, OnResume, Section, sections_within

_ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One changed setting; of a component that was replaced by another one, all its settings together.

    before, now: plain JSON values, `(absent)` where there was none. mark: what a resume may do about it; never
    MAY_GROW, which is FREE for a count that grew and BY_NAME for any other change.
    """

    key: str
    before: Any
    now: Any
    mark: OnResume

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}"

    def is_named(self, name: str) -> bool:
        """Return whether this name of a setting or section means it."""
        return name in (self.key, f"{self.key}.name") or self.key.startswith(f"{name}.")


def differences(before: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """Return every setting that differs between a stored config (as `LoadedConfig.resolved` gave it) and this one.

    Another secret in the place of one is no difference.
    """
    before, now = hide_secrets(before), hide_secrets(config.model_dump(mode="json"))
    sections = dict(sections_within(config))
    marks = dict(_marks(sections))
    wholes = {path for path, section in sections.items() if isinstance(section, (ComponentConfig, NamedSection))}
    return [
        Difference(key, stored, value, _settled(_mark_of(key, marks), stored, value))
        for key, stored, value in _changes(before, now, "", wholes)
        # The section of a plugin comes and goes with it; one within a section only where it says nothing.
        if _ABSENT not in (stored, value) or ("." in key and None not in (stored, value))
    ]


def setting_names(config: RunConfig) -> list[str]:
    """Key paths of all settings and sections of this config."""
    return [key for key, _ in _paths(config.model_dump(mode="json"), "")]


def _changes(before: Any, now: Any, key: str, wholes: set[str]) -> Iterator[tuple[str, Any, Any]]:
    """(key, before, now) of what differs, as far down as both sides have the same shape."""
    if before == now:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        old, new = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", now)
        if key not in wholes or old.get("name") == new.get("name"):
            for name in dict.fromkeys([*new, *old]):
                path = f"{key}.{name}" if key else name
                yield from _changes(old.get(name, _ABSENT), new.get(name, _ABSENT), path, wholes)
            return
    elif _lists_sections(before) and _lists_sections(now):
        for index, (left, right) in enumerate(zip_longest(before, now, fillvalue=_ABSENT)):
            yield from _changes(left, right, f"{key}.{index}", wholes)
        return
    yield key, before, now


def _lists_sections(value: Any) -> TypeGuard[list[Any]]:
    """Plain values in a list are one setting together, and an empty list may become either."""
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in cast("list[Any]", value))


def _settled(mark: OnResume, before: Any, now: Any) -> OnResume:
    if mark is not OnResume.MAY_GROW:
        return mark
    grew = isinstance(before, (int, float)) and isinstance(now, (int, float)) and now >= before
    return OnResume.FREE if grew else OnResume.BY_NAME


def _mark_of(key: str, marks: Mapping[str, OnResume]) -> OnResume:
    """Return the mark of a field, or of the closest section around it; FREE is that of all below it."""
    found = OnResume.REFUSED
    parts = key.split(".")
    for depth in range(1, len(parts) + 1):
        found = marks.get(".".join(parts[:depth]), found)
        if found is OnResume.FREE:
            break
    return found


def _marks(sections: Mapping[str, Section]) -> Iterator[tuple[str, OnResume]]:
    for path, section in sections.items():
        for name, field in type(section).model_fields.items():
            mark = next((item for item in field.metadata if isinstance(item, OnResume)), None)
            if mark is not None:
                yield f"{path}.{name}" if path else name, mark
        for name in type(section).retired:
            yield f"{path}.{name}" if path else name, OnResume.FREE


def _paths(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = list(cast("Mapping[str, Any]", value).items())
    elif _lists_sections(value):
        items = list(enumerate(value))
    for name, item in items:
        path = f"{key}.{name}" if key else str(name)
        yield path, item
        yield from _paths(item, path)


def _shown(value: Any) -> str:
    """Return a component by its name, where it is one; else the value as Python writes it."""
    if isinstance(value, Mapping) and "name" in value:
        return str(cast("Mapping[str, Any]", value)["name"])
    return _ABSENT if value == _ABSENT else repr(cast("object", value))
