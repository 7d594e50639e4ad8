"""What the plugin interface promises is there, and `help` shows what an author needs."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
from pathlib import Path
from types import ModuleType

import pytest

from spurline.plugins import API_VERSION
from spurline.plugins.changes import CHANGED

ROOT = Path(__file__).parents[2]
KITS = [
    importlib.import_module(f"{name}.testing")
    for name in ("spurline", "spurline_text", "spurline_models", "spurline_rl", "spurline_insight")
]
SUITES = [getattr(kit, name) for kit in KITS for name in kit.__all__ if inspect.isclass(getattr(kit, name))]


@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.__name__)
def test_help_on_a_contract_kit_shows_every_suite_and_what_it_takes(kit: ModuleType) -> None:
    text = pydoc.plain(pydoc.render_doc(kit))
    suites = [suite for suite in SUITES if suite.__module__.startswith(kit.__name__)]
    assert suites
    for suite in suites:
        assert re.search(rf"class {suite.__name__}\(", text), suite
        assert (inspect.getdoc(suite) or "").splitlines()[0] in text, suite


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__)
def test_help_on_a_suite_describes_every_attribute_that_a_subclass_may_set(suite: type) -> None:
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
        assert attribute in text, f"help({suite.__name__}) does not say what `{attribute}` is: describe it there"


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


def test_the_version_of_the_interface_says_what_it_has_changed() -> None:
    assert CHANGED[max(CHANGED)]
    assert max(CHANGED) == API_VERSION
