"""Count what training on a GPU would compute, on a machine without one.

Tensors are fake: they have shapes and no values, so whatever would wait for the device raises an error. Launches of
Triton kernels are counted instead of run. A kernel takes as long as its bytes or its FLOPs need on an H200, and at
least 2.5 us. The sum is a lower limit of the time of a step, hence a ceiling of the speed, and no measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from backend_batches import TINY_QWEN3, Sample, cross_entropy, lay_out, no_other, run_config, write_model_folder
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel
from triton.runtime.jit import KernelInterface

from spurline.plugins.host import PluginHost
from spurline.protocols.loss import ENTROPY, Objective
from spurline_models.accumulate import accumulate_gradients
from spurline_models.device_profile import DeviceProfile
from spurline_models.kernels import change_computing
from spurline_models.loading import load_model
from spurline_models.local import trained_model
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.local.trained_model import TrainedModel
from spurline_models.optimizers.configs import AdamWConfig
from spurline_models.optimizers.optimization import policy_optimization
from spurline_models.placement.master_parameters import MasterParameters
from spurline_models.placement.narrow_weights import narrow_weights
from spurline_models.streams import segment_attention
from spurline_models.streams.stream_model import Reading, StreamModel
from spurline_models.streams.token_stream import token_stream

BYTES_PER_S = 4.0e12
FLOPS_PER_S = 650e12
"""Of large matrix products in bf16, as they are reached. The peak is `PEAK`."""
ATTENTION_FLOPS_PER_S = {"_varlen_attn": 350e12, "_varlen_attn_backward": 270e12}
LAUNCH_S = 2.5e-6
PEAK = 989e12


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    others = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    return {**sizes, **others, "tie_word_embeddings": tied, "max_position_embeddings": 40_960}


QWEN3 = {
    "0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
    "4B": _qwen3(36, 2560, 9728, 32, tied=True),
    "8B": _qwen3(36, 4096, 12_288, 32, tied=False),
}
"""Shapes of Qwen3, as changes of `TINY_QWEN3`."""

# fmt: off
_FREE = {
    "alias", "as_strided", "detach", "device", "empty", "empty_like", "empty_strided", "expand", "is_same_size",
    "lift_fresh", "new_empty", "new_empty_strided", "permute", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unflatten", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}
# fmt: on
"""Operations that launch no kernel."""

_CHANGED = {
    "_overwrite": ("logits",),
    "_swiglu_backward_kernel": ("a_ptr", "b_ptr"),
    "_triton_rope": ("q_ptr", "k_ptr"),
}
"""Arguments that Triton kernels both read and write."""


@dataclass
class Counts(TorchDispatchMode):
    """Kernels, bytes, FLOPs and seconds of operations, by their names, and the FLOPs of attention with `lengths`."""

    lengths: NDArray[np.int64]
    kernels: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        if name.rstrip("_") in _FREE or not (given or made):
            return out
        size = sum(map(_num_bytes, given)) + sum(map(_num_bytes, made))
        if name in ("copy_", "fill_", "zero_"):
            size -= _num_bytes(made[0])
        elif name in ("embedding", "index_select", "gather", "index"):
            size = 2 * sum(map(_num_bytes, made))
        flops, rate = 0.0, ATTENTION_FLOPS_PER_S.get(name, FLOPS_PER_S)
        if name in ATTENTION_FLOPS_PER_S:
            backward = name.endswith("backward")
            query = given[1 if backward else 0]
            flops = 2 * query.shape[1] * query.shape[2] * float((self.lengths**2).sum()) * (2.5 if backward else 1)
        elif func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        self._add(f"{name}[{str(made[0].dtype)[6:] if made else ''}]", size, flops / rate)
        return out

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Count a launch of a Triton kernel, which reads or writes each tensor once."""
        name = kernel.fn.__name__
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
        twice = [tensors[key] for key in _CHANGED.get(name, ())]
        self._add(name, sum(map(_num_bytes, [*tensors.values(), *twice])), 0.0)

    def _add(self, name: str, size: int, seconds: float) -> None:
        self.kernels[name] += 1
        self.bytes[name] += size
        self.seconds[name] += max(size / BYTES_PER_S, seconds, LAUNCH_S)


def _num_bytes(tensor: Tensor) -> int:
    """Of the tensor's memory. Repeated parts are counted once."""
    distinct = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return int(np.prod(distinct, dtype=np.int64)) * tensor.element_size()


@contextmanager
def pretended_gpu(counts: Counts) -> Iterator[FakeTensorMode]:
    """Pretend that the device is a GPU. Its tensors are those made in the yielded mode, or sent by a profile."""
    mode = FakeTensorMode()

    def send(_: DeviceProfile, tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor)

    def fits(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> bool:
        return query.shape[-1] == value.shape[-1]

    with (
        patch.object(KernelInterface, "__getitem__", lambda kernel, grid: partial(counts.launch, kernel)),
        patch.object(segment_attention, "_varlen_kernel_fits", fits),
        patch.object(DeviceProfile, "send", send),
        # The model is made on the device.
        patch.object(nn.Module, "to", lambda module, **_: module),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        # As on GPUs, one kernel computes with many tensors.
        patch.object(clip_grad, "_has_foreach_support", lambda *_: True),
        patch.object(clip_grad, "_device_has_foreach_support", lambda *_: True),
        # Weights have no values.
        patch.object(trained_model, "weights_digest", lambda *_, **__: ""),
    ):
        yield mode


def count_step(
    folder: Path,
    lengths: Sequence[int],
    objective: Objective | None = None,
    reading: Reading = "stream",
    **settings: Any,
) -> Counts:
    """Return the counts of an update of the model in this folder, by one micro-batch of sequences of these lengths.

    `settings` are those of the backend `local`. Each token but the first of a sequence has loss. Raises an error of
    torch if something waits for the device before the sums of the micro-batch are fetched.
    """
    config = LocalBackendConfig(device="cuda", **settings)
    run = run_config(folder, backend=config, optimizer=AdamWConfig(max_grad_norm=1.0))
    # Fake tensors of a GPU cannot be differentiated without one.
    profile = DeviceProfile(torch.device("cpu"), torch.float32, torch.bfloat16)
    counts = Counts(np.asarray(lengths, np.float64))
    objective = objective or cross_entropy()
    samples = [Sample(str(n), (7,) * length, (0.0,) + (1.0,) * (length - 1)) for n, length in enumerate(lengths)]
    with pretended_gpu(counts) as mode:
        batch = lay_out(samples)
        columns = {name: torch.zeros_like(batch.tokens["loss_weights"]) for name in objective.loss.needs - {ENTROPY}}
        batch = replace(batch, tokens={**batch.tokens, **columns})
        stream = token_stream(batch, np.arange(batch.num_rows), sorted(columns), profile)
        assert stream is not None
        with mode:
            masters: dict[str, Tensor] = {}

            def change(causal: PreTrainedModel) -> None:
                change_computing(causal, run.model, config.kernels, config.fp8, DeviceProfile(torch.device("cuda")))
                if config.narrow_weights:
                    masters.update(narrow_weights(causal, torch.bfloat16, torch.float32, also_trained=True))

            causal = load_model(run.model, profile, 0, change)
            model = StreamModel(causal, config.chunk_tokens, config.fuses_logprobs)
            model.read_as(reading)
            parameters = dict(causal.named_parameters())
            stepped = MasterParameters(parameters, profile, masters)
            optimization = policy_optimization(run, PluginHost.load([]).registry, 10)(stepped.parameters)
            trained = TrainedModel(model, parameters, stepped, optimization, torch.float32)
            for parameter in stepped.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            # The first step makes the optimizer's state.
            optimization.optimizer.step()
            optimization.optimizer.zero_grad()
            with counts:
                accumulate_gradients(model, [(np.arange(batch.num_rows), stream)], objective, profile, no_other)
                norm = trained.gradient_norm()
                # Larger than the limit, so that gradients are clipped.
                trained.step(norm, 2.0)
    return counts


@dataclass(frozen=True)
class Ceiling:
    """What an update of a model costs at least. `mfu` is a share of the dense peak of an H200 in bf16."""

    kernels: float
    bytes: float
    seconds: float
    tokens_per_s: float
    mfu: float


def ceiling(folder: Path, model: str, lengths: Sequence[int], **settings: Any) -> Ceiling:
    """Return the ceiling of one of `QWEN3` with these settings of the backend `local`.

    Layers cost the same, so models of one and of two layers are counted. The files are written into the folder.
    """
    shape = TINY_QWEN3 | QWEN3[model]

    def counted(layers: int) -> NDArray[np.float64]:
        counts = count_step(write_model_folder(folder, **(shape | {"num_hidden_layers": layers})), lengths, **settings)
        return np.array([sum(part.values()) for part in (counts.kernels, counts.bytes, counts.seconds)])

    layers, one = int(shape["num_hidden_layers"]), counted(1)
    kernels, size, seconds = one + (layers - 1) * (counted(2) - one)
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    matrices = 128 * hidden * (2 * heads + 2 * shape["num_key_value_heads"]) + 3 * hidden * shape["intermediate_size"]
    tokens = sum(lengths)
    flops = 6 * (layers * matrices + hidden * shape["vocab_size"]) * tokens
    flops += 6 * layers * heads * 128 * sum(length**2 for length in lengths)
    return Ceiling(kernels, size, seconds, tokens / seconds, flops / seconds / PEAK)
