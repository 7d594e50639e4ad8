"""Hold frozen weights of linear layers in 4 bits, and compute with their dequantized values.

Each block of 64 values has a scale, and each value is one of 16 multiples of the scale (NF4). The scales are quantized
to 8 bits, in blocks of 256 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). Each matrix is dequantized when it is used,
in the forward and the backward pass. Results are bit for bit the same as with a matrix of the dequantized values.

Weights are quantized on the host by bitsandbytes, so that all devices get the same codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
"""Number of values that share a scale."""
OUTER_BLOCK = 256
"""Number of scales that share an outer scale."""
_KIND = "nf4"
_PARTS = ("weight", "weight_scales", "weight_outer_scales", "weight_table", "weight_offset")


def quantized_bytes(num_values: int) -> int:
    """Return the bytes of a quantized weight of `num_values` values."""
    blocks = math.ceil(num_values / BLOCK)
    table_and_offset = 4 * (256 + 1)
    return math.ceil(num_values / 2) + blocks + 4 * math.ceil(blocks / OUTER_BLOCK) + table_and_offset


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in 4 bits.

    `codes` is uint8 [ceil(n / 2), 1], with two values in each byte. `scales` is uint8 [blocks], with indexes into
    `table`, fp32 [256]. The scale of a block is `table[scales[block]] * outer_scales[block // 256] + offset`, in fp32.
    """

    shape: torch.Size
    codes: Tensor
    scales: Tensor
    outer_scales: Tensor
    table: Tensor
    offset: Tensor

    @classmethod
    def of(cls, values: Tensor) -> QuantizedWeight:
        """Quantize values on the host. The result is on the device of the values."""
        import bitsandbytes.functional as quantization  # pyright: ignore[reportMissingImports]

        codes, state = quantization.quantize_4bit(
            values.detach().to("cpu", torch.float32).contiguous(), blocksize=BLOCK, quant_type=_KIND
        )
        scales: Tensor = state.absmax
        # `fsum` gives the same codes on every machine. The last digits of torch's mean depend on the number of threads.
        offset = torch.tensor(math.fsum(scales.tolist()) / scales.numel(), dtype=torch.float32)
        outer: Any
        inner, outer = quantization.quantize_blockwise(scales - offset, blocksize=OUTER_BLOCK)
        parts: list[Tensor] = [codes, inner, outer.absmax, outer.code, offset]
        return cls(values.shape, *(part.to(values.device) for part in parts))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.outer_scales, self.table, self.offset

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes in this dtype, as a new tensor."""
        import bitsandbytes.functional as quantization  # pyright: ignore[reportMissingImports]

        outer = quantization.QuantState(
            absmax=self.outer_scales, code=self.table, blocksize=OUTER_BLOCK, dtype=torch.float32
        )
        # bitsandbytes needs a compiler for rows of odd length.
        is_even = self.shape[-1] % 2 == 0
        state = quantization.QuantState(
            absmax=self.scales,
            shape=self.shape if is_even else torch.Size((1, 2 * self.codes.numel())),
            # bitsandbytes has no output dtype wider than fp32. It rounds to half precision as torch does.
            dtype=dtype if dtype.itemsize <= 4 else torch.float32,
            blocksize=BLOCK,
            quant_type=_KIND,
            offset=self.offset,
            state2=outer,
        )
        values = quantization.dequantize_4bit(self.codes, state)
        return (values if is_even else values.view(-1)[: self.shape.numel()].view(self.shape)).to(dtype)

    def named(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, part) for the weight with this name. The codes have the same name as the weight."""
        prefix = name.removesuffix("weight")
        yield from zip((prefix + part for part in _PARTS), self.parts, strict=True)


def quantized_layers(causal: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers with quantized weights, by the names of these weights."""
    modules = causal.named_modules()
    return {f"{name}.weight": module for name, module in modules if isinstance(module, QuantizedLinear)}


def num_parameters(causal: nn.Module) -> int:
    """Count the values of all parameters. A quantized value counts as one value."""
    held = sum(value.numel() for value in causal.parameters())
    layers = quantized_layers(causal).values()
    return held + sum(layer.held().shape.numel() - layer.held().codes.numel() for layer in layers)


class QuantizedLinear(nn.Linear):
    """A linear layer whose parameter `weight` holds codes. The attribute `weight` returns the dequantized values."""

    wide_dtype: torch.dtype

    def quantize(self, wide: torch.dtype) -> None:
        """Replace the values by codes. `wide` is the dtype of the attribute `weight`."""
        weight = self._parameters["weight"]
        assert weight is not None
        self.wide_dtype = wide
        quantized = QuantizedWeight.of(weight)
        self._parameters["weight"] = nn.Parameter(quantized.codes, requires_grad=False)
        for name, part in list(quantized.named("weight"))[1:]:
            # Checkpoints do not contain frozen weights, so do not save the parts.
            self.register_buffer(name, part, persistent=False)

    def held(self, read: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> QuantizedWeight:
        """Return the quantized weight. `read` returns a tensor, or a host copy while engines use its memory."""
        codes = self._parameters["weight"]
        assert codes is not None
        shape = torch.Size((self.out_features, self.in_features))
        scales = [self.get_buffer(name) for name in _PARTS[1:]]
        return QuantizedWeight(shape, *(read(part) for part in (codes.detach(), *scales)))

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.held().values(self.wide_dtype)

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        held = self.held()
        result: Any = WidenedLinear.apply(
            input.to(dtype),
            self.bias,
            lambda dtype, *parts: QuantizedWeight(held.shape, *parts).values(dtype),
            *held.parts,
        )
        return result


class WidenedLinear(torch.autograd.Function):
    """A linear layer that computes its frozen matrix in both passes, so that the matrix is not kept in between.

    `values(dtype, *parts)` returns the matrix in this dtype.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, values: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.values = values
        return F.linear(input, values(input.dtype, *parts), None if bias is None else bias.to(input.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        # With activation checkpointing, saved tensors can be read only once.
        parts = ctx.saved_tensors
        return gradient @ ctx.values(gradient.dtype, *parts), *(None,) * (2 + len(parts))
