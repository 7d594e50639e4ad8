"""The packages of this repository are released together, so their versions and the pins among them agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = sorted([ROOT / "core/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")])
PINNING = [*PACKAGES, *sorted(ROOT.glob("examples/*/pyproject.toml"))]

PAGES = [*sorted(ROOT.glob("docs/*.md")), ROOT / "core/README.md"]
"""Show pins to readers."""


def pin_of(version: str) -> str:
    """Return `~=X.Y.0` for a release, and the version itself for a pre-release, which `~=` excludes."""
    parsed = Version(version)
    return f"~={version}" if parsed.is_prerelease else f"~={parsed.major}.{parsed.minor}.0"


def project(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def pins(path: Path) -> dict[str, str]:
    """Specifier of each package of this repository that another declares, extras of its own distribution left out."""
    declared = project(path)
    extras = [entry for entries in declared.get("optional-dependencies", {}).values() for entry in entries]
    found = {}
    for entry in [*declared["dependencies"], *extras]:
        name, specifier = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?(.*)", entry.partition(";")[0].strip()).groups()
        if name == "spurline" or name.startswith("spurline-"):
            found[name] = specifier or found.get(name, "")
    return {name: specifier for name, specifier in found.items() if name != declared["name"]}


def only_version(root: Path) -> str:
    (version,) = {project(root / path.relative_to(ROOT))["version"] for path in PACKAGES}
    return version


def test_every_package_has_the_version_of_core_and_pins_its_minor_releases() -> None:
    pin = pin_of(only_version(ROOT))
    wrong = {
        f"{path.parent.relative_to(ROOT)}: {name}": specifier
        for path in PINNING
        for name, specifier in pins(path).items()
        if specifier != pin
    }
    assert wrong == {}


def test_the_sets_of_core_have_every_package_of_this_repository() -> None:
    sets = project(ROOT / "core/pyproject.toml")["optional-dependencies"]
    assert {*pins(ROOT / "core/pyproject.toml")} == {project(path)["name"] for path in PACKAGES} - {"spurline"}
    assert sets["rl"][0] == "spurline[sft]"
    assert sets["all"][0] == "spurline[rl]"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that a release changes, and what changes them, elsewhere."""
    for path in [*PINNING, *PAGES, ROOT / ".ci/bump"]:
        copied = tmp_path / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    return tmp_path


def bumped(checkout: Path, *version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / ".ci/bump"), *version]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("version", "pin"),
    [
        ("7.8.0", "~=7.8.0"),
        ("7.8.9", "~=7.8.0"),
        ("7.8.0rc1", "~=7.8.0rc1"),
        ("7.8.2b10", "~=7.8.2b10"),
        ("7.8.0.dev3", "~=7.8.0.dev3"),
    ],
)
def test_one_command_sets_all_versions_and_pins(checkout: Path, version: str, pin: str) -> None:
    assert SpecifierSet(pin).contains(version, prereleases=True)
    assert not SpecifierSet(pin).contains("7.9.0")
    # What was written for another release gives way too.
    assert bumped(checkout, "7.7.0rc2").returncode == 0
    result = bumped(checkout, version)
    assert result.returncode == 0, result.stderr
    assert only_version(checkout) == version
    pinned = {specifier for path in PINNING for specifier in pins(checkout / path.relative_to(ROOT)).values()}
    assert pinned == {pin}
    texts = [(checkout / page.relative_to(ROOT)).read_text(encoding="utf-8") for page in PAGES]
    shown = [re.findall(r"\bspurline[\w-]*(~=\S+?)[`\"]", text) for text in texts]
    assert {found for page in shown for found in page} == {pin}
    assert shown[-1], "core/README.md shows none"
    assert {"core/pyproject.toml", "core/README.md"} <= {*result.stdout.splitlines()}
    assert bumped(checkout, version).stdout == ""


@pytest.mark.processes
@pytest.mark.parametrize("version", [(), ("1.2",), ("v1.2.3",), ("1.2.3", "1.2.4")])
def test_what_is_no_version_changes_nothing(checkout: Path, version: tuple[str, ...]) -> None:
    before = (checkout / "core/pyproject.toml").read_bytes()
    assert bumped(checkout, *version).returncode == 1
    assert (checkout / "core/pyproject.toml").read_bytes() == before
