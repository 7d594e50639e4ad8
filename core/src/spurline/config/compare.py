"""Compare the config of a checkpoint with the config that resumes it, setting by setting.

Each `Difference` carries the mark of its field (`OnResume`). `spurline.run.checkpoints.resume` decides whether the
difference is permitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, TypeGuard, cast

from spurline.config.hidden import hide_secrets
from spurline.config.run_config import RunConfig
from spurline.config.section import ComponentConfig, NamedSection, OnResume, Section, sections_within

_ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One changed setting, or all settings of a component that was replaced by another component.

    Attributes:
        key: Key path of the setting.
        before: The earlier value as plain JSON; `(absent)` if the setting did not exist.
        now: The new value as plain JSON; `(absent)` if the setting no longer exists.
        mark: Whether a resume may change the setting. MAY_GROW becomes FREE if the number grew, else BY_NAME.
    """

    key: str
    before: Any
    now: Any
    mark: OnResume

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}"

    def is_named(self, name: str) -> bool:
        """Return whether `name` is this setting or a section around it."""
        return name in (self.key, f"{self.key}.name") or self.key.startswith(f"{name}.")


def differences(before: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """Return every setting that differs between this config and an earlier result of `LoadedConfig.resolved`.

    Secrets are hidden in both configs, so a changed secret does not count as a difference.
    """
    before, now = hide_secrets(before), hide_secrets(config.model_dump(mode="json"))
    sections = dict(sections_within(config))
    marks = dict(_marks(sections)) | dict.fromkeys(config.backend.free_after(before["backend"]), OnResume.FREE)
    wholes = {path for path, section in sections.items() if isinstance(section, (ComponentConfig, NamedSection))}
    plain = {
        f"{path}.{name}"
        for path, section in sections.items()
        for name, field in type(section).model_fields.items()
        if getattr(section, name) == field.default
    }
    return [
        Difference(key, stored, value, _settled(_mark_of(key, marks), stored, value))
        for key, stored, value in _changes(before, now, "", wholes)
        # Skip a top-level section that only one side has, since its plugin is not enabled on the other side. Also skip
        # a deeper key that is new and has its default, or that only one side has and that is null there.
        if _ABSENT not in (stored, value)
        or ("." in key and None not in (stored, value) and not (stored == _ABSENT and key in plain))
    ]


def _changes(before: Any, now: Any, key: str, wholes: set[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, before, now) of each difference. Descend into mappings and lists of sections that both sides have."""
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
    """Return whether a value is a list of sections. Any other list is a single setting."""
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in cast("list[Any]", value))


def _settled(mark: OnResume, before: Any, now: Any) -> OnResume:
    if mark is not OnResume.MAY_GROW:
        return mark
    grew = isinstance(before, (int, float)) and isinstance(now, (int, float)) and now >= before
    return OnResume.FREE if grew else OnResume.BY_NAME


def _mark_of(key: str, marks: Mapping[str, OnResume]) -> OnResume:
    """Return the mark of a field, or the mark of the closest section around it that has one.

    Every field within a FREE section is FREE.
    """
    around = accumulate(key.split("."), "{}.{}".format)
    found = [OnResume.REFUSED, *(marks[path] for path in around if path in marks)]
    return OnResume.FREE if OnResume.FREE in found else found[-1]


def _marks(sections: Mapping[str, Section]) -> Iterator[tuple[str, OnResume]]:
    for path, section in sections.items():
        for name, field in type(section).model_fields.items():
            mark = next((item for item in field.metadata if isinstance(item, OnResume)), None)
            if mark is not None:
                yield f"{path}.{name}" if path else name, mark
        for name in type(section).retired:
            yield f"{path}.{name}" if path else name, OnResume.FREE


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value:
        return str(cast("Mapping[str, Any]", value)["name"])
    return _ABSENT if value == _ABSENT else repr(cast("object", value))
