"""Source `preference`: pairs of a chosen and a rejected answer, in an order that is known before training.

Data flow: row -> two `PreferenceSide` rows, each a prompt with its completion -> tokenization of each side ->
pairs -> one joint sample per pair -> collator -> `split_pairs` -> TrainingBatch. The collator gets a pair as one
sample, and micro-batches and ranks do not divide rows, so pairs stay together. In the batch each answer is its own
segment, which does not attend to the other answer.

| form of a row | prompt | chosen, rejected |
|---|---|---|
| text | text | text |
| turns as text | text, in `instruction` and, if there is one, `input` | text |
| messages | messages, in `prompt` or `messages` | messages, or a single message |
| whole conversations | none, or text | messages; the first messages that both share are the prompt |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from spurline.data.batch import Ragged, TrainingBatch, sums_by_number
from spurline.data.collators.packing import round_up
from spurline.data.token_store import TokenStore, TokenStoreBuilder, TokenView, fingerprint_of
from spurline.errors import DataError
from spurline.protocols.dataset import Dataset, DatasetConfig
from spurline.protocols.source import Samples, SourceContext
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_preference.configs import PreferenceSourceConfig
from spurline_text.rows.messages import read_messages
from spurline_text.rows.rows import BadRowError, RowView
from spurline_text.sources.sft import SampleSet, SftSource
from spurline_text.tokenization import DerivedDataset, distinct_labels
from spurline_text.tokenizer import pad_token_id

Side = Literal["chosen", "rejected"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")


def side_of(source: DatasetToTokenize, side: Side) -> DatasetToTokenize:
    """Return one side of a preference dataset as a dataset of prompts and completions."""
    names = source.config.columns
    columns = {**names, "prompt": names.get("prompt", "prompt"), "completion": names.get(side, side)}
    config = source.config.model_copy(update={"format": "prompt_completion", "columns": columns})
    return DatasetToTokenize(PreferenceSide(source.dataset, side, dict(names)), config)


class PreferenceSide(DerivedDataset):
    """A `Dataset` that wraps a preference dataset. Its rows have separate columns for the prompt and one side's answer.

    `columns` is the dataset's setting `columns`. The answer stays in its original column.
    """

    def __init__(self, dataset: Dataset, side: Side, columns: Mapping[str, str]) -> None:
        super().__init__(dataset)
        self.label = f"{dataset.label}/{side}"
        self._side: Side = side
        self._columns = columns

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        values = self._dataset[row]
        view = RowView(values, self._columns)
        try:
            has_prompt = "prompt" in view or "messages" in view
            is_turn = "instruction" in self._columns or ("instruction" in view and not has_prompt)
            prompt, answer = _split(view, self._side, is_turn=is_turn)
        except BadRowError as error:
            raise error.at(self._dataset.location(row)) from error
        return {**values, view.label("prompt"): prompt, view.label(self._side): answer}

    def fingerprint(self) -> str:
        # Increase the last number when the code reads rows differently, so that tokens in older caches are not used.
        return f"{self._dataset.fingerprint()}/{self._side}/2"


def _split(view: RowView, side: Side, *, is_turn: bool) -> tuple[Any, Any]:
    """Return the prompt and the answer of one side. In a well-formed row both are text, or both are messages.

    If `is_turn` is True, the prompt is made of the columns `instruction` and `input`, and becomes a user turn.
    """
    answers = {name: view.require(name) for name in SIDES}
    answers = {name: [answer] if isinstance(answer, Mapping) else answer for name, answer in answers.items()}
    prompt = view.get("prompt")
    if is_turn:
        prompt = view.instruction()
        if isinstance(answers[side], str):
            return [{"role": "user", "content": prompt}], [{"role": "assistant", "content": answers[side]}]
    if prompt is None and "messages" in view:
        prompt = view.require("messages")
    if isinstance(answers[side], str) or (prompt is not None and not isinstance(prompt, str)):
        return (view.require("prompt") if prompt is None else prompt), answers[side]
    whole = {name: read_messages(answers[name], view.label(name)) for name in SIDES}
    # The last message is the answer, so it is not compared.
    pairs = zip(whole["chosen"][:-1], whole["rejected"][:-1], strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if shared:
        return whole[side][:shared], whole[side][shared:]
    if prompt is None:
        raise BadRowError(
            view.label("prompt"),
            f"is missing, and {view.label('chosen')} and {view.label('rejected')} begin with different messages. Give "
            "a column with the messages that come before the answers, and name it with `columns: {prompt: NAME}`.",
        )
    return [{"role": "user", "content": prompt}], whole[side]


def join_pairs(
    samples: TokenView,
    labels: Sequence[str],
    datasets: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    align_to: int,
    pad_token_id: int,
) -> tuple[TokenStore, dict[str, tuple[int, int]]]:
    """Join the two samples of each pair into one sample.

    Args:
        samples: The samples chosen, rejected, chosen, rejected, ...
        labels: Names of the datasets.
        datasets: int64 [pairs], the dataset of each pair.
        rows: int64 [pairs], the row of each pair. Dataset and row together make the uid of a pair.
        align_to: The rejected answer starts at a multiple of this.
        pad_token_id: The token that fills the gap between the answers.

    Returns:
        A store with one sample per pair: chosen tokens, filling, rejected tokens. Also a dict that maps the uid of each
        pair to the length of the chosen sample and the start of the rejected sample.
    """
    builder = TokenStoreBuilder(labels)
    shapes: list[tuple[int, int]] = []
    for pair, (dataset, row) in enumerate(zip(datasets.tolist(), rows.tolist(), strict=True)):
        chosen, rejected = 2 * pair, 2 * pair + 1
        length = len(samples.tokens(chosen))
        start = round_up(length, align_to)
        filling = np.zeros(start - length, np.int32)
        builder.add(
            np.concatenate([samples.tokens(chosen), filling + pad_token_id, samples.tokens(rejected)]),
            np.concatenate([samples.loss_mask(chosen), filling, samples.loss_mask(rejected)]),
            dataset,
            row,
        )
        shapes.append((length, start))
    store = builder.build()
    return store, {store.uid(pair): shape for pair, shape in enumerate(shapes)}


def split_pairs(batch: TrainingBatch, shapes: Mapping[str, tuple[int, int]]) -> TrainingBatch:
    """Split each joint segment of a batch into the chosen and the rejected answer, and add the column `pair_ids`.

    The loss weights of each pair are scaled to sum to 1, so the loss is a mean over pairs.
    """
    ids, positions = batch.tokens["segment_ids"], batch.tokens["position_ids"]
    table = np.array([shapes[uid] for uid in batch.segments["uid"].values.tolist()], np.int64).reshape(-1, 2)
    # Number the pairs of the batch from 1. Padding has number 0. By row 0 below, it is in neither answer.
    before = torch.from_numpy(batch.segments["uid"].offsets[:-1]).unsqueeze(1)
    pairs = torch.where(ids > 0, ids.long() + before, 0)
    length, start = torch.from_numpy(np.concatenate([[[0, 2**62]], table]))[pairs].unbind(-1)
    chosen, rejected = positions < length, positions >= start
    kept = chosen | rejected
    weights = batch.tokens["loss_weights"]
    sums = sums_by_number(weights, pairs)
    columns = {
        "segment_ids": torch.where(kept, 2 * ids - chosen.int(), 0),
        "position_ids": torch.where(rejected, positions - start, torch.where(chosen, positions, 0)).int(),
        "loss_weights": torch.where(kept, weights / sums[pairs].clamp(min=1e-30), 0.0).to(weights.dtype),
        "pair_ids": torch.where(chosen, pairs, torch.where(rejected, -pairs, 0)).int(),
    }
    return replace(batch, tokens={**batch.tokens, **columns}, segments=_two_for_one(batch.segments, table))


def _two_for_one(segments: Mapping[str, Ragged], table: NDArray[np.int64]) -> dict[str, Ragged]:
    """Return the metadata of each answer. `sample` is 0 for a chosen and 1 for a rejected answer."""
    chosen, start = table.T
    halves: dict[str, Any] = {
        "length": np.stack([chosen, segments["length"].values - start], axis=1).ravel(),
        "sample": np.tile([0, 1], len(table)),
    }
    return {
        name: Ragged(
            halves.get(name, np.repeat(column.values, 2)).astype(column.values.dtype, copy=False), 2 * column.offsets
        )
        for name, column in segments.items()
    }


class PairSet(SampleSet):
    """A `SampleSet` whose samples are pairs. A row with an unusable answer is left out and counted."""

    answer = "chosen"

    def __init__(self, configs: Sequence[DatasetConfig], context: SourceContext) -> None:
        super().__init__(configs, context)
        store = self._tokenized.store
        found = [_pairs_of_dataset(store, dataset) for dataset in range(len(configs))]
        self._labels = tuple(distinct_labels([source.dataset.label.rpartition("/")[0] for source in self.answered()]))
        for label, pairs in zip(self._labels, found, strict=True):
            if not len(pairs):
                raise DataError(f"{label}: no row has both a usable chosen and a usable rejected answer.")
        self._pairs = np.concatenate(found)
        self._sizes = tuple(len(pairs) for pairs in found)
        # Align both answers of a pair as the collator would align two samples.
        self._align_to = math.lcm(context.layout.align_to, context.config.collator.sample_alignment)
        self._pad_token_id = pad_token_id(context.tokenizer)

    @property
    def labels(self) -> tuple[str, ...]:
        return self._labels

    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    def batch(self, numbers: NDArray[np.int64], *, training: bool) -> TrainingBatch:
        store, chosen = self._tokenized.store, self._pairs[numbers, 0]
        joint, shapes = join_pairs(
            store.view(self._pairs[numbers].ravel()),
            self._labels,
            store.source[chosen].astype(np.int64) // len(SIDES),
            store.row[chosen],
            align_to=self._align_to,
            pad_token_id=self._pad_token_id,
        )
        everything = np.arange(len(joint), dtype=np.int64)
        return split_pairs(self._collator.collate(joint.view(everything), training=training), shapes)

    def fingerprint(self) -> str:
        """Return a fingerprint that also covers which samples form pairs."""
        return fingerprint_of([super().fingerprint(), xxhash.xxh3_128_hexdigest(self._pairs.data)])

    def summary(self) -> dict[str, Any]:
        """Add `pairs` to the facts. Token counts and lengths describe single answers, each with its prompt."""
        facts = super().summary()
        num_pairs = len(self._pairs)
        alone = len(self._tokenized.store) - len(SIDES) * num_pairs
        # These answers are usable, but the other answers of their rows are not.
        dropped = {**facts["dropped"], **({"other_answer_left_out": alone} if alone else {})}
        notes = [f"{num_pairs:,} pairs of a chosen and a rejected answer", *facts["notes"]]
        return {**facts, "pairs": num_pairs, "dropped": dropped, "notes": notes}

    def _whole(self) -> NDArray[np.int64]:
        # The chosen answer identifies its pair.
        return self._pairs[:, 0]

    def _lengths(self) -> NDArray[np.int64]:
        return self._tokenized.store.lengths()[self._pairs].sum(axis=1)

    def answered(self) -> Sequence[DatasetToTokenize]:
        """Return the prompts with their chosen answers."""
        return self._sources[:: len(SIDES)]

    def _to_tokenize(self, opened: Sequence[DatasetToTokenize]) -> Sequence[DatasetToTokenize]:
        return [side_of(source, side) for source in opened for side in SIDES]


def _pairs_of_dataset(store: TokenStore, dataset: int) -> NDArray[np.int64]:
    """Return the store indices of both answers of each complete row, int64 [pairs, 2], in the order of the rows."""
    places = [np.flatnonzero(store.source == len(SIDES) * dataset + side) for side in range(len(SIDES))]
    _, of_chosen, of_rejected = np.intersect1d(
        store.row[places[0]], store.row[places[1]], assume_unique=True, return_indices=True
    )
    return np.stack([places[0][of_chosen], places[1][of_rejected]], axis=1).astype(np.int64)


class PreferenceSource(SftSource):
    """A source whose samples are pairs of answers. It orders them as the source `sft` orders its samples."""

    def __init__(self, config: PreferenceSourceConfig, context: SourceContext) -> None:
        self._context = context
        super().__init__(config, context, PairSet(context.config.data.train, context))

    def summary(self) -> Mapping[str, object]:
        return {**super().summary(), "step_of": f"{self._batch_size} pairs"}

    def held_out(self, datasets: Sequence[DatasetConfig]) -> Samples:
        return PairSet(datasets, self._context)
