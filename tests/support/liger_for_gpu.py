"""Compile what Liger's functions launch to code of a GPU, and trace them as torch.compile does, without a GPU.

python tests/support/liger_for_gpu.py    prints {"code": {kernel: bytes of sm_90 code}, "graphs": {function: graphs}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.utils._triton
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# torch.compile traces Triton kernels only where it believes that they can run. It asks when it is imported.
torch.utils._triton.has_triton = lambda: True  # type: ignore[assignment]

from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction  # noqa: E402  # pyright: ignore
from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
OPTIONS = ("num_warps", "num_stages", "num_ctas")


def calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Return functions and inputs as a layer uses them under autocast, with heads of 128 and hidden states of 1024."""

    def values(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, requires_grad=True)

    def norm(hidden: Tensor, weight: Tensor) -> Any:
        return LigerRMSNormFunction.apply(hidden, weight, 1e-6, 0.0, "llama", True, None)

    def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        return LigerRopeFunction.apply(query, key, cos, sin, None, 1)

    def swiglu(gate: Tensor, up: Tensor) -> Any:
        return LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)

    def geglu(gate: Tensor, up: Tensor) -> Any:
        return LigerGELUMulFunction.apply(gate, up)

    halves = [torch.zeros(1, 40, 128) for _ in range(2)]
    return {
        "norm": (norm, (values(40, 1024), values(1024, of=torch.float32))),
        "norm of heads": (norm, (values(1, 40, 16, 128), values(128, of=torch.float32))),
        "swiglu": (swiglu, (values(40, 3072), values(40, 3072))),
        "geglu": (geglu, (values(40, 3072), values(40, 3072))),
        "rope": (rope, (values(1, 40, 16, 128), values(1, 40, 8, 128), *halves)),
    }


def launches(run: Callable[[], None]) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Yield each kernel that is launched, its arguments by name, and its options. None of them runs."""
    seen: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        defaults = {part.name: part.default for part in kernel.params if part.has_default}
        seen.append((kernel, defaults | given, options))

    own = triton.runtime.JITFunction.run
    triton.runtime.JITFunction.run = launch  # pyright: ignore
    try:
        run()
    finally:
        triton.runtime.JITFunction.run = own
    yield from seen


def code_bytes(kernel: Any, given: dict[str, Any], options: dict[str, Any]) -> int:
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    for place, part in enumerate(kernel.params):
        value = given[part.name]
        if part.is_constexpr or value is None:
            signature[part.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[part.name] = DTYPES[value.dtype]
        else:
            signature[part.name] = "fp32" if isinstance(value, float) else "i32"
    made = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=HOPPER, options=options)
    return len(made.asm["cubin"])


def compile_all() -> dict[str, int]:
    code: dict[str, int] = {}
    for dtype in DTYPES:
        for name, (function, inputs) in calls(dtype).items():

            def run(function: Any = function, inputs: Any = inputs) -> None:
                outputs = function(*(one * 1 if one.requires_grad else one for one in inputs))
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])

            for kernel, given, options in launches(run):
                pass_ = " backward" if given.get("BACKWARD_PASS") else ""
                code[f"{name}: {kernel.__name__}{pass_} {dtype}"] = code_bytes(kernel, given, options)
    return code


def traced(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> int:
    """Return the number of graphs that torch.compile makes of a function."""
    graphs: list[Any] = []

    def stop(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        raise NotImplementedError

    torch._dynamo.reset()
    with suppress(BackendCompilerFailed):
        torch.compile(function, backend=stop, fullgraph=True)(*inputs)
    assert "triton_kernel_wrapper" in str(graphs[0].graph) or "autograd_function_apply" in str(graphs[0].graph)
    return len(graphs)


if __name__ == "__main__":
    graphs = {name: traced(*call) for name, call in calls(torch.bfloat16).items()}
    print(json.dumps({"code": compile_all(), "graphs": graphs}))
