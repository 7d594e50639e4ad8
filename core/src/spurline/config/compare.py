"""Compare the config of a checkpoint with the one that wants to resume it, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume, sections_within

_ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One changed setting. allowed: whether a resume may change it."""

    key: str
    before: Any
    now: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.now!r}"


def differences(before: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """Every setting that differs between a stored config (as `model_dump(mode="json")` gave it) and this one."""
    now = config.model_dump(mode="json")
    marks = dict(_marks(config))
    old, new = dict(_leaves(before, "")), dict(_leaves(now, ""))
    found: list[Difference] = []
    for key in [*new, *(key for key in old if key not in new)]:
        value, stored = new.get(key, _ABSENT), old.get(key, _ABSENT)
        if value != stored:
            found.append(Difference(key, stored, value, _is_allowed(_mark_of(key, marks), stored, value)))
    return found


def _is_allowed(mark: OnResume | None, before: Any, now: Any) -> bool:
    if mark is OnResume.MAY_GROW:
        return isinstance(before, (int, float)) and isinstance(now, (int, float)) and now >= before
    return mark is OnResume.FREE


def _mark_of(key: str, marks: Mapping[str, OnResume]) -> OnResume | None:
    """The mark of a field, or of the closest section around it."""
    while key:
        if key in marks:
            return marks[key]
        key = key.rpartition(".")[0]
    return None


def _marks(config: RunConfig) -> Iterator[tuple[str, OnResume]]:
    for path, section in sections_within(config):
        for name, field in type(section).model_fields.items():
            mark = next((item for item in field.metadata if isinstance(item, OnResume)), None)
            if mark is not None:
                yield f"{path}.{name}" if path else name, mark


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in cast("Mapping[str, Any]", value).items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value:
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _leaves(item, f"{key}.{index}")
    else:
        yield key, value
