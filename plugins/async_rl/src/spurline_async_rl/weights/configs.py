"""Settings of the ways that weights take to the engines: bucket size, checksum, time limit, folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spurline.config.paths import PathSetting
from spurline.config.section import OnResume
from spurline.protocols.weight_sync import WeightSyncConfig


class BucketSyncConfig(WeightSyncConfig):
    """Base of all transports."""

    bucket_mb: Annotated[int, OnResume.FREE] = Field(default=512, gt=0)
    """Largest memory one bucket of weights takes, in MiB; a single larger tensor travels alone."""
    checksum: Annotated[bool, OnResume.FREE] = False
    """Compare a checksum of every bucket on both sides."""
    timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds that one publish may take."""


class InProcessSyncConfig(BucketSyncConfig):
    """Hand the tensors to an engine in this process."""

    name: str = "in_process"


class SharedMemorySyncConfig(BucketSyncConfig):
    """Through shared memory, to engines on the machine where the weights are."""

    name: str = "shared_memory"


class DiskSyncConfig(BucketSyncConfig):
    """Through safetensors files in a folder that engines and trainer see, for external servers."""

    name: str = "disk"
    folder: Annotated[str | None, OnResume.FREE, PathSetting()] = None
    """Where the files are written; null is `weights` in the run directory. What a killed run left there, files named
    `spurline-weights-*`, is removed, so runs do not share a folder."""


class NcclSyncConfig(BucketSyncConfig):
    """GPU to GPU over NCCL, by vLLM's own weight transfer. Does not work yet: set `shared_memory` or `disk`."""

    needs_gpu = True
    name: str = "nccl"


class CudaIpcSyncConfig(BucketSyncConfig):
    """Handles of GPU memory to engines on the same GPUs, by vLLM's own weight transfer."""

    needs_gpu = True
    name: str = "cuda_ipc"
