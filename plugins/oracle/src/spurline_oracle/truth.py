"""Compute the gradient of a dump's batch with the model of Hugging Face, one sequence at a time.

`Reference.gradient` is the truth, in fp64, when it is called without arguments. Its arguments change one thing of the
computation, and so model the bugs of training stacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from spurline.config.run_config import ModelConfig
from spurline_models.architecture import decoder_layers
from spurline_models.device_profile import device_profile
from spurline_models.loading import load_model
from spurline_oracle.dump import Dump, Row
from spurline_oracle.losses import normalized, pair_loss, token_losses

Gradients = dict[str, Tensor]
"""Gradients by the names of parameters: fp64 on the host, with their shapes."""


@dataclass(frozen=True)
class Stretch:
    """Tokens that the model reads in one call.

    row: the index of their row. where: their positions in the row. positions: int64 [length], or None for 0, 1, ...
    mask: whether the model sees each token, or None if it sees all.
    """

    row: int
    where: range
    positions: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Prediction:
    """The gradients that a mistake would make.

    name: of the mistake. words: what it is, and where to look. ratio: the number of tokens that it learns, relative to
    the right number, since a stack may still divide by the right one.
    """

    name: str
    words: str
    gradients: Gradients
    ratio: float = 1.0


Reading = Callable[[Row, int], Iterable[Stretch]]
"""How a row is cut into stretches."""


def each_sequence(row: Row, index: int) -> Iterable[Stretch]:
    """Read each sequence by itself, with positions that begin at 0."""
    return [Stretch(index, each) for each in row.ranges]


@dataclass(frozen=True)
class Reference:
    """The model of a dump, and its batch. `noise_of` is None for fp64, or the dtype of weights and computation."""

    dump: Dump
    device: Literal["auto", "cpu", "cuda"] = "auto"
    noise_of: tuple[str, str] | None = None
    _reading: list[Stretch] = field(default_factory=list[Stretch])

    @cached_property
    def profile(self) -> Any:
        if self.noise_of is None:
            return device_profile(self.device, "fp64")
        weights, computed = self.noise_of
        return device_profile(self.device, "bf16" if computed != "float32" and weights == "float32" else "fp32")

    @cached_property
    def causal(self) -> Any:
        model = ModelConfig(path=self.dump.model_path)
        causal = load_model(model, self.profile, seed=0).eval()
        if self.noise_of is not None and self.noise_of[0] not in ("float32", "float64"):
            causal = causal.to(getattr(torch, self.noise_of[0]))
        return causal

    @cached_property
    def weights(self) -> list[Tensor]:
        """The weight of each token in the right loss, by row."""
        return normalized(self.dump, [row.wanted for row in self.dump.rows])

    @cached_property
    def truth(self) -> Gradients:
        """The gradient of the batch as it is meant."""
        return self.gradient()

    def gradient(
        self,
        weights: Sequence[Tensor] | None = None,
        reading: Reading = each_sequence,
        *,
        offset: int = 0,
        by_labels: bool = False,
        settings: Mapping[str, Any] | None = None,
        numbers: Callable[[Row], dict[str, Tensor]] | None = None,
    ) -> Gradients:
        """Return the gradient of the batch.

        Args:
            weights: The weight of each token in the loss, by row, aligned to the token that is predicted.
            reading: How rows are cut into what the model reads.
            offset: How many tokens after the right one the target is.
            by_labels: Whether targets are what labels say, instead of the tokens of the row.
            settings: Settings of the loss that replace those of the dump.
            numbers: A function that returns the columns of a row which the loss reads, if they differ.
        """
        loss = {**self.dump.loss, **(settings or {})}
        weights = self.weights if weights is None else weights
        units: dict[Any, list[Stretch]] = {}
        for index, row in enumerate(self.dump.rows):
            for stretch in reading(row, index):
                if bool(weights[index][stretch.where.start + 1 : stretch.where.stop + 1].any()):
                    key = (row.rank, row.micro_batch, row.pair) if loss["name"] == "dpo" else len(units)
                    units.setdefault(key, []).append(stretch)
        self.causal.zero_grad(set_to_none=True)
        for stretches in units.values():
            terms = [self._terms(stretch, weights, loss, offset, by_labels, numbers) for stretch in stretches]
            total = self._pair(terms, loss, numbers) if loss["name"] == "dpo" else terms[0][0]
            total.backward()
        named = self.causal.named_parameters()
        found = {name: _host(value.grad) for name, value in named if value.grad is not None}
        self.causal.zero_grad(set_to_none=True)
        return found

    def reading_now(self) -> Stretch:
        """Return what the model is reading, for hooks that run in its forward pass."""
        return self._reading[-1]

    def layers(self) -> list[Tensor]:
        """Return the outputs of layers [rows, length, hidden] for the rows of the first micro-batch; 0 on padding."""
        rows = [index for index, row in enumerate(self.dump.rows) if row.rank == row.micro_batch == 0]
        kept: list[list[Tensor]] = [[] for _ in rows]
        for place, index in enumerate(rows):
            row = self.dump.rows[index]
            for each in row.ranges:
                with torch.no_grad(), hidden_states(self.causal) as outputs:
                    self._logits(Stretch(index, each))
                for layer, output in enumerate(outputs):
                    if layer == len(kept[place]):
                        kept[place].append(torch.zeros(len(row.tokens), output.shape[-1], dtype=torch.float64))
                    kept[place][layer][each.start : each.stop] = _host(output)[0]
        return [torch.stack(list(layer)) for layer in zip(*kept, strict=True)] if kept and kept[0] else []

    def _logits(self, stretch: Stretch) -> Tensor:
        row, device = self.dump.rows[stretch.row], self.profile.device
        where = slice(stretch.where.start, stretch.where.stop)
        tokens = row.tokens[where]
        # A mask without zeros keeps transformers from finding sequences by their positions.
        mask = torch.ones_like(tokens) if stretch.mask is None else stretch.mask[where].long()
        inputs = {"input_ids": tokens[None].to(device), "attention_mask": mask[None].to(device), "use_cache": False}
        if stretch.positions is not None and "position_ids" in inspect.signature(self.causal.forward).parameters:
            inputs["position_ids"] = stretch.positions[None].to(device)
        self._reading[:] = [stretch]
        with self.profile.computing():
            return self.causal(**inputs).logits[0]

    def _terms(
        self, stretch: Stretch, weights: Sequence[Tensor], loss: dict[str, Any], offset: int, by_labels: bool, numbers: Any
    ) -> tuple[Tensor, Tensor, Row]:
        row, device = self.dump.rows[stretch.row], self.profile.device
        start, stop = stretch.where.start, stretch.where.stop
        logits = self._logits(stretch)
        wide = torch.float64 if self.noise_of is None else torch.float32
        scores = torch.log_softmax(logits.to(wide) / loss.get("temperature", 1.0), dim=-1)
        targets = row.labels.clamp(min=0) if by_labels else row.tokens
        # The logits at the last position of a row predict nothing.
        predicted = slice(start + 1, min(stop, len(row.tokens) - 1) + 1)
        count = predicted.stop - predicted.start
        index = (torch.arange(predicted.start, predicted.stop) + offset).clamp(0, len(row.tokens) - 1)
        logprobs = scores[:count].gather(-1, targets[index].to(device)[:, None])[:, 0]
        weight = weights[stretch.row][predicted].to(device, wide)
        found = {name: value[predicted].to(device, wide) for name, value in (numbers or _own_numbers)(row).items()}
        if loss["name"] == "dpo":
            counted = (weight > 0).to(wide)
            return (logprobs * counted).sum() / (counted.sum() if loss.get("averages") else 1), weight.max(), row
        return (token_losses(loss, logprobs, found) * weight).sum(), weight.max(), row

    def _pair(self, terms: list[tuple[Tensor, Tensor, Row]], loss: dict[str, Any], numbers: Any) -> Tensor:
        margin: Any = 0
        for logprobs, _, row in terms:
            margin = margin + (1 if row.chosen else -1) * logprobs
        for row in {id(row): row for _, _, row in terms}.values():
            of_reference = (numbers or _own_numbers)(row).get("reference_logprobs")
            if of_reference is not None:
                margin = margin - (1 if row.chosen else -1) * float(of_reference[0])
        return torch.stack([weight for _, weight, _ in terms]).max() * pair_loss(loss, margin)


class hidden_states:  # noqa: N801
    """A context that collects the outputs of the decoder's layers, in their order."""

    def __init__(self, causal: Any) -> None:
        self._layers = decoder_layers(causal)

    def __enter__(self) -> list[Tensor]:
        found: list[Tensor] = []

        def keep(module: Any, inputs: Any, output: Any) -> None:
            found.append((output[0] if isinstance(output, tuple) else output).detach())

        self._hooks = [layer.register_forward_hook(keep) for layer in self._layers]
        return found

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _own_numbers(row: Row) -> dict[str, Tensor]:
    return row.numbers


def _host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float64)
