"""What transports between GPUs need, said before anything is started.

Choose the way of weights to the engines.

In: what the config says, the engine, the registered transports. Out: the config of the transport to create.
"""

from __future__ import annotations

from typing import cast

import torch

from spurline.config.section import ComponentConfig
from spurline.errors import ConfigError, Problem, listing
from spurline.plugins.registry import Registry
from spurline.protocols.rollout_engine import TakesWeights
from spurline.protocols.weight_sync import WeightSyncConfig
from spurline_async_rl.engines.vllm.launch import require_vllm


def require_gpu(transport: str) -> None:
    """Raise ConfigError on a machine where this transport cannot work."""
    if not torch.cuda.is_available():
        raise ConfigError(
            [
                Problem(
                    "source.weight_sync.name",
                    f"is {transport}, which sends from GPU to GPU, but torch sees no GPU. Set weight_sync: "
                    "shared_memory, or check nvidia-smi.",
                )
            ]
        )
    require_vllm()


def choose_sync(given: ComponentConfig | None, engine: TakesWeights, registry: Registry) -> ComponentConfig:
    """given: the config's `weight_sync`. Without one, the first of the engine's transports that can be used here.

    Raises ConfigError naming both sides when they do not fit.
    """
    reads = f"which reads {listing(engine.transports)}"
    if given is not None:
        if given.name.rpartition("/")[2] not in engine.transports:
            raise _refused(
                "source.weight_sync.name",
                f"is {given.name}, which the chosen source.engine does not read: it takes weights by "
                f"{listing(engine.transports)}. Set one of these, or leave weight_sync out.",
            )
        return given
    registered = registry.names("weight_sync")
    for name in engine.transports:
        if name in registered:
            config = cast("type[WeightSyncConfig]", registry.get("weight_sync", name).config)
            if torch.cuda.is_available() or not config.needs_gpu:
                return config(name=name)
    raise _refused(
        "source.engine.name",
        f"chooses an engine, {reads}; this run has {listing(registered)} (without a GPU no nccl "
        "or cuda_ipc). Choose another engine, or enable the plugin that brings the transport.",
    )


def _refused(key: str, text: str) -> ConfigError:
    return ConfigError([Problem(key, text)])
