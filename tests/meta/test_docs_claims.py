"""What the pages show can be typed in: settings validate, commands and files exist, names import.

A `yaml` block of a page is a config, or a part of one that is completed with a model, data and a number of steps. A
comment before the block says what else it needs:

    <!-- yaml: with {plugins: [async_rl]} -->    these settings too
    <!-- yaml: under source -->                  the block is the value of this key; `with {...}` may follow
    <!-- yaml: no config -->                     it is something else
"""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import typer.main
from pydantic import BaseModel
from ruamel.yaml import YAML

from spurline import load_config
from spurline.cli import app
from spurline.config.loading import config_model
from spurline.plugins.host import InstalledPlugin, PluginHost, installed_plugins
from spurline.plugins.official import DEFAULT_PLUGINS

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
PAGES = sorted(
    path
    for pattern in ("README.md", "*/README.md", "plugins/*/README.md", "examples/*/README.md", "docs/*.md")
    for path in ROOT.glob(pattern)
)
COMPLETION = {"model": {"path": "any"}, "data": {"train": "any.jsonl", "eval": "any.jsonl"}}
ENTRY_POINT_GROUPS = ("spurline.plugins", "spurline.commands", "spurline.view")
ROOTS = (ROOT, ROOT / "core/src/spurline", *EXAMPLES)
"""Where the files that a page names may lie."""


def available() -> dict[str, InstalledPlugin]:
    """Installed plugins, and those of `examples/`, which need not be installed for a page to be true."""
    found = dict(installed_plugins())
    for folder in EXAMPLES:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for name, module in project["entry-points"]["spurline.plugins"].items():
            found[name] = InstalledPlugin(name, module, project["name"], project["version"])
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """The mappings laid over each other, later ones on top, at any depth."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def configs_of(page: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line and completed config of each yaml block that is one."""
    for found in re.finditer(r"(?:<!-- yaml: (.*?) -->\n\s*)?^[ ]*```yaml[^\n]*\n(.*?)```", page, re.S | re.M):
        mark, block = found.group(1) or "", parse(found.group(2))
        if mark == "no config":
            continue
        under, _, extra_text = mark.partition("with ")
        for key in reversed(under.removeprefix("under ").strip().split(".") if under else ()):
            block = {key: block}
        extra = parse(extra_text) if extra_text else {}
        steps = {} if {"steps", "epochs"} & {*block, *extra} else {"steps": 100}
        yield page[: found.start()].count("\n") + 1, merged(COMPLETION, steps, extra, block)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_settings_that_a_page_shows_are_settings(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in EXAMPLES:
        monkeypatch.syspath_prepend(str(folder / "src"))
    text = path.read_text(encoding="utf-8")
    # A config may list a plugin that is a file of the page.
    for name, code in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', text, re.S):
        (tmp_path / name).write_text(code)
        monkeypatch.chdir(tmp_path)
    for line, config in configs_of(text):
        try:
            load_config(config, available=available())
        except Exception as error:
            raise AssertionError(f"{name_of(path)}:{line} shows a config that is refused: {error}") from error


def paths_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key path of these settings."""
    for key, value in values.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from paths_of(value, f"{prefix}{key}.")


def prose_of(page: str) -> str:
    """The page without its blocks."""
    return re.sub(r"^[ ]*```.*?^[ ]*```", "", page, flags=re.S | re.M)


def members_of(annotation: Any) -> Iterator[Any]:
    """Every class that may stand in a field of this type, through unions, lists, maps and marks."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from members_of(arguments[0])
    elif origin in (Union, types.UnionType) or arguments:
        for argument in arguments:
            yield from members_of(argument)
    else:
        yield annotation


def is_setting(model: type[BaseModel], path: list[str]) -> bool:
    if not path:
        return True
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    inner = [member for member in members_of(field.annotation) if isinstance(member, type)]
    models = [member for member in inner if issubclass(member, BaseModel)]
    # A free mapping, such as reward_weights, has keys of the user's.
    return len(path) == 1 or not models or any(is_setting(member, path[1:]) for member in models)


@pytest.fixture(scope="module")
def model() -> type[BaseModel]:
    with pytest.MonkeyPatch.context() as patch:
        for folder in EXAMPLES:
            patch.syspath_prepend(str(folder / "src"))
        known = available()
        return config_model(PluginHost.load(sorted(known.keys() - {*DEFAULT_PLUGINS}), known))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_settings_that_a_page_names_exist(path: Path, model: type[BaseModel]) -> None:
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]*)?`", prose_of(path.read_text(encoding="utf-8")))
    files = (".py", ".md", ".json", ".jsonl", ".yaml", ".toml", ".html", ".txt", ".lock", ".safetensors")
    keys = [key for key in named if key.split(".")[0] in model.model_fields and not key.endswith(files)]
    # The page of the architecture names modules of the package without the package.
    wrong = [key for key in keys if not is_setting(model, key.split(".")) and not resolves(f"spurline.{key}")]
    assert wrong == []


def commands_of(page: str) -> Iterator[list[str]]:
    """Each command line after a `$`, without its comment, its lines put together."""
    for block in re.findall(r"```console\n(.*?)```", page, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if line.lstrip().startswith("$ "):
                yield shlex.split(line.lstrip()[2:], comments=True)


def complaint(words: list[str], targets: set[str]) -> str | None:
    """What is wrong with a command, if we can tell."""
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"make has no target {unknown}" if unknown else None
    if words[0] in ("python", "pytest"):
        missing = [word for word in words[1:] if word.endswith((".py", "/tests")) and "/" in word]
        missing = [word for word in missing if not (ROOT / word).exists()]
        return f"no file {missing}" if missing else None
    if words[0] != "spurline" or words[1:2] == ["--help"]:
        return None
    command: Any = typer.main.get_command(app)
    if len(words) > 1:
        if words[1] not in command.list_commands(None):
            return f"spurline has no command '{words[1]}'"
        command = command.get_command(None, words[1])
    for word in words[2:]:
        command = getattr(command, "commands", {}).get(word, command)
    known = {option for parameter in command.params for option in parameter.opts}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    return f"'{' '.join(words[:2])}' has no option {unknown}" if unknown else None


@pytest.fixture(scope="module")
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_that_a_page_shows_exist(path: Path, targets: set[str]) -> None:
    found = [complaint(words, targets) for words in commands_of(path.read_text(encoding="utf-8")) if words]
    assert [problem for problem in found if problem] == []


def resolves(dotted: str) -> bool:
    """Whether this is a module, or something in one, at any depth."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if part not in getattr(found, "__annotations__", {}) and not hasattr(found, part):
                return False
            found = getattr(found, part, None)
        return True
    return False


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_names_that_a_page_gives_can_be_imported(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    dotted = set(re.findall(r"(?<![\w./-])(spurline(?:_[a-z_]+)?(?:\.\w+)+)(?![\w/-]|\.\w)", prose_of(page)))
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        for module, names in re.findall(r"^from (spurline\S*) import ([^(\n]+)$", block, re.M):
            dotted |= {f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(",")}
    dotted = {name for name in dotted if name not in ENTRY_POINT_GROUPS and not name.endswith((".py", ".yaml"))}
    assert sorted(name for name in dotted if not resolves(name)) == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_of_the_repository_that_a_page_names_exist(path: Path) -> None:
    folders = "|".join(("benchmarks", "core", "docs", "examples", "plugins", "tests"))
    named = re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", path.read_text(encoding="utf-8"))
    assert [name for name in named if not any((root / name).exists() for root in ROOTS)] == []
