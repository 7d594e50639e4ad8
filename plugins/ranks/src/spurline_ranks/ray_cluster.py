"""The Ray cluster that this process has joined.

All code of this process shares one connection to the cluster, from the first `RayCluster.open` to the last `close`.
Modules that import Ray are imported only if a run places something on a cluster.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from spurline.errors import RunFailedError, UserError
from spurline.threads import call_on_daemon
from spurline_ranks.group import ClusterRequest

Bundle = Mapping[str, float]
"""Resources of one machine, such as `{"GPU": 2, "CPU": 2}`."""

CONNECT_TIMEOUT_S = 60.0
"""Maximum seconds to join a cluster, and maximum seconds of the test in `obeys_strangers`."""
_ANSWER_TIMEOUT_S = 5.0
"""Seconds within which the head of a cluster must answer at its address."""
_RESTART = (
    "Look at `ray status`. Stop the rest of an old cluster with `ray stop`, or set cluster.address or RAY_ADDRESS to "
    "another cluster."
)
_STRANGER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


@dataclass(frozen=True)
class Node:
    """A live machine of the cluster, with its total and its free resources."""

    id: str
    name: str
    resources: Mapping[str, float]
    free: Mapping[str, float] = field(default_factory=dict[str, float])

    def has(self, resource: str) -> float:
        return self.resources.get(resource, 0.0)


class RayCluster:
    """A client of the cluster, from `open` to `close`. All clients in a process share one connection."""

    _lock: ClassVar = threading.Lock()
    _holds: ClassVar[list[RayCluster]] = []
    _has_joined: ClassVar = False
    """Whether this class initialized Ray, and so shuts it down. Otherwise other code does both."""

    def __init__(self, request: ClusterRequest) -> None:
        self._request = request

    def open(self) -> None:
        """Join the cluster. A second call has no effect.

        Raises:
            UserError: If there is no cluster, it does not answer, or this process has joined another cluster.
        """
        with RayCluster._lock:
            if self in RayCluster._holds:
                return
            for other in RayCluster._holds:
                known, own = other._request, self._request
                if (known.address, known.env_vars) != (own.address, own.env_vars):
                    raise UserError(
                        "This process has joined a Ray cluster with another address or runtime_env, and can join only "
                        "one. Use the same settings for both runs."
                    )
            if not RayCluster._holds and not ray.is_initialized():
                _join_in_time(self._request)
                RayCluster._has_joined = True
            RayCluster._holds.append(self)

    def close(self) -> None:
        """Leave the cluster if this process has no other open client. A second call has no effect."""
        with RayCluster._lock:
            if self not in RayCluster._holds:
                return
            RayCluster._holds.remove(self)
            if not RayCluster._holds and RayCluster._has_joined:
                RayCluster._has_joined = False
                ray.shutdown()

    def obeys_strangers(self) -> bool:
        """Return whether the head answers a process without a token. Raises RunFailedError if it cannot be asked."""
        address = ray.get_runtime_context().gcs_address
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
        command = [sys.executable, "-c", _STRANGER, address]
        try:
            asked = subprocess.run(
                command,
                env={**environment, "RAY_AUTH_MODE": "disabled"},
                capture_output=True,
                text=True,
                timeout=CONNECT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"The Ray cluster at {address} did not answer in {CONNECT_TIMEOUT_S:g} s.") from None
        if asked.returncode and "AuthenticationError" not in asked.stderr:
            raise RunFailedError(f"The Ray cluster at {address} could not be asked: {asked.stderr[-300:].strip()}")
        return asked.returncode == 0

    def nodes(self) -> list[Node]:
        """Return the live machines, ordered by name."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        there = Counter(node["NodeManagerHostname"] for node in alive)
        free = available_resources_per_node()
        nodes: list[Node] = []
        for node in alive:
            name, identity = node["NodeManagerHostname"], node["NodeID"]
            # In tests, several nodes run on one machine and have the same name.
            told = name if there[name] == 1 else f"{name} ({identity[:8]})"
            nodes.append(Node(identity, told, node["Resources"], free.get(identity, {})))
        return sorted(nodes, key=lambda node: (node.name, node.id))

    def reserve(self, bundles: Sequence[Bundle]) -> PlacementGroup:
        """Ask for a placement group, without waiting for it. Each bundle is on a machine of its own."""
        return placement_group([dict(bundle) for bundle in bundles], strategy="STRICT_SPREAD")

    def release(self, group: PlacementGroup) -> None:
        """Free the resources of a placement group, and kill the processes there."""
        if ray.is_initialized():
            remove_placement_group(group)

    def actor_options(self, group: PlacementGroup, bundle: int, needs: Bundle) -> dict[str, Any]:
        """Return the options of an actor that runs in this bundle. Ray never restarts the actor."""
        return {
            "num_cpus": needs.get("CPU", 0),
            "num_gpus": needs.get("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        }


def free_of(nodes: Sequence[Node]) -> str:
    """Return a text such as `2 of 4 GPU, 8 of 8 CPU on node1; 0 of 4 GPU, 8 of 8 CPU on node2`."""
    return "; ".join(
        ", ".join(
            f"{node.free.get(kind, 0.0):g} of {node.has(kind):g} {kind}" for kind in ("GPU", "CPU") if node.has(kind)
        )
        + f" on {node.name}"
        for node in nodes
    )


def _join_in_time(request: ClusterRequest) -> None:
    try:
        # On the main thread Ray would replace the handler of SIGTERM.
        call_on_daemon("spurline-ray", _join, request).result(CONNECT_TIMEOUT_S)
    except TimeoutError:
        raise UserError(f"The Ray cluster has not answered for {CONNECT_TIMEOUT_S:g} s. {_RESTART}") from None


def _join(request: ClusterRequest) -> None:
    """Join the cluster. Raises UserError if there is none, or it does not answer."""
    try:
        # If the address is None, Ray chooses one.
        wanted: Any = None if request.address == "auto" else request.address
        address = canonicalize_bootstrap_address(wanted)
        if address is None:
            raise ConnectionError("there is none on this machine. Start one with `ray start --head`")
        _check_answers(address)
        # log_to_driver would disturb the console tracker. Our errors show the end of a process's log.
        environment = {"env_vars": dict(request.env_vars)}
        ray.init(address, runtime_env=environment, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"The Ray cluster cannot be joined: {error}. {_RESTART}") from error


def _check_answers(address: str) -> None:
    """Raise ConnectionError if nothing answers at the address of a head. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(
            f"the head of the cluster does not answer at {address} ({error.strerror or error})"
        ) from error
