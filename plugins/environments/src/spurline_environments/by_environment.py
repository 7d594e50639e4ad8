"""Advantage `by_environment`: each environment of a run with its own algorithm and its own statistics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spurline.plugins.registry import Registry
from spurline_environments.configs import ByEnvironmentConfig
from spurline_rl.protocols.advantage import Advantage
from spurline_rl.scored_groups import ScoredGroups


class ByEnvironment:
    """Computes the advantages of the groups of each environment together, as if the others were not in the batch."""

    def __init__(self, config: ByEnvironmentConfig, registry: Registry) -> None:
        self._other: Advantage = registry.create("advantage", config.other)
        self._parts: dict[str, Advantage] = {
            label: registry.create("advantage", part) for label, part in config.advantages.items()
        }
        self.needs = frozenset[str]().union(*(part.needs for part in (self._other, *self._parts.values())))

    def advantages(self, scored: ScoredGroups) -> Mapping[str, NDArray[np.float32]]:
        labels = np.array([group.environment for group in scored.groups])
        of_tokens = np.repeat(labels, [int(group.flat.num_response.sum()) for group in scored.groups])
        found: dict[str, NDArray[np.float32]] = {"advantages": np.zeros(len(of_tokens), np.float32)}
        for label in dict.fromkeys(labels.tolist()):
            is_here = of_tokens == label
            computed = {name: values[is_here] for name, values in scored.computed.items()}
            part = ScoredGroups([group for group in scored.groups if group.environment == label], computed)
            for name, values in self._parts.get(label, self._other).advantages(part).items():
                found.setdefault(name, np.zeros(len(of_tokens), np.float32))[is_here] = values
        return found

    def describe(self) -> str:
        parts = [f"{label}: {part.describe()}" for label, part in self._parts.items()]
        return " ".join([*parts, f"Other environments: {self._other.describe()}"])
