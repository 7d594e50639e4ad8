"""Reserve room (CPUs and GPUs) on a Ray cluster for all processes that a run places there, before anything loads.

Code that starts actors calls `room_for`, which returns the room that is reserved for a `ClusterNeed`, or reserves it.
Only runs that place something on Ray import this module.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from spurline.errors import ConfigError, RunFailedError
from spurline_ranks.group import ClusterNeed, ClusterRequest
from spurline_ranks.machine_actor import MachineActor
from spurline_ranks.outcomes import Raised, unpacked
from spurline_ranks.ray_cluster import Bundle, Node, RayCluster, free_of

_SLICE_S = 2.0
"""Maximum seconds of one blocking wait for Ray, during which Ctrl-C has no effect."""
_ANSWER_TIMEOUT_S = 300.0
"""Seconds that a machine has to start a process and answer a question."""


@dataclass(frozen=True)
class Place:
    """A placement group with its bundles and their machines. Its room stays reserved until `RayCluster.release`."""

    group: PlacementGroup
    bundles: Sequence[Bundle]
    nodes: Sequence[Node]


_reserved: dict[ClusterNeed, list[Place]] = {}
"""Reserved room of a run that `room_for` has not returned yet."""
_reserved_lock = threading.Lock()


@contextmanager
def reserved_room(request: ClusterRequest, needs: Sequence[ClusterNeed]) -> Iterator[Callable[..., Mapping[str, Any]]]:
    """Reserve room for all needs of a run. The run's code takes parts of it with `room_for` while the context is open.

    Yields:
        A function that calls `module:function` with plain data in a process of each machine, and returns the answers
        by machine. It raises the error of a machine, or RunFailedError if a machine does not answer.

    Raises:
        ConfigError: If there is too little room. The message names the free resources.
    """
    cluster = RayCluster(request)
    cluster.open()
    try:
        found = _reserve(cluster, needs, "cluster", request.room_timeout_s)
        with _reserved_lock:
            for need, places in zip(needs, found, strict=True):
                _reserved.setdefault(need, []).extend(places)
        yield partial(_ask, cluster, [place for places in found for place in places])
    finally:
        with _reserved_lock:
            left = [place for places in _reserved.values() for place in places]
            _reserved.clear()
        for place in left:
            cluster.release(place.group)
        cluster.close()


def _ask(cluster: RayCluster, places: Sequence[Place], function: str, *arguments: Any) -> Mapping[str, Any]:
    bundles = {node.name: (place.group, number) for place in places for number, node in enumerate(place.nodes)}
    actors: dict[str, Any] = {}
    try:
        for name, (group, number) in bundles.items():
            actors[name] = ray.remote(MachineActor).options(**cluster.actor_options(group, number, {})).remote()
        asked = {name: actor.run.remote(function, *arguments) for name, actor in actors.items()}
        found = answers(asked, _ANSWER_TIMEOUT_S)
    finally:
        for actor in actors.values():
            ray.kill(actor)
    if silent := [name for name in actors if name not in found]:
        raise RunFailedError(
            f"{', '.join(silent)} did not answer `{function}` within {_ANSWER_TIMEOUT_S:g} s. Look at `ray status`."
        )
    return found


def room_for(
    cluster: RayCluster, need: ClusterNeed, setting: str, timeout_s: float, given_up: Callable[[], bool] = lambda: False
) -> list[Place]:
    """Return the reserved room of this run for a need, or reserve it now.

    Args:
        cluster: The cluster.
        need: The processes. If they are `together` they get one `Place` for all, otherwise one `Place` each.
        setting: The section that an error names.
        timeout_s: Seconds to wait for room.
        given_up: A function that ends the wait by returning True.

    Raises:
        ConfigError: If there is too little room. The message names the wanted and the free resources.
        RunFailedError: If `given_up` returns True.
    """
    with _reserved_lock:
        places = _reserved.pop(need, [])
    return places or _reserve(cluster, [need], setting, timeout_s, given_up)[0]


def _reserve(
    cluster: RayCluster,
    needs: Sequence[ClusterNeed],
    setting: str,
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
) -> list[list[Place]]:
    before = cluster.nodes()
    plans = [_plan(need, before) for need in needs]
    wishes = "; ".join(_wish(need, plan[0]) for need, plan in zip(needs, plans, strict=True))
    lack = f"the run wants {wishes}. Free are {free_of(before)}"
    until, told = time.monotonic() + timeout_s, False
    groups: list[list[PlacementGroup]] = []
    try:
        for plan in plans:
            groups.append([cluster.reserve(bundles) for bundles in plan])
            # Ranks come first and need whole machines. Engines, if placed first, could take a part of each machine.
            for group in groups[-1]:
                while not group.wait(_SLICE_S):
                    if not told:
                        print(f"Waiting for room, {timeout_s:g} s at most: {lack}.", file=sys.stderr, flush=True)
                        told = True
                    if given_up():
                        raise RunFailedError("The wait for room on the cluster was given up.")
                    if time.monotonic() >= until:
                        raise ConfigError.at(
                            setting,
                            f"does not fit on the cluster: {lack}. Ask for fewer resources, add machines with `ray "
                            "start --address=...`, or wait until other runs end.",
                        )
        machines = cluster.nodes()
        return [
            [placed(group, bundles, machines) for group, bundles in zip(of_need, plan, strict=True)]
            for of_need, plan in zip(groups, plans, strict=True)
        ]
    except BaseException:
        for group in (group for of_need in groups for group in of_need):
            cluster.release(group)
        raise


def placed(group: PlacementGroup, bundles: Sequence[Bundle], machines: Sequence[Node]) -> Place:
    """Return the `Place` of a placement group that is ready. `machines` are all machines of the cluster."""
    place_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    by_id = {node.id: node for node in machines}
    return Place(group, bundles, [by_id[place_of_bundle[number]] for number in range(len(bundles))])


def each_needs(need: ClusterNeed, nodes: Sequence[Node]) -> dict[str, float]:
    """Return the resources of one process. An optional GPU is left out if the cluster has none."""
    has_gpus = any(node.has("GPU") for node in nodes)
    gpus = need.gpus if has_gpus or not need.gpus_if_any else 0
    return {**({"GPU": float(gpus)} if gpus else {}), "CPU": float(need.cpus)}


def _plan(need: ClusterNeed, nodes: Sequence[Node]) -> list[list[Bundle]]:
    """Return the bundles of each placement group for a need."""
    each = each_needs(need, nodes)
    if not need.together:
        return [[each]] * need.count
    per_machine = ranks_per_machine(need, nodes)
    bundle = {resource: amount * per_machine for resource, amount in each.items()}
    return [[bundle] * (need.count // per_machine)]


def ranks_per_machine(need: ClusterNeed, nodes: Sequence[Node]) -> int:
    """Return the number of processes on each machine: `need.per_machine` if it is set, else as many as fit.

    Raises:
        ConfigError: If the machines are not equal, or the processes do not fill them.
    """
    resource, each = ("GPU", need.gpus) if need.gpus else ("CPU", need.cpus)
    room = {node.name: int(node.has(resource) // each) for node in nodes if node.has(resource) >= each}
    # If no machine has room for a process, the later wait for room ends in an error.
    most = max(room.values(), default=need.count)
    per_machine = min(need.count, need.per_machine or most)
    if need.per_machine is None and most < need.count and len(set(room.values())) > 1:
        listed = ", ".join(f"at most {count} on {name}" for name, count in room.items())
        raise ConfigError.at(
            "backend", f"has to spread {need.count} ranks over unequal machines, {listed}. Set ranks_per_node."
        )
    if need.count % per_machine:
        raise ConfigError.at(
            "backend",
            f"has {need.count} ranks, which do not fill machines with {per_machine} ranks each. Set ranks to a "
            f"multiple of {per_machine}, or ranks_per_node to a divisor of {need.count}.",
        )
    return per_machine


def _wish(need: ClusterNeed, bundles: Sequence[Bundle]) -> str:
    """Return a text such as `8 ranks with 8 GPU, 8 CPU on each of 2 machines`."""
    amounts = ", ".join(f"{count:g} {resource}" for resource, count in bundles[0].items())
    where = f" on each of {len(bundles)} machines" if need.together else " for each"
    return f"{need.count} {need.kind} with {amounts}{where}"


def answers(asked: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the answers that come within the limit, by machine. Dead actors give no answers.

    Args:
        asked: The reference that Ray returned for the call of each actor, by machine. The answers are packed outcomes.
        limit_s: Seconds to wait.

    Raises:
        SpurlineError: If a machine raises it. Other errors become a RunFailedError.
    """
    until, ready, waiting = time.monotonic() + limit_s, list[Any](), list(asked.values())
    while waiting and (left := until - time.monotonic()) > 0:
        more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(_SLICE_S, left))
        ready += more
    found: dict[str, Any] = {}
    for machine, answer in asked.items():
        if answer not in ready:
            continue
        with suppress(RayError):
            outcome = unpacked(ray.get(answer))
            if isinstance(outcome, Raised):
                error = outcome.error or RunFailedError(f"A process of the cluster failed: {outcome.traceback}")
                error.add_note(f"This is from {machine}.")
                raise error
            found[machine] = outcome.value
    return found
