"""On a machine with GPUs nothing of torch or Megatron is replaced."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import sys, types
from types import SimpleNamespace
import torch
from spurline_ranks import messages

before = dict(vars(torch.cuda))
tensor_before = dict(vars(torch.Tensor))

# Stands for what needs a GPU.
rank = types.ModuleType("spurline_megatron_backend.rank")
rank.MegatronRank = lambda *arguments: arguments
sys.modules[rank.__name__] = rank
messages.read_run = lambda run: (SimpleNamespace(backend=SimpleNamespace(on="cuda")), None)

from spurline_megatron_backend.open_rank import open_rank

open_rank("place", {}, 1)
print("imported", [name for name in sys.modules if name.endswith("cpu_debug")])
for what, now, then in (("replaced", torch.cuda, before), ("tensor", torch.Tensor, tensor_before)):
    changed = {name for name, value in vars(now).items() if then.get(name) is not value}
    # Modules that are imported meanwhile replace nothing.
    print(what, sorted(name for name in changed if not isinstance(vars(now)[name], types.ModuleType)))
print("compiles", [torch._dynamo.eval_frame._stance.stance])
"""


def test_a_rank_on_a_gpu_replaces_nothing_and_imports_nothing_that_would() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["imported []", "replaced []", "tensor []", "compiles ['default']"]
