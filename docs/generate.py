"""Write from the code what the documentation says of it: config sections, hooks, components, layers, contracts.

    python docs/generate.py            write the pages
    python docs/generate.py --check    exit 1 when a page is not what the code says

The pages are committed, so that a reader needs no build; a test keeps them in step.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import sys
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from spurline.config.run_config import RunConfig
from spurline.config.section import Component, ComponentConfig, OnResume, Section, summary_of
from spurline.plugins import hookspecs
from spurline.plugins.host import API_VERSION, PluginHost, hooks_of
from spurline.plugins.official import DEFAULT_PLUGINS, OFFICIAL
from spurline.plugins.registry import Registration
from spurline_rl import hookspecs as rl_hookspecs

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.append(str(ROOT / "tests/support"))

from import_graph import offered  # noqa: E402 - beside the tests, which use it too

PLUGINS = tuple(name for name in OFFICIAL if name not in DEFAULT_PLUGINS)
"""Plugins of this repository that a config has to list."""
KITS = ("spurline", "spurline_text", "spurline_models", "spurline_rl", "spurline_insight")
"""Packages with a contract kit, `testing`."""
API_LISTS = ROOT / "tests/meta/api"
INTERFACE = offered()
"""Package -> the lines of its list."""


def config_page() -> str:
    """Return each section and component that needs no `plugins:`, then those of the other plugins."""
    lines = [
        "# Config reference",
        "",
        "Generated from the code by `docs/generate.py`. A run is one YAML file (or TOML, by suffix); every key below",
        "may also be set on the command line, as in `--set optimizer.learning_rate=1e-4`. `spurline schema` prints the",
        "same as a JSON schema for editors, plugins included.",
        "",
        "*resume*: whether a run that continues a checkpoint may change the setting: *may change*; *to rounding*: may",
        "change, and the run goes on equal to rounding and not bit for bit; *by name*: with `--allow-change KEY`; and",
        "without a word there it may not. [More](../configuration.md#what-a-resume-may-change).",
        "",
    ]
    whole = whole_file()
    lines += _section("Top level", whole)
    for name, field in whole.model_fields.items():
        section = _section_type(field)
        if section is not None and not _mentions_component(field):
            lines += _nested(name, section, _mark(field))
    lines += [
        "## Components",
        "",
        "A component is chosen by `name:`; a bare string is short for a mapping with only the name "
        "(`collator: packed`), and for a dataset short for `path`.",
        "",
        "Those below are of core and of the plugins that are loaded wherever they are installed; the package of each",
        "stands beside its name.",
        "",
    ]
    registry = PluginHost.load([]).registry
    for kind in registry.kinds:
        entries = [entry for entry in registry.entries() if entry.kind == kind and kind != "report_panel"]
        if entries:
            lines += [f"### Kind `{kind}`", ""]
            for entry in entries:
                lines += _component(entry, registry.default(kind) == entry.name)
    for plugin in PLUGINS:
        lines += _plugin(plugin)
    return "\n".join(lines).rstrip() + "\n"


def _plugin(name: str) -> list[str]:
    """Return the components that one plugin adds, and the new settings of those that extend another component."""
    lines = [f"## Plugin `{name}`", ""]
    registry = PluginHost.load([name]).registry
    for entry in registry.entries(name):
        if entry.kind == "report_panel":
            continue
        lines += [f"### {entry.kind} `{entry.name}`", "", summary_of(entry.config), ""]
        own = _own_fields(entry.config)
        others = [field for field in entry.config.model_fields if field not in {*own, "name"}]
        if own:
            above = _mark_of_kind(entry.kind)
            lines += [*_table(entry.config, (*others, "name"), above), "", *_inner_tables(entry.config, own, above)]
        if others:
            lines += [f"And as without the plugin: {', '.join(f'`{other}`' for other in others)}.", ""]
    return lines


def _own_fields(config: type[ComponentConfig]) -> list[str]:
    """Return the settings that no component has without the plugin."""
    core = PluginHost.load([]).registry
    said = {
        (name, _declares(entry.config, name))
        for entry in core.entries()
        if entry.kind == config.kind
        for name in entry.config.model_fields
    }
    return [name for name in config.model_fields if name != "name" and (name, _declares(config, name)) not in said]


def _declares(config: type[BaseModel], field: str) -> type:
    """Return the class that declares this setting."""
    return next(base for base in config.__mro__ if field in vars(base).get("__annotations__", {}))


def hooks_page() -> str:
    """Return the page of hooks, with their arguments and docstrings."""
    lines = [
        "# Hooks",
        "",
        "Generated from `spurline.plugins.hookspecs` and `spurline_rl.hookspecs` by `docs/generate.py`.",
        "",
        inspect.getdoc(hookspecs) or "",
        "",
    ]
    for name, hook in {**hooks_of(hookspecs), **hooks_of(rl_hookspecs)}.items():
        arguments = ", ".join(str(parameter) for parameter in inspect.signature(hook).parameters.values())
        lines += [f"## `{name}`", "", f"```python\n{name}({arguments})\n```", "", *_paragraphs(hook), ""]
    return "\n".join(lines).rstrip() + "\n"


def _paragraphs(hook: Any) -> list[str]:
    """Return the docstring. A line that begins a new `word:` entry becomes its own list item."""
    lines: list[str] = []
    for line in (inspect.getdoc(hook) or "").splitlines():
        head, separator, _ = line.partition(":")
        starts_entry = bool(separator) and " " not in head.strip("`") and bool(head)
        lines.append(f"- {line}" if starts_entry else line)
    return lines


def _nested(path: str, section: type[BaseModel], above: OnResume) -> list[str]:
    lines = _section(f"`{path}`", section, above)
    for name, field in section.model_fields.items():
        inner = _section_type(field)
        if inner is not None and not _mentions_component(field):
            lines += _nested(f"{path}.{name}", inner, _mark(field, above))
    return lines


def _section(title: str, section: type[BaseModel], above: OnResume = OnResume.REFUSED) -> list[str]:
    return [f"## {title}", "", summary_of(section), "", *_table(section, skip=(), above=above), ""]


def _component(entry: Registration, default: bool) -> list[str]:
    heading = f"#### `{entry.name}`" + (" (default)" if default else "") + f" of {entry.distribution}"
    lines = [heading, "", summary_of(entry.config), ""]
    above = _mark_of_kind(entry.kind)
    if set(entry.config.model_fields) - {"name"}:
        lines += [*_table(entry.config, skip=("name",), above=above), ""]
    return [*lines, *_inner_tables(entry.config, entry.config.model_fields, above)]


def _inner_tables(config: type[BaseModel], names: Iterable[str], above: OnResume) -> Iterator[str]:
    """Yield a table for each of these fields that is a section."""
    for name in names:
        inner = _section_type(field := config.model_fields[name])
        if inner is not None:
            yield from (f"`{name}`: {summary_of(inner)}", "", *_table(inner, (), _mark(field, above)), "")


def _table(section: type[BaseModel], skip: tuple[str, ...], above: OnResume) -> list[str]:
    rows = ["| setting | type | default | resume | meaning |", "|---|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if name not in skip:
            cells = (f"`{name}`", _type(field), _default(field), _RESUME[_mark(field, above)], field.description or "")
            rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return rows


def _type(field: FieldInfo) -> str:
    text = _words(field.annotation, field.metadata)
    if "component" in text or "section" in text:
        return text
    bounds = list(_bounds(field.annotation, field.metadata))
    return f"`{text}`" + (f" ({', '.join(bounds)})" if bounds else "")


def _bounds(annotation: Any, marks: Sequence[Any]) -> Iterator[str]:
    """Yield the bounds of a number, or of the choices of a union."""
    for mark in marks:
        yield from _bounds(None, mark.metadata) if isinstance(mark, FieldInfo) else ()
        if type(mark).__name__ in _BOUNDS:
            yield _bound(mark)
    if _is_union(get_origin(annotation)):
        for choice in get_args(annotation):
            if get_origin(choice) is Annotated:
                yield from _bounds(None, get_args(choice)[1:])


def _words(annotation: Any, marks: Sequence[Any] = ()) -> str:
    """Return a type as people write it. A component is named by its kind."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0], arguments[1:])
    mark = next((item for item in marks if isinstance(item, Component)), None)
    if mark is not None:
        choices = [item for item in arguments if item is not type(None)] if _is_union(origin) else [annotation]
        return f"{mark.kind} component" + (" or null" if len(choices) < len(arguments) else "")
    if _is_union(origin):
        parts = [_words(item) for item in arguments]
        if any("component" in part or part == "section" for part in parts):
            return " or ".join("null" if part == "None" else part for part in parts)
        return " | ".join(parts)
    inner = [_words(item) for item in arguments if item is not Ellipsis]
    if any("component" in part for part in inner):
        return f"map of name to {inner[-1]}" if origin is dict else f"list of {inner[0]}s"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    if origin is Literal:
        return " | ".join(repr(item) for item in arguments)
    name = "None" if annotation is type(None) else getattr(origin or annotation, "__name__", str(annotation))
    return f"{name}[{', '.join([*inner, *(['...'] if Ellipsis in arguments else [])])}]" if arguments else name


def _is_union(origin: Any) -> bool:
    return origin in (Union, types.UnionType)


_BOUNDS = {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<=", "MinLen": "length >="}


def _bound(item: object) -> str:
    (value,) = vars(item).values() if hasattr(item, "__dict__") else [getattr(item, item.__slots__[0])]  # type: ignore[attr-defined]
    return f"{_BOUNDS[type(item).__name__]} {value}"


def _default(field: FieldInfo) -> str:
    if _mentions_component(field):
        return "see the kind"
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=False)
    if isinstance(value, Section):
        return "see below"
    return f"`{value}`" if isinstance(value, Path) else f"`{value!r}`"


_RESUME = {
    OnResume.REFUSED: "",
    OnResume.BY_NAME: "by name",
    OnResume.MAY_GROW: "may grow, else by name",
    OnResume.TO_ROUNDING: "to rounding",
    OnResume.FREE: "may change",
}


def _mark(field: FieldInfo, above: OnResume = OnResume.REFUSED) -> OnResume:
    """Return the mark of a field in a section with the mark `above`."""
    own = next((item for item in field.metadata if isinstance(item, OnResume)), above)
    return above if above is OnResume.FREE else own


def _mark_of_kind(kind: str) -> OnResume:
    """Return the mark of the components of a kind, or REFUSED if it depends on the place."""
    marks = set(_marks_of_kind(kind, whole_file(), OnResume.REFUSED))
    for entry in PluginHost.load(PLUGINS).registry.entries():
        marks |= set(_marks_of_kind(kind, entry.config, OnResume.REFUSED))
    return marks.pop() if len(marks) == 1 else OnResume.REFUSED


def _marks_of_kind(kind: str, section: type[BaseModel], above: OnResume) -> Iterator[OnResume]:
    for field in section.model_fields.values():
        mark, inner = _mark(field, above), _section_type(field)
        if f"{kind} component" in _words(field.annotation, field.metadata):
            yield mark
        elif inner is not None:
            yield from _marks_of_kind(kind, inner, mark)


def _section_type(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, Section)), None)


def _mentions_component(field: FieldInfo) -> bool:
    return any(isinstance(item, Component) for item in field.metadata)


@functools.cache
def whole_file() -> type[BaseModel]:
    """Return the settings of a file, with the sections that default plugins add."""
    fields: dict[str, dict[str, Any]] = {"": {}}
    for name, section in PluginHost.load([]).registry.sections.items():
        parent, _, key = name.rpartition(".")
        summary = summary_of((get_args(section.annotation) or (section.annotation,))[0])
        annotation = section.annotation | None if section.optional else section.annotation
        default = Field(default=None) if section.optional else Field(default_factory=dict)
        default.description = summary
        fields.setdefault(parent, {})[key] = (annotation, default)
    top = fields.pop("")
    for parent, inner in fields.items():
        field = RunConfig.model_fields[parent]
        base = field.annotation
        assert isinstance(base, type)
        made = create_model(base.__name__, __base__=base, __doc__=base.__doc__, **inner)
        top[parent] = (Annotated[made, *field.metadata], Field(default_factory=made, description=field.description))
    return create_model("RunConfig", __base__=RunConfig, __doc__=RunConfig.__doc__, **top)


def component_table() -> list[str]:
    """Return a row for each kind: what it decides, its protocol, and the components of plugins loaded by default."""
    registry = PluginHost.load([]).registry
    lines = ["| kind | decides | Protocol | components |", "|---|---|---|---|"]
    for kind, declared in registry.kinds.items():
        module, _, protocol = declared.protocol.partition(":")
        text = (inspect.getdoc(importlib.import_module(module)) or "").splitlines()[0].partition(": ")[2].rstrip(".")
        default = registry.default(kind)
        packages: dict[str, list[str]] = {}
        for entry in registry.entries():
            if entry.kind == kind:
                mark = " (default)" if entry.name == default else ""
                packages.setdefault(entry.distribution, []).append(f"`{entry.name}`{mark}")
        shown = [
            f"{package}: {', '.join(names) if kind != 'report_panel' else len(names)}"
            for package, names in packages.items()
        ]
        lines.append(f"| `{kind}` | {text} | `{module}.{protocol}` | {'; '.join(shown) or '-'} |")
    return lines


def layers() -> list[str]:
    """Return the layers that import-linter checks, from top to bottom: packages first, then those within core."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    lines: list[str] = []
    for contract in [contract for contract in tools["contracts"] if contract["type"] == "layers"]:
        rows = [layer.replace(" : ", ", ").replace(" | ", ", ") for layer in contract["layers"]]
        if len(rows) > 10:
            rows = [row.replace("spurline.", "") for row in rows]
        lines += [f"{contract['name']}:", "", "```", *rows, "```", ""]
    return lines[:-1]


def contracts() -> list[str]:
    """Return a row for each suite of the contract kits, with what a subclass provides."""
    lines = ["| suite | to use it | from |", "|---|---|---|"]
    for package in KITS:
        kit = importlib.import_module(f"{package}.testing")
        for name in kit.__all__:
            suite = getattr(kit, name)
            if inspect.isclass(suite):
                first = " ".join((inspect.getdoc(suite) or "").partition("\n\n")[0].split()).rstrip(".")
                lines.append(f"| `{name}` | {first} | `{kit.__name__}` |")
    return lines


def api_list(package: str) -> str:
    """Return the list of a package, with a head that says how it is made."""
    lines = INTERFACE[package]
    head = [
        f"# What other packages may import of {package}: {len(lines)} modules and names.",
        "# `python docs/generate.py` makes the list of what plugins/*/src, examples/ and the pages' Python import.",
        "# A line that comes is a promise, so look whether the name is meant for others. One that goes or gets other",
        f"# parameters breaks plugins of others: raise API_VERSION, now {API_VERSION}, unless no release had it.",
    ]
    return "\n".join([*head, *lines]) + "\n"


def api_page() -> str:
    """Return the page of modules and names that plugins may rely on."""
    lines = [
        "# Plugin interface",
        "",
        "Generated from the code by `docs/generate.py`. These are the modules and names that",
        f"`api={API_VERSION}` covers: a plugin that declares it may import them, and a release of Spurline that takes",
        "one away, or changes what it means, has another number. They are what the plugins of this project, its",
        "examples and these pages import.",
        "[Architecture](../architecture.md#what-a-plugin-may-import) says what else may be imported.",
        "",
    ]
    for package, entries in INTERFACE.items():
        lines += [f"## Package `{package}`", ""]
        for name in sorted({entry.partition(":")[0] for entry in entries}):
            module = importlib.import_module(name)
            names = [entry.partition(":")[2].partition("(")[0] for entry in entries if entry.startswith(f"{name}:")]
            shown = ", ".join(f"`{attribute}`" for attribute in names)
            summary = (inspect.getdoc(module) or "").splitlines()[0]
            lines += [f"### `{name}`", "", summary, "", shown or "The module.", ""]
    return "\n".join(lines).rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference/config.md": config_page,
    "reference/hooks.md": hooks_page,
    "reference/api.md": api_page,
}
"""Pages that are generated as a whole."""

PARTS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "architecture.md": {"components": component_table, "layers": layers},
    "testing-plugins.md": {"contracts": contracts},
}
"""Generated parts of written pages, between `<!-- generated: NAME -->` and `<!-- end -->`."""


def with_parts(text: str, parts: dict[str, Callable[[], list[str]]]) -> str:
    """Return the page with new generated parts. Raises SystemExit if the page has no place for one."""
    for name, build in parts.items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        if text.count(begin) != 1:
            raise SystemExit(f"A page needs exactly one place for its part '{name}': {begin.strip()} ... {end}")
        before, _, rest = text.partition(begin)
        text = "".join([before, begin, "\n", "\n".join(build()), "\n\n", end, rest.partition(end)[2]])
    return text


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    check = parser.parse_args().check
    built = {DOCS / name: build() for name, build in PAGES.items()}
    built |= {API_LISTS / f"{package}.txt": api_list(package) for package in INTERFACE}
    for name, parts in PARTS.items():
        built[DOCS / name] = with_parts((DOCS / name).read_text(encoding="utf-8"), parts)
    stale = [path for path, text in built.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is not what the code says; run: python docs/generate.py")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(built[path], encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
