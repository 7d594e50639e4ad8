"""Model the usual mistakes of training stacks: each computes the gradient that a stack with this mistake would make.

To add one, write a function that takes the `Reference` of a dump and yields its `Prediction`s, and put it into
`HYPOTHESES`. It yields nothing if the mistake cannot occur on the batch. A prediction that equals the truth on the
batch is left out later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from spurline_models.architecture import output_layer
from spurline_oracle.comparison import inner_product
from spurline_oracle.dump import Row
from spurline_oracle.losses import mean_of_parts, normalized
from spurline_oracle.tensor_parallel import (
    each_forward,
    embedding_name,
    gathered_logits,
    missing_sums_of_inputs,
    missing_sums_of_weights,
    scaled_kinds,
    without_weight_gradient,
)
from spurline_oracle.truth import Prediction, Reading, Reference, Stretch, as_row, whole_row

Hypothesis = Callable[[Reference], Iterable[Prediction]]


def detached(reference: Reference) -> Iterable[Prediction]:
    """Lose the gradients of the parameters that have none."""
    lost = [name for name, value in reference.recorded.items() if not value.any() and reference.truth[name].any()]
    if lost:
        title = f"no gradient reached {lost[0]}" + (f" and {len(lost) - 1} others" if len(lost) > 1 else "")
        words = "What cuts them off? Look for detach(), no_grad(), and checkpointing of inputs without a gradient."
        zeros = {name: torch.zeros_like(reference.truth[name]) for name in lost}
        yield Prediction(title, words, {**reference.truth, **zeros})


def mean_of_means(reference: Reference) -> Iterable[Prediction]:
    """Normalize each micro-batch, or each rank, by its own count."""
    dump, wanted = reference.dump, reference.wanted
    words = "Each was averaged by its own count, so tokens in short ones weigh more. Divide by the count of the update."
    for groups, name in ((dump.micro_batches, "micro-batches"), (dump.ranks, "ranks")):
        if len(groups) > 1:
            parts = [[each * (index in group) for index, each in enumerate(wanted)] for group in groups]
            yield reference.predict(f"mean of means over {name}", words, mean_of_parts(dump, parts))


def another_reduction(reference: Reference) -> Iterable[Prediction]:
    """Average over tokens instead of sequences, or over sequences instead of tokens."""
    own = reference.dump.loss["reduction"]
    if reference.dump.loss["name"] != "dpo":
        for reduction in {"token_mean", "sequence_mean"} - {own}:
            weights = normalized(reference.dump, reference.wanted, reduction)
            yield reference.predict(f"{reduction} instead of {own}", "The settings say otherwise.", weights)


def parts_lost(reference: Reference) -> Iterable[Prediction]:
    """Use the gradients of some micro-batches, or of one rank, and lose or double those of the others."""
    rows, ranks = reference.dump.rows, reference.dump.facts["num_ranks"]
    last = max(row.micro_batch for row in rows)
    overwritten = "Gradients were not accumulated: is zero_grad inside the loop, or are they overwritten?"
    unreduced = "Those of the other data-parallel ranks were not added."
    doubled = "What was accumulated before was added to itself with each micro-batch."
    factors: list[tuple[str, str, Callable[[Row], float]]] = []
    if last > 0:
        factors.append(("only the last micro-batch", overwritten, lambda row: row.micro_batch == last))
        factors.append(("only the first micro-batch", overwritten, lambda row: row.micro_batch == 0))
        factors.append(("the last micro-batch lost", overwritten, lambda row: row.micro_batch < last))
        factors.append(("sums doubled with each micro-batch", doubled, lambda row: 2.0 ** (last - row.micro_batch)))
    if ranks > 1:
        # Stacks that average gradients over ranks multiply losses by the number of ranks before.
        factors.append(("only the gradients of the first rank", unreduced, lambda row: ranks * (row.rank == 0)))
        factors.append(("only the gradients of the first rank", unreduced, lambda row: row.rank == 0))
    for name, words, factor in factors:
        weights = [weight * factor(row) for weight, row in zip(reference.weights, rows, strict=True)]
        yield reference.predict(name, words, weights)


def wrong_tokens(reference: Reference) -> Iterable[Prediction]:
    """Learn tokens that are not to be learned, or leave out some that are."""
    rows, wanted = reference.dump.rows, reference.wanted
    every = [row.valid.double() * ~row.starts for row in rows]
    yield reference.learning("loss over prompts", "Prompts were not masked.", every)
    if not all(bool(row.valid.all()) for row in rows):
        after = [torch.ones_like(each).index_fill(0, torch.tensor([0]), 0) for each in wanted]
        padded = [torch.where(row.valid, want, one) for row, want, one in zip(rows, wanted, after, strict=True)]
        for name, asked in (("loss over padding", padded), ("loss over prompts and padding", after)):
            yield reference.learning(name, "Padding was not masked in the labels.", asked, as_row)
    if any(bool((row.labels != row.tokens)[row.asked > 0].any()) for row in rows):
        words = (
            "Labels of the dump do not name the tokens at their positions. If the stack shifts labels, they must "
            'not be shifted before. If it does not, give the recorder loss["labels"] = "next".'
        )
        weights = normalized(reference.dump, [row.asked for row in rows])
        yield reference.predict("labels do not fit the tokens", words, weights, as_row, by_labels=True)
    for name, words, edge in (
        ("last token of each sequence dropped", "No loss was computed on it, such as the end-of-turn token.", -1),
        ("first learned token of each sequence dropped", "The mask begins one token too late.", 0),
    ):
        asked = [want.clone() for want in wanted]
        for each, row in zip(asked, rows, strict=True):
            for found in row.ranges:
                learned = each[found.start : found.stop].nonzero().flatten() + found.start
                each[learned[edge : edge + 1 or None]] = 0
        yield reference.learning(name, words, asked)


def wrong_targets(reference: Reference) -> Iterable[Prediction]:
    """Predict the token itself, or the token after the next."""
    for offset, name, words in (
        (1, "labels shifted twice", "Logits were compared with the token after the next one."),
        (-1, "labels not shifted", "Logits were compared with the token that the model reads at the same position."),
    ):
        # The label that is compared decides whether there is a loss.
        asked = [pad(want, (1, 0)) if offset < 0 else pad(want[1:], (0, 1)) for want in reference.wanted]
        yield reference.learning(name, words, asked, offset=offset)


def packing(reference: Reference) -> Iterable[Prediction]:
    """Let packed sequences see each other, or count positions on, or learn first tokens from the sequence before."""
    if all(len(row.ranges) <= 1 for row in reference.dump.rows):
        return
    words = (
        "Tokens saw the sequences before theirs in the packed row. Give attention the boundaries: cu_seqlens, a "
        "block-diagonal mask, or positions with use_cache=False and without an attention_mask of ones."
    )
    boundary = [row.wanted + row.starts * (torch.arange(len(row.tokens)) > 0) for row in reference.dump.rows]
    across = "attention across packed sequences"
    edges = "The first token of a packed sequence was predicted from the sequence before. Mask its label."
    yield reference.learning("loss at boundaries of packed sequences", edges, boundary)
    for name, reading in ((across, whole_row(True)), (f"{across}, positions that go on", whole_row(False))):
        yield reference.predict(name, words, reading=reading)
        yield reference.learning(f"{name}, loss at boundaries", f"{words} {edges}", boundary, reading)
    name = "positions that go on in packed rows"
    yield reference.predict(name, "Positions must restart with each sequence.", reading=_counting_on)


def left_padding(reference: Reference) -> Iterable[Prediction]:
    """Let tokens see the padding before them, or count it in positions."""
    if any(not bool(row.valid[0]) and bool(row.valid.any()) for row in reference.dump.rows):
        words = "The attention mask did not reach the model."
        yield reference.predict("attention to padding", words, reading=whole_row(False))
        yield reference.predict("attention to padding, right positions", words, reading=whole_row(True))
        words = "Give the model position_ids that begin with the first token."
        yield reference.predict("positions that count padding", words, reading=as_row)


def context_parallel(reference: Reference) -> Iterable[Prediction]:
    """Cut rows into parts, and lose what crosses the cuts."""
    dump = reference.dump
    for size in [dump.facts["layout"]["context"]] if "context" in dump.facts["layout"] else [2, 4]:
        words = "Keys and values of other ranks did not reach attention."
        name = f"attention within context-parallel parts alone ({size} ranks)"
        yield reference.predict(name, words, reading=_in_parts(size))
        for parts, how in ((size, f"{size} ranks"), (2 * size, f"{size} ranks, zigzag")):
            asked = [want.clone() for want in reference.wanted]
            for each in asked:
                each[[cut for cut in _cuts(len(each), parts) if cut < len(each)]] = 0
            words = "Labels were shifted within each part, so its first token is never a target. Shift before cutting."
            yield reference.learning(f"context-parallel boundary tokens lost ({how})", words, asked)
            own = [[_of_rank(want, size, parts, rank) for want in reference.wanted] for rank in range(size)]
            words = "Each context-parallel rank divided by the count of its own part."
            weights = mean_of_parts(dump, own)
            yield reference.predict(f"mean of means over context-parallel ranks ({how})", words, weights)


def shared_embeddings(reference: Reference) -> Iterable[Prediction]:
    """Lose or double a part of the gradient of an embedding that is also the output layer."""
    causal, name = reference.causal, embedding_name(reference.causal)
    head = output_layer(causal)
    if head is None or name is None or getattr(head, "weight", None) is not causal.get_input_embeddings().weight:
        return
    with each_forward([head], without_weight_gradient):
        as_input = reference.gradient()[name]
    whole = reference.truth[name]
    words = "See how the first and the last pipeline stage, or the two modules, share the weight and sum its gradients."
    for title, value in (
        ("shared embeddings counted twice", 2 * whole),
        ("shared embeddings without their part as output layer", as_input),
        ("shared embeddings without their part as input", whole - as_input),
    ):
        yield Prediction(title, words, {**reference.truth, name: value})


def logits(reference: Reference) -> Iterable[Prediction]:
    """Forget the temperature, or a scale or cap of logits in the model's config."""
    if reference.dump.loss.get("temperature", 1.0) != 1:
        words = "Logits were not divided by the temperature of sampling."
        yield reference.predict("temperature missing", words, settings={"temperature": 1.0})
    for name, neutral in (("logits_scaling", 1.0), ("logit_scale", 1.0), ("final_logit_softcapping", None)):
        if getattr(reference.causal.config, name, None) not in (None, neutral):
            words = f"The output layer was called directly, without what the model does with `{name}`."
            with _replaced(reference.causal, name, neutral):
                yield reference.predict(f"{name} of the model missing", words)


def policy_loss(reference: Reference) -> Iterable[Prediction]:
    """Leave out or misalign a part of a policy loss."""
    loss = reference.dump.loss
    if loss["name"] != "policy":
        return
    yield reference.predict("no clipping", "Ratios were not clipped.", settings={"clip_low": 1e30, "clip_high": 1e30})
    words, low = "Ratios were clipped by clip_low on both sides.", loss.get("clip_low", 0.2)
    yield reference.predict("clip_high ignored", words, settings={"clip_high": low})
    yield reference.predict("KL term missing", "kl was not added.", settings={"kl": 0.0})
    words = "Ratios were 1, as if the old log-probabilities had been recomputed with the trained weights."
    yield reference.predict("old log-probabilities ignored", words, numbers=_without_old)
    words = "A column for the token at t must be used with the logits at t - 1."
    for by, side in ((1, "late"), (-1, "early")):
        name = f"advantages and log-probabilities one token too {side}"
        yield reference.predict(name, words, numbers=lambda row, by=by: {k: v.roll(by) for k, v in row.numbers.items()})


def preference_loss(reference: Reference) -> Iterable[Prediction]:
    """Leave out the reference of DPO, or average log-probabilities over tokens."""
    if reference.dump.loss["name"] == "dpo":
        words = "The log-probabilities of the reference were not subtracted."
        yield reference.predict("reference ignored", words, numbers=lambda row: {})
        words = "Log-probabilities of a sequence were averaged over its tokens. DPO sums them."
        yield reference.predict("log-probabilities averaged", words, settings={"averages": True})


def factors_of_micro_batches(reference: Reference) -> Iterable[Prediction]:
    """Multiply the gradient of each micro-batch by the factor that explains the sum best.

    Some other mistakes are such sums too, so this is tried only if none of them explains the gradients.
    """
    groups, recorded = reference.dump.micro_batches, reference.recorded
    if reference.dump.facts["norms"] or not 1 < len(groups) <= _MOST_FACTORS:
        return
    parts = [
        reference.gradient([each * (index in group) for index, each in enumerate(reference.weights)])
        for group in groups
    ]
    products = torch.tensor([[inner_product(recorded, one, other) for other in parts] for one in parts])
    aims = torch.tensor([inner_product(recorded, one, recorded) for one in parts])
    factors = torch.linalg.lstsq(products, aims[:, None]).solution[:, 0].tolist()
    words = (
        f"The gradients of micro-batches were multiplied by {', '.join(f'{factor:.3g}' for factor in factors)}, in the "
        "order of ranks and micro-batches. Were they clipped, or scaled, within the loop of the micro-batches?"
    )
    summed = {name: torch.zeros_like(value) for name, value in reference.truth.items()}
    for factor, part in zip(factors, parts, strict=True):
        for name, value in part.items():
            summed[name] += factor * value
    yield Prediction("micro-batches with factors of their own", words, summed)


HYPOTHESES: tuple[Hypothesis, ...] = (
    detached,
    mean_of_means,
    another_reduction,
    parts_lost,
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
    gathered_logits,
)
"""The hypotheses that are tried at first."""

_MOST_FACTORS = 16
"""The largest number of micro-batches whose gradients are held at once."""


def _counting_on(row: Row, index: int) -> Iterable[Stretch]:
    return [Stretch(index, each, torch.arange(each.start, each.stop)) for each in row.ranges]


def _in_parts(parts: int) -> Reading:
    def read(row: Row, index: int) -> Iterator[Stretch]:
        cuts = _cuts(len(row.tokens), parts)
        for each in row.ranges:
            edges = sorted({each.start, each.stop, *(cut for cut in cuts if each.start < cut < each.stop)})
            for start, stop in pairwise(edges):
                yield Stretch(index, range(start, stop), row.within[start:stop])

    return read


def _cuts(length: int, parts: int) -> list[int]:
    size = -(-length // parts)
    return [min(part * size, length) for part in range(parts + 1)]


def _of_rank(wanted: Tensor, size: int, parts: int, rank: int) -> Tensor:
    """Return what a context-parallel rank learns of a row: its part, and in zigzag also the mirrored one."""
    asked, cuts = torch.zeros_like(wanted), _cuts(len(wanted), parts)
    for part in {rank} if parts == size else {rank, parts - 1 - rank}:
        # A part holds the logits that predict the tokens after its own.
        where = slice(cuts[part] + 1, cuts[part + 1] + 1)
        asked[where] = wanted[where]
    return asked


def _without_old(row: Row) -> dict[str, Tensor]:
    return {name: value for name, value in row.numbers.items() if name != "old_logprobs"}


@contextmanager
def _replaced(causal: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of the model and of its config in the context."""
    holders = [holder for holder in (causal, causal.config) if name in vars(holder)]
    before = getattr(causal.config, name)
    try:
        for holder in holders:
            setattr(holder, name, value)
        yield
    finally:
        for holder in holders:
            setattr(holder, name, before)
