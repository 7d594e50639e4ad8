"""Sets of tokenized answers from which the batches of the sources `preference` and `labels` are drawn.

Data flow: row -> one `AnswersOfSide` row per answer -> tokenization -> AnswerSet -> order -> collator -> TrainingBatch.
If log-probabilities of the reference model are kept, they are stored for the tokens of a set in one flat array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from spurline.data.batch import Ragged, TrainingBatch, segment_numbers, sums_by_number
from spurline.data.token_store import TokenStore, TokenStoreBuilder, TokenView, fingerprint_of
from spurline.errors import DataError
from spurline.progress import waiting
from spurline.protocols.backend import Backend, Role
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.source import SourceContext
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_preference.pair_layout import join_pairs, split_pairs
from spurline_preference.reference import ReferenceLogprobs, file_of, places_of_tokens
from spurline_preference.rows import SIDES, RowsAt, Side, has_labels, read_label, side_of
from spurline_text.sources.sft import SampleSet, values_of_segments
from spurline_text.tokenization import distinct_labels
from spurline_text.tokenizer import pad_token_id

Numbers = NDArray[np.int64]


class AnswerSet(SampleSet):
    """A `SampleSet` of answers. Its batches have the column `reference_logprobs` after `add_reference`."""

    _reference: ReferenceLogprobs | None = None

    def __init__(self, configs: Sequence[DatasetConfig], context: SourceContext) -> None:
        self._context = context
        self._pad_token_id = pad_token_id(context.tokenizer)
        super().__init__(configs, context)

    def lay_out(self, numbers: Numbers, *, training: bool) -> tuple[TrainingBatch, Numbers]:
        """Return a batch, and the place of the first token of each of its segments in a flat array of all tokens."""
        raise NotImplementedError

    @property
    def num_places(self) -> int:
        """Return the length of that flat array."""
        return int(self._tokenized.store.offsets[-1])

    def batch(self, numbers: Numbers, *, training: bool) -> TrainingBatch:
        batch, starts = self.lay_out(numbers, training=training)
        batch = self.with_carried(batch, numbers)
        if self._reference is None:
            return batch
        column = self._reference.column(places_of_tokens(batch, starts))
        return replace(batch, tokens={**batch.tokens, "reference_logprobs": column})

    def add_reference(self, backend: Backend, role: Role, batch_size: int) -> str:
        """Read log-probabilities of the reference model for all answers, or compute and store them with this role.

        Returns the name of the file, which is a digest of everything on which the values depend.
        """
        path = file_of(self._context, self.fingerprint())
        self._reference = ReferenceLogprobs.load(path, self.num_places)
        if self._reference is None:
            count = sum(self.sizes())
            starts = range(0, count, batch_size)

            def batches() -> Iterator[tuple[TrainingBatch, torch.Tensor]]:
                for start in starts:
                    numbers = np.arange(start, min(start + batch_size, count), dtype=np.int64)
                    batch, places = self.lay_out(numbers, training=False)
                    yield batch, places_of_tokens(batch, places)

            with waiting(self._context.progress, f"computing the reference's log-probabilities of {count:,} samples"):
                self._reference = ReferenceLogprobs.compute(batches(), self.num_places, backend, role, path)
        return path.name


class PairSet(AnswerSet):
    """A set whose samples are pairs. A row with an unusable answer is left out and counted."""

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

    @property
    def labels(self) -> tuple[str, ...]:
        return self._labels

    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    def lay_out(self, numbers: Numbers, *, training: bool) -> tuple[TrainingBatch, Numbers]:
        store, pairs = self._tokenized.store, self._pairs[numbers]
        joint, shapes = join_pairs(
            store.view(pairs.ravel()),
            self._labels,
            store.source[pairs[:, 0]].astype(np.int64) // len(SIDES),
            store.row[pairs[:, 0]],
            align_to=self._align_to,
            pad_token_id=self._pad_token_id,
        )
        everything = np.arange(len(joint), dtype=np.int64)
        batch = split_pairs(self._collator.collate(joint.view(everything), training=training), shapes)
        index_of = {joint.uid(pair): index for pair, index in enumerate(pairs.tolist())}
        names = zip(batch.segments["uid"].values.tolist(), batch.segments["sample"].values.tolist(), strict=True)
        return batch, store.offsets[np.array([index_of[uid][sample] for uid, sample in names], np.int64)]

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

    def _uid(self, number: int) -> str:
        store, chosen = self._tokenized.store, self._pairs[number, 0]
        return f"{self._labels[store.source[chosen] // len(SIDES)]}:{store.row[chosen]}"

    def _whole(self) -> Numbers:
        # The chosen answer identifies its pair.
        return self._pairs[:, 0]

    def _lengths(self) -> Numbers:
        return self._tokenized.store.lengths()[self._pairs].sum(axis=1)

    def answered(self) -> Sequence[DatasetToTokenize]:
        """Return the prompts with their chosen answers."""
        return self._sources[:: len(SIDES)]

    def _to_tokenize(self, opened: Sequence[DatasetToTokenize]) -> Sequence[DatasetToTokenize]:
        return [side_of(source, side) for source in opened for side in SIDES]


def _pairs_of_dataset(store: TokenStore, dataset: int) -> Numbers:
    """Return the store indices of both answers of each complete row, int64 [pairs, 2], in the order of the rows."""
    places = [np.flatnonzero(store.source == len(SIDES) * dataset + side) for side in range(len(SIDES))]
    _, of_chosen, of_rejected = np.intersect1d(
        store.row[places[0]], store.row[places[1]], assume_unique=True, return_indices=True
    )
    return np.stack([places[0][of_chosen], places[1][of_rejected]], axis=1).astype(np.int64)


class LabelSet(AnswerSet):
    """A set whose samples are single answers, good or bad. Batches also have mismatched answers, with label 0.

    The mismatched answer of a sample is the answer of another sample, after the sample's own prompt. All samples of
    the set form one random cycle, and each gets the answer of the next one. The beginning of a prompt is cut off if the
    mismatched answer would otherwise be longer than all samples.
    """

    answer = "completion"

    def __init__(self, configs: Sequence[DatasetConfig], context: SourceContext) -> None:
        super().__init__(configs, context)
        store = self._tokenized.store
        self._signs = self._read_labels(store)
        cycle = np.random.default_rng(0).permutation(len(store))
        self._partner = np.empty_like(cycle)
        self._partner[cycle] = np.roll(cycle, -1)
        trained = np.flatnonzero(store.loss_mask)
        # Tokens before the first token with loss are the prompt.
        self._prompts = trained[np.searchsorted(trained, store.offsets[:-1])] - store.offsets[:-1]
        answers = (store.lengths() - self._prompts)[self._partner]
        self._kept = np.minimum(self._prompts, store.lengths().max() - answers)
        self._starts = np.cumsum([0, *(self._kept + answers)]) + store.offsets[-1]

    def _read_labels(self, store: TokenStore) -> NDArray[np.int32]:
        """Return 1 or -1 for each sample of the store."""
        signs = np.zeros(len(store), np.int32)
        for number, (side, source) in enumerate(zip(self._sides, self._sources, strict=True)):
            (found,) = np.nonzero(store.source == number)
            of_side = {"chosen": 1, "rejected": -1}.get(side)
            rows = store.row[found].tolist()
            signs[found] = [read_label(source, row) for row in rows] if of_side is None else of_side
        return signs

    @property
    def num_places(self) -> int:
        return int(self._starts[-1])

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(distinct_labels([item.dataset.label for item in self._opened]))

    def sizes(self) -> tuple[int, ...]:
        counts = iter(self._tokenized.store.sizes())
        return tuple(sum(next(counts) for _ in sides) for sides in self._sides_by_dataset)

    def lay_out(self, numbers: Numbers, *, training: bool) -> tuple[TrainingBatch, Numbers]:
        store = self._tokenized.store
        answers = self._collator.collate(store.view(numbers), training=training)
        others = self._collator.collate(self._mismatched(numbers), training=training)
        number_of = {store.uid(number): number for number in numbers.tolist()}
        found = [
            np.array([number_of[uid] for uid in batch.segments["uid"].values.tolist()], np.int64)
            for batch in (answers, others)
        ]
        labelled = _with_labels(answers, self._signs[found[0]])
        unlabelled = _with_labels(others, np.zeros(len(found[1]), np.int32))
        starts = np.concatenate([store.offsets[found[0]], self._starts[found[1]]])
        return _stacked(labelled, unlabelled), starts

    def _mismatched(self, numbers: Numbers) -> TokenView:
        store, partners = self._tokenized.store, self._partner[numbers]
        own, other = store.view(numbers), store.view(partners)
        builder = TokenStoreBuilder(store.labels)
        for index, (number, partner) in enumerate(zip(numbers.tolist(), partners.tolist(), strict=True)):
            end, begin = self._prompts[number], self._prompts[partner]
            prompt = own.tokens(index)[end - self._kept[number] : end]
            builder.add(
                np.concatenate([prompt, other.tokens(index)[begin:]]),
                np.concatenate([np.zeros(len(prompt), np.uint8), other.loss_mask(index)[begin:]]),
                int(store.source[number]),
                int(store.row[number]),
            )
        return builder.build().view(np.arange(len(numbers), dtype=np.int64))

    def fingerprint(self) -> str:
        """Return a fingerprint that also covers the labels, and which answers are mismatched."""
        arrays = (self._signs, self._partner, self._kept)
        return fingerprint_of([super().fingerprint(), *(xxhash.xxh3_128_hexdigest(array.data) for array in arrays)])

    def summary(self) -> dict[str, Any]:
        """Add the numbers of good and bad answers to the facts."""
        facts = super().summary()
        counts = {"good": int((self._signs > 0).sum()), "bad": int((self._signs < 0).sum())}
        notes = [f"{counts['good']:,} good and {counts['bad']:,} bad answers", *facts["notes"]]
        return {**facts, **counts, "notes": notes}

    def answered(self) -> Sequence[DatasetToTokenize]:
        """Return the prompts with good answers."""
        found: list[DatasetToTokenize] = []
        store = self._tokenized.store
        for number, (side, source) in enumerate(zip(self._sides, self._sources, strict=True)):
            rows = store.row[(store.source == number) & (self._signs > 0)].astype(np.int64)
            if side == "completion":
                found.append(replace(source, dataset=RowsAt(source.dataset, rows)))
            elif side == "chosen":
                found.append(source)
        return found

    def _to_tokenize(self, opened: Sequence[DatasetToTokenize]) -> Sequence[DatasetToTokenize]:
        single: tuple[Side, ...] = ("completion",)
        self._sides_by_dataset = [single if has_labels(source) else SIDES for source in opened]
        pairs = list(zip(opened, self._sides_by_dataset, strict=True))
        self._sides = [side for _, sides in pairs for side in sides]
        return [side_of(source, side) for source, sides in pairs for side in sides]


def _with_labels(batch: TrainingBatch, signs: NDArray[np.int32]) -> TrainingBatch:
    """Add the column `labels`, and scale the weights of each answer to sum to 1. `signs` has a label per segment."""
    numbers, labels = segment_numbers(batch), values_of_segments(batch, signs)
    weights = batch.tokens["loss_weights"]
    sums = sums_by_number(weights, numbers)[numbers].clamp(min=1e-30)
    scaled = (weights / sums).to(weights.dtype)
    return replace(batch, tokens={**batch.tokens, "labels": labels, "loss_weights": scaled})


def _stacked(first: TrainingBatch, second: TrainingBatch) -> TrainingBatch:
    """Return the rows of both batches as one batch. Segments of the second have `sample` 1."""
    length = max(first.length, second.length)

    def column(name: str) -> torch.Tensor:
        parts = [torch.nn.functional.pad(part.tokens[name], (0, length - part.length)) for part in (first, second)]
        return torch.cat(parts)

    def ragged(name: str) -> Ragged:
        one, other = first.segments[name], second.segments[name]
        values = np.ones_like(other.values) if name == "sample" else other.values
        offsets = np.concatenate([one.offsets, other.offsets[1:] + one.offsets[-1]])
        return Ragged(np.concatenate([one.values, values]), offsets)

    def release() -> None:
        first.release()
        second.release()

    return TrainingBatch(
        tokens={name: column(name) for name in first.tokens},
        segments={name: ragged(name) for name in first.segments},
        unit_ids=torch.cat([first.unit_ids, second.unit_ids + first.unit_ids.max() + 1]),
        is_padding_row=torch.cat([first.is_padding_row, second.is_padding_row]),
        info=first.info,
        on_release=release,
    )
