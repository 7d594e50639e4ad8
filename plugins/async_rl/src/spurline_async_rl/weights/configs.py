"""Settings of the transports for weights. This module imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from spurline.config.paths import PathSetting
from spurline.config.section import OnResume
from spurline_rl.protocols.weight_sync import WeightSyncConfig


class BucketSyncConfig(WeightSyncConfig):
    """Base of all transports."""

    retired: ClassVar[tuple[str, ...]] = ("checksum", "exchange_timeout_s")
    bucket_mb: Annotated[int, OnResume.FREE] = Field(default=512, gt=0)
    """Largest size of a bucket of weights, in MiB. A larger tensor has its own bucket."""
    timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds that one publish may take."""
    adapters: Annotated[bool, OnResume.TO_ROUNDING] = True
    """Send only the adapters of `backend.lora`, if the engines support that. `false` sends all weights, with the
    adapters merged."""

    @property
    def sends_adapters(self) -> bool | None:
        return self.adapters

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mb << 20

    @property
    def whole_every(self) -> int:
        """Return after how many publishes all weights are sent again; 1 if only whole weights are sent."""
        return 1


DEFAULT_BUCKET_BYTES: int = BucketSyncConfig.model_fields["bucket_mb"].default << 20


class InProcessSyncConfig(BucketSyncConfig):
    """Pass the tensors to an engine in this process."""

    name: str = "in_process"

    @property
    def bucket_bytes(self) -> int:
        return 0


class ChangesSyncConfig(BucketSyncConfig):
    """Base of transports that can send only what changed."""

    full_every: Annotated[int, OnResume.FREE] = Field(default=1, ge=1)
    """Send all weights with every n-th publish, and with the others only what changed, compressed and exact. 1 always
    sends all weights. With a larger number, the trainer and each worker of an engine need host memory for a copy of the
    weights. New engines always get all weights."""

    @property
    def whole_every(self) -> int:
        return self.full_every


class SharedMemorySyncConfig(ChangesSyncConfig):
    """Send the weights through shared memory to engines on the trainer's machine."""

    name: str = "shared_memory"


class DiskSyncConfig(ChangesSyncConfig):
    """Write safetensors files into a folder that trainer and engines share."""

    name: str = "disk"
    folder: Annotated[str | None, OnResume.FREE, PathSetting()] = None
    """Folder of the files; null is `weights` in the run directory. A run removes all files `spurline-weights-*` there,
    so two runs must not use the same folder."""


class CollectiveSyncConfig(ChangesSyncConfig):
    """Broadcast the weights to all engines at once, on any machine, with NCCL from GPUs and with gloo from CPUs."""

    name: str = "collective"
    address: Annotated[str | None, OnResume.FREE] = None
    """Host name or IP address of this machine in the network of ranks and engines; null finds it automatically."""


class VllmNativeSyncConfig(BucketSyncConfig):
    """Send the weights with NCCL to stock vLLM servers, over vLLM's own weight transfer."""

    needs_gpu = True
    name: str = "vllm_native"
    address: Annotated[str | None, OnResume.FREE] = None
    """Host name or IP address of this machine in the network of ranks and servers; null finds it automatically."""


class CudaIpcSyncConfig(BucketSyncConfig):
    """Send handles of GPU memory to engines on the trainer's GPUs."""

    needs_gpu = True
    name: str = "cuda_ipc"
