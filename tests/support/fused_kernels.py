"""A stand-in for Liger-Kernel that replaces what Liger replaces, computes with PyTorch, and notes what it computes."""

from __future__ import annotations

import sys
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from spurline_models import kernels


class Fused:
    """Stands for Liger: replaces classes and functions of transformers' file, and functions of a given model.

    factor: what its norms multiply by; 1.0 computes the same. calls: names of what was computed by it, uncompiled.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factor = 1.0
        self.calls: set[str] = set()
        self.own_mlp = modeling_qwen3.Qwen3MLP.forward
        self.own_rope = modeling_qwen3.apply_rotary_pos_emb
        names = ("", ".ops", ".transformers", ".transformers.monkey_patch", ".transformers.rope")
        _, ops, transformers, patch, rope = modules = [ModuleType(f"liger_kernel{name}") for name in names]
        for module in modules:
            module.__spec__ = object()  # type: ignore[assignment]  # only whether there is one is asked
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(transformers).update(monkey_patch=patch, rope=rope)
        vars(rope).update(liger_rotary_pos_emb=lambda *_: pytest.fail("chooses a library in each call"))
        vars(ops).update(LigerRopeFunction=SimpleNamespace(apply=self.rotate))
        vars(patch).update(_apply_liger_kernel_to_instance=self.apply, MODEL_TYPE_TO_APPLY_LIGER_FN={"qwen3": None})
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        kernels._rotating.cache_clear()

    def called(self, name: str) -> None:
        if not torch.compiler.is_compiling():
            self.calls.add(name)

    def rotate(self, query: Any, key: Any, cos: Any, sin: Any, positions: None, unsqueeze_dim: int) -> Any:
        self.called("rope")
        return self.own_rope(query, key, cos, sin, unsqueeze_dim)

    def apply(self, model: Any, **_: Any) -> None:
        fused = self

        class FusedNorm(torch.nn.Module):
            pass

        def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
            fused.called("norm")
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * x * scale * fused.factor

        def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
            fused.called("mlp")
            return fused.own_mlp(self, x)

        modeling_qwen3.Qwen3RMSNorm = FusedNorm  # type: ignore[misc,assignment]
        modeling_qwen3.apply_rotary_pos_emb = sys.modules["liger_kernel.transformers.rope"].liger_rotary_pos_emb
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                vars(module)["forward"] = MethodType(norm, module)
            if type(module).__name__ == "Qwen3MLP":
                vars(module)["forward"] = MethodType(mlp, module)
