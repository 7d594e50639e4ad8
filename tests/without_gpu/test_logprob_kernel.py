"""The Triton kernels for logprobs are as exact as PyTorch, and are compiled for Hopper GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spurline_models.streams import logprob_kernel

# Triton compiles by programs of its own.
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[1] / "support" / "logprobs_on_cpu.py"


def test_kernels_compute_what_pytorch_computes_in_fp64() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert len(answer["cases"]) == 6
    for case, (value, gradient) in answer["cases"].items():
        assert value < 2e-6, case
        # Gradients have the dtype of the logits. The interpreter rounds to bf16 by cutting digits off.
        assert gradient < (2**-7 if "bf16" in case else 1e-6), case
    assert "modified by an inplace operation" in answer["error"]


@pytest.mark.parametrize("name", ["_read", "_overwrite"])
def test_kernels_are_compiled_for_hopper(name: str) -> None:
    kernel: Any = getattr(logprob_kernel, name)
    constants: dict[str, Any] = {"temperature": 0.7, "entropy": True, "block": logprob_kernel._BLOCK}
    types = {"logits": "*bf16", "targets": "*i64", "count": "i32", "size": "i32"}
    signature = {key: "constexpr" if key in constants else types.get(key, "*fp32") for key in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(key),): value for key, value in constants.items()})
    compiled: Any = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": logprob_kernel._WARPS}
    )
    assert compiled.asm["cubin"]
    # Nothing is moved from registers to memory.
    assert "st.local" not in compiled.asm["ptx"]
