"""Weight sync `cuda_ipc`: handles of GPU memory, to engines on the same GPU.

Place on the way: weights on the trainer's GPU -> their handles -> `read_handles` in the worker on that GPU, which
copies from the very memory. vLLM's own transfer of handles keeps the memory of the whole model alive until the end of
the update; here it is one bucket's.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from spurline.errors import RunFailedError
from spurline.protocols.rollout_engine import WeightBucket
from spurline_async_rl.weights.buckets import BucketSync, cut, place_of

_GPU, _HANDLES = "gpu", "handles"
"""Keys of a bucket's `where`."""
_DEVICE_ARGUMENT = 6
"""Place among the arguments of torch's rebuild_cuda_tensor of the GPU's number, which differs between processes."""


class CudaIpcSync(BucketSync):
    """A `WeightSync` for engine `vllm` in mode `engine` on this machine."""

    transport = "cuda_ipc"

    def make_buckets(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Iterator[WeightBucket]:
        device = torch.cuda.current_device()
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        for held in cut(weights, self.max_bucket_bytes):
            places = tuple(place_of(name, tensor) for name, tensor in held)
            # They must live until every engine has copied them: a handle does not keep its memory.
            tensors = [tensor.detach().to(device).contiguous() for _, tensor in held]
            torch.cuda.synchronize(device)
            handles = pickle.dumps([reduce_tensor(tensor)[1] for tensor in tensors])
            where = {_GPU: gpu, _HANDLES: base64.b64encode(handles).decode()}
            yield WeightBucket(self.transport, places, where, within_machine=True)
            del tensors
            torch.cuda.ipc_collect()


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
