"""Weight sync `cuda_ipc`: handles of GPU memory, to engines on the same GPU.

Place on the way: weights on the trainer's GPU -> their handles -> `read_handles` in the worker on that GPU, which
copies from the very memory. vLLM's own transfer of handles keeps the memory of the whole model alive until the end of
the update; here it is one bucket's.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from spurline.errors import RunFailedError
from spurline.protocols.rollout_engine import TensorPlace, WeightBucket
from spurline.ranks.machine import this_machine
from spurline_async_rl.weights.buckets import MakerSync

_GPU, _HANDLES = "gpu", "handles"
"""Keys of a bucket's `where`."""
_DEVICE_ARGUMENT = 6
"""Place among the arguments of torch's rebuild_cuda_tensor of the GPU's number, which differs between processes."""


class CudaIpcSync(MakerSync):
    """A `WeightSync` for engine `vllm` in mode `engine` on this machine."""

    transport = "cuda_ipc"
    maker = f"{__name__}:HandleMaker"


class HandleMaker:
    """A `BucketMaker`."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        self.taken()
        device = torch.cuda.current_device()
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        places: list[TensorPlace] = []
        for name, tensor in weights:
            places.append(TensorPlace.of(name, tensor))
            # They must live until every engine has copied them: a handle does not keep its memory.
            self._held.append(tensor.detach().to(device).contiguous())
        torch.cuda.synchronize(device)
        handles = pickle.dumps([reduce_tensor(tensor)[1] for tensor in self._held])
        where = {_GPU: gpu, _HANDLES: base64.b64encode(handles).decode()}
        return WeightBucket(CudaIpcSync.transport, tuple(places), where, machine=this_machine())

    def taken(self) -> None:
        if self._held:
            self._held.clear()
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self.taken()


def read_handles(bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
    """The weights, in the trainer's memory: copy them before the bucket is answered."""
    device = torch.cuda.current_device()
    here = str(torch.cuda.get_device_properties(device).uuid)
    if here != bucket.where[_GPU]:
        raise RunFailedError(
            f"The weights are on GPU {bucket.where[_GPU]} and this worker is on GPU {here}: cuda_ipc needs both on "
            "one. Set source.weight_sync: shared_memory."
        )
    # Written by the trainer that started this engine; a server does not offer this transport.
    handles = pickle.loads(base64.b64decode(bucket.where[_HANDLES]))  # noqa: S301
    for place, arguments in zip(bucket.places, handles, strict=True):
        rebuilt = [*arguments]
        rebuilt[_DEVICE_ARGUMENT] = device
        yield place.name, rebuild_cuda_tensor(*rebuilt)
