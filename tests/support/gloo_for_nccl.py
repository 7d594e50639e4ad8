"""Let vLLM's weight transfer `nccl` run on CPUs: a plugin of vLLM that replaces only the communicator, by gloo.

A test server loads it through an entry point, as vLLM loads all its plugins; the test itself calls `use_gloo`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist


class GlooCommunicator:
    """The interface of vLLM's PyNcclCommunicator."""

    def __init__(self, group: Any, device: Any) -> None:
        options: Any = cast("Any", dist.ProcessGroupGloo)._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group: Any = dist.ProcessGroupGloo(group.store, group.rank, group.world_size, options)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None: ...


def use_gloo(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """replace: called with an object, and the name and the new value of an attribute."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    replace(pynccl, "PyNcclCommunicator", GlooCommunicator)
    replace(packed_tensor, "_get_streams", lambda _, count: [SimpleNamespace(synchronize=lambda: None)] * count)
    replace(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    replace(torch.accelerator, "synchronize", lambda: None)
    replace(torch.accelerator, "current_device_index", lambda: 0)


def install(folder: Path) -> str:
    """Write the metadata of a package with the plugin. Return the PYTHONPATH with which a server finds it."""
    info = folder / "gloo_for_nccl-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-for-nccl\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo = gloo_for_nccl:use_gloo\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
