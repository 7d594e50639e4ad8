"""Model the usual mistakes of training stacks: each computes the gradient that a stack with this mistake would make.

To add one, write a function that takes the `Reference` of a dump and yields its `Prediction`s, and put it into
`HYPOTHESES`. It yields nothing if the mistake cannot occur on the batch. A prediction that equals the truth on the
batch is left out later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spurline_models.architecture import output_layer
from spurline_oracle.dump import Dump, Row
from spurline_oracle.losses import normalized
from spurline_oracle.parts import each_forward, embedding_name, without_weight_gradient
from spurline_oracle.tensor_parallel import missing_sums_of_inputs, missing_sums_of_weights, scaled_kinds
from spurline_oracle.truth import Gradients, Prediction, Reading, Reference, Stretch, each_sequence

Hypothesis = Callable[[Reference], Iterable[Prediction]]


def mean_of_means(reference: Reference) -> Iterable[Prediction]:
    """Normalize each micro-batch, or each rank, by its own count."""
    dump = reference.dump
    for groups, name in ((dump.micro_batches, "micro-batches"), (dump.ranks, "ranks")):
        if len(groups) > 1:
            parts = [normalized(dump, _wanted(dump), among=group) for group in groups]
            weights = [sum(part) / len(groups) for part in zip(*parts, strict=True)]
            yield Prediction(
                f"mean of means over {name}",
                f"The loss of each of the {name} was averaged by its own count, so learned tokens in short ones weigh "
                "more. Divide the sums by the count of the whole update.",
                reference.gradient(weights),
            )


def another_reduction(reference: Reference) -> Iterable[Prediction]:
    """Average over tokens instead of sequences, or over sequences instead of tokens."""
    for reduction in {"token_mean", "sequence_mean"} - {reference.dump.loss["reduction"]}:
        if reference.dump.loss["name"] != "dpo":
            yield Prediction(
                f"{reduction} instead of {reference.dump.loss['reduction']}",
                "The loss was reduced in another way than the settings say.",
                reference.gradient(normalized(reference.dump, _wanted(reference.dump), reduction)),
            )


def parts_lost(reference: Reference) -> Iterable[Prediction]:
    """Use the gradients of one micro-batch, or of one rank, and lose those of the others."""
    rows, num_batches = reference.dump.rows, max(row.micro_batch for row in reference.dump.rows) + 1
    kept: list[tuple[str, str, Callable[[Row], bool]]] = []
    if num_batches > 1:
        words = "Gradients were not accumulated: is zero_grad inside the loop, or are they overwritten?"
        kept.append(("only the last micro-batch", words, lambda row: row.micro_batch == num_batches - 1))
        kept.append(("the last micro-batch lost", words, lambda row: row.micro_batch < num_batches - 1))
        kept.append(("only the first micro-batch", words, lambda row: row.micro_batch == 0))
    for name, words, keeps in kept:
        weights = [weight * keeps(row) for weight, row in zip(reference.weights, rows, strict=True)]
        yield Prediction(name, words, reference.gradient(weights))
    ranks = reference.dump.facts["num_ranks"]
    # Stacks that average gradients over ranks multiply losses by the number of ranks before.
    for factor in (ranks, 1) if ranks > 1 else ():
        weights = [weight * factor * (row.rank == 0) for weight, row in zip(reference.weights, rows, strict=True)]
        words = "Those of the other data-parallel ranks were not added."
        yield Prediction("only the gradients of the first rank", words, reference.gradient(weights))


def amplified(reference: Reference) -> Iterable[Prediction]:
    """Double what is accumulated with each micro-batch."""
    rows, last = reference.dump.rows, max(row.micro_batch for row in reference.dump.rows)
    if last > 0:
        weights = [weight * 2.0 ** (last - row.micro_batch) for weight, row in zip(reference.weights, rows, strict=True)]
        words = "What was accumulated before was added to itself with each micro-batch."
        yield Prediction("accumulated gradients doubled with each micro-batch", words, reference.gradient(weights))


def wrong_tokens(reference: Reference) -> Iterable[Prediction]:
    """Learn tokens that are not to be learned, or leave out some that are."""
    dump = reference.dump
    wanted = _wanted(dump)
    every = [row.valid.double() * ~row.starts for row in dump.rows]
    yield _with_tokens(reference, "loss over prompts", "Prompts were not masked, so they were learned too.", every)
    if any(not bool(row.valid.all()) for row in dump.rows):
        words = "Padding was not masked in labels, so it was learned too."
        after = [torch.cat([torch.zeros(1), torch.ones(len(row.tokens) - 1)]).double() for row in dump.rows]
        for name, asked in (
            ("loss over padding", [torch.where(row.valid, want, one) for row, want, one in zip(dump.rows, wanted, after, strict=True)]),
            ("loss over prompts and padding", after),
        ):
            yield _with_tokens(reference, name, words, asked, as_row)
    if any(bool((row.labels[row.asked > 0] != row.tokens[row.asked > 0]).any()) for row in dump.rows):
        words = (
            "The labels of the dump do not name the tokens at their positions. If the stack shifts labels itself, they "
            'must not be shifted before; if it does not, set loss["labels"] to "next" in the recorder.'
        )
        asked = [row.asked for row in dump.rows]
        yield Prediction(
            "labels do not fit the tokens", words, reference.gradient(normalized(dump, asked), as_row, by_labels=True)
        )
    edges = (
        ("last token of each sequence dropped", "No loss was computed on it, such as the end-of-turn token.", -1, 0.0),
        ("first learned token of each sequence dropped", "The mask begins one token too late.", 0, 0.0),
        ("the last token of each prompt learned", "The mask begins one token too early.", 0, 1.0),
    )
    for name, words, edge, value in edges:
        asked = [want.clone() for want in wanted]
        for row, each in zip(dump.rows, asked, strict=True):
            for found in row.ranges:
                learned = (row.wanted[found.start : found.stop] > 0).nonzero().flatten() + found.start
                if len(learned):
                    each[learned[edge] - (1 if value else 0)] = value
        asked = [each * ~row.starts for row, each in zip(dump.rows, asked, strict=True)]
        yield _with_tokens(reference, name, words, asked)


def wrong_targets(reference: Reference) -> Iterable[Prediction]:
    """Predict the token itself, or the token after the next."""
    for offset, name, words in (
        (1, "labels shifted twice", "Logits were compared with the token after the next one."),
        (-1, "labels not shifted", "Logits were compared with the token that the model reads at the same position."),
    ):
        # What decides whether there is a loss is the label that is compared.
        asked = [_rolled(row.wanted, -offset) for row in reference.dump.rows]
        ratio = _ratio(reference.dump, asked)
        gradients = reference.gradient(normalized(reference.dump, asked), offset=offset)
        yield Prediction(name, words, gradients, ratio)


def packing(reference: Reference) -> Iterable[Prediction]:
    """Let packed sequences see each other, or count positions on, or learn first tokens from the sequence before."""
    dump = reference.dump
    if not dump.is_packed:
        return
    boundary = [row.wanted + row.starts * (torch.arange(len(row.tokens)) > 0) for row in dump.rows]
    across = "Tokens saw the sequences before theirs in the packed row. Give attention the boundaries (cu_seqlens, a block-diagonal mask, or positions without an all-ones attention_mask)."
    readings: list[tuple[str, str, Reading]] = [
        ("attention across packed sequences", across, as_whole(restarts=True)),
        ("attention across packed sequences, positions that go on", across, as_whole(restarts=False)),
        ("positions that go on in packed rows", "Positions must restart with each sequence.", _counting_on),
    ]
    for name, words, reading in readings:
        yield Prediction(name, words, reference.gradient(reading=reading))
    edges = "The first token of a packed sequence was predicted from the sequence before it. Mask its label."
    readings.insert(0, ("", "", each_sequence))
    for name, words, reading in readings[:3]:
        title = f"{name}, loss at boundaries" if name else "loss at boundaries of packed sequences"
        yield _with_tokens(reference, title, f"{words} {edges}".strip(), boundary, reading)


def left_padding(reference: Reference) -> Iterable[Prediction]:
    """Let tokens see the padding before them, or count it in positions."""
    if any(bool(row.valid.any()) and not bool(row.valid[0]) for row in reference.dump.rows):
        words = "The attention mask did not reach the model."
        for restarts in (False, True):
            name = "attention to padding" + (", with right positions" if restarts else "")
            yield Prediction(name, words, reference.gradient(reading=as_whole(restarts)))
        words = "Positions counted padding. Give the model position_ids that begin with the first token."
        yield Prediction("positions that count padding", words, reference.gradient(reading=as_row))


def context_parallel(reference: Reference) -> Iterable[Prediction]:
    """Cut rows into parts, and lose what crosses the cuts."""
    dump = reference.dump
    sizes = [dump.facts["layout"]["context"]] if "context" in dump.facts["layout"] else [2, 4]
    for size, parts in [(size, size * turns) for size in sizes for turns in (1, 2)]:
        how = f"{size} ranks" + (", zigzag" if parts != size else "")
        asked = [row.wanted.clone() for row in dump.rows]
        for each in asked:
            each[[cut for cut in _cuts(len(each), parts) if cut < len(each)]] = 0
        yield _with_tokens(
            reference,
            f"context-parallel boundary tokens lost ({how})",
            "Labels were shifted within each part, so the first token of a part is never a target. Shift before cutting.",
            asked,
        )
        if parts == size:
            yield Prediction(
                f"attention within context-parallel parts alone ({how})",
                "Keys and values of other ranks did not reach attention.",
                reference.gradient(reading=_in_parts(size)),
            )
        own = [_by_part(dump, size, parts, rank) for rank in range(size)]
        weights = [sum(each) / size for each in zip(*(normalized(dump, part) for part in own), strict=True)]
        words = "Each context-parallel rank divided by the count of its own part."
        yield Prediction(f"mean of means over context-parallel ranks ({how})", words, reference.gradient(weights))


def shared_embeddings(reference: Reference) -> Iterable[Prediction]:
    """Lose or double a part of the gradient of an embedding that is also the output layer."""
    head = output_layer(reference.causal)
    name = embedding_name(reference.causal)
    if head is None or name is None or getattr(head, "weight", None) is not reference.causal.get_input_embeddings().weight:
        return
    with each_forward([head], without_weight_gradient):
        as_input = reference.gradient()[name]
    whole = reference.truth[name]
    where = "Look at how the first and the last pipeline stage, or the two modules, share the weight."
    for title, value in (
        ("shared embeddings counted twice", 2 * whole),
        ("shared embeddings without their part as output layer", as_input),
        ("shared embeddings without their part as input", whole - as_input),
    ):
        yield Prediction(title, f"One weight embeds tokens and makes logits. {where}", {**reference.truth, name: value})


def logits(reference: Reference) -> Iterable[Prediction]:
    """Forget the temperature, or a scale or cap of logits in the model's config."""
    loss = reference.dump.loss
    if loss.get("temperature", 1.0) != 1:
        words = "The loss was computed from logits that were not divided by the temperature of sampling."
        yield Prediction("temperature missing", words, reference.gradient(settings={"temperature": 1.0}))
    else:
        for name, neutral in (("logits_scaling", 1.0), ("logit_scale", 1.0), ("final_logit_softcapping", None)):
            if getattr(reference.causal.config, name, None) not in (None, neutral):
                with _replaced(reference.causal, name, neutral):
                    gradients = reference.gradient()
                words = f"The output layer was called directly, without what the model does with `{name}`."
                yield Prediction(f"{name} of the model missing", words, gradients)


def policy_loss(reference: Reference) -> Iterable[Prediction]:
    """Leave out or misalign a part of a policy loss."""
    loss = reference.dump.loss
    if loss["name"] != "policy":
        return
    high = {"clip_low": 1e30, "clip_high": 1e30}
    yield Prediction("no clipping", "Ratios were not clipped.", reference.gradient(settings=high))
    words = "Ratios were clipped by clip_low on both sides."
    yield Prediction("clip_high ignored", words, reference.gradient(settings={"clip_high": loss.get("clip_low", 0.2)}))
    if loss.get("kl"):
        yield Prediction("KL term missing", "kl was not added.", reference.gradient(settings={"kl": 0.0}))
    if any("old_logprobs" in row.numbers for row in reference.dump.rows):
        words = "Ratios were 1, as if the old log-probabilities had been recomputed with the trained weights."
        yield Prediction("old log-probabilities ignored", words, reference.gradient(numbers=_without_old))
    for by, side in ((1, "late"), (-1, "early")):
        words = "Columns and tokens are not aligned: a column for the token at t must be used with the logits at t - 1."
        shifted = reference.gradient(numbers=lambda row, by=by: {k: v.roll(by) for k, v in row.numbers.items()})
        yield Prediction(f"advantages and log-probabilities one token too {side}", words, shifted)


def preference_loss(reference: Reference) -> Iterable[Prediction]:
    """Leave out the reference of DPO, or average log-probabilities over tokens."""
    if reference.dump.loss["name"] == "dpo":
        words = "The loss did not subtract the log-probabilities of the reference."
        yield Prediction("reference ignored", words, reference.gradient(numbers=lambda row: {}))
        words = "Log-probabilities of a sequence were averaged over its tokens. DPO sums them."
        yield Prediction("log-probabilities averaged", words, reference.gradient(settings={"averages": True}))


HYPOTHESES: tuple[Hypothesis, ...] = (
    mean_of_means,
    another_reduction,
    parts_lost,
    amplified,
    wrong_tokens,
    wrong_targets,
    packing,
    left_padding,
    context_parallel,
    shared_embeddings,
    logits,
    policy_loss,
    preference_loss,
    scaled_kinds,
    missing_sums_of_weights,
    missing_sums_of_inputs,
)
"""All hypotheses. Those that leave equally little unexplained are named in this order."""


def as_row(row: Row, index: int) -> Iterable[Stretch]:
    """Read a row as it stands: with its mask, and with its positions if it has some."""
    return [Stretch(index, range(len(row.tokens)), row.positions, row.valid)]


def as_whole(restarts: bool) -> Reading:
    """Return a reading of a whole row without a mask. `restarts` says whether positions restart in each sequence."""

    def read(row: Row, index: int) -> Iterable[Stretch]:
        return [Stretch(index, range(len(row.tokens)), row.within if restarts else torch.arange(len(row.tokens)))]

    return read


def _counting_on(row: Row, index: int) -> Iterable[Stretch]:
    return [Stretch(index, each, torch.arange(each.start, each.stop)) for each in row.ranges]


def _in_parts(parts: int) -> Reading:
    def read(row: Row, index: int) -> Iterator[Stretch]:
        cuts = _cuts(len(row.tokens), parts)
        for each in row.ranges:
            edges = sorted({each.start, each.stop, *(cut for cut in cuts if each.start < cut < each.stop)})
            for start, stop in zip(edges, edges[1:], strict=False):
                yield Stretch(index, range(start, stop), row.within[start:stop])

    return read


def _cuts(length: int, parts: int) -> list[int]:
    size = -(-length // parts)
    return [min(part * size, length) for part in range(parts)] + [length]


def _by_part(dump: Dump, size: int, parts: int, rank: int) -> list[Tensor]:
    """Return what a context-parallel rank learns: its part of each row, and the mirrored one in zigzag."""
    asked = [torch.zeros_like(row.wanted) for row in dump.rows]
    for row, each in zip(dump.rows, asked, strict=True):
        cuts = _cuts(len(row.tokens), parts)
        for part in {rank} if parts == size else {rank, parts - 1 - rank}:
            # A part holds the logits that predict the tokens after its own.
            each[cuts[part] + 1 : cuts[part + 1] + 1] = row.wanted[cuts[part] + 1 : cuts[part + 1] + 1]
    return asked


def _wanted(dump: Dump) -> list[Tensor]:
    return [row.wanted for row in dump.rows]


def _ratio(dump: Dump, asked: list[Tensor]) -> float:
    return sum(float(each.sum()) for each in asked) / sum(float(row.wanted.sum()) for row in dump.rows)


def _with_tokens(
    reference: Reference, name: str, words: str, asked: list[Tensor], reading: Reading = each_sequence
) -> Prediction:
    gradients = reference.gradient(normalized(reference.dump, asked), reading)
    return Prediction(name, words, gradients, _ratio(reference.dump, asked))


def _rolled(values: Tensor, by: int) -> Tensor:
    rolled = values.roll(by)
    rolled[slice(0, by) if by > 0 else slice(by, None)] = 0
    return rolled


def _without_old(row: Row) -> dict[str, Tensor]:
    return {name: value for name, value in row.numbers.items() if name != "old_logprobs"}


@contextmanager
def _replaced(causal: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of the model, or of its config if it has none, in the context."""
    holders = [holder for holder in (causal, causal.config) if name in vars(holder)]
    before = [getattr(holder, name) for holder in holders]
    for holder in holders:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, old in zip(holders, before, strict=True):
            setattr(holder, name, old)
