"""What transports between GPUs need, said before anything is started."""

from __future__ import annotations

import torch

from spurline.errors import ConfigError, Problem
from spurline_async_rl.vllm.launch import require_vllm


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
