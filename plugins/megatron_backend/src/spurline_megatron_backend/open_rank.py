"""Prepare a process for Megatron-core, and make a rank in this process.

A rank imports this module before it joins the other ranks, and must not touch a GPU until then. So this module imports
Megatron-core at once only if there are no GPUs. With GPUs `open_rank` does so, since the import looks at the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_models.machine import num_gpus
from spurline_ranks.group import Place
from spurline_ranks.messages import read_run

if TYPE_CHECKING:
    from spurline_megatron_backend.rank import MegatronRank


def _import_rank() -> type[MegatronRank]:
    import megatron.core.jit

    # This must run before the other imports. Otherwise small functions are compiled for each new number of tokens.
    megatron.core.jit.disable_jit_fuser()
    from spurline_megatron_backend.rank import MegatronRank

    return MegatronRank


if not num_gpus():
    _import_rank()


def open_rank(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> MegatronRank:
    """Make a rank of this backend."""
    run, registry = read_run(plain_run)
    rank = _import_rank()
    if cast(MegatronBackendConfig, run.backend).on == "cpu":
        from spurline_megatron_backend.cpu_debug import run_on_cpu

        run_on_cpu()
    return rank(place, run, registry, total_updates)
