"""Kind `order`: choose the samples of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from spurline.config.section import ComponentConfig
from spurline.errors import ConfigError, Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class OrderConfig(ComponentConfig):
    """Settings of an order."""

    kind: ClassVar[str] = "order"
    reads_lengths: ClassVar[bool] = False
    """If True, the order needs the token count of each sample, which is unknown if responses are generated."""

    def problems(self, run: Any) -> Iterable[Problem]:
        """Refuse an order by length if lengths are not known."""
        if self.reads_lengths and run.source.facts.supplies == "rollouts":
            yield Problem(
                "name",
                f"is {self.name}, which needs the length of each sample, but source: {run.source.name} generates its "
                "samples later. Set data.order: uniform, or curriculum with a column that holds a length.",
            )


def epoch_shares(sizes: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of samples of each dataset in one epoch: size x weight, rounded; at least 1 if size > 0."""
    return tuple(max(1, round(n * w)) if n else 0 for n, w in zip(sizes, weights, strict=True))


class SampleColumns(Protocol):
    """Columns of the rows from which samples are made. Each call reads the rows again."""

    def values(self, name: str) -> Sequence[Any]:
        """Return the value of a column for each sample. `name` may have dots for nested objects (`meta.difficulty`).

        The value is None for an unreadable row that `on_bad_row: skip` leaves out. If another row lacks the column,
        this raises DataError naming the row and the columns that it has.
        """
        ...

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return the values as numbers, float64 [N], with NaN for None. Text is parsed, since CSV has only text.

        Raises DataError naming the first row whose value is not a finite number.
        """
        ...

    def location(self, sample: int) -> str:
        """Return the place of a sample's row, for messages: `train.jsonl:12`."""
        ...


@dataclass(frozen=True)
class SampleFacts:
    """Facts about the samples that an order may use. Samples are numbered from 0, dataset after dataset.

    Attributes:
        sizes: Number of samples of each dataset.
        weights: Passes over each dataset in one epoch.
        per_step: Number of samples in a step.
        columns: Columns of the rows.
        count_tokens: Returns the number of tokens of each sample, int64 [N]. None if the numbers are not known.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    per_step: int
    columns: SampleColumns
    count_tokens: Callable[[], NDArray[np.int64]] | None = None

    @property
    def shares(self) -> tuple[int, ...]:
        """Return the number of samples of each dataset in one epoch."""
        return epoch_shares(self.sizes, self.weights)

    @property
    def samples_per_epoch(self) -> int:
        """Return the number of samples in one pass over the weighted mixture."""
        return sum(self.shares)

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sample, int64 [N]. Raises ConfigError if it is not known."""
        if self.count_tokens is None:
            raise ConfigError.at(
                "data.order",
                "needs the length of each sample, which this source does not know. Choose another order, such as "
                "uniform.",
            )
        return self.count_tokens()


class Order(Protocol):
    """An endless sequence of samples. Each step takes the next `per_step` positions of it.

    Factory: `Class(config, samples=SampleFacts, seed=int)`. It raises DataError or ConfigError for facts that the order
    cannot use, so that `spurline plan` reports them.

    An order is a pure function of the config, the facts and the seed, without global random state. Its positions may be
    read at any time, on any thread, before or after a resume. Epoch e has the positions
    [e * samples_per_epoch, (e + 1) * samples_per_epoch), with `shares` samples of each dataset. After any number of
    epochs, all samples of a dataset have been seen equally often, up to a difference of one. The base class
    `spurline.data.orders.epochs.EpochOrder` fulfils all these rules.
    """

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions [start, stop), counted from 0: int64 [stop - start]. Do not write to them."""
        ...
