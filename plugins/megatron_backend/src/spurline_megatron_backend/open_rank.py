"""Make a process ready for Megatron-core, and open the rank in it: what the controller names as the worker.

Ranks are forked from a process that has imported this module. With GPUs it imports nothing of Megatron-core, which
looks at the device of the process when it is imported; without any it imports all of it, as that takes seconds.
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

    # Modules imported from here on would otherwise have torch compile small functions, such as one that every router
    # calls, again for each new number of tokens.
    megatron.core.jit.disable_jit_fuser()
    from spurline_megatron_backend.rank import MegatronRank

    return MegatronRank


if not num_gpus():
    _import_rank()


def open_rank(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> MegatronRank:
    """A `Worker`."""
    run, registry = read_run(plain_run)
    rank = _import_rank()
    if cast(MegatronBackendConfig, run.backend).on == "cpu":
        from spurline_megatron_backend.cpu_debug import run_on_cpu

        run_on_cpu()
    return rank(place, run, registry, total_updates)
