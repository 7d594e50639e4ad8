"""The loops, compiled by numba without the interpreter lock, once per machine: the code is cached on disk.

numba keeps the cache beside the source, or in the user's cache folder where the package is read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from spurline_collation_fast.kernels import Kernels, fitting, loops
from spurline_collation_fast.packing import Planner


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # No folder is writable; compiling in each process costs seconds, failing would cost the run.
        return njit(nogil=True)(function)


KERNELS = Kernels(
    name="numba",
    write_tokens=_compiled(loops.write_tokens),
    write_segment_ids=_compiled(loops.write_segment_ids),
    write_positions=_compiled(loops.write_positions),
    write_values=_compiled(loops.write_values),
    plan_rows=Planner(
        _compiled(fitting.first_fit), _compiled(fitting.best_fit), _compiled(fitting.arrange_rows)
    ).plan_rows,
)
