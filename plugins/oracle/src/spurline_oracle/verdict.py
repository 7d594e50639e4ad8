"""Judge a dump: does it agree with the truth, where does it depart, and which usual mistake explains it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from spurline.errors import DataError
from spurline_oracle.comparison import ALLOWANCE, Departure, Noise, compare, norm, scale
from spurline_oracle.dump import Dump
from spurline_oracle.hypotheses import HYPOTHESES, factors_of_micro_batches
from spurline_oracle.losses import check_loss
from spurline_oracle.truth import Prediction, Reference

_SAME = 0.3
"""The excess below which a hypothesis is too close to the truth on this batch to be told from it."""


@dataclass(frozen=True)
class Scale:
    """A factor that a mistake would multiply gradients by. `text` says which number it is."""

    value: float
    text: str
    words: str = ""


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that was tried, and what it leaves unexplained. `scale` is None if no factor is needed."""

    name: str
    words: str
    departure: Departure
    scale: Scale | None = None

    @property
    def title(self) -> str:
        """The name, with the factor if there is one."""
        factor = f"scaled by {self.scale.text}" if self.scale and self.scale.text else ""
        return ", ".join(filter(None, (self.name, factor)))


@dataclass(frozen=True)
class Verdict:
    """A judgement of a dump.

    departure: from the truth. factor: the scale that comes closest to the truth. layer: the first layer whose output
    departs, with words, or None. tried: hypotheses; those that explain the gradients stand first, then by what they
    leave. missing: parameters that are frozen or were not given.
    """

    dump: Dump
    noise: Noise
    departure: Departure
    factor: float
    layer: str | None = None
    tried: list[Explanation] = field(default_factory=list[Explanation])
    missing: list[str] = field(default_factory=list[str])

    @property
    def is_clean(self) -> bool:
        """Say whether the gradients are right, up to noise."""
        return self.departure.excess <= 1

    @property
    def explanations(self) -> list[Explanation]:
        """The hypotheses that leave only noise, the best first."""
        return [each for each in self.tried if each.departure.excess <= 1]


def judge(dump: Dump, device: Literal["auto", "cpu", "cuda"] = "auto") -> Verdict:
    """Compare a dump with the truth, and try all hypotheses if it departs.

    Raises:
        DataError: If the dump cannot be judged.
        ModelError: If its model cannot be loaded.
    """
    check_loss(dump)
    reference = Reference(dump, device)
    noisy = Reference(dump, device, rounds=True)
    truth, gradients = reference.shown(reference.truth), reference.recorded
    if norm(truth) == 0:
        raise DataError("The true gradient of this batch is zero, so it shows nothing. Record another batch.")
    noise = Noise.measured(truth, reference.shown(noisy.truth), dump.facts["dtype"], dump.facts["tf32"])
    missing = sorted(truth.keys() - gradients.keys())
    found = compare(gradients, truth, noise), scale(gradients, truth), _first_layer(dump, reference, noisy)
    verdict = Verdict(dump, noise, *found, missing=missing)
    if verdict.is_clean or verdict.departure.excess == float("inf"):
        return verdict
    tried = [each for prediction in _predictions(reference) if (each := _tried(prediction, reference, noise))]
    if all(each.departure.excess > 1 for each in tried):
        more = factors_of_micro_batches(reference)
        tried += [each for prediction in more if (each := _tried(prediction, reference, noise))]
    # A mistake that needs no factor is more likely.
    left = lambda each: each.departure.total * (2 if each.scale and each.name else 1)  # noqa: E731
    return replace(verdict, tried=sorted(tried, key=lambda each: (each.departure.excess > 1, left(each))))


def _predictions(reference: Reference) -> Iterator[Prediction]:
    # Without a name, it is the truth, which may be scaled. Each prediction is dropped before the next one is made.
    yield Prediction("", "", reference.truth)
    for hypothesis in HYPOTHESES:
        yield from hypothesis(reference)


def _tried(prediction: Prediction, reference: Reference, noise: Noise) -> Explanation | None:
    gradients, predicted = reference.recorded, reference.shown(prediction.gradients)
    plain = compare(gradients, predicted, noise)
    factor = scale(gradients, predicted)
    options: list[tuple[Departure, Scale | None]] = [(plain, None)] if prediction.name else []
    known = _scales_of(reference.dump)
    if prediction.ratio > 0 and abs(prediction.ratio - 1) > 1e-9:
        known.append(Scale(prediction.ratio, "", "The normalizer is that of the right tokens."))
    for one in known:
        if abs(factor / one.value - 1) < max(2 * noise.overall, 1e-5):
            options.append((compare(gradients, predicted, noise, one.value), one))
    if not prediction.name and not options:
        size = norm(gradients)
        hint = "No number of the batch explains it. Give the recorder `counts`. Were gradients clipped before save()?"
        if abs(size / float(f"{size:.1g}") - 1) < 1e-3:
            hint = f"Their norm is {size:.1g}, as after clipping. Call save() before."
        one = Scale(factor, f"{factor:.6g}", hint)
        options.append((compare(gradients, predicted, noise, factor), one))
    if prediction.name and compare(predicted, reference.shown(reference.truth), noise).excess < _SAME:
        return None
    departure, used = min(options, key=lambda option: option[0].excess)
    words = " ".join(filter(None, (prediction.words, used.words if used else "")))
    return Explanation(prediction.name, words, departure, used)


def _scales_of(dump: Dump) -> list[Scale]:
    """Return the factors other than 1 that the numbers of a dump can explain, one for each value."""
    rows, ranks = dump.rows, dump.facts["num_ranks"]
    batches = max(row.micro_batch for row in rows) + 1
    learned = sum(float(row.wanted.sum()) for row in rows)
    given = {f"your count {name}": count for name, count in dump.facts["counts"].items() if count}
    sizes = {
        "the number of micro-batches": batches,
        "the number of ranks": ranks,
        **({"the number of micro-batches on all ranks": batches * ranks} if batches > 1 < ranks else {}),
        **{f"the number of {name} ranks": size for name, size in dump.facts["layout"].items()},
        **given,
    }
    tokens = {
        "all tokens, prompts included": sum(int(row.valid.sum()) for row in rows),
        "all tokens and padding": sum(len(row.tokens) for row in rows),
        "labels, also those of first tokens or padding": sum(float(row.asked.sum()) for row in rows),
        "sequences": sum(len(row.ranges) for row in rows),
        "rows of a micro-batch": len(rows) / (batches * ranks),
        **given,
    }
    summed = "Gradients of parts were summed and not divided."
    twice = "They were divided twice: by a normalizer of the whole update, and by this number."
    other = "The loss was divided by a count of other things than the learned tokens of this update."
    found = [Scale(size, f"{name} ({size:g})", summed) for name, size in sizes.items()]
    found += [Scale(1 / size, f"1 / {name} (1/{size:g})", twice) for name, size in sizes.items()]
    if dump.loss["reduction"] == "token_mean":
        found.append(Scale(learned, f"the number of learned tokens ({learned:g})", "The loss was summed."))
        for name, count in tokens.items():
            found.append(Scale(learned / count, f"learned tokens / {name} ({learned:g}/{count:g})", other))
    for name, count in given.items():
        found.append(Scale(batches / count, f"micro-batches / {name} ({batches}/{count:g})", "Windows were mixed up."))
    merged: dict[str, Scale] = {}
    for each in found:
        key = f"{each.value:.9g}"
        before = f"{merged[key].text} or " if key in merged else ""
        merged[key] = Scale(each.value, before + each.text, merged.get(key, each).words)
    merged.pop("1", None)
    return list(merged.values())


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
        wrong = (~(errors <= allowed) & valid).nonzero().tolist()
        if wrong:
            row, token = wrong[0]
            sequence = rows[row].sample[token] - rows[row].sample[rows[row].valid].min()
            return (
                f"layer {index} of {len(right)}: from token {token} of row {row} on (token "
                f"{int(rows[row].within[token])} of sequence {int(sequence)} in the row); {len(wrong)} of "
                f"{int(valid.sum())} tokens depart"
            )
    return ""
