"""No module stands on itself, not even by way of a type: a circle is read as a whole or not at all.

To cut one: let the module below ask for a small Protocol of what it uses, or move the thing that both need below both.
Imports within functions do not count.
"""

from __future__ import annotations

import graphlib

import pytest
from import_graph import SOURCES, imports_of, modules

PACKAGES = sorted(path.name for source in SOURCES for path in source.iterdir() if (path / "__init__.py").exists())


def circle(package: str) -> list[str]:
    """The modules of one circle within the package, each importing the next; none where there is none."""
    graph = {
        name: {found.module for found in imports_of(path) if found.when != "lazy"} - {name}
        for name, path in modules().items()
        if name.split(".")[0] == package
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    assert circle(package) == []


def test_the_packages_are_those_of_the_project() -> None:
    assert {"spurline", "spurline_rl"} <= {*PACKAGES}
    assert len(PACKAGES) == len(SOURCES)
