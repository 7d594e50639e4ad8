"""Judge a dump: does it agree with the truth, where does it depart, and which usual mistake explains it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from spurline.errors import DataError, listing
from spurline_oracle.comparison import ALLOWANCE, Departure, Noise, compare, norm, norms_of, scale
from spurline_oracle.dump import Dump
from spurline_oracle.hypotheses import HYPOTHESES
from spurline_oracle.losses import check_loss
from spurline_oracle.scales import Scale, scales_of
from spurline_oracle.truth import Gradients, Prediction, Reference

_SAME = 0.3
"""The excess below which a hypothesis is too close to the truth on this batch to be told from it."""


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that was tried, and what it leaves unexplained. `scale` is None if no factor is needed."""

    name: str
    words: str
    departure: Departure
    scale: Scale | None = None

    @property
    def explains(self) -> bool:
        """Say whether only noise is left."""
        return self.departure.excess <= 1

    @property
    def title(self) -> str:
        """The name, with the factor if there is one."""
        if self.scale is None or not self.scale.text:
            return self.name
        return f"scaled by {self.scale.text}" if not self.name else f"{self.name}, scaled by {self.scale.text}"


@dataclass(frozen=True)
class Verdict:
    """A judgement of a dump.

    departure: from the truth. factor: the scale that comes closest to the truth. explanations: those that leave only
    noise, the best first; if there are none, `others` are still the hypotheses by what they leave. layer: the first
    layer whose output departs, with words, or None. unchecked: parameters of the dump that the model does not have.
    """

    dump: Dump
    noise: Noise
    departure: Departure
    factor: float
    layer: str | None = None
    explanations: list[Explanation] = field(default_factory=list[Explanation])
    others: list[Explanation] = field(default_factory=list[Explanation])
    missing: list[str] = field(default_factory=list[str])

    @property
    def is_clean(self) -> bool:
        """Say whether the gradients are right, up to noise."""
        return self.departure.excess <= 1


def judge(dump: Dump, device: Literal["auto", "cpu", "cuda"] = "auto") -> Verdict:
    """Compare a dump with the truth, and try all hypotheses if it departs.

    Raises:
        DataError: If the dump cannot be judged.
        ModelError: If its model cannot be loaded.
    """
    check_loss(dump)
    reference = Reference(dump, device)
    noisy = Reference(dump, device, rounds=True)
    shown = norms_of if dump.facts["norms"] else dict[str, Tensor]
    truth = shown(reference.truth)
    gradients = _matched(dump, truth, {name for name, _ in reference.causal.named_parameters(remove_duplicate=False)})
    missing = sorted(truth.keys() - gradients.keys())
    noise = Noise.measured(truth, shown(noisy.truth), dump.facts["dtype"], dump.facts["tf32"])
    departure = compare(gradients, truth, noise)
    factor = scale(gradients, truth)
    layer = _first_layer(dump, reference, noisy)
    if departure.excess <= 1:
        return Verdict(dump, noise, departure, factor, layer, missing=missing)
    tried = [
        explanation
        for prediction in _predictions(reference)
        if (explanation := _tried(prediction, gradients, truth, noise, dump, shown)) is not None
    ]
    tried.sort(key=lambda each: (not each.explains, each.departure.total * (2 if each.scale and each.name else 1)))
    found = [each for each in tried if each.explains]
    return Verdict(dump, noise, departure, factor, layer, found, [each for each in tried if not each.explains], missing)


def _predictions(reference: Reference) -> Iterator[Prediction]:
    # Without a name, it is the truth, which may be scaled. Each prediction is dropped before the next one is made.
    yield Prediction("", "", reference.truth)
    for hypothesis in HYPOTHESES:
        yield from hypothesis(reference)


def _tried(
    prediction: Prediction, gradients: Gradients, truth: Gradients, noise: Noise, dump: Dump, shown: type | object
) -> Explanation | None:
    predicted = shown(prediction.gradients)  # pyright: ignore
    plain = compare(gradients, predicted, noise)
    factor = scale(gradients, predicted)
    options: list[tuple[Departure, Scale | None]] = [(plain, None)] if prediction.name else []
    known = scales_of(dump)
    if abs(prediction.ratio - 1) > 1e-9:
        known.append(Scale(prediction.ratio, "", "The normalizer is that of the right tokens."))
    for one in known:
        if abs(factor / one.value - 1) < max(2 * noise.overall, 1e-5):
            options.append((compare(gradients, predicted, noise, one.value), one))
    if not prediction.name and not options:
        size = norm(gradients)
        hint = "Their norm is 1: were they recorded after clipping?" if abs(size - 1) < 1e-3 else ""
        one = Scale(factor, f"{factor:.6g}", hint or "No number of the batch explains it. Give the recorder `counts`.")
        options.append((compare(gradients, predicted, noise, factor), one))
    if prediction.name and compare(predicted, truth, noise).excess < _SAME:
        return None
    departure, used = min(options, key=lambda option: option[0].excess)
    words = " ".join(filter(None, (prediction.words, used.words if used else "")))
    return Explanation(prediction.name, words, departure, used)


def _matched(dump: Dump, truth: Gradients, names: set[str]) -> Gradients:
    found = {name: value.double() for name, value in dump.gradients.items() if name in truth}
    # A shared weight may have two names. Its gradient has the first one.
    unknown = sorted(dump.gradients.keys() - names)
    if unknown or not found:
        raise DataError(
            f"{dump.folder} has gradients of {listing(unknown[:3])}{', ...' if len(unknown) > 3 else ''}, which the "
            f"model {dump.model_path} does not train. It has {', '.join(list(truth)[:3])}, ... Give save() gradients "
            "by their Hugging Face names. Adapters must be merged or left out."
        )
    for name, value in found.items():
        if value.shape != truth[name].shape:
            raise DataError(f"{dump.folder}: {name} is {list(value.shape)}, and should be {list(truth[name].shape)}.")
    return found


def _first_layer(dump: Dump, reference: Reference, noisy: Reference) -> str | None:
    """Return words about the first layer whose output departs from the truth, or None."""
    if not dump.layers:
        return None
    first = [index for index, row in enumerate(dump.rows) if row.rank == row.micro_batch == 0]
    rows, right, rounded = [dump.rows[index] for index in first], reference.layers(first), noisy.layers(first)
    valid = torch.stack([row.valid for row in rows])
    for index, (recorded, wanted, noise) in enumerate(zip(dump.layers, right, rounded, strict=False)):
        if recorded.numel() != wanted.numel():
            return None
        sizes = wanted.norm(dim=-1).clamp(min=1e-300)
        errors = (recorded.double().reshape(wanted.shape) - wanted).norm(dim=-1) / sizes
        allowed = ALLOWANCE * ((noise - wanted).norm(dim=-1) / sizes)[valid].max().clamp(min=1e-6)
        wrong = ((errors > allowed) & valid).nonzero().tolist()
        if wrong:
            row, token = wrong[0]
            sequence = rows[row].sample[token] - rows[row].sample[rows[row].valid].min()
            return (
                f"layer {index} of {len(right)}: from token {token} of row {row} on (token "
                f"{int(rows[row].within[token])} of sequence {int(sequence)} in the row); {len(wrong)} of "
                f"{int(valid.sum())} tokens depart"
            )
    return ""
