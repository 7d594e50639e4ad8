"""A Ray cluster of two machines, which are two raylets here, started once for all tests that want one."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

CPUS, GPUS = 4, 2
"""What each of its machines says to have; there are no such GPUs."""


@cache
def two_machines() -> Any:
    """The running `ray.cluster_utils.Cluster`. Its address is for RAY_ADDRESS."""
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    with _environment():
        cluster = Cluster(initialize_head=True, head_node_args=_machine() | {"include_dashboard": False})
    atexit.register(cluster.shutdown)
    # Ray records it as the cluster of this machine, which other runs here would join.
    os.unlink(get_ray_address_file(None))
    add_machine(cluster)
    return cluster


def add_machine(cluster: Any) -> Any:
    """Add a machine and return its handle for `cluster.remove_node`."""
    with _environment():
        node = cluster.add_node(**_machine())
    cluster.wait_for_nodes()
    return node


def _machine() -> dict[str, Any]:
    # The log monitor costs CPU time, and tests do not read logs.
    return {"num_cpus": CPUS, "num_gpus": GPUS, "include_log_monitor": False}


@contextmanager
def _environment() -> Iterator[None]:
    """Set the environment of the raylets, which their processes inherit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(place or os.getcwd() for place in sys.path))
        # Ray would start a process for each CPU.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        yield
