"""Start the ranks of a run without a model, and let them try what a run needs: each other, their devices, the folders.

In: a config. Out: findings for `spurline doctor`. The controller's side asks; a `DoctorRank` answers in every rank.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.config.run_config import RunConfig
from spurline.errors import SpurlineError, UserError
from spurline.files import scratch_inside
from spurline.model.device_profile import device_profile
from spurline.protocols.backend import Finding
from spurline.ranks.cluster_checks import check_nodes
from spurline.ranks.group import Place, RankGroup
from spurline.ranks.launch import open_ranks
from spurline.ranks.messages import plain_run, read_run
from spurline_fsdp_backend.memory import sent_bytes
from spurline_fsdp_backend.mesh import EXPERT, EXPERT_SHARD, REPLICA, SHARD, make_meshes

if TYPE_CHECKING:
    from spurline_fsdp_backend.configs import FsdpBackendConfig

EXCHANGED_BYTES = 64 * 2**20
"""Of each rank in one exchange."""

LIMIT_S = 120.0
"""Seconds for an exchange, and for a call: who needs longer for 64 MB will not train."""

_REPEATS = 3

_TOKEN = "token"

_ALL = "all ranks"


@dataclass(frozen=True)
class Exchange:
    """What came of an exchange. seconds: of the fastest of a few. sent: bytes that a rank sent. right: the values."""

    seconds: float
    sent: float
    right: bool

    @property
    def rate(self) -> float:
        """Bytes that a rank sent in a second."""
        return self.sent / self.seconds


def doctor(config: FsdpBackendConfig, run: RunConfig) -> Iterator[Finding]:
    """Findings of the real ranks; see `BackendConfig.doctor`."""
    limits = replace(config.limits, call_s=LIMIT_S, collective_s=min(LIMIT_S, config.collective_timeout_s))
    began = time.monotonic()
    try:
        ranks = open_ranks(config.rank_request(), f"{__name__}:DoctorRank", (plain_run(run),), limits, check_nodes(run))
    except SpurlineError as error:
        yield Finding("ranks", f"{config.num_ranks} were asked for, and did not start", _words(error))
        return
    try:
        yield from _ask(ranks, time.monotonic() - began, config, run)
    except SpurlineError as error:
        yield Finding("ranks", "ended before they had answered", _words(error))
    finally:
        ranks.close()


def _ask(ranks: RankGroup, seconds: float, config: FsdpBackendConfig, run: RunConfig) -> Iterator[Finding]:
    found: list[dict[str, Any]] = ranks.call("look")
    yield from _placement(found, seconds)
    yield from _versions(found)
    yield from _devices(found)
    yield from _folder(ranks, Path(run.run_dir).absolute())
    for group in found[0]["groups"]:
        for kind in EXCHANGES:
            outcomes: list[Exchange] = ranks.call("exchange", group, kind, EXCHANGED_BYTES)
            yield _exchanged(group, kind, outcomes)
            if (group, kind) == (_ALL, _REDUCE):
                yield from _weights_and_gradients(config, run, _slowest(outcomes))


def _words(error: SpurlineError) -> str:
    # Which file the settings are in, an error that was not raised by loading it does not know.
    return "\n".join([str(error).removeprefix("config: "), *getattr(error, "__notes__", ())])


def _placement(found: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[Finding]:
    by_node: dict[str, list[int]] = {}
    for rank, answer in enumerate(found):
        by_node.setdefault(answer["node"], []).append(rank)
    places = "; ".join(f"{node}: {_ranks(members)}" for node, members in by_node.items())
    yield Finding("ranks", f"{len(found)} met each other in {seconds:.1f} s. {places}")


def _ranks(members: Sequence[int]) -> str:
    return f"rank {members[0]}" if len(members) == 1 else f"ranks {members[0]} to {members[-1]}"


def _versions(found: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    nodes: dict[str, set[str]] = {}
    for answer in found:
        nodes.setdefault(answer["versions"], set()).add(answer["node"])
    if len(nodes) == 1:
        yield Finding("versions of the ranks", found[0]["versions"])
        return
    said = "; ".join(f"{versions} on {', '.join(sorted(on))}" for versions, on in nodes.items())
    yield Finding("versions of the ranks", said, "install the same on all machines: one image, or one shared venv")


def _devices(found: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for rank, answer in enumerate(found):
        if answer["memory"] is None:
            continue
        free, total = answer["memory"]
        value = f"{answer['device']}, {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free"
        fix = f"end what else runs on the GPU of {answer['node']}: see `nvidia-smi`" if free < total / 2 else ""
        yield Finding(f"device of rank {rank}", value, fix)
    names = {answer["device"] for answer in found}
    if len(names) > 1:
        yield Finding("devices", ", ".join(sorted(names)), "use equal devices: all wait for the slowest")
    elif found[0]["memory"] is None:
        threads = sorted({answer["threads"] for answer in found})
        yield Finding("devices", f"{names.pop()}, {' or '.join(map(str, threads))} threads for each rank")


def _folder(ranks: RankGroup, folder: Path) -> Iterator[Finding]:
    """Do the ranks see what this process writes into the folder of the run, and the other way round?"""
    what, fix = "run_dir of the ranks", "choose a folder that all machines share, and that their ranks may write to"
    try:
        with scratch_inside(folder) as scratch:
            (scratch / _TOKEN).write_text(scratch.name, encoding="utf-8")
            problems = ranks.call("answer_token", str(scratch))
            unseen = [rank for rank in range(ranks.size) if not (scratch / f"{_TOKEN}-{rank}").is_file()]
    except OSError as error:
        yield Finding(what, f"{folder}: {error.strerror or error}", fix)
        return
    blind = [rank for rank, problem in enumerate(problems) if problem]
    if blind:
        yield Finding(what, f"rank {blind[0]}: {problems[blind[0]]}", fix)
    elif unseen:
        yield Finding(what, f"what rank {unseen[0]} writes there is not seen here", fix)
    else:
        yield Finding(what, f"{folder} is one folder for all of them")


def _exchanged(group: str, kind: str, outcomes: Sequence[Exchange]) -> Finding:
    what = f"{kind} of 64 MB, {group}"
    wrong = [rank for rank, outcome in enumerate(outcomes) if not outcome.right]
    if wrong:
        fix = "do not train here: see the driver's and the network's logs, and NCCL_DEBUG=INFO on GPUs"
        return Finding(what, f"wrong values in rank {wrong[0]}", fix)
    slowest = _slowest(outcomes)
    return Finding(what, f"{1e3 * slowest.seconds:,.1f} ms, {slowest.rate / 1e9:,.2f} GB/s from each rank")


def _slowest(outcomes: Sequence[Exchange]) -> Exchange:
    return max(outcomes, key=lambda outcome: outcome.seconds)


def _weights_and_gradients(config: FsdpBackendConfig, run: RunConfig, measured: Exchange) -> Iterator[Finding]:
    try:
        sent = sent_bytes(config, run)
    except UserError:
        # A model that cannot be read is a finding of its own, before the ranks are started.
        return
    yield Finding(
        "weights and gradients",
        f"{sent / 1e6:,.1f} MB from each rank for a micro-batch: an estimated {1e3 * sent / measured.rate:,.1f} ms at "
        "that rate, of which computing hides a part",
    )


class DoctorRank:
    """A `Worker` without a model."""

    def __init__(self, place: Place, plain_run: Mapping[str, Any]) -> None:
        run, _ = read_run(plain_run)
        config: Any = run.backend
        self._place = place
        self._profile = device_profile(config.on)
        self._groups = _groups(config, place)

    def look(self) -> dict[str, Any]:
        """What this rank finds around it."""
        libraries = (f"{library.__name__} {library.__version__}" for library in (torch, transformers))
        return {
            "node": self._place.node,
            "versions": ", ".join([f"Python {platform.python_version()}", *libraries]),
            "device": self._profile.name,
            "memory": self._profile.memory(),
            "threads": torch.get_num_threads(),
            "groups": list(self._groups),
        }

    def answer_token(self, folder: str) -> str:
        """Read what the controller wrote, and write an answer beside it; returns what is wrong, if anything."""
        try:
            if (Path(folder) / _TOKEN).read_text(encoding="utf-8") != Path(folder).name:
                return f"{folder} has another content than was written"
            (Path(folder) / f"{_TOKEN}-{self._place.rank}").touch()
        except OSError as error:
            return f"{folder}: {error.strerror or error}"
        return ""

    def exchange(self, group: str, kind: str, num_bytes: int) -> Exchange:
        """Send so many bytes a few times within a group of ranks."""
        self._place.doing(f"{kind}, {group}")
        process_group, size = self._groups[group], dist.get_world_size(self._groups[group])
        values = num_bytes // 4 // size * size
        seconds, right = [], True
        # The first one also makes the connections.
        for _ in range(1 + _REPEATS):
            sent = torch.full((values,), dist.get_rank(process_group) + 1.0, device=self._profile.device)
            dist.barrier(process_group)
            self._profile.synchronize()
            began = time.perf_counter()
            received = EXCHANGES[kind](sent, process_group)
            self._profile.synchronize()
            seconds.append(time.perf_counter() - began)
            right = right and bool((received == _expected(kind, size, received)).all())
        share = (size - 1) / size * 4 * values
        return Exchange(min(seconds[1:]), share * (2 if kind == _REDUCE else 1), right)


def _groups(config: FsdpBackendConfig, place: Place) -> dict[str, ProcessGroup]:
    """The groups of more than one rank that this rank is in, by what they do."""
    meshes = make_meshes(config, place)
    groups = {_ALL: dist.group.WORLD}
    if meshes.sharding.ndim == 2:
        groups |= {
            "ranks that hold one copy of the model": meshes.sharding.get_group(SHARD),
            "ranks that hold the same part of the copies": meshes.sharding.get_group(REPLICA),
        }
    if meshes.context is not None:
        groups["ranks that share sequences"] = meshes.context
    if meshes.experts is not None:
        groups |= {
            "ranks that divide the experts": meshes.experts.get_group(EXPERT),
            "ranks that hold parts of the same experts": meshes.experts.get_group(EXPERT_SHARD),
        }
    return {name: group for name, group in groups.items() if group is not None and dist.get_world_size(group) > 1}


def _all_reduce(values: Tensor, group: ProcessGroup) -> Tensor:
    dist.all_reduce(values, group=group)
    return values


def _all_to_all(values: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    return received


_REDUCE = "all-reduce"

EXCHANGES: Mapping[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    _REDUCE: _all_reduce,
    "all-to-all": _all_to_all,
}


def _expected(kind: str, size: int, received: Tensor) -> Tensor:
    """Rank r sent r + 1 everywhere: the sum of all, or an equal part of each."""
    if kind == _REDUCE:
        return torch.full_like(received, size * (size + 1) / 2)
    parts = torch.arange(1, size + 1, dtype=received.dtype, device=received.device)
    return parts.repeat_interleave(len(received) // size)
