"""Draw prompts from the rows of the datasets, in the endless order of `data.order`.

Data flow: rows -> draws, each with its own uid -> attempts. A row is read when it is drawn. An unusable row is
remembered and not read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from spurline.data.token_store import fingerprint_of
from spurline.errors import DataError
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.order import Order, OrderConfig, SampleFacts, epoch_shares
from spurline.protocols.source import SourceContext
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_rl.protocols.adaptive_order import AdaptiveOrder, MeasuresDraws, ScoredDraw
from spurline_rl.protocols.environment import Task
from spurline_rl.trajectory import Group, terms_of
from spurline_text.prompts import question_key
from spurline_text.sources.sft import ColumnsOfRows, note_of_shared
from spurline_text.tokenization import check_rows, mix_notes, open_datasets, passes_per_epoch, share_read, store_labels

_ROWS_COMPARED = 10_000
"""Number of rows of each dataset that are compared with held-out prompts."""


@dataclass(frozen=True)
class Draw:
    """One drawn prompt.

    Attributes:
        number: Position in the endless order, starting at 0.
        uid: `LABEL:ROW@NUMBER`, unique in the run.
        location: Where the row is, for messages.
    """

    number: int
    uid: str
    dataset: DatasetConfig
    location: str
    row: Mapping[str, Any]

    def task(self, sample: int) -> Task:
        """Return the task for attempt number `sample` at this prompt."""
        return Task(self.row, self.dataset, self.uid, sample, self.location)


@dataclass(frozen=True)
class SkippedRow:
    """A drawn row that `on_bad_row: skip` leaves out. `reason` says where the row is and why it cannot be used."""

    uid: str
    draw: int
    reason: str


def row_of(uid: str) -> str:
    """Return the name of a row, `LABEL:ROW`, given the uid of one of its draws, `LABEL:ROW@NUMBER`."""
    return uid.rpartition("@")[0]


class PromptDraws:
    """The endless order of prompts from several datasets. Prompts are mixed by the weights of the datasets.

    Args:
        make_order: Builds the order from facts about the rows.
        per_step: Prompts that one step trains on.
        namespace: Prefix of every uid. Seeds depend on the uid, so prompts with another prefix have other seeds.

    Attributes:
        prompts_per_epoch: Prompts in one pass over the weighted mixture.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetToTokenize],
        make_order: Callable[[SampleFacts], Order],
        *,
        per_step: int,
        namespace: str = "",
    ) -> None:
        for item in datasets:
            check_rows(item.dataset)
            if len(item.dataset) == 0:
                raise DataError(f"{item.dataset.label} has no rows.")
        self.datasets = datasets
        self._labels = store_labels(datasets)
        self._sizes = [len(item.dataset) for item in datasets]
        self._starts = np.cumsum([0, *self._sizes])
        configs = [item.config for item in datasets]
        weights = passes_per_epoch(configs, self._sizes)
        columns = ColumnsOfRows(datasets, [np.arange(size, dtype=np.int64) for size in self._sizes])
        self._order = make_order(SampleFacts(tuple(self._sizes), weights, per_step, columns))
        # An asynchronous source draws on one thread and observes on another.
        self._order_lock = threading.Lock()
        # Count also the rows that a row limit left unread.
        whole = [round(size / share) for size, share in zip(self._sizes, share_read(datasets), strict=True)]
        self.prompts_per_epoch = sum(epoch_shares(whole, passes_per_epoch(configs, whole)))
        self._notes = mix_notes(configs, whole, self._labels)
        self._read_in_part = whole != self._sizes
        self._namespace = namespace
        self._skipped: dict[str, str] = {}

    @classmethod
    def open(
        cls,
        configs: Sequence[DatasetConfig],
        context: SourceContext,
        *,
        order: OrderConfig,
        per_step: int,
        namespace: str = "",
    ) -> PromptDraws:
        """Open the datasets that `configs` describe. Raises DataError for data that cannot be found or read."""
        registry, seed = context.host.registry, context.config.seed
        return cls(
            open_datasets(configs, registry, context.row_limit),
            lambda facts: registry.create("order", order, samples=facts, seed=seed),
            per_step=per_step,
            namespace=namespace,
        )

    def take(self, start: int, count: int) -> list[Draw | SkippedRow]:
        """Return `count` draws, beginning with number `start`. A row that is left out becomes a SkippedRow.

        Raises:
            DataError: If a row cannot be read and `on_bad_row` is `error`, or if all rows have been left out.
        """
        if len(self._skipped) == sum(self._sizes):
            raise DataError(
                f"All {len(self._skipped)} rows were left out as unusable (on_bad_row: skip). The first: "
                f"{next(iter(self._skipped.values()))}"
            )
        with self._order_lock:
            indices = self._order.positions(start, start + count).tolist()
        return [self._draw(start + offset, index) for offset, index in enumerate(indices)]

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Let the order learn from the rewards of these groups, if it is adaptive. Groups must be sorted by draw."""
        if not isinstance(self._order, AdaptiveOrder):
            return
        with self._order_lock:
            draws: list[ScoredDraw] = []
            for group in groups:
                [sample] = self._order.positions(group.draw, group.draw + 1).tolist()
                terms = {name: tuple(values) for name, values in terms_of(group.trajectories).items()}
                draws.append(ScoredDraw(group.draw, sample, tuple(group.returns.tolist()), terms))
            self._order.observe(step, draws)

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the order, if it has some."""
        with self._order_lock:
            return self._order.metrics() if isinstance(self._order, MeasuresDraws) else {}

    def rows(self, limit: int) -> Iterator[Draw | SkippedRow]:
        """Yield the first rows of each dataset in file order. The numbers of these draws have no meaning."""
        for start, size in zip(self._starts, self._sizes, strict=False):
            for place in range(min(size, limit)):
                yield self._draw(place, int(start) + place)

    @cached_property
    def _keyed(self) -> list[tuple[int, str]]:
        draws = [draw for draw in self.rows(_ROWS_COMPARED) if isinstance(draw, Draw)]
        return [(question_key(draw.row, draw.dataset), draw.location) for draw in draws]

    def keys(self) -> NDArray[np.uint64]:
        """Return hashes of prompts, up to 10,000 of each dataset. Equal prompts have equal hashes."""
        return np.array([key for key, _ in self._keyed], np.uint64)

    def notes_of_shared(self, trained: NDArray[np.uint64]) -> list[str]:
        """Return notes on prompts that are also training prompts. `trained` has the keys of the training prompts."""
        return note_of_shared(self.keys(), trained, lambda number: self._keyed[number][1])

    def skip(self, row: SkippedRow) -> None:
        """Leave this row out of later draws."""
        self._skipped.setdefault(row_of(row.uid), row.reason)

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = {"skipped": dict(self._skipped)}
        if isinstance(self._order, AdaptiveOrder):
            with self._order_lock:
                state["order"] = self._order.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._skipped = dict(cast("dict[str, str]", state["skipped"]))
        if isinstance(self._order, AdaptiveOrder):
            self._order.load_state_dict(cast("dict[str, object]", state["order"]))

    def summary(self) -> dict[str, Any]:
        """Return facts in JSON for `spurline plan` and the report."""
        return {
            "prompts": sum(self._sizes),
            "sources": dict(zip(self._labels, self._sizes, strict=True)),
            "read_in_part": self._read_in_part,
            "notes": self._notes,
        }

    def fingerprint(self) -> str:
        """Return a hash that changes if the rows of any dataset change."""
        return fingerprint_of(item.dataset.fingerprint() for item in self.datasets)

    def _draw(self, number: int, index: int) -> Draw | SkippedRow:
        source = int(np.searchsorted(self._starts, index, side="right")) - 1
        place = index - int(self._starts[source])
        dataset, config = self.datasets[source].dataset, self.datasets[source].config
        uid = f"{self._namespace}{self._labels[source]}:{place}@{number}"
        known = self._skipped.get(row_of(uid))
        if known is not None:
            return SkippedRow(uid, number, known)
        try:
            row = dataset[place]
        except DataError as error:
            if config.on_bad_row == "error":
                raise
            skipped = SkippedRow(uid, number, str(error))
            self.skip(skipped)
            return skipped
        return Draw(number, uid, config, dataset.location(place), row)
