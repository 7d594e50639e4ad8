"""Print which of this project's source a run imports, by package: modules and lines.

    python benchmarks/closures.py

Read from the source, so that it can be compared over time: top-level imports, from the modules of the run and from the
implementation that the registry names for each component of the config. What is imported within functions is left
out. What is imported to read the config is counted apart: besides core's, `plugin.py` and `configs.py` of each plugin
that is loaded by default, whatever the run.
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
    """What a run imports. config: to read its config. run: beyond that."""

    config: frozenset[str]
    run: frozenset[str]


def closure_of(config: Mapping[str, Any]) -> Closure:
    """The modules that a run of this config imports."""
    loaded = load_config(config)
    read = closure(["spurline.config.loading", *(plugin.module.__name__ for plugin in loaded.host.plugins.values())])
    run = closure(["spurline.run.run", *implementations(loaded)])
    return Closure(frozenset(read), frozenset(run - read))


def implementations(loaded: LoadedConfig) -> Iterable[str]:
    """Modules of the components that the config chooses, and of what its sections hold."""
    registry = loaded.host.registry
    for _, section in sections_within(loaded.config):
        if isinstance(section, ComponentConfig):
            yield registry.get(section.kind, section.name).factory.partition(":")[0]
    for name, section in registry.sections.items():
        if section.held is not None and getattr(loaded.config, name, None) is not None:
            yield section.held.partition(":")[0]


def closure(names: Iterable[str]) -> set[str]:
    """These modules and all that is imported at the top of one of them, their packages included."""
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
    """Lines of the modules, together."""
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
