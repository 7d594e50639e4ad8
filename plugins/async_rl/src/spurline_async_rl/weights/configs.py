"""Settings of the transports for weights. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from pydantic import Field

from spurline.config.paths import PathSetting
from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline_rl.protocols.weight_sync import WeightSyncConfig


class BucketSyncConfig(WeightSyncConfig):
    """Base of all transports."""

    retired: ClassVar[tuple[str, ...]] = ("checksum",)
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
    sends all weights. The trainer and each worker of an engine then need host memory for a copy of the weights. New
    engines always get all weights."""

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
    exchange_timeout_s: Annotated[float | None, OnResume.FREE] = Field(default=None, gt=0)
    """Time limit in seconds for all engines to join the group, and also for all engines to receive one bucket. After
    this time, the bucket is sent again to the engines that still run. The limit must be less than
    `engine.update_timeout_s`; null means half of `engine.update_timeout_s`."""
    address: Annotated[str | None, OnResume.FREE] = None
    """Host name or IP address of this machine in the network of ranks and engines; null finds it automatically."""

    def exchange_limit_s(self, run: RunConfig | None) -> float | None:
        """Return the time limit of an exchange, or None if neither this config nor the engine's config has one."""
        if self.exchange_timeout_s is not None:
            return self.exchange_timeout_s
        limit_s = None if run is None else run.source.facts.update_limit_s
        return None if limit_s is None else limit_s / 2

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        limit_s = run.source.facts.update_limit_s
        if self.exchange_timeout_s is not None and limit_s is not None and self.exchange_timeout_s >= limit_s:
            yield Problem(
                "exchange_timeout_s",
                f"is {self.exchange_timeout_s:g}, but must be less than source.engine.update_timeout_s ({limit_s:g}). "
                "Otherwise one engine that hangs would end all engines. Remove exchange_timeout_s, or raise "
                "update_timeout_s.",
            )


class CudaIpcSyncConfig(BucketSyncConfig):
    """Send handles of GPU memory to engines on the trainer's GPUs."""

    needs_gpu = True
    name: str = "cuda_ipc"
