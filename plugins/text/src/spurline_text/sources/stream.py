"""Source `stream`: samples from data that is read only when it is needed. The data need not fit into memory.

Data flow: streams -> a block of rows -> tokens -> shuffled samples -> collator -> TrainingBatch. One block is in
memory. Steps are built in order. The state contains the position where the block began, and how many of the block's
samples were used. A resumed run reads the block again and continues after these samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline.data.orders.epochs import permutation
from spurline.data.token_store import Tokenized, TokenStoreBuilder, summarize
from spurline.errors import DataError
from spurline.protocols.collator import Collator
from spurline.protocols.dataset import Longest
from spurline.protocols.source import BatchSource, SourceContext
from spurline.protocols.stateful import refuse_other_data
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.configs import StreamSourceConfig
from spurline_text.datasets.protocols import RowReader, StreamedDataset, StreamedRow
from spurline_text.encoding import RowEncoder
from spurline_text.tokenization import SampleCollector, passes_per_epoch, plain_text_notes, store_labels
from spurline_text.tokenizer import pad_token_id


class _Window:
    """A dataset with the rows of one stream in the current block. After each pass, it opens the stream again."""

    def __init__(self, stream: StreamedDataset) -> None:
        self.label = stream.label
        self._stream = stream
        self._reader: RowReader = stream.open()
        self._rows: list[StreamedRow] = []
        self.numbers: list[int] = []
        """Number of each row in the block, counted from the start of the pass."""
        self.passes = self._next = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        values = self._rows[row].values
        if isinstance(values, DataError):
            raise values
        return values

    def location(self, row: int) -> str:
        return self._rows[row].location

    def fingerprint(self) -> str:
        raise AssertionError("the rows in a window change")

    def fill(self, limit: int, *, within_pass: bool) -> None:
        """Replace the rows by the next `limit` rows of the stream. If `within_pass` is true, stop at the end of a pass.

        Raises DataError if the stream has no rows.
        """
        self._rows, self.numbers = [], []
        while len(self) < limit:
            row = self._reader.read()
            if row is not None:
                self._rows.append(row)
                self.numbers.append(self._next)
                self._next += 1
                continue
            if self._next == 0:
                raise DataError(f"{self.label}: has no rows.")
            if within_pass and len(self):
                break
            self.close()
            self._reader, self._next, self.passes = self._stream.open(), 0, self.passes + 1

    def state(self) -> dict[str, Any]:
        return {"passes": self.passes, "row": self._next, "position": self._reader.position()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.close()
        self._reader = self._stream.open(state["position"])
        self.passes, self._next = state["passes"], state["row"]

    def close(self) -> None:
        self._reader.close()


@dataclass(frozen=True)
class _Block:
    """Samples that are in memory together.

    Attributes:
        number: Number of blocks before this one.
        begin: State of each window before the block was read.
        order: The training order of the samples.
        left_out: Number of rows without a sample, from the first block to this block.
    """

    number: int
    begin: Sequence[Mapping[str, Any]]
    tokenized: Tokenized
    order: NDArray[np.int64]
    left_out: int


class StreamSource(BatchSource):
    """A source that builds the batches of steps in order. A resumed run continues with the next sample."""

    reads_only_data = True

    def __init__(self, config: StreamSourceConfig, context: SourceContext) -> None:
        run = context.config
        assert run.steps is not None, "StreamSourceConfig.problems asks for steps"
        self.total_steps = run.steps
        self._run, self._tokenizer = run, context.tokenizer
        self._shuffles = config.shuffle
        self._block_rows = min(config.buffer_rows, context.row_limit or config.buffer_rows)
        entries = run.data.train
        registry = context.host.registry
        self._windows = [_Window(registry.create("dataset", entry, registry=registry)) for entry in entries]
        self._sources = [DatasetToTokenize(*pair) for pair in zip(self._windows, entries, strict=True)]
        self._encoders: dict[int, RowEncoder] = {}
        self._labels = store_labels(self._sources)
        self._collator: Collator = context.host.registry.create(
            "collator", run.collator, pad_token_id=pad_token_id(context.tokenizer), layout=context.layout
        )
        # Read the first block now, to find mistakes in it before the weights are loaded.
        self._block = self._read_block(0, 0)
        self._taken = self._step = 0
        note = f"read as a stream; these are the first {len(self._block.order):,} samples"
        notes = (note, *plain_text_notes(self._sources, context.tokenizer, "completion"))
        self._facts = summarize(replace(self._block.tokenized, notes=notes))

    def summary(self) -> Mapping[str, object]:
        return self._facts

    def longest(self) -> Longest:
        # Later samples may have up to `max_length` tokens.
        return Longest(self._run.data.max_length, "samples of the stream", "data.max_length")

    def build(self, step: int) -> TrainingBatch:
        assert step == self._step + 1, f"step {step} was requested after step {self._step}"
        batch_size, builder = self._run.batch_size, TokenStoreBuilder(self._labels)
        for _ in range(batch_size):
            if self._taken == len(self._block.order):
                self._block, self._taken = self._read_block(self._block.number + 1, self._block.left_out), 0
            store, index = self._block.tokenized.store, int(self._block.order[self._taken])
            self._taken += 1
            view = store.view(np.array([index]))
            builder.add(view.tokens(0), view.loss_mask(0), int(store.source[index]), int(store.row[index]))
        self._step = step
        everything = np.arange(batch_size, dtype=np.int64)
        batch = self._collator.collate(builder.build().view(everything), training=True)
        return replace(batch, info={**batch.info, "stream/left_out": float(self._block.left_out)})

    def epoch(self, step: int) -> float:
        """Return the number of complete passes over the first dataset, because a stream's length is not known."""
        return float(self._windows[0].passes)

    def state_dict(self) -> dict[str, object]:
        return {
            "step": self._step,
            "block": self._block.number,
            "taken": self._taken,
            # Count only rows before this block, because a resumed run reads this block again and counts its rows.
            "left_out": self._block.left_out - sum(self._block.tokenized.dropped.values()),
            "begin": [dict(place) for place in self._block.begin],
            "data": self._block.tokenized.store.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        for window, place in zip(self._windows, cast("list[Mapping[str, Any]]", state["begin"]), strict=True):
            window.restore(place)
        self._block = self._read_block(cast("int", state["block"]), cast("int", state["left_out"]))
        refuse_other_data(
            state,
            self._block.tokenized.store.fingerprint,
            "The next data of the stream differs from the data of the checkpoint in tokens or loss masks: a file, the "
            "tokenizer or the chat template has changed. Restore it, or start again with another run_dir.",
        )
        self._taken, self._step = cast("int", state["taken"]), cast("int", state["step"])

    def close(self) -> None:
        for window in self._windows:
            window.close()

    def _read_block(self, number: int, left_out: int) -> _Block:
        """Return the next block that has samples. Raises DataError if two passes over the first stream give none."""
        limit = self._windows[0].passes + 2
        while True:
            begin = [window.state() for window in self._windows]
            tokenized = self._tokenize(number)
            left_out += sum(tokenized.dropped.values())
            if size := len(tokenized.store):
                order = permutation(size, self._run.seed, number) if self._shuffles else np.arange(size, dtype=np.int64)
                return _Block(number, begin, tokenized, order, left_out)
            number += 1
            if self._windows[0].passes >= limit:
                raise DataError(f"{self._labels[0]}: no usable sample in a whole pass over the data.")

    def _tokenize(self, number: int) -> Tokenized:
        """Read the rows of a block, and tokenize them."""
        weights = passes_per_epoch([source.config for source in self._sources], [1] * len(self._sources))
        for window, weight in zip(self._windows, weights, strict=True):
            share = weight / sum(weights)
            # With this rounding, each stream's share of the rows in all blocks follows its weight.
            rows = int((number + 1) * self._block_rows * share) - int(number * self._block_rows * share)
            # With one stream, weights do not matter. So a block ends where a pass over the stream ends.
            window.fill(rows, within_pass=len(self._windows) == 1)
        collector = SampleCollector(self._sources)
        for source, window in enumerate(self._windows):
            if len(window):
                if source not in self._encoders:
                    self._encoders[source] = RowEncoder(self._sources[source], self._tokenizer, self._run.data)
                collector.encode(source, self._encoders[source])
        tokenized = collector.finish(may_be_empty=True)
        store = tokenized.store
        places = zip(store.source.tolist(), store.row.tolist(), strict=True)
        numbers = [self._windows[source].numbers[row] for source, row in places]
        return replace(tokenized, store=replace(store, row=np.array(numbers, np.int64)))
