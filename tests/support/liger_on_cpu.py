"""Compare gradients by Liger's real kernels with those without them, on a CPU through Triton's interpreter.

python tests/support/liger_on_cpu.py MODEL_TYPE ...    prints {model type: [largest relative difference, kernels]}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, write_model_folder
from triton.runtime import interpreter


def complete_interpreter() -> None:
    """Add what Liger uses and the interpreter of Triton 3.9 lacks: floats as arguments, and functions of CUDA."""
    convert: Any = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
    from liger_kernel.ops import geglu, rms_norm  # pyright: ignore

    rms_norm.rsqrt = lambda x: 1.0 / tl.sqrt(x)
    geglu.tanh = lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0


def compare(model_type: str, folder: Path) -> tuple[float, str]:
    """Return the largest difference of a parameter's gradients, relative to its norm. The probe compares logprobs."""
    model = write_model_folder(folder, model_type=model_type, pad_token_id=0)
    batch, objective = lay_out(make_samples([9, 12, 5])), cross_entropy(40.0)
    plain = excite(local_backend(model, kernels="none"))
    fused = excite(local_backend(model, kernels="liger", probe=True))
    expected = dict(plain.gradients(batch, objective))
    worst = max(
        float((gradient - expected[name]).norm() / expected[name].norm())
        for name, gradient in fused.gradients(batch, objective)
    )
    return worst, str(fused.facts()["kernels"])


if __name__ == "__main__":
    complete_interpreter()
    with TemporaryDirectory() as top:
        print(json.dumps({name: compare(name, Path(top, name)) for name in sys.argv[1:]}))
