"""Weight sync `vllm_native`: send weights to stock vLLM servers over vLLM's own weight transfer, with NCCL.

The process with the weights has one group with the workers of each server, and broadcasts each bucket in all groups at
once, as vLLM's backend `nccl` expects it. A worker of vLLM cannot leave a broadcast that does not end, so in a common
group one dead server would stop all others.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

from spurline.terminal import tell
from spurline.threads import call_on_daemon
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.exchange import Meeting, address_towards
from spurline_models.weight_buckets import TensorPlace, WeightBucket

GROUPS = "groups"
"""Key of a bucket's `where`, with vLLM's `init_info` of each server's group, unless sending to the server failed."""
_POLL_S = 0.01
_WHOLE_BUCKET = 1 << 62
"""vLLM divides what it receives into parts that are a little larger than this many bytes."""


class NativeSync(CollectiveSync):
    """A `WeightSync` to servers of vLLM. No bucket is lost: a server that does not get one counts as dead."""

    transport = "vllm_native"
    maker = f"{__name__}:TransferMaker"
    made_by = "first"

    def note_receivers(self, receivers: Mapping[str, int]) -> None:
        if self._meeting is not None and self._store is not None:
            for name in self._receivers.keys() - receivers.keys():
                self._meeting.end(self._store, f"{name} ended while weights were on their way", name)
            # A server that is only late gets a new group in its next publish.
            self._receivers = {name: count for name, count in self._receivers.items() if name in receivers}

    def _give_up(self, why: str) -> None:
        self.note_receivers({})


class TransferMaker:
    """A `BucketMaker` that broadcasts each bucket in the groups of all servers.

    Args:
        meeting: The fields of a `Meeting`. It tells the servers, and when not to wait for one of them any longer.
    """

    def __init__(self, meeting: Mapping[str, Any]) -> None:
        self._meeting = Meeting(**meeting)
        self._store = TCPStore(self._meeting.host, self._meeting.port, is_master=False)
        address = own = address_towards(self._meeting.host)
        if own.startswith("127.") and not self._meeting.host.startswith(("127.", "localhost")):
            # Many systems map their own name to the loopback, but other machines know it by another address.
            address, own = self._meeting.host, ""
        self._groups = {name: _ServerGroup(address, own, count) for name, count in self._meeting.receivers.items()}

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        # vLLM wants no gaps in the buffer. Every tensor is aligned if those with larger elements come first.
        held = sorted(weights, key=lambda pair: -pair[1].element_size())
        places = tuple(TensorPlace.of(name, tensor) for name, tensor in held)
        self.taken()
        flat = [tensor.detach().to(self._meeting.device).reshape(-1).view(torch.uint8) for _, tensor in held]
        buffer = torch.cat(flat)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()
        for group in self._groups.values():
            # The first send waits until the workers have joined.
            group.sent = call_on_daemon("spurline-broadcast", group.send, buffer)
        groups = {name: group.init_info for name, group in self._groups.items()}
        return WeightBucket(NativeSync.transport, places, {GROUPS: groups})

    def close(self) -> None:
        for group in self._groups.values():
            group.leave()

    def taken(self) -> None:
        """Wait until all servers have the last bucket. Leave the groups of servers that cannot get it."""
        for name, group in [*self._groups.items()]:
            while not (has_ended := self._meeting.failure(self._store, name) is not None) and not group.sent.done():
                time.sleep(_POLL_S)
            error = None if has_ended else group.sent.exception()
            if error is not None:
                tell(f"{name} gets no more weights, because sending failed: {type(error).__name__}: {error}")
            if has_ended or error is not None:
                self._groups.pop(name).leave()


class _ServerGroup:
    """The group of this process, which has rank 0, and the workers of one server.

    Attributes:
        init_info: The arguments with which vLLM's workers join the group.
        sent: The last send.
    """

    def __init__(self, address: str, own: str, num_workers: int) -> None:
        # Nothing else can get the port while it is open.
        self._listener = socket.create_server((own, 0))
        self.init_info: dict[str, Any] = {
            "master_address": address,
            "master_port": self._listener.getsockname()[1],
            "rank_offset": 1,
            "world_size": 1 + num_workers,
            "packed": True,
            "packed_buffer_size_bytes": _WHOLE_BUCKET,
        }
        self._communicator: Any = None
        self._is_left = False
        self.sent: Future[None] = Future()
        self.sent.set_result(None)

    def leave(self) -> None:
        self._is_left = True
        self._listener.close()
        # Otherwise the kernel of a send that hangs would go on waiting.
        if self._communicator is not None:
            self._communicator.destroy()

    def send(self, buffer: Tensor) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        stream = None
        if buffer.is_cuda:
            torch.cuda.set_device(buffer.device)
            # On the default stream, a send that hangs would stop all work of the trainer.
            stream = torch.cuda.Stream()
        if self._communicator is None:
            host, port, size = (self.init_info[key] for key in ("master_address", "master_port", "world_size"))
            group = StatelessProcessGroup.create(host, port, 0, size, listen_socket=self._listener)
            communicator = PyNcclCommunicator(group, buffer.device)
            if self._is_left:
                communicator.destroy()
                return
            self._communicator = communicator
        self._communicator.broadcast(buffer, src=0, stream=stream)
        if stream is not None:
            stream.synchronize()
