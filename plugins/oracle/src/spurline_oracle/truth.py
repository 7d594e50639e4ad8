"""Compute the gradient of a dump's batch with the model of Hugging Face, one sequence at a time.

`Reference.gradient` is the truth, in fp64, when it is called without arguments. Its arguments change one thing of the
computation, and so model the mistakes of training stacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from spurline.config.run_config import ModelConfig
from spurline.errors import DataError, listing
from spurline_models.device_profile import device_profile
from spurline_models.loading import load_model
from spurline_oracle.dump import Dump, Row
from spurline_oracle.losses import normalized, pair_loss, token_losses
from spurline_oracle.recorder import layers_of

Gradients = dict[str, Tensor]
"""Gradients by the names of parameters: fp64 on the host, with their shapes."""


@dataclass(frozen=True)
class Stretch:
    """Tokens that the model reads in one call: their row and place, positions (None: from 0 on), and the mask."""

    row: int
    where: range
    positions: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Prediction:
    """The gradients that a mistake would make, and words for the user on what it is and where to look.

    `ratio` is the number of tokens that it learns, relative to the right number. A stack may divide by either.
    """

    name: str
    words: str
    gradients: Gradients
    ratio: float = 1.0


Reading = Callable[[Row, int], Iterable[Stretch]]
"""A function that cuts the row with an index into what the model reads."""


def each_sequence(row: Row, index: int) -> Iterable[Stretch]:
    """Read each sequence by itself, with positions that begin at 0."""
    return [Stretch(index, each) for each in row.ranges]


def as_row(row: Row, index: int) -> Iterable[Stretch]:
    """Read a row as it stands: with its mask, and with its positions if it has some."""
    return [Stretch(index, range(len(row.tokens)), row.positions, row.valid)]


def whole_row(restarts: bool) -> Reading:
    """Return a reading of a whole row without a mask. `restarts` says whether positions restart in each sequence."""
    return lambda row, index: [Stretch(index, range(len(row.tokens)), row.within if restarts else None)]


@dataclass(frozen=True)
class Reference:
    """The model of a dump with its batch, in fp64, or in the stack's dtypes if it `rounds`."""

    dump: Dump
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rounds: bool = False
    reading: list[Stretch] = field(default_factory=list[Stretch])
    """One stretch: the one that the model is reading, for hooks."""

    @cached_property
    def _profile(self) -> Any:
        weights, computed = self.dump.facts["weight_dtype"], self.dump.facts["dtype"]
        narrow = "bf16" if weights == "float32" != computed else "fp32"
        return device_profile(self.device, narrow if self.rounds else "fp64")

    @cached_property
    def causal(self) -> Any:
        """The model of Hugging Face, in evaluation mode."""
        causal = load_model(ModelConfig(path=self.dump.model_path), self._profile, seed=0).eval()
        narrow = self.rounds and self.dump.facts["weight_dtype"] in ("bfloat16", "float16")
        return causal.to(getattr(torch, self.dump.facts["weight_dtype"])) if narrow else causal

    @property
    def wanted(self) -> list[Tensor]:
        """The weights of tokens before they are normalized, by row."""
        return [row.wanted for row in self.dump.rows]

    @cached_property
    def weights(self) -> list[Tensor]:
        """The weight of each token in the right loss, by row."""
        return normalized(self.dump, self.wanted)

    @cached_property
    def truth(self) -> Gradients:
        """The gradient of the batch as it is meant."""
        return self.gradient()

    @cached_property
    def recorded(self) -> Gradients:
        """The gradients of the dump, as `shown`, under the first names of parameters.

        A trained parameter without a gradient has zeros. Of the gradients of a shared weight under two names, the one
        that departs more stands for both.

        Raises:
            DataError: If a gradient has a name or a shape that the model does not have.
        """
        dump, truth = self.dump, self.shown(self.truth)
        firsts: dict[Tensor, str] = {}
        names = {n: firsts.setdefault(each, n) for n, each in self.causal.named_parameters(remove_duplicate=False)}
        unknown = sorted(dump.gradients.keys() - names.keys())
        if unknown:
            raise DataError(
                f"{dump.folder} has gradients of {listing(unknown[:3])}, which {dump.model_path} does not have. "
                f"Give save() those of {', '.join(list(truth)[:3])}, ... Adapters must be merged or left out."
            )
        frozen = dump.facts["frozen"]
        left_out = truth.keys() if frozen is None else {names.get(name, name) for name in frozen}
        found = {name: torch.zeros_like(value) for name, value in truth.items() if name not in left_out}
        errors: dict[str, float] = {}
        for name, value in dump.gradients.items():
            first, right = names[name], truth[names[name]]
            if value.shape != right.shape:
                raise DataError(f"{dump.folder}: {name} is {list(value.shape)}, and should be {list(right.shape)}.")
            error = float((value.double() - right).norm().nan_to_num(float("inf")))
            if error >= errors.get(first, 0.0):
                found[first], errors[first] = value.double(), error
        return found

    def shown(self, gradients: Gradients) -> Gradients:
        """Return gradients as the dump has them: whole, or the norm of each, [1]."""
        norms = {name: value.norm().reshape(1) for name, value in gradients.items()}
        return norms if self.dump.facts["norms"] else gradients

    def predict(self, name: str, words: str, *arguments: Any, **changes: Any) -> Prediction:
        """Return the prediction of a mistake. The further arguments are those of `gradient`."""
        return Prediction(name, words, self.gradient(*arguments, **changes))

    def learning(self, name: str, words: str, asked: Sequence[Tensor], *rest: Any, **changes: Any) -> Prediction:
        """Return the prediction of a mistake that learns other tokens: `asked` replaces `wanted`."""
        gradients = self.gradient(normalized(self.dump, asked), *rest, **changes)
        return Prediction(name, words, gradients, float(sum(map(torch.sum, asked)) / sum(map(torch.sum, self.wanted))))

    def gradient(
        self,
        weights: Sequence[Tensor] | None = None,
        reading: Reading = each_sequence,
        *,
        offset: int = 0,
        by_labels: bool = False,
        settings: Mapping[str, Any] | None = None,
        numbers: Callable[[Row], dict[str, Tensor]] = lambda row: row.numbers,
        vocabulary_parts: int = 1,
    ) -> Gradients:
        """Return the gradient of the batch.

        Args:
            weights: The weight of each token in the loss, by row, aligned to the token that is predicted.
            reading: How rows are cut into what the model reads.
            offset: How many tokens after the right one the target is.
            by_labels: Whether targets are what labels say, instead of the tokens of the row.
            settings: Settings of the loss that replace those of the dump.
            numbers: A function that returns the columns of a row which the loss reads.
            vocabulary_parts: How many ranks take whole logits for their part of the vocabulary. All add their sum of
                exponentials, each keeps the gradient of its part, and the first one alone finds the token.
        """
        loss = {**self.dump.loss, **(settings or {})}
        weights = [pad(each, (0, 1)) for each in (self.weights if weights is None else weights)]
        units: dict[Any, list[Stretch]] = {}
        for index, row in enumerate(self.dump.rows):
            for stretch in reading(row, index):
                if bool(weights[index][stretch.where.start + 1 : stretch.where.stop + 1].any()):
                    key = (row.rank, row.micro_batch, row.pair) if loss["name"] == "dpo" else len(units)
                    units.setdefault(key, []).append(stretch)
        self.causal.zero_grad(set_to_none=True)
        for stretches in units.values():
            margin: Any = 0.0
            weight: Any = 0.0
            for place, stretch in enumerate(stretches):
                row, where = self.dump.rows[stretch.row], slice(stretch.where.start + 1, stretch.where.stop + 1)
                targets = row.labels.clamp(min=0) if by_labels else row.tokens
                index = (torch.arange(where.start, where.stop) + offset).clamp(0, len(targets) - 1)
                logprobs = self._logprobs(stretch, targets[index], loss.get("temperature", 1.0), vocabulary_parts)
                own = weights[stretch.row][where].to(logprobs)
                columns = {name: pad(value, (0, 1))[where].to(logprobs) for name, value in numbers(row).items()}
                if loss["name"] != "dpo":
                    (token_losses(loss, logprobs, columns) * own).sum().backward()
                    continue
                counted = (own > 0).to(logprobs)
                summed = (logprobs * counted).sum() / (counted.sum() if loss.get("averages") else 1)
                if "reference_logprobs" in columns and stretch.row not in {each.row for each in stretches[:place]}:
                    summed = summed - columns["reference_logprobs"][0]
                margin = margin + (summed if row.chosen else -summed)
                weight = torch.maximum(own.max(), torch.as_tensor(weight).to(own))
            if loss["name"] == "dpo":
                (weight * pair_loss(loss, margin)).backward()
        named = self.causal.named_parameters()
        found = {name: _host(torch.zeros_like(each) if each.grad is None else each.grad) for name, each in named}
        self.causal.zero_grad(set_to_none=True)
        return found

    def layers(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the outputs of layers [rows, length, hidden], with 0 on padding."""
        found: list[Tensor] = []
        for place, index in enumerate(rows):
            for stretch in each_sequence(self.dump.rows[index], index):
                with torch.no_grad(), _outputs(self.causal) as outputs:
                    self._logits(stretch)
                for layer, output in enumerate(outputs):
                    if layer == len(found):
                        shape = len(rows), len(self.dump.rows[index].tokens), output.shape[-1]
                        found.append(torch.zeros(shape, dtype=torch.float64))
                    found[layer][place, stretch.where.start : stretch.where.stop] = _host(output)[0]
        return found

    def _logprobs(self, stretch: Stretch, targets: Tensor, temperature: float, parts: int) -> Tensor:
        wide = torch.float32 if self.rounds else torch.float64
        scores = self._logits(stretch).to(wide) / temperature
        targets = targets.to(scores.device)
        found = scores.gather(-1, targets[:, None])[:, 0] * (targets < scores.shape[-1] / parts)
        return found - scores.logsumexp(-1) / parts

    def _logits(self, stretch: Stretch) -> Tensor:
        self.reading[:] = [stretch]
        where = slice(stretch.where.start, stretch.where.stop)
        tokens = self.dump.rows[stretch.row].tokens[where]
        # A mask without zeros keeps transformers from finding sequences by their positions.
        mask = torch.ones_like(tokens) if stretch.mask is None else stretch.mask[where].long()
        inputs = {"input_ids": tokens, "attention_mask": mask}
        if stretch.positions is not None and "position_ids" in inspect.signature(self.causal.forward).parameters:
            inputs["position_ids"] = stretch.positions
        with self._profile.computing():
            on_device = {name: value[None].to(self._profile.device) for name, value in inputs.items()}
            return self.causal(**on_device, use_cache=False).logits[0]


@contextmanager
def _outputs(causal: Any) -> Iterator[list[Tensor]]:
    """Collect the outputs of the decoder's layers in the context, in their order."""
    found: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).detach())

    hooks = [layer.register_forward_hook(keep) for layer in layers_of(causal)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float64)
