"""AdamW, with moments of full precision or of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter

from spurline.errors import ConfigError
from spurline.importing import quiet_bitsandbytes
from spurline_models.optimizers.configs import AdamW8BitConfig, AdamWConfig
from spurline_models.optimizers.groups import parameter_groups


def make_adamw(config: AdamWConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.AdamW:
    """Optimizer `adamw`."""
    groups = parameter_groups(config, named_parameters)
    # One fused kernel per group, on CPU as on CUDA: several times faster than a kernel per operation and tensor.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def make_adamw_8bit(config: AdamW8BitConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.Optimizer:
    """Optimizer `adamw_8bit`. Raises ConfigError where bitsandbytes is missing or cannot train these parameters."""
    quiet_bitsandbytes()
    try:
        from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError.at(
            "optimizer.name",
            f"is {config.name}, which needs bitsandbytes. Run `pip install spurline-models[optim-8bit]`.",
        ) from error
    double = next((name for name, value in named_parameters.items() if value.dtype == torch.float64), None)
    if double is not None:
        raise ConfigError.at(
            "optimizer.name",
            f"is {config.name}, which has no kernel for float64, and {double} is of that dtype. Use adamw, or "
            "backend.precision: fp32.",
        )
    if config.paged and any(value.device.type == "cpu" for value in named_parameters.values()):
        raise ConfigError.at(
            "optimizer.paged",
            "is true, but moments are paged between the memories of a GPU and the host, and there are trained "
            "parameters on the CPU. Remove it, or train on a GPU.",
        )
    return (_paged_class() if config.paged else AdamW8bit)(
        parameter_groups(config, named_parameters),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        min_8bit_size=config.smallest,
    )


def _paged_class() -> Any:
    """bitsandbytes' paged AdamW, whose moments may have come from a checkpoint, or of one that was not paged."""
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]
    from bitsandbytes.optim.adamw import PagedAdamW8bit  # pyright: ignore[reportMissingImports]

    class Paged(PagedAdamW8bit):
        def prefetch_state(self, p: Any) -> None:
            state = self.state[p]
            for key in ("state1", "state2"):
                moment = state.get(key)
                # A copy of a paged tensor is one of the host, which kernels of the GPU must not be given.
                if moment is not None and moment.device.type == "cpu" and not getattr(moment, "is_paged", False):
                    state[key] = functional.get_paged(*moment.shape, dtype=moment.dtype, device=p.device)
                    state[key].copy_(moment)
                    self.page_mng.paged_tensors.append(state[key])
            super().prefetch_state(p)

    return Paged
