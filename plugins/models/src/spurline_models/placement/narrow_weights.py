"""Hold weights in half precision ("narrow"), and compute as if the same values had the wide dtype.

Matrices of linear layers and plain embeddings are held in the narrow dtype. All other weights keep the wide dtype, with
rounded values. Results are bitwise the same as if all rounded values were held in the wide dtype. Autocast uses narrow
matrices without conversion. The gradient of a narrow weight is rounded as autocast would round it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_models.architecture import SCORE, load_model_config
from spurline_models.configs import LoraConfig
from spurline_models.placement.quantized_weights import QuantizedLinear, WidenedLinear
from spurline_models.weight_files import stored_dtype


def base_dtype(lora: LoraConfig, model: ModelConfig) -> torch.dtype:
    """Return the dtype of the weights under adapters, except quantized weights."""
    if lora.base_dtype in _DTYPES:
        return _DTYPES[lora.base_dtype]
    if model.init == "random" or any(Path(model.path).glob("*.safetensors")):
        return stored_dtype(model)
    dtype = load_model_config(model).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FORWARDS = (nn.Linear.forward, nn.Embedding.forward)


def round_weights(causal: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round values to this dtype, one parameter at a time. Dtypes stay, and score heads keep their values."""
    for name, parameter in causal.named_parameters():
        if name == SCORE:
            continue
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)


def narrow_weights(
    causal: PreTrainedModel, dtype: torch.dtype, wide: torch.dtype, *, also_trained: bool = False
) -> dict[str, Tensor]:
    """Convert frozen weights, and trained ones if `also_trained`, to this dtype where possible, one at a time.

    `wide` is the dtype of hidden states, which stay wide. Returns the former values of trained weights by name.
    """
    modules = [
        module
        for _, module in narrowable_modules(causal)
        if also_trained or not any(own.requires_grad for own in module.parameters())
    ]
    trained = {id(module.weight) for module in modules if module.weight.requires_grad}
    masters = {name: value.data for name, value in causal.named_parameters() if id(value) in trained}
    for module in modules:
        # Change the class instead of replacing modules, so that adapters, hooks and names stay.
        if isinstance(module, nn.Linear):
            module.__class__ = _NarrowLinear
        else:
            module.__class__ = _NarrowEmbedding
            module.wide_dtype = wide  # type: ignore[assignment]
        # Keep the parameter object, since two modules share a tied weight.
        module.weight.data = module.weight.data.to(dtype)
    return masters


def narrowable_modules(causal: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Embedding]]:
    """Yield (name, module) for weights that may be narrow, because only torch's own forward functions read them."""
    read_otherwise = {
        id(parameter)
        for module in causal.modules()
        if type(module).forward not in _FORWARDS
        for parameter in module.parameters(recurse=False)
    }
    for name, module in causal.named_modules():
        # Subclasses, such as embeddings that scale their output, may compute in the dtype of the weight.
        if not isinstance(module, nn.Linear | nn.Embedding) or type(module).forward not in _FORWARDS:
            continue
        if id(module.weight) not in read_otherwise:
            yield name, module


def quantizable_modules(causal: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (name, module) for linear layers whose weights may be quantized, except the output layer."""
    head = causal.get_output_embeddings()
    for name, module in narrowable_modules(causal):
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def quantize_weights(causal: PreTrainedModel, wide: torch.dtype) -> None:
    """Quantize the weights of linear layers, one at a time. Raises ModelError if no layer can be quantized.

    `wide` is the dtype of dequantized weights.
    """
    modules = [module for _, module in quantizable_modules(causal)]
    if not modules:
        raise ModelError(
            f"backend.lora.base_dtype: {type(causal).__name__} has no linear layers that could be quantized. Set "
            "backend.lora.base_dtype: bf16."
        )
    for module in modules:
        # Change the class instead of replacing the module, so that names and hooks stay.
        module.__class__ = QuantizedLinear
        assert isinstance(module, QuantizedLinear)
        module.quantize(wide)


class _NarrowLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight, self.bias)
        if input.dtype == self.weight.dtype:
            # The model itself rounds hidden states to the dtype of this weight, as Mamba does.
            raise ModelError(
                f"This model rounds hidden states to the dtype of its weights, so weights in {self.weight.dtype} "
                "would change it. Set backend.lora.base_dtype: fp32 or backend.weights: fp32."
            )
        if self.weight.requires_grad and torch.is_grad_enabled():
            return F.linear(input, self.weight.to(input.dtype), self.bias)
        widened: Any = WidenedLinear.apply(input, self.bias, lambda dtype, weight: weight.to(dtype), self.weight)
        return widened


class _NarrowEmbedding(nn.Embedding):
    wide_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        if not (self.weight.requires_grad and torch.is_grad_enabled()):
            return super().forward(input).to(self.wide_dtype)
        rows: Any = _WideRows.apply(
            input, self.weight, self.wide_dtype, -1 if self.padding_idx is None else self.padding_idx
        )
        return rows


class _WideRows(torch.autograd.Function):
    """A lookup in a narrow table, whose backward pass sums the gradients of a token's positions in the wide dtype."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, wide: torch.dtype, padding: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table, ctx.padding = (table.shape[0], table.dtype), padding
        return F.embedding(tokens, table).to(wide)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens,), (size, dtype) = ctx.saved_tensors, ctx.table
        summed = torch.ops.aten.embedding_dense_backward(grads[0], tokens, size, ctx.padding, False)
        return None, summed.to(dtype), None, None
