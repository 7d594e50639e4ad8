"""The Ray cluster that this process works with: one that it joins, or one of this machine alone that it starts.

All that this process places on Ray shares one connection, from the first `RayCluster.open` to the last `close`. Only
this module and `ray_actors` import Ray, and they are imported only if something is placed on Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from spurline.errors import UserError
from spurline_ranks.group import ClusterRequest
from spurline_ranks.ray_protection import folder_of_ours, obeys_strangers, read_authentication, starting_for_us_alone

Bundle = Mapping[str, float]
"""Resources of one machine, such as `{"GPU": 2, "CPU": 2}`."""

_OWN_CPUS = 1024
"""CPUs of a cluster that is started here. They are only counted, and are so many that no placement lacks one."""
_OWN_SETTINGS = {
    # It would start a process for each of the counted CPUs.
    "prestart_worker_first_driver": False,
}
CONNECT_TIMEOUT_S = 60.0
"""Seconds until a cluster has been joined or started."""
_ANSWER_TIMEOUT_S = 5.0
"""Seconds that the head of a cluster has to answer at its address."""
_RESTART = (
    "Look at `ray status`; stop what is left of a cluster with `ray stop`, or set cluster.address or RAY_ADDRESS to "
    "another one."
)


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is alive. id: Ray's. name: for people. resources: all that it has to give.
    free: what of that nobody has."""

    id: str
    name: str
    resources: Mapping[str, float]
    free: Mapping[str, float] = field(default_factory=dict[str, float])

    def has(self, resource: str) -> float:
        return self.resources.get(resource, 0.0)


class RayCluster:
    """One user's hold on the cluster, from `open` to `close`."""

    def __init__(self, request: ClusterRequest) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._is_open = False

    def open(self) -> None:
        """Join the cluster, or start one where it may be any and there is none. May be called again.

        Raises:
            UserError: If the cluster does not answer, or this process has opened another one.
        """
        with self._lock:
            if not self._is_open:
                _CONNECTION.enter(self._request)
                self._is_open = True

    def close(self) -> None:
        """The last one ends a cluster that was started here. May be called again."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                _CONNECTION.leave()

    @property
    def is_own(self) -> bool:
        """True where it was started here, so that no machine will be added to it."""
        return _CONNECTION.is_own

    def obeys_strangers(self) -> bool:
        """Return whether a process without a token can run code on it."""
        return obeys_strangers(ray.get_runtime_context().gcs_address)

    def nodes(self) -> list[Node]:
        """Return those that are alive, in an order that stays."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        there = Counter(node["NodeManagerHostname"] for node in alive)
        free = available_resources_per_node()
        nodes: list[Node] = []
        for node in alive:
            name, identity = node["NodeManagerHostname"], node["NodeID"]
            # Several may run on one machine.
            told = name if there[name] == 1 else f"{name} ({identity[:8]})"
            nodes.append(Node(identity, told, node["Resources"], free.get(identity, {})))
        return sorted(nodes, key=lambda node: (node.name, node.id))

    def reserve(self, bundles: Sequence[Bundle], strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]) -> PlacementGroup:
        """Ask for a placement group, each bundle on one machine; wait for its `ready()`."""
        return placement_group([dict(bundle) for bundle in bundles], strategy=strategy)

    def release(self, group: PlacementGroup) -> None:
        """Give its resources back; what runs there is killed."""
        if ray.is_initialized():
            remove_placement_group(group)

    def actor_options(self, group: PlacementGroup, bundle: int, needs: Bundle) -> dict[str, Any]:
        """Return the options of an actor in that bundle, which is never started a second time."""
        return {
            "num_cpus": needs.get("CPU", 0),
            "num_gpus": needs.get("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        }


def amounts(resources: Mapping[str, float]) -> str:
    """Such as `2 GPU, 8 CPU`."""
    return ", ".join(f"{count:g} {resource}" for resource, count in resources.items())


def free_of(nodes: Sequence[Node]) -> str:
    """Such as `2 of 4 GPU, 8 of 8 CPU on node1; 0 of 4 GPU, 8 of 8 CPU on node2`."""
    return "; ".join(
        ", ".join(
            f"{node.free.get(kind, 0.0):g} of {node.has(kind):g} {kind}" for kind in ("GPU", "CPU") if node.has(kind)
        )
        + f" on {node.name}"
        for node in nodes
    )


class _Connection:
    """The one connection of this process to a cluster."""

    def __init__(self) -> None:
        self.is_own = False
        self._lock = threading.Lock()
        self._users = 0
        self._request = ClusterRequest()
        self._keeper: threading.Thread | None = None
        self._leaving = threading.Event()

    def enter(self, request: ClusterRequest) -> None:
        with self._lock:
            if not self._users:
                self._request = request
                # Otherwise the code that has initialized Ray in this process also ends it.
                if not ray.is_initialized():
                    self._start()
            elif (self._request.address, self._request.env_vars) != (request.address, request.env_vars):
                raise UserError(
                    "This process has joined a Ray cluster with another address or runtime_env, and can be in one "
                    "alone. Give both runs the same."
                )
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self._keeper is None:
                return
            self._leaving.set()
            self._keeper.join()
            self._keeper = None

    def _start(self) -> None:
        started: Future[None] = Future()
        self._leaving.clear()
        # Processes of a cluster that is started here end with the thread that started them, which so must be one of
        # its own; and on the main thread Ray would take SIGTERM for itself.
        self._keeper = threading.Thread(target=self._keep, args=(started,), name="spurline-ray", daemon=True)
        self._keeper.start()
        try:
            started.result(CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise UserError(f"The Ray cluster has not answered for {CONNECT_TIMEOUT_S:g} s. {_RESTART}") from None

    def _keep(self, started: Future[None]) -> None:
        with ExitStack() as until_left:
            until_left.callback(_forget_protection, set(os.environ))
            try:
                self.is_own = _connect(self._request, until_left)
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                started.set_exception(error)
                return
            started.set_result(None)
            self._leaving.wait()
            ray.shutdown()


_CONNECTION = _Connection()


def _forget_protection(before: Collection[str]) -> None:
    """Take back how Ray protected a cluster, or processes of ours could not join another one.

    before: names of the variables of the environment that there were.
    """
    for name in set(os.environ) - set(before):
        if name.startswith("RAY_"):
            del os.environ[name]
    read_authentication()


def _connect(request: ClusterRequest, until_left: ExitStack) -> bool:
    """Join the cluster there is, or start one; returns whether it was started. until_left: frees what that one has."""
    # Not `address="auto"`: that also finds the own cluster of another run on this machine, which ends with it.
    address = None if request.address == "auto" else request.address
    try:
        # What Ray would join, so that it is asked before Ray waits for it.
        joined = canonicalize_bootstrap_address(address)  # pyright: ignore[reportArgumentType] - None is for any
        if joined is not None:
            _check_answers(joined)
    except (OSError, ValueError) as error:
        raise _cannot_join(error) from error
    # log_to_driver would write over the terminal's tracker; errors carry the end of what their process said.
    init = partial(ray.init, logging_level=logging.ERROR, log_to_driver=False)
    if joined is None:
        # On this very machine modules are found where this process finds them.
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        here = {"env_vars": {"PYTHONPATH": path, **request.env_vars}}
        own = {"num_cpus": _OWN_CPUS, "include_dashboard": False, "_system_config": _OWN_SETTINGS}
        folder = until_left.enter_context(folder_of_ours())
        with starting_for_us_alone():
            init("local", **own, _temp_dir=folder, runtime_env=here)
        return True
    try:
        init(joined, runtime_env={"env_vars": dict(request.env_vars)})
        return False
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _cannot_join(error) from error


def _check_answers(address: str) -> None:
    """Raise OSError where nobody answers at the address of a head: Ray itself asks for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(
            f"nobody answers at {address} ({error.strerror or error}), where the head of the cluster should be"
        ) from error


def _cannot_join(error: Exception) -> UserError:
    return UserError(f"The Ray cluster cannot be joined: {error}. {_RESTART}")
