"""Divide samples into parts by a column of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spurline.data.orders.epochs import Indices
from spurline.errors import ConfigError, listing, suggestion
from spurline.protocols.order import SampleFacts
from spurline_curricula.configs import PartsConfig


@dataclass(frozen=True)
class Parts:
    """Parts of the samples, sorted by name.

    Attributes:
        names: Name of each part.
        members: Samples of each part, in the order of the data: int64 [size] each.
        shares: Share of each part in the samples of an epoch: float64 [parts], with the sum 1.
    """

    names: tuple[str, ...]
    members: tuple[Indices, ...]
    shares: NDArray[np.float64]

    @classmethod
    def of(cls, samples: SampleFacts, config: PartsConfig) -> Parts:
        """Divide the samples. Unreadable rows that `on_bad_row: skip` leaves out are in no part.

        Raises:
            DataError: If a row lacks the column.
            ConfigError: If the shares do not fit the parts.
        """
        values = samples.columns.values(config.column)
        named = np.array(["" if value is None else str(value) for value in values])
        known = np.array([value is not None for value in values], bool)
        names = sorted(set(named[known].tolist()))
        members = [np.flatnonzero(known & (named == name)).astype(np.int64) for name in names]
        weights = np.repeat(np.array(samples.weights, np.float64), samples.sizes)
        amounts = np.array([weights[numbers].sum() for numbers in members])
        return cls(tuple(names), tuple(members), _shares(names, amounts, config))


def _shares(names: Sequence[str], amounts: NDArray[np.float64], config: PartsConfig) -> NDArray[np.float64]:
    for name in config.shares:
        if name not in names:
            raise ConfigError.at(
                f"data.order.shares.{name}",
                f"is a share of rows with {config.column}: {name}, and there are none.{suggestion(name, names)} Values "
                f"of {config.column}: {listing(names)}.",
            )
    given = np.array([config.shares.get(name, np.nan) for name in names])
    free, total = np.isnan(given), float(np.nansum(given))
    if free.any() and total >= 1 - 1e-9:
        unnamed = listing(name for name, is_free in zip(names, free, strict=True) if is_free)
        raise ConfigError.at(
            "data.order.shares",
            f"has the sum 1, which leaves nothing for other values of {config.column}: {unnamed}. Give them the share "
            "0 to leave them out, or lower another share.",
        )
    if free.any():
        return np.where(free, (1 - total) * amounts / max(amounts[free].sum(), 1e-300), given)
    if not np.isclose(total, 1):
        raise ConfigError.at("data.order.shares", f"has the sum {total:g}, but every part has a share. Make it 1.")
    return given / total


def divide(count: int, wanted: NDArray[np.float64], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return whole numbers near `wanted` with the sum `count`, none of them above `room`: int64 [parts].

    Every number is the whole part of the wanted one, or one more for the largest fractions, as far as there is room.
    """
    assert count <= room.sum(), (count, room)
    counts = np.minimum(np.maximum(np.floor(wanted), 0).astype(np.int64), room)
    while (lacking := count - int(counts.sum())) != 0:
        # The parts whose number differs most from the wanted one change first. Equal ones change in their order.
        missing = (wanted - counts) * np.sign(lacking)
        able = counts < room if lacking > 0 else counts > 0
        best = np.argsort(np.where(able, -missing, np.inf), kind="stable")[: min(abs(lacking), int(able.sum()))]
        counts[best] += np.sign(lacking)
    return counts
