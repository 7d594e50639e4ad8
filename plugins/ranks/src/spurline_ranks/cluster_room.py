"""Room on a Ray cluster for all that one run places there: reserved at once, before anything loads, and handed out.

Place on the way: `ClusterNeed` of ranks and engines -> placement groups that are ready -> whoever starts actors there.
Whoever finds nothing reserved for its need reserves it by itself, in the same way. Imported only where something is
placed on Ray.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from spurline.errors import ConfigError, RunFailedError
from spurline.protocols.ranks import ClusterNeed
from spurline_ranks.calls import PATIENCE_S
from spurline_ranks.cluster_checks import NodeChecks
from spurline_ranks.group import ClusterRequest
from spurline_ranks.outcomes import Outcome, Raised, Value
from spurline_ranks.ray_cluster import Bundle, Node, RayCluster, amounts
from spurline_ranks.ray_node import NodeActor, unpacked

Strategy = Literal["STRICT_PACK", "STRICT_SPREAD"]

SLICE_S = 2.0
"""Seconds of one wait for Ray: an interruption is seen only in between."""
_ANSWER_TIMEOUT_S = 600.0
"""Seconds that a machine has for what is done as soon as it is there, the start of a process included."""
_DOWNLOAD_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Place:
    """Room that is one's own until `RayCluster.release`. group: its placement group. bundles: what each machine of it
    has to give. nodes: the machine of each bundle."""

    group: PlacementGroup
    bundles: Sequence[Bundle]
    nodes: Sequence[Node]


class RunRoom:
    """All room of a run, from `reserve` to `close`; processes of this run take their parts with `room_for`."""

    def __init__(self, request: ClusterRequest) -> None:
        self._request = request
        self._cluster = RayCluster(request)

    def reserve(self, needs: Mapping[str, ClusterNeed], check: NodeChecks) -> None:
        """Wait for room for all of it, and check the machines on which no ranks are: ranks check their own.

        needs: by the key of the section. Raises ConfigError with the numbers when there is no room in time, and what
        `check` raises.
        """
        self._cluster.open()
        found = _reserve(self._cluster, list(needs.values()), "cluster", self._request.room_timeout_s)
        for need, places in zip(needs.values(), found, strict=True):
            _RESERVED.put(need, places)
        of_ranks = [places for need, places in zip(needs.values(), found, strict=True) if need.together]
        ranks = {node.id for places in of_ranks for place in places for node in place.nodes}
        others = {place.nodes[0].id: place for places in found for place in places if place.nodes[0].id not in ranks}
        if others:
            self._check(others, check)

    def close(self) -> None:
        """Give back what nobody has taken. May be called again."""
        for place in _RESERVED.clear():
            self._cluster.release(place.group)
        self._cluster.close()

    def _check(self, places: Mapping[str, Place], check: NodeChecks) -> None:
        kind = ray.remote(NodeActor)
        watchers: dict[str, Any] = {}
        try:
            for place in places.values():
                options: dict[str, Any] = self._cluster.actor_options(place.group, 0, {})
                watchers[place.nodes[0].name] = kind.options(**options).remote()

            def ask(function: str, *arguments: Any, doing: str | None = None) -> Mapping[str, Any]:
                limit_s = _ANSWER_TIMEOUT_S if doing is None else _DOWNLOAD_TIMEOUT_S
                what = doing or f"answer `{function}`"
                answers: dict[str, Any] = {}
                for name, outcome in outcomes_of(watchers, function, arguments, what, limit_s).items():
                    if isinstance(outcome, Raised):
                        error = outcome.error() or RunFailedError(f"`{function}` failed: {outcome.traceback}")
                        error.add_note(f"This is from {name}, where engines are placed.")
                        raise error
                    assert isinstance(outcome, Value), outcome
                    answers[name] = outcome.value
                return answers

            check(ask)
        finally:
            for watcher in watchers.values():
                ray.kill(watcher)


class _Reserved:
    """What a run of this process has reserved, and nobody has taken yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[ClusterNeed, list[Place]] = {}

    def put(self, need: ClusterNeed, places: Sequence[Place]) -> None:
        with self._lock:
            self._places.setdefault(need, []).extend(places)

    def take(self, need: ClusterNeed) -> list[Place]:
        with self._lock:
            return self._places.pop(need, [])

    def clear(self) -> list[Place]:
        with self._lock:
            left = [place for places in self._places.values() for place in places]
            self._places = {}
            return left


_RESERVED = _Reserved()


def room_for(
    cluster: RayCluster, need: ClusterNeed, setting: str, timeout_s: float, given_up: Callable[[], bool] = lambda: False
) -> list[Place]:
    """The room that this run has reserved for this need, or else room that is reserved now: one place for all processes
    that are `together`, or one for each.

    setting: the section to name. given_up: whether nobody wants it any more. Raises ConfigError with the numbers when
    there is no room within the limit, RunFailedError when it was given up.
    """
    return _RESERVED.take(need) or _reserve(cluster, [need], setting, timeout_s, given_up)[0]


def _reserve(
    cluster: RayCluster,
    needs: Sequence[ClusterNeed],
    setting: str,
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
) -> list[list[Place]]:
    """Room for each of these, in this order."""
    before = cluster.nodes()
    plans = [_plan(need, before) for need in needs]
    lacks = _in_words(needs, plans, before)
    # Nobody else uses an own cluster, and no machine will be added to it.
    limit_s = 0.0 if cluster.is_own and not all(_could_fit(plan, before) for plan in plans) else timeout_s
    until, told = time.monotonic() + limit_s, False
    groups: list[list[PlacementGroup]] = []
    try:
        for plan in plans:
            groups.append([cluster.reserve(bundles, strategy) for bundles, strategy in plan])
            # One kind after the other: engines would take pieces of machines that ranks need as a whole.
            for group in groups[-1]:
                while not group.wait(SLICE_S):
                    if not told:
                        print(f"Waiting for room, {limit_s:g} s at most: {lacks}.", file=sys.stderr, flush=True)
                        told = True
                    if given_up():
                        raise RunFailedError("The wait for room on the cluster was given up.")
                    if time.monotonic() >= until:
                        raise ConfigError.at(
                            setting,
                            f"finds no room: {lacks}. Ask for fewer, add machines with `ray start --address=...`, or "
                            "wait for those who use them.",
                        )
        machines = cluster.nodes()
        return [
            [placed(group, bundles, machines) for group, (bundles, _) in zip(of_need, plan, strict=True)]
            for of_need, plan in zip(groups, plans, strict=True)
        ]
    except BaseException:
        for group in (group for of_need in groups for group in of_need):
            cluster.release(group)
        raise


def placed(group: PlacementGroup, bundles: Sequence[Bundle], machines: Sequence[Node]) -> Place:
    """A placement group that is ready, of these bundles, and where it is. machines: of the cluster."""
    place_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    by_id = {node.id: node for node in machines}
    return Place(group, bundles, [by_id[place_of_bundle[number]] for number in range(len(bundles))])


_Plan = Sequence[tuple[Sequence[Bundle], Strategy]]
"""Placement groups, each by its bundles."""


def each_needs(need: ClusterNeed, nodes: Sequence[Node]) -> dict[str, float]:
    """Resources of one process on such a cluster; 0 GPUs where it does without."""
    has_gpus = any(node.has("GPU") for node in nodes)
    gpus = need.gpus if has_gpus or not need.gpus_if_any else 0
    return {**({"GPU": float(gpus)} if gpus else {}), "CPU": float(need.cpus)}


def _plan(need: ClusterNeed, nodes: Sequence[Node]) -> _Plan:
    each = each_needs(need, nodes)
    if not need.together:
        alone: tuple[Sequence[Bundle], Strategy] = ([each], "STRICT_PACK")
        return [alone] * need.count
    per_machine = ranks_per_machine(need, nodes)
    bundle = {resource: amount * per_machine for resource, amount in each.items()}
    machines = need.count // per_machine
    strategy: Strategy = "STRICT_SPREAD" if machines > 1 else "STRICT_PACK"
    return [([bundle] * machines, strategy)]


def ranks_per_machine(need: ClusterNeed, nodes: Sequence[Node]) -> int:
    """Processes of each machine: as many as are asked for, else all where one machine has room, else as many as each
    has.

    Raises ConfigError for machines that are not equal, and for a number of processes that does not fill them.
    """
    resource, each = ("GPU", need.gpus) if need.gpus else ("CPU", need.cpus)
    room = {node.name: int(node.has(resource) // each) for node in nodes if node.has(resource) >= each}
    # Where no machine has room, the wait for it says so.
    most = max(room.values(), default=need.count)
    per_machine = min(need.count, need.per_machine or most)
    if need.per_machine is None and most < need.count and len(set(room.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in room.items())
        raise ConfigError.at(
            "backend", f"has to spread {need.count} ranks over machines with room for {listed}. Set ranks_per_node."
        )
    if need.count % per_machine:
        raise ConfigError.at(
            "backend",
            f"has {need.count} ranks, which do not fill machines with {per_machine} ranks each. Set ranks to a "
            f"multiple of {per_machine}, or ranks_per_node to a divisor of {need.count}.",
        )
    return per_machine


def _could_fit(plan: _Plan, nodes: Sequence[Node]) -> bool:
    """Whether the machines could have this, were they empty and all else elsewhere."""
    return all(len(bundles) <= len(_fitting(bundles[0], nodes)) for bundles, _ in plan)


def _fitting(bundle: Bundle, nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if all(node.has(resource) >= amount for resource, amount in bundle.items())]


def _in_words(needs: Sequence[ClusterNeed], plans: Sequence[_Plan], nodes: Sequence[Node]) -> str:
    """What is wanted, and what there is: `the run wants 16 GPUs (8 ranks + 4 engines of 2), the cluster has 8 free of
    12: node1 4, node2 4`, and the same of CPUs."""
    each = [each_needs(need, nodes) for need in needs]
    parts: list[str] = []
    for resource in ("GPU", "CPU"):
        wanted = [(need, of_one.get(resource, 0.0)) for need, of_one in zip(needs, each, strict=True)]
        total = sum(need.count * amount for need, amount in wanted)
        if not total:
            continue
        who = " + ".join(
            f"{_counted(need)}{f' of {amount:g}' if amount != 1 else ''}" for need, amount in wanted if amount
        )
        free = sum(node.free.get(resource, 0.0) for node in nodes)
        there = sum(node.has(resource) for node in nodes)
        by_node = ", ".join(f"{node.name} {node.free.get(resource, 0.0):g}" for node in nodes)
        kind = f"{resource}{'' if total == 1 else 's'}"
        parts.append(f"wants {total:g} {kind} ({who}), the cluster has {free:g} free of {there:g}: {by_node}")
    shapes: list[str] = []
    for need, plan in zip(needs, plans, strict=True):
        bundles, _ = plan[0]
        fitting = len(_fitting(bundles[0], nodes))
        if need.together:
            whole = f"{len(bundles)} machine{'s' if len(bundles) > 1 else ''} with {amounts(bundles[0])}"
            shapes.append(
                f"{_counted(need)} need{'s' if need.count == 1 else ''} {whole}{' each' * (len(bundles) > 1)}, and "
                f"{fitting} of its machines can have that much"
            )
        elif not fitting:
            shapes.append(f"each of the {need.kind} needs {amounts(bundles[0])} of one machine, and none has that much")
    return "; ".join(["the run " + "; and ".join(parts), *shapes])


def _counted(need: ClusterNeed) -> str:
    return f"{need.count} {need.kind if need.count != 1 else need.kind.removesuffix('s')}"


def outcomes_of(
    watchers: Mapping[str, Any], function: str, arguments: tuple[Any, ...], what: str, limit_s: float, setting: str = ""
) -> dict[str, Outcome]:
    """What came of `module:function` on each machine, by its name, from the `NodeActor` there.

    what: a verb first. setting: of the limit. Raises RunFailedError naming machines that have not answered in time.
    """
    asked = {name: watcher.run.remote(function, arguments) for name, watcher in watchers.items()}
    _wait_for_nodes(asked, what, limit_s)
    answers = {name: unpacked(wire) for name, wire in what_comes(asked, SLICE_S).items()}
    if silent := [name for name in watchers if name not in answers]:
        limit = f"within {limit_s:g} s{f' ({setting})' if setting else ''}"
        raise RunFailedError(f"{', '.join(silent)} did not {what} {limit}. Look at `ray status`.")
    return answers


def _wait_for_nodes(asked: Mapping[str, Any], what: str, limit_s: float) -> None:
    """Until each machine has answered or the limit is over; says now and then who has not. what: a verb first."""
    began = told = time.monotonic()
    waiting = dict(asked)
    while waiting and (left := began + limit_s - time.monotonic()) > 0:
        ready, _ = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=min(SLICE_S, left))
        waiting = {name: answer for name, answer in waiting.items() if answer not in ready}
        if waiting and time.monotonic() - told >= PATIENCE_S:
            told = time.monotonic()
            text = f"Waiting for {told - began:.0f} s, {limit_s:g} s at most, for {', '.join(waiting)} to {what}."
            print(text, file=sys.stderr, flush=True)


def what_comes(asked: Mapping[Any, Any], limit_s: float) -> dict[Any, Any]:
    """key -> answer, of those that answer within the limit; dead ones do not."""
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s) if asked else ([], [])
    answers: dict[Any, Any] = {}
    for key, answer in asked.items():
        if answer in ready:
            with suppress(RayError):
                answers[key] = ray.get(answer)
    return answers
