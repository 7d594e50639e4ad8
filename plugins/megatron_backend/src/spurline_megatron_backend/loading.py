"""Fill a rank's parameters with the weights of a Hugging Face folder. Each rank reads its own values from the files.

With `init: random`, or without safetensors files, the first rank loads the whole model and broadcasts it tensor by
tensor. Files may hold a separate tensor for each expert, and the embedding of a tied model under two names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.parts import Part, whole_shapes
from spurline_megatron_backend.weight_gathering import Held
from spurline_models.architecture import SCORE
from spurline_models.device_profile import device_profile
from spurline_models.loading import check_loaded, load_model
from spurline_models.weight_files import safetensors_files, slices_of
from spurline_ranks.pieces import Box, Shape

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_BASE = "model."
"""A prefix of tensor names, which is missing in files of a model without an output layer."""
_IGNORED = "rotary_emb.inv_freq"
"""Tables in old files. They are not needed, since they follow from the config."""


def load_weights(
    held: Held,
    model: ModelConfig,
    architecture: Architecture,
    seed: int,
    device: Literal["cpu", "cuda"],
    *,
    critic: bool = False,
) -> None:
    """Fill the parameters with the values of the model. This is a collective.

    Padding of the vocabulary and the value head of a critic become 0.

    Args:
        held: The parameters, each with a contiguous tensor for its values, of any floating dtype and on any device.
        model: The model whose files are read.
        architecture: The architecture of the model.
        seed: The seed for `init: random`.
        device: The device on which ranks exchange tensors.
        critic: Whether the model has a value head instead of the output layer.

    Raises:
        ModelError: If weights do not fit.
    """
    files = [] if model.init == "random" else safetensors_files(model)
    if not files:
        _hand_out(held, model, architecture, seed, device, critic=critic)
        return
    weights = WeightFiles(files, architecture, critic=critic)
    # Only the first rank warns.
    unexpected = weights.unexpected if dist.get_rank() == 0 else ()
    check_loaded(model, weights.missing, weights.mismatched, unexpected)
    weights.fill(held)
    if weights.heads_differ(held):
        raise ModelError(
            f"model.path: the config of {model.path} ties the output layer to the embedding, but they differ in its "
            "files. To train both, set model.config_overrides: {tie_word_embeddings: false}."
        )


@dataclass(frozen=True)
class _Stored:
    """A tensor in the files: the region `box` of a tensor of the model. Its `shape` may lack leading sizes of 1."""

    box: Box
    shape: Shape


_Form = Mapping[str, _Stored]
"""The tensors in the files that together make up one tensor of the model, by key."""


def _forms(name: str, shape: Shape) -> Iterator[_Form]:
    """Yield the forms in which files may hold a tensor of the model."""
    short = name.removeprefix(_BASE)
    for known in (name, short if short != name else f"{_BASE}{name}"):
        yield {known: _Stored(Box.whole(shape), shape)}
        for suffix, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            if known.endswith(f".mlp.experts.{suffix}"):
                at, rows = known.removesuffix(suffix), shape[1] // len(kinds)
                yield {
                    f"{at}{expert}.{kind}_proj.weight": _Stored(
                        Box((expert, number * rows, 0), (1, rows, shape[2])), (rows, shape[2])
                    )
                    for expert in range(shape[0])
                    for number, kind in enumerate(kinds)
                }


class WeightFiles:
    """The safetensors files of a model.

    The constructor reads only headers. `missing` has the names of tensors that are in no file. `unexpected` has keys
    that the model does not know. `mismatched` has tuples of key, shape in the files and shape in the model. Values can
    be read if `missing` and `mismatched` are empty.
    """

    def __init__(self, files: Sequence[Path], architecture: Architecture, *, critic: bool):
        self._stored = slices_of(files)
        critic = critic or architecture.scores
        self._forms: dict[str, _Form] = {}
        self.missing: list[str] = []
        shapes = whole_shapes(architecture)
        heads = list(_forms(HEAD, (architecture.vocabulary, architecture.hidden)))
        if critic:
            shapes.pop(HEAD, None)
        for name, shape in shapes.items():
            # Files may hold a tied embedding under either name.
            forms = [*_forms(name, shape), *(heads if architecture.tied and name == EMBEDDING else ())]
            found = next((form for form in forms if not form.keys().isdisjoint(self._stored)), None)
            if found is None:
                self.missing.append(name)
            else:
                self._forms[name] = found
                self.missing += found.keys() - self._stored.keys()
        asked = {key: stored.shape for form in self._forms.values() for key, stored in form.items()}
        left = self._stored.keys() - asked.keys()
        unused_heads = [form for form in heads if left & form.keys()] if critic or architecture.tied else []
        self._second_embedding = unused_heads[0] if unused_heads and not critic else None
        left -= {key for form in unused_heads for key in form}
        self.unexpected = [key for key in left if not key.endswith(_IGNORED)]
        self.mismatched = [
            (key, found, asked[key])
            for key in asked.keys() & self._stored.keys()
            if (found := tuple(self._stored[key].get_shape())) != asked[key]
        ]

    def fill(self, held: Held) -> None:
        """Give the parameters their values. The host holds only one part at a time."""
        for parameter, tensor in held:
            values = tensor.detach().view(-1).zero_()
            for part in parameter.parts:
                if part.name in self._forms:
                    values[part.begin : part.end].copy_(self._read(self._forms[part.name], part.box).reshape(-1))
                else:
                    assert part.name in (HEAD, SCORE), part

    def heads_differ(self, held: Held) -> bool:
        """Return whether the files of a tied model have an output layer that differs from the embedding."""
        if self._second_embedding is None:
            return False
        parts = [part for parameter, _ in held for part in parameter.parts if part.name == EMBEDDING]
        first, second = self._forms[EMBEDDING], self._second_embedding
        return any(not torch.equal(self._read(first, part.box), self._read(second, part.box)) for part in parts)

    def _read(self, form: _Form, box: Box) -> Tensor:
        found = [(key, stored) for key, stored in form.items() if stored.box.common(box) == box]
        assert found, f"no stored tensor has all of {box}: {list(form)}"
        key, stored = found[0]
        return self._stored[key][box.slices_in(stored.box)[-len(stored.shape) :]]


def _hand_out(
    held: Held, model: ModelConfig, architecture: Architecture, seed: int, device: str, *, critic: bool
) -> None:
    """Load the whole model on the host of the first rank, and broadcast it."""
    whole: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        loaded = load_model(model, device_profile("cpu"), seed).named_parameters()
        whole = {name: value.detach() for name, value in loaded}
        found = {name: tuple(value.shape) for name, value in whole.items()}
        assert found == whole_shapes(architecture), (found, architecture)
    parts: dict[str, list[tuple[Part, Tensor]]] = {}
    for parameter, tensor in held:
        values = tensor.detach().view(-1).zero_()
        for part in parameter.parts:
            parts.setdefault(part.name, []).append((part, values[part.begin : part.end]))
    for name, shape in whole_shapes(architecture).items():
        if critic and name == HEAD:
            continue
        full = torch.empty(shape, device=device)
        if whole:
            full.copy_(whole[name])
        dist.broadcast(full, src=0)
        for part, values in parts.get(name, ()):
            values.copy_(full[part.box.slices_in(Box.whole(shape))].reshape(-1))
