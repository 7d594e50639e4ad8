"""Fill a rank's parameters with the weights of a Hugging Face folder: each rank reads its own values from the files.

The first rank loads models without safetensors files and models with `init: random`, as the local backend does, and
broadcasts them tensor by tensor. Files may hold experts one by one, and the embedding of a tied model under two names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.parts import HeldParameter, Part, whole_shapes
from spurline_models.device_profile import device_profile
from spurline_models.loading import check_loaded, load_model
from spurline_models.weight_files import safetensors_files
from spurline_ranks.pieces import Box, Shape

Held = Sequence[tuple[HeldParameter, Tensor]]
"""A rank's parameters with their contiguous values."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_BASE = "model."
"""A prefix of tensor names. Files of the model without its output layer lack it."""
_IGNORED = "rotary_emb.inv_freq"
"""Tables in old files; the config has them too."""


def load_weights(
    held: Held,
    model: ModelConfig,
    architecture: Architecture,
    seed: int,
    device: Literal["cpu", "cuda"],
    *,
    critic: bool = False,
) -> None:
    """Fill the parameters with the model's values, and padding of the vocabulary with 0. A collective.

    Parameters may have any floating dtype and be on any device; ranks exchange tensors on `device`. The value head of a
    critic begins with 0.

    Raises:
        ModelError: If weights do not fit.
    """
    files = [] if model.init == "random" else safetensors_files(model)
    if not files:
        _hand_out(held, model, architecture, seed, device, critic=critic)
        return
    with WeightFiles(files, architecture, critic=critic) as opened:
        # One rank warns for all.
        unexpected = opened.unexpected if dist.get_rank() == 0 else ()
        check_loaded(model, opened.missing, opened.mismatched, unexpected)
        opened.fill(held)
        if opened.heads_differ(held):
            raise _untied(model)


def _untied(model: ModelConfig) -> ModelError:
    return ModelError(
        f"model.path: the config of {model.path} ties the output layer to the embedding, and its files have two that "
        "differ. To train both set model.config_overrides: {tie_word_embeddings: false}."
    )


def _cleared(tensor: Tensor) -> Tensor:
    """Return the memory of a parameter as a vector of zeros."""
    return tensor.detach().view(-1).zero_()


@dataclass(frozen=True)
class _Whole:
    """A tensor that files hold as it is, under this key."""

    key: str
    shape: Shape

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every key in the files."""
        return {self.key: self.shape}

    def find(self, box: Box) -> tuple[str, tuple[slice, ...]]:
        """Return the key with a box of the tensor, and its slices."""
        return self.key, box.slices_in(Box.whole(self.shape))


@dataclass(frozen=True)
class _OfExperts:
    """The tensor of all experts, which files hold one by one. Its rows are one kind of projection after another."""

    at: str
    kinds: tuple[str, ...]
    shape: Shape

    @property
    def _rows(self) -> int:
        return self.shape[1] // len(self.kinds)

    def _key(self, expert: int, kind: str) -> str:
        return f"{self.at}{expert}.{kind}_proj.weight"

    @property
    def shapes(self) -> dict[str, Shape]:
        keys = (self._key(expert, kind) for expert in range(self.shape[0]) for kind in self.kinds)
        return dict.fromkeys(keys, (self._rows, self.shape[2]))

    def find(self, box: Box) -> tuple[str, tuple[slice, ...]]:
        """Find a box within one projection of one expert; see `_Whole.find`."""
        expert, row, _ = box.offset
        kind = row // self._rows
        own = Box((expert, kind * self._rows, 0), (1, self._rows, self.shape[2]))
        assert own.common(box) == box, (self, box)
        return self._key(expert, self.kinds[kind]), box.slices_in(own)[1:]


_Form = _Whole | _OfExperts


def _forms(name: str, shape: Shape) -> Iterator[_Form]:
    """Yield the forms in which files may hold a tensor."""
    short = name.removeprefix(_BASE)
    names = (name, short if short != name else f"{_BASE}{name}")
    for known in names:
        yield _Whole(known, shape)
        for suffix, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            if known.endswith(f".mlp.experts.{suffix}"):
                yield _OfExperts(known.removesuffix(suffix), kinds, shape)


class WeightFiles:
    """The safetensors files of a model; a context that closes them. Opening reads only headers.

    `missing` holds names that no file has, `unexpected` keys without a place in the model, and `mismatched` tuples of
    key, shape in the files and shape in the model. Values can be read if none is missing or mismatched.
    """

    def __init__(self, files: Sequence[Path], architecture: Architecture, *, critic: bool):
        self._opened = ExitStack()
        self._stored: dict[str, Any] = {}
        for path in files:
            file = self._opened.enter_context(safe_open(str(path), "pt"))
            self._stored.update({key: file.get_slice(key) for key in file.keys()})  # noqa: SIM118
        self._forms: dict[str, _Form] = {}
        self.missing: list[str] = []
        shapes = whole_shapes(architecture)
        heads = list(_forms(HEAD, (architecture.vocabulary, architecture.hidden)))
        if critic:
            shapes.pop(HEAD, None)
        for name, shape in shapes.items():
            # Files have a tied embedding under either name.
            forms = [*_forms(name, shape), *(heads if architecture.tied and name == EMBEDDING else ())]
            found = next((form for form in forms if not form.shapes.keys().isdisjoint(self._stored)), None)
            if found is None:
                self.missing.append(name)
            else:
                self._forms[name] = found
                self.missing += found.shapes.keys() - self._stored.keys()
        asked = {key: shape for form in self._forms.values() for key, shape in form.shapes.items()}
        left = self._stored.keys() - asked.keys()
        unused_heads = [form for form in heads if left & form.shapes.keys()] if critic or architecture.tied else []
        self._second_embedding = unused_heads[0] if unused_heads and not critic else None
        left -= {key for form in unused_heads for key in form.shapes}
        self.unexpected = [key for key in left if not key.endswith(_IGNORED)]
        self.mismatched = [
            (key, found, asked[key])
            for key in asked.keys() & self._stored.keys()
            if (found := tuple(self._stored[key].get_shape())) != asked[key]
        ]

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def fill(self, held: Held) -> None:
        """Give the parameters their values, with host memory for one part."""
        for parameter, tensor in held:
            values = _cleared(tensor)
            for part in parameter.parts:
                if part.name in self._forms:
                    values[part.begin : part.end].copy_(self._read(self._forms[part.name], part.box).reshape(-1))
                else:
                    assert part.name == HEAD, part

    def heads_differ(self, held: Held) -> bool:
        """Return whether the files of a tied model have another output layer than the embedding."""
        if self._second_embedding is None:
            return False
        parts = [part for parameter, _ in held for part in parameter.parts if part.name == EMBEDDING]
        first, second = self._forms[EMBEDDING], self._second_embedding
        return any(not torch.equal(self._read(first, part.box), self._read(second, part.box)) for part in parts)

    def _read(self, form: _Form, box: Box) -> Tensor:
        key, inside = form.find(box)
        return self._stored[key][inside]


def _hand_out(
    held: Held, model: ModelConfig, architecture: Architecture, seed: int, device: str, *, critic: bool
) -> None:
    """Load the whole model on the host of the first rank, and broadcast it."""
    whole = _load_whole(model, architecture, seed) if dist.get_rank() == 0 else {}
    parts: dict[str, list[tuple[Part, Tensor]]] = {}
    for parameter, tensor in held:
        values = _cleared(tensor)
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


def _load_whole(model: ModelConfig, architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """Return the weights as the local backend has them, on CPU."""
    loaded = {name: value.detach() for name, value in load_model(model, device_profile("cpu"), seed).named_parameters()}
    if architecture.tied and HEAD in loaded:
        # transformers does not tie what differs.
        raise _untied(model)
    found = {name: tuple(value.shape) for name, value in loaded.items()}
    assert found == whole_shapes(architecture), (found, architecture)
    return loaded
