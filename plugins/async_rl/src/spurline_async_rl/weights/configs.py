"""Settings of the transports that bring weights to the engines. Imports no torch."""

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
    """Largest memory one bucket of weights takes, in MiB; a single larger tensor travels alone."""
    timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds that one publish may take."""
    adapters: Annotated[bool, OnResume.TO_ROUNDING] = True
    """Send the adapters of `backend.lora` alone where engines can put them on the weights they started with; `false`
    always sends whole weights with the adapters merged."""

    @property
    def sends_adapters(self) -> bool | None:
        return self.adapters

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mb << 20


DEFAULT_BUCKET_BYTES: int = BucketSyncConfig.model_fields["bucket_mb"].default << 20
"""Bytes of a bucket by default."""


class InProcessSyncConfig(BucketSyncConfig):
    """Hand the tensors to an engine in this process."""

    name: str = "in_process"

    @property
    def bucket_bytes(self) -> int:
        return 0


class SharedMemorySyncConfig(BucketSyncConfig):
    """Send through shared memory, to engines on the machine where the weights are."""

    name: str = "shared_memory"


class DiskSyncConfig(BucketSyncConfig):
    """Write safetensors files into a folder that engines and trainer see, for external servers."""

    name: str = "disk"
    folder: Annotated[str | None, OnResume.FREE, PathSetting()] = None
    """Folder of the files; null is `weights` in the run directory. Files named `spurline-weights-*` that a killed run
    left there are removed, so runs must not share a folder."""


class CollectiveSyncConfig(BucketSyncConfig):
    """Send by one broadcast for all engines, on any machine: over NCCL where the weights are on GPUs, else over
    gloo."""

    name: str = "collective"
    exchange_timeout_s: Annotated[float | None, OnResume.FREE] = Field(default=None, gt=0)
    """Seconds in which engines join, or a bucket reaches all of them, before it is sent again to those that are left.
    null is half of `engine.update_timeout_s`, and it must be less than that."""
    address: Annotated[str | None, OnResume.FREE] = None
    """Host name or IP address under which ranks and engines reach this machine; null finds it."""

    def exchange_limit_s(self, run: RunConfig | None) -> float | None:
        """Return the seconds of one exchange; None if neither these settings nor the engine's say it."""
        if self.exchange_timeout_s is not None:
            return self.exchange_timeout_s
        limit_s = None if run is None else run.source.facts.update_limit_s
        return None if limit_s is None else limit_s / 2

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        limit_s = run.source.facts.update_limit_s
        if self.exchange_timeout_s is not None and limit_s is not None and self.exchange_timeout_s >= limit_s:
            yield Problem(
                "exchange_timeout_s",
                f"is {self.exchange_timeout_s:g}, but an engine that waits {limit_s:g} s for a bucket is ended "
                "(source.engine.update_timeout_s), so one that stands still would end them all. Remove it, which makes "
                f"it {limit_s / 2:g}, or raise update_timeout_s.",
            )


class CudaIpcSyncConfig(BucketSyncConfig):
    """Send handles of GPU memory, to engines on the GPUs where the weights are."""

    needs_gpu = True
    name: str = "cuda_ipc"
