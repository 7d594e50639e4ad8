"""Read buckets of weights in a worker of an engine, whichever transport sent them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spurline.errors import BucketLostError
from spurline_async_rl.weights.changes import ChangesReader
from spurline_async_rl.weights.collective import BroadcastReader
from spurline_async_rl.weights.cuda_ipc import read_handles
from spurline_async_rl.weights.disk import read_file
from spurline_async_rl.weights.shared_memory import MemoryReader
from spurline_models.weight_buckets import WeightBucket


class BucketReader:
    """A reader of the buckets of all transports. See `BroadcastReader` for the arguments."""

    def __init__(self, worker: int = 0, device: torch.device | None = None) -> None:
        self.changes = ChangesReader()
        self._broadcasts = BroadcastReader(worker, device)
        self._transports = {
            "collective": self._broadcasts.read,
            "shared_memory": MemoryReader().read,
            "disk": read_file,
            "cuda_ipc": read_handles,
        }

    def read(self, bucket: WeightBucket) -> Iterable[tuple[str, Tensor]]:
        """Return the weights of a bucket, which may be views of memory that the next bucket overwrites.

        Raises:
            BucketLostError: If the weights did not arrive as they were sent.
            RunFailedError: If this worker cannot reach them.
        """
        try:
            return self.changes.read(bucket, self._transports[bucket.transport](bucket))
        except BucketLostError:
            # Otherwise the bucket would count as taken when it is sent again.
            self._broadcasts.forget()
            raise

    def end_update(self) -> None:
        """Free the memory that only an update needs. See `BroadcastReader.end_update`."""
        self._broadcasts.end_update()
