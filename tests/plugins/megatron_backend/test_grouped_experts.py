"""The experts of a rank, computed together, are what each computes alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spurline_megatron_backend.model_building import GroupedExperts

COUNTS, HIDDEN, FFN = [5, 0, 9, 2], 16, 8


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func._schema.name] if "mm" in func._schema.name else []
        return func(*args, **(kwargs or {}))


def test_experts_are_computed_together_as_each_alone_and_keep_no_copy_of_weights() -> None:
    torch.manual_seed(0)
    together: Any = GroupedExperts.__new__(GroupedExperts)
    nn.Module.__init__(together)
    layers = {"linear_fc1": (HIDDEN, 2 * FFN), "linear_fc2": (FFN, HIDDEN)}
    together.local_experts = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in layers.items()}) for _ in COUNTS
    )
    for expert in together.local_experts:
        # As in Megatron's MLPs.
        expert.__dict__.update(expert._modules)
    weights = list(together.parameters())
    hidden = torch.randn(sum(COUNTS), HIDDEN, requires_grad=True)
    scale = torch.rand(sum(COUNTS), requires_grad=True)

    def alone() -> Tensor:
        outputs: list[Tensor] = []
        for expert, tokens, factor in zip(
            together.local_experts, hidden.split(COUNTS), scale.split(COUNTS), strict=True
        ):
            gate, up = expert["linear_fc1"](tokens).chunk(2, -1)
            outputs.append(expert["linear_fc2"](F.silu(gate) * up * factor[:, None]))
        return torch.cat(outputs)

    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    wanted, direction = alone(), torch.randn(sum(COUNTS), HIDDEN)
    gradients = torch.autograd.grad((wanted * direction).sum(), [hidden, scale, *weights])
    with Products() as products, torch.compiler.set_stance("force_eager"):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output, bias = together(hidden, torch.tensor(COUNTS), scale)
        found = torch.autograd.grad((output * direction).sum(), [hidden, scale, *weights])
    assert bias is None
    assert products.names == ["aten::_grouped_mm"] * 6
    addresses = {weight.data_ptr() for weight in weights}
    assert all(tensor.ndim < 3 or tensor.data_ptr() in addresses for tensor in saved)
    torch.testing.assert_close(output, wanted)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other)
