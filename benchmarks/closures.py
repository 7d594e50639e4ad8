"""Print the number of this project's modules and lines that a run imports, by package.

    python benchmarks/closures.py

The script reads the source, so results of different versions can be compared. It follows top-level imports from the
modules of the run, and from the implementation of each component in the config. It does not follow imports within
functions. Imports for reading the config have their own column. They are modules of core, and `plugin.py` and
`configs.py` of each plugin that is loaded by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline import load_config
from spurline.config.loading import LoadedConfig
from spurline.config.section import ComponentConfig, sections_within

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from import_graph import imports_of, modules

_BASE: dict[str, Any] = {"model": {"path": "model"}, "data": {"train": "rows.jsonl", "eval": "rows.jsonl"}, "steps": 1}
_ROLLOUTS = {"prompts_per_step": 4, "samples_per_prompt": 2, "environment": {"rewards": {"exact": "exact_match"}}}
RUNS: Mapping[str, dict[str, Any]] = {
    "SFT": _BASE,
    "RL": _BASE | {"source": {"name": "rollouts", **_ROLLOUTS}},
    "async RL": _BASE
    | {
        "plugins": ["async_rl"],
        "source": {"name": "async_rollouts", "correction": "tis", "weight_sync": "in_process", **_ROLLOUTS},
    },
}


@dataclass(frozen=True)
class Closure:
    """The modules that a run imports. `config` has the modules for reading its config, and `run` all others."""

    config: frozenset[str]
    run: frozenset[str]


def closure_of(config: Mapping[str, Any]) -> Closure:
    """Return the modules that a run of this config imports."""
    loaded = load_config(config)
    read = closure(["spurline.config.loading", *(plugin.module.__name__ for plugin in loaded.host.plugins.values())])
    run = closure(["spurline.run.run", *implementations(loaded)])
    return Closure(frozenset(read), frozenset(run - read))


def implementations(loaded: LoadedConfig) -> Iterable[str]:
    """Return the modules of the components that the config chooses, and of the components in its sections."""
    registry = loaded.host.registry
    for _, section in sections_within(loaded.config):
        if isinstance(section, ComponentConfig):
            yield registry.get(section.kind, section.name).factory.partition(":")[0]
    for name, section in registry.sections.items():
        if section.held is not None and getattr(loaded.config, name, None) is not None:
            yield section.held.partition(":")[0]


def closure(names: Iterable[str]) -> set[str]:
    """Return these modules, all modules that they import at the top, and so on, including their packages."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        waiting += [imported.module for imported in imports_of(modules()[name]) if imported.when == "top"]
        waiting += [name.rpartition(".")[0]] if "." in name else []
    return found


def num_lines(names: Iterable[str]) -> int:
    """Return the number of lines of all modules."""
    return sum(len(modules()[name].read_text(encoding="utf-8").splitlines()) for name in names)


def main() -> None:
    """Print a table for each run."""
    for title, config in RUNS.items():
        found = closure_of(config)
        print(f"{title:<28}{'config':>8}{'lines':>9}{'run':>8}{'lines':>9}")
        for package in ("", *sorted({name.partition(".")[0] for name in found.config | found.run})):
            shown = [
                [name for name in names if package in ("", name.partition(".")[0])]
                for names in (found.config, found.run)
            ]
            row = "".join(f"{len(names):>8}{num_lines(names):>9,}" for names in shown)
            print(f"  {package or 'all':<26}{row}")
        both = found.config | found.run
        print(f"  together {len(both)} modules, {num_lines(both):,} lines\n")


if __name__ == "__main__":
    main()
