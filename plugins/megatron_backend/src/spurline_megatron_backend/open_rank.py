"""Prepare a process for Megatron-core, and make a rank in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import megatron.core.jit

# This must run before the other imports. Otherwise small functions are compiled for each new number of tokens.
megatron.core.jit.disable_jit_fuser()

from spurline_megatron_backend.configs import MegatronBackendConfig  # noqa: E402
from spurline_megatron_backend.rank import MegatronRank  # noqa: E402
from spurline_ranks.group import Place  # noqa: E402
from spurline_ranks.messages import read_run  # noqa: E402


def open_rank(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> MegatronRank:
    """Make a rank of this backend."""
    run, registry = read_run(plain_run)
    if cast(MegatronBackendConfig, run.backend).on == "cpu":
        from spurline_megatron_backend.cpu_debug import run_on_cpu

        run_on_cpu()
    return MegatronRank(place, run, registry, total_updates)
