"""Model the usual mistakes of training stacks: each computes the gradient that a stack with this mistake would make.

To add one, write a function that takes the `Reference` of a dump and returns its `Prediction`s, and put it into
`HYPOTHESES`. A function returns nothing if its mistake cannot occur on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spurline_oracle.losses import normalized
from spurline_oracle.truth import Gradients, Reference


@dataclass(frozen=True)
class Prediction:
    """The gradients that a mistake would make. name: of the mistake. words: what it is, and where to look."""

    name: str
    words: str
    gradients: Gradients


Hypothesis = Callable[[Reference], Iterable[Prediction]]


def mean_of_means(reference: Reference) -> Iterable[Prediction]:
    """Normalize each micro-batch, or each rank, by its own count."""
    dump = reference.dump
    asked = [row.wanted for row in dump.rows]
    for groups, name, words in (
        (dump.micro_batches, "mean of means over micro-batches", "Each micro-batch was averaged by its own count."),
        (dump.ranks, "mean of means over ranks", "Each rank was averaged by its own count."),
    ):
        if len(groups) > 1:
            parts = [normalized(dump, asked, among=group) for group in groups]
            weights = [sum(part) / len(groups) for part in zip(*parts, strict=True)]
            yield Prediction(name, words, reference.gradient(weights))


HYPOTHESES: tuple[Hypothesis, ...] = (mean_of_means,)
"""All hypotheses, in the order in which they are tried."""
