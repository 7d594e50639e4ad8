"""Write from the code what the documentation says of it: config sections, hooks, components, layers, contracts.

    python docs/generate.py            write the pages
    python docs/generate.py --check    exit 1 when a page is not what the code says

The pages are committed, so that a reader needs no build; a test keeps them in step.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import pkgutil
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from spurline import testing
from spurline.config.run_config import RunConfig
from spurline.config.section import Component, ComponentConfig, OnResume, Section, summary_of
from spurline.plugins import hookspecs
from spurline.plugins.host import API_VERSION, PluginHost, hooks_of
from spurline.plugins.registry import Registration
from spurline.rl import hookspecs as rl_hookspecs

COVERED = (
    "spurline",
    "spurline.errors",
    "spurline.plugins",
    "spurline.plugins.hookspecs",
    "spurline.protocols.*",
    "spurline.config.section",
    "spurline.config.run_config",
    "spurline.config.loading",
    "spurline.config.paths",
    "spurline.data.batch",
    "spurline.data.configs",
    "spurline.data.text_configs",
    "spurline.data.sources.preference_configs",
    "spurline.data.token_store",
    "spurline.data.tokenization",
    "spurline.data.tokenizer",
    "spurline.data.collators.layout",
    "spurline.data.orders.configs",
    "spurline.data.orders.epochs",
    "spurline.losses.configs",
    "spurline.losses.policy_loss",
    "spurline.optimizers.configs",
    "spurline.optimizers.groups",
    "spurline.optimizers.schedules",
    "spurline.update.configs",
    "spurline.rl.configs",
    "spurline.rl.concurrency",
    "spurline.rl.flat_turns",
    "spurline.rl.prompt_source",
    "spurline.rl.trajectory",
    "spurline.rl.advantages.configs",
    "spurline.rl.advantages.shared",
    "spurline.report.figure",
    "spurline.report.markup",
    "spurline.report.record",
    "spurline.testing",
)
"""Modules whose public names the plugin interface covers; `.*` stands for every module in a package."""

PLUGINS = ("collation_fast", "async_rl", "fsdp_backend", "megatron_backend")
"""Those of this repository."""

DOCS = Path(__file__).parent
ROOT = DOCS.parent


def config_page() -> str:
    """Every section and component of core, then what each plugin adds, with types, defaults and meaning."""
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
        if section is not None and not any(isinstance(item, Component) for item in field.metadata):
            lines += _nested(name, section, _mark(field))
    lines += ["## Components", ""]
    lines += [
        "A component is chosen by `name:`; a bare string is short for a mapping with only the name "
        "(`collator: packed`), and for a dataset short for `path`.",
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
    """The components one plugin adds; of a config that extends one of core's, what it adds to that."""
    lines = [f"## Plugin `{name}`", ""]
    registry = PluginHost.load([name]).registry
    for entry in registry.entries(name):
        if entry.kind == "report_panel":
            continue
        lines += [f"### {entry.kind} `{entry.name}`", "", summary_of(entry.config), ""]
        own = _own_fields(entry.config)
        others = [field for field in entry.config.model_fields if field not in {*own, "name"}]
        if own:
            lines += [*_table(entry.config, skip=(*others, "name"), above=_mark_of_kind(entry.kind)), ""]
        if others:
            lines += [f"And as in core: {', '.join(f'`{other}`' for other in others)}.", ""]
    return lines


def _own_fields(config: type[ComponentConfig]) -> list[str]:
    """Settings that no component of core has: the plugin's, and those of a base in core that only plugins use."""
    core = PluginHost.load([]).registry
    said = {
        (name, _declares(entry.config, name))
        for entry in core.entries()
        if entry.kind == config.kind
        for name in entry.config.model_fields
    }
    return [name for name in config.model_fields if name != "name" and (name, _declares(config, name)) not in said]


def _declares(config: type[BaseModel], field: str) -> type:
    """The class whose settings this one is among."""
    return next(base for base in config.__mro__ if field in vars(base).get("__annotations__", {}))


def hooks_page() -> str:
    """Every hook with its arguments and its docstring."""
    lines = [
        "# Hooks",
        "",
        "Generated from `spurline.plugins.hookspecs` and `spurline.rl.hookspecs` by `docs/generate.py`.",
        "",
        inspect.getdoc(hookspecs) or "",
        "",
    ]
    for name, hook in {**hooks_of(hookspecs), **hooks_of(rl_hookspecs)}.items():
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
    heading = f"#### `{entry.name}`" + (" (default)" if default else "")
    lines = [heading, "", summary_of(entry.config), ""]
    above = _mark_of_kind(entry.kind)
    if set(entry.config.model_fields) - {"name"}:
        lines += [*_table(entry.config, skip=("name",), above=above), ""]
    for name, field in entry.config.model_fields.items():
        inner = _section_type(field)
        if inner is not None:
            table = _table(inner, skip=(), above=_mark(field, above))
            lines += [f"`{name}`: {summary_of(inner)}", "", *table, ""]
    return lines


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
    """Bounds of a number or of one of the choices of a union; of the entries of a list they would be too much here."""
    for mark in marks:
        yield from _bounds(None, mark.metadata) if isinstance(mark, FieldInfo) else ()
        if type(mark).__name__ in _BOUNDS:
            yield _bound(mark)
    if _is_union(get_origin(annotation)):
        for choice in get_args(annotation):
            if get_origin(choice) is Annotated:
                yield from _bounds(None, get_args(choice)[1:])


def _words(annotation: Any, marks: Sequence[Any] = ()) -> str:
    """A type as people write it; components by their kind."""
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
    if any(isinstance(item, Component) for item in field.metadata):
        return "see the kind"
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=False)
    return (
        "see below" if isinstance(value, Section) else f"`{value!r}`" if not isinstance(value, Path) else f"`{value}`"
    )


_RESUME = {
    OnResume.REFUSED: "",
    OnResume.BY_NAME: "by name",
    OnResume.MAY_GROW: "may grow, else by name",
    OnResume.TO_ROUNDING: "to rounding",
    OnResume.FREE: "may change",
}


def _mark(field: FieldInfo, above: OnResume = OnResume.REFUSED) -> OnResume:
    """What holds for a field of a section whose own mark is `above`."""
    own = next((item for item in field.metadata if isinstance(item, OnResume)), above)
    return above if above is OnResume.FREE else own


def _mark_of_kind(kind: str) -> OnResume:
    """What holds for the components of a kind wherever one is chosen; REFUSED where that depends on the place."""
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
    """The settings of a file with the sections that core's own plugins add, as they are written in the code."""
    fields: dict[str, Any] = {
        name: (section.annotation, Field(default_factory=dict, description=summary_of(get_args(section.annotation)[0])))
        for name, section in PluginHost.load([]).registry.sections.items()
    }
    return create_model("RunConfig", __base__=RunConfig, __doc__=RunConfig.__doc__, **fields)


def component_table() -> list[str]:
    """Every kind with what it decides, as its protocol's docstring begins, and core's components of it."""
    registry = PluginHost.load([]).registry
    lines = ["| kind | decides | Protocol in `spurline.protocols` | in core |", "|---|---|---|---|"]
    for kind, declared in registry.kinds.items():
        module, _, protocol = declared.protocol.partition(":")
        text = (inspect.getdoc(importlib.import_module(module)) or "").splitlines()[0].partition(": ")[2].rstrip(".")
        default = registry.default(kind)
        names = [f"`{name}`" + (" (default)" if name == default else "") for name in registry.names(kind)]
        shown = ", ".join(names) if kind != "report_panel" else f"{len(names)} panels"
        lines.append(f"| `{kind}` | {text} | `{module.rpartition('.')[2]}.{protocol}` | {shown or '-'} |")
    return lines


def layers() -> list[str]:
    """The layers that import-linter checks, from top to bottom."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    named = next(contract for contract in tools["contracts"] if contract["type"] == "layers")
    return ["```", *(layer.replace("spurline.", "").replace(" : ", ", ") for layer in named["layers"]), "```"]


def contracts() -> list[str]:
    """The suites of the contract kit, and what a subclass of each provides."""
    lines = ["| suite | to use it | in `spurline.testing` |", "|---|---|---|"]
    for name in testing.__all__:
        suite = getattr(testing, name)
        if inspect.isclass(suite):
            first = " ".join((inspect.getdoc(suite) or "").partition("\n\n")[0].split()).rstrip(".")
            lines.append(f"| `{name}` | {first} | `{suite.__module__.rpartition('.')[2]}` |")
    return lines


def covered_modules() -> list[str]:
    """The names of `COVERED`, packages spelled out."""
    names: list[str] = []
    for name in COVERED:
        package = importlib.import_module(name.removesuffix(".*"))
        inner = pkgutil.iter_modules(package.__path__) if name.endswith(".*") else ()
        names += [f"{package.__name__}.{module.name}" for module in inner] or [name]
    return names


def public_names(module: types.ModuleType) -> dict[str, Any]:
    """What a module offers: what its `__all__` lists, else what it defines without an underscore."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in sorted(module.__all__)}
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    defined: list[str] = []
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            defined.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined += [target.id for target in targets if isinstance(target, ast.Name)]
    return {name: getattr(module, name) for name in sorted(defined) if not name.startswith("_")}


def public_api() -> list[str]:
    """A line for each covered name: `module.name`, with its parameters, and `module.Class.member`."""
    lines: list[str] = []
    for name in covered_modules():
        for attribute, value in public_names(importlib.import_module(name)).items():
            lines.append(f"{name}.{attribute}{_parameters(value)}")
            if inspect.isclass(value):
                members = {*vars(value), *inspect.get_annotations(value)}
                lines += [
                    f"{name}.{attribute}.{member}{_parameters(inspect.getattr_static(value, member, None))}"
                    for member in sorted(members)
                    # Tests of a suite may come and go.
                    if not member.startswith(("_", "test_", "model_"))
                ]
    return lines


def _parameters(value: Any) -> str:
    """Names of a function's parameters in brackets; nothing for anything else."""
    if not inspect.isfunction(value):
        return ""
    return f"({', '.join(name for name in inspect.signature(value).parameters if name != 'self')})"


def api_page() -> str:
    """What plugins may rely on, by module, and for what."""
    lines = [
        "# Plugin interface",
        "",
        "Generated from the code by `docs/generate.py`. These are the modules and names that `api=1` covers: a plugin",
        "that declares it may import them, and a release of Spurline that takes one away, or changes what it means,",
        "has another number. [Architecture](../architecture.md#what-a-plugin-may-import) says what else may be",
        "imported.",
        "",
    ]
    for name in covered_modules():
        module = importlib.import_module(name)
        names = ", ".join(f"`{attribute}`" for attribute in public_names(module))
        lines += [f"## `{name}`", "", (inspect.getdoc(module) or "").splitlines()[0], "", names, ""]
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


PROMISED = ROOT / "tests" / "meta" / f"api_{API_VERSION}.txt"
"""Every line of `public_api` that was ever there under this number; only a hand takes one out."""


def promised() -> str:
    """The file of promises with what has come since."""
    before = PROMISED.read_text(encoding="utf-8").splitlines() if PROMISED.exists() else []
    return "\n".join(sorted({*before, *public_api()})) + "\n"


def with_parts(text: str, parts: dict[str, Callable[[], list[str]]]) -> str:
    """The page with its generated parts made anew. Raises SystemExit when the page has no place for one."""
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
    built = {DOCS / name: build() for name, build in PAGES.items()} | {PROMISED: promised()}
    for name, parts in PARTS.items():
        built[DOCS / name] = with_parts((DOCS / name).read_text(encoding="utf-8"), parts)
    stale = [path for path, text in built.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is not what the code says; run: python docs/generate.py")
        else:
            path.write_text(built[path], encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
