"""Weight sync `nccl`: GPU to GPU, by vLLM's own weight transfer.

Place on the way: the trainer's GPU -> one broadcast per tensor -> every worker of every engine. The trainer is rank 0
of a group that all workers join with the first bucket. When an engine has been started anew, a new group is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spurline.errors import ConfigError
from spurline.protocols.rollout_engine import TakesWeights, TensorPlace, WeightBucket
from spurline.protocols.weight_sync import SyncReport
from spurline_async_rl.weights.buckets import BucketSync, cut
from spurline_async_rl.weights.configs import NcclSyncConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig
    from spurline.protocols.backend import Backend


class NcclSync(BucketSync):
    """A `WeightSync` for engine `vllm` in mode `engine`."""

    transport = "nccl"

    def __init__(self, config: NcclSyncConfig, run: RunConfig | None = None) -> None:
        if run is not None and run.backend.rank_request() is not None:
            raise ConfigError.at(
                "source.weight_sync.name",
                f"is nccl, which sends from this process, but the weights of backend '{run.backend.name}' are in its "
                "ranks. Set weight_sync: shared_memory, or disk across machines.",
            )
        super().__init__(config, run)
        self._num_workers = 0
        self._engines_started = 0
        self._group: Any = None

    async def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights]) -> SyncReport:
        started = sum(engine.engines_started for engine in engines)
        if started != self._engines_started:
            self._group = None
        self._engines_started = started
        self._num_workers = sum(engine.num_workers for engine in engines)
        return await super().publish(version, backend, engines)

    def make_buckets(self, version: int, backend: Backend) -> Iterator[WeightBucket]:
        for held in cut(backend.named_weights(), self.max_bucket_bytes):
            where: dict[str, Any] = {}
            if self._group is None:
                where["init"] = self._meeting_point()
            places = tuple(TensorPlace.of(name, tensor) for name, tensor in held)
            # The workers wait for the broadcast, and the broadcast for them.
            sent = _in_daemon(self._send, where.get("init"), [tensor for _, tensor in held])
            yield WeightBucket(self.transport, places, where)
            sent.result()

    def close(self) -> None:
        self._group = None

    def _meeting_point(self) -> dict[str, Any]:
        """What a worker needs to join; each engine adds its place to `rank_offset`."""
        from vllm.utils.network_utils import get_ip, get_open_port

        return {
            "master_address": get_ip(),
            "master_port": get_open_port(),
            "rank_offset": 1,
            "world_size": 1 + self._num_workers,
            "packed": False,
        }

    def _send(self, meeting_point: dict[str, Any] | None, tensors: list[Tensor]) -> None:
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        device = torch.cuda.current_device()
        if meeting_point is not None:
            self._group = stateless_init_process_group(
                meeting_point["master_address"], meeting_point["master_port"], 0, meeting_point["world_size"], device
            )
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            self._group.broadcast(tensor.detach().to(device).contiguous(), src=0, stream=stream)
        stream.synchronize()


def _in_daemon(work: Any, *arguments: Any) -> Future[None]:
    """A broadcast to a worker that has died never ends; its thread must not keep the process alive."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="spurline-nccl").start()
    return done
