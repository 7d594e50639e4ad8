"""Write docs/reference/*.md from the code: the config sections and the hooks.

    python docs/generate.py            write the pages
    python docs/generate.py --check    exit 1 when a page is not what the code says

The pages are committed, so that a reader needs no build; a test keeps them in step.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spurline.config.run_config import RunConfig
from spurline.config.section import Component, OnResume, Section
from spurline.plugins import hookspecs
from spurline.plugins.host import PluginHost
from spurline.plugins.registry import KINDS, Registration

PLUGINS = ("collation_fast", "async_rl")
"""Those of this repository."""

REFERENCE = Path(__file__).parent / "reference"


def config_page() -> str:
    """Every section and component of core, then what each plugin adds, with types, defaults and meaning."""
    lines = [
        "# Config reference",
        "",
        "Generated from the code by `docs/generate.py`. A run is one YAML file (or TOML, by suffix); every key below",
        "may also be set on the command line, as in `--set optimizer.learning_rate=1e-4`. `spurline schema` prints the",
        "same as a JSON schema for editors, plugins included.",
        "",
        "*resume*: whether a run that continues a checkpoint may change the setting. Settings without a word there may",
        "not.",
        "",
    ]
    lines += _section("Top level", RunConfig, "")
    for name, field in RunConfig.model_fields.items():
        section = _section_type(field)
        if section is not None and not any(isinstance(item, Component) for item in field.metadata):
            lines += _nested(name, section)
    lines += ["## Components", ""]
    lines += [
        "A component is chosen by `name:`; a bare string is short for a mapping with only the name "
        "(`collator: packed`), and for a dataset short for `path`.",
        "",
    ]
    registry = PluginHost.load([]).registry
    for kind in KINDS:
        entries = [entry for entry in registry.entries() if entry.kind == kind and kind != "report_panel"]
        if entries:
            lines += [f"### Kind `{kind}`", ""]
            for entry in entries:
                lines += _component(entry, registry.default(kind) == entry.name)
    for plugin in PLUGINS:
        lines += _plugin(plugin)
    return "\n".join(lines).rstrip() + "\n"


def _plugin(name: str) -> list[str]:
    """The components one plugin adds; of a config that extends one of core's, what it adds to that."""
    lines = [f"## Plugin `{name}`", ""]
    registry = PluginHost.load([name]).registry
    for entry in registry.entries(name):
        if entry.kind == "report_panel":
            continue
        lines += [f"### {entry.kind} `{entry.name}`", "", inspect.getdoc(entry.config) or "", ""]
        own = _own_fields(entry.config)
        others = [field for field in entry.config.model_fields if field not in {*own, "name"}]
        if own:
            lines += [*_table(entry.config, skip=(*others, "name")), ""]
        if others:
            lines += [f"And as in core: {', '.join(f'`{other}`' for other in others)}.", ""]
    return lines


def _own_fields(config: type[BaseModel]) -> list[str]:
    """Settings that a class outside of core declares."""
    declared = [
        base for base in config.__mro__ if not base.__module__.startswith(("spurline.", "pydantic", "builtins"))
    ]
    return [
        name
        for name in config.model_fields
        if name != "name" and any(name in vars(base).get("__annotations__", {}) for base in declared)
    ]


def hooks_page() -> str:
    """Every hook with its arguments and its docstring."""
    lines = [
        "# Hooks",
        "",
        "Generated from `spurline.plugins.hookspecs` by `docs/generate.py`.",
        "",
        inspect.getdoc(hookspecs) or "",
        "",
    ]
    for name, hook in vars(hookspecs).items():
        if not hasattr(hook, f"{hookspecs.PROJECT}_spec"):
            continue
        arguments = ", ".join(str(parameter) for parameter in inspect.signature(hook).parameters.values())
        lines += [f"## `{name}`", "", f"```python\n{name}({arguments})\n```", "", *_paragraphs(hook), ""]
    return "\n".join(lines).rstrip() + "\n"


def _paragraphs(hook: Any) -> list[str]:
    """The docstring; a line that begins a new `word:` entry becomes its own list item."""
    lines: list[str] = []
    for line in (inspect.getdoc(hook) or "").splitlines():
        head, separator, _ = line.partition(":")
        starts_entry = bool(separator) and " " not in head.strip("`") and bool(head)
        lines.append(f"- {line}" if starts_entry else line)
    return lines


def _nested(path: str, section: type[BaseModel]) -> list[str]:
    lines = _section(f"`{path}`", section, path)
    for name, field in section.model_fields.items():
        inner = _section_type(field)
        if inner is not None and not _mentions_component(field):
            lines += _nested(f"{path}.{name}", inner)
    return lines


def _section(title: str, section: type[BaseModel], path: str) -> list[str]:
    return [f"## {title}", "", inspect.getdoc(section) or "", "", *_table(section, skip=()), ""]


def _component(entry: Registration, default: bool) -> list[str]:
    heading = f"#### `{entry.name}`" + (" (default)" if default else "")
    lines = [heading, "", inspect.getdoc(entry.config) or "", ""]
    if set(entry.config.model_fields) - {"name"}:
        lines += [*_table(entry.config, skip=("name",)), ""]
    for name, field in entry.config.model_fields.items():
        inner = _section_type(field)
        if inner is not None:
            lines += [f"`{name}`: {inspect.getdoc(inner)}", "", *_table(inner, skip=()), ""]
    return lines


def _table(section: type[BaseModel], skip: tuple[str, ...]) -> list[str]:
    rows = ["| setting | type | default | resume | meaning |", "|---|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if name not in skip:
            cells = (f"`{name}`", _type(field), _default(field), _resume(field), field.description or "")
            rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return rows


def _type(field: FieldInfo) -> str:
    mark = next((item for item in field.metadata if isinstance(item, Component)), None)
    if mark is not None:
        return f"{mark.kind} component"
    text = str(field.annotation) if not isinstance(field.annotation, type) else field.annotation.__name__
    for noise in (
        "typing.",
        "pathlib.",
        "spurline.config.run_config.",
        "spurline.config.section.",
    ):
        text = text.replace(noise, "")
    if "Component(" in text:
        kind = text.split("kind='")[1].split("'")[0]
        return f"map of name to {kind} component" if text.startswith("dict") else f"list of {kind} components"
    bounds = [_bound(item) for item in field.metadata if type(item).__name__ in _BOUNDS]
    text = text.replace(
        "Annotated[float, FieldInfo(annotation=NoneType, required=True, metadata=[Ge(ge=0), Lt(lt=1)])]", "float"
    )
    return f"`{text}`" + (f" ({', '.join(bounds)})" if bounds else "")


_BOUNDS = {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<=", "MinLen": "length >="}


def _bound(item: object) -> str:
    (value,) = vars(item).values() if hasattr(item, "__dict__") else [getattr(item, item.__slots__[0])]  # type: ignore[attr-defined]
    return f"{_BOUNDS[type(item).__name__]} {value}"


def _default(field: FieldInfo) -> str:
    if any(isinstance(item, Component) for item in field.metadata):
        return "see the kind"
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=False)
    return (
        "see below" if isinstance(value, Section) else f"`{value!r}`" if not isinstance(value, Path) else f"`{value}`"
    )


def _resume(field: FieldInfo) -> str:
    mark = next((item for item in field.metadata if isinstance(item, OnResume)), None)
    return {None: "", OnResume.FREE: "may change", OnResume.MAY_GROW: "may grow"}[mark]


def _section_type(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, Section)), None)


def _mentions_component(field: FieldInfo) -> bool:
    return any(isinstance(item, Component) for item in field.metadata)


PAGES = {"config.md": config_page, "hooks.md": hooks_page}


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    check = parser.parse_args().check
    stale = 0
    for name, build in PAGES.items():
        path, text = REFERENCE / name, build()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if check:
            print(f"{path} is not what the code says; run: python docs/generate.py")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
