"""What the plugin interface promises is there, and `help` shows what an author needs."""

from __future__ import annotations

import importlib.util
import inspect
import pydoc
import re
from pathlib import Path
from types import ModuleType

import pytest

from spurline import testing
from spurline.plugins import API_VERSION

ROOT = Path(__file__).parents[2]
PROMISED = Path(__file__).with_name(f"api_{API_VERSION}.txt")
SUITES = [name for name in testing.__all__ if inspect.isclass(getattr(testing, name))]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The program that writes the reference pages."""
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_that_the_plugin_interface_promised_has_gone(generate: ModuleType) -> None:
    gone = sorted({*PROMISED.read_text(encoding="utf-8").splitlines()} - {*generate.public_api()})
    assert not gone, (
        f"api={API_VERSION} promises these to plugins, and they are gone or have other parameters:\n  "
        + "\n  ".join(gone)
        + "\nKeep them, say under the old name. If they must go: raise API_VERSION, say so in CHANGELOG.md, and take "
        f"the lines out of {PROMISED.relative_to(ROOT)}. A name that was in no release is only taken out there."
    )


def test_the_promise_reaches_what_the_example_plugins_import(generate: ModuleType) -> None:
    covered = {*generate.covered_modules()}
    for path in sorted((ROOT / "examples").glob("*/src/*/*.py")):
        imported = set(re.findall(r"^from (spurline(?:\.[\w.]+)?) import", path.read_text(encoding="utf-8"), re.M))
        assert imported <= covered, (
            f"{path.name} imports {sorted(imported - covered)}, which api={API_VERSION} does not cover"
        )


def test_help_on_the_contract_kit_shows_every_suite_and_what_it_takes() -> None:
    text = pydoc.plain(pydoc.render_doc(testing))
    assert len(SUITES) >= 15
    for name in SUITES:
        assert re.search(rf"class {name}\(", text), name
        first = (inspect.getdoc(getattr(testing, name)) or "").splitlines()[0]
        assert first in text, name


@pytest.mark.parametrize("name", SUITES)
def test_help_on_a_suite_describes_every_attribute_that_a_subclass_may_set(name: str) -> None:
    suite = getattr(testing, name)
    text = inspect.getdoc(suite) or ""
    for attribute, value in inspect.getmembers_static(suite):
        is_setting = not callable(value) and not isinstance(value, (staticmethod, classmethod, property))
        if (
            not is_setting
            or attribute.startswith("_")
            or attribute == "pytestmark"
            or "Fixture" in type(value).__name__
        ):
            continue
        assert attribute in text, f"help({name}) does not say what `{attribute}` is: describe it in the docstring"


def test_types_in_the_config_reference_are_words_that_a_user_can_write() -> None:
    page = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    types = re.findall(r"^\| `\w+` \| ((?:[^|\\]|\\\|)*) \|", page, re.M)
    assert len(types) > 100
    leaks = re.compile(r"FieldInfo|Undefined|Validator|typing\.|<class|Config\b|Annotated|ForwardRef|NoneType")
    assert [text for text in types if leaks.search(text)] == []
    top = page.partition("## `model`")[0]
    for single in ("source", "loss", "backend", "collator"):
        assert f"| `{single}` | {single} component |" in top
    assert "| `trackers` | list of tracker components |" in top
