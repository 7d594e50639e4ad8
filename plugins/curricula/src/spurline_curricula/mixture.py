"""Order `mixture`: parts of the data in fixed shares in each epoch, as a pure function of the seed."""

from __future__ import annotations

import numpy as np

from spurline.data.configs import UniformOrderConfig
from spurline.data.orders.epochs import Indices, UniformOrder
from spurline.errors import ConfigError, DataError
from spurline.protocols.order import SampleFacts
from spurline_curricula.configs import MixtureConfig
from spurline_curricula.parts import Parts, divide


class MixtureOrder:
    """The uniform order of the parts, as if each of them was a dataset whose weight follows from its share.

    An epoch has as many samples as without shares. It continues in each part where the previous epoch stopped, so every
    sample of a part is seen equally often.
    """

    def __init__(self, config: MixtureConfig, *, samples: SampleFacts, seed: int) -> None:
        parts, total = Parts.of(samples, config), samples.samples_per_epoch
        sizes = np.array([len(numbers) for numbers in parts.members], np.int64)
        if not sizes.size:
            raise DataError(f"No row can be read, so data.order finds no value of {config.column}.")
        counts = divide(total, parts.shares * total, np.full(len(sizes), total))
        for name, count in zip(parts.names, counts, strict=True):
            share = config.shares.get(name)
            if share and not count:
                raise ConfigError.at(
                    f"data.order.shares.{name}",
                    f"is {share:g}, which is no sample in an epoch of {total:,}. Raise it, or set it to 0.",
                )
        drawn = [part for part in range(len(sizes)) if counts[part]]
        self._numbers = np.concatenate([parts.members[part] for part in drawn])
        weights = tuple(float(counts[part] / sizes[part]) for part in drawn)
        facts = SampleFacts(tuple(sizes[drawn].tolist()), weights, samples.per_step, samples.columns)
        assert facts.samples_per_epoch == total, (facts.shares, total)
        self._order = UniformOrder(UniformOrderConfig(), samples=facts, seed=seed)

    def positions(self, start: int, stop: int) -> Indices:
        return self._numbers[self._order.positions(start, stop)]
