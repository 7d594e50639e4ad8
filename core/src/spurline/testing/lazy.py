"""Import the names of a contract kit on first use, so that importing the kit in a conftest costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package whose names are in modules below it.

    Args:
        package: Dotted name of the package (its `__name__`).
        names: For each module below the package, the names that the package exports from it.
    """
    homes = {name: module for module, found in names.items() for name in found}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    # `help` documents the names that `__dir__` returns.
    return sorted(homes), get, lambda: sorted({*vars(importlib.import_module(package)), *homes})
