"""Section `cluster`: the Ray cluster where a run places the ranks of its backend and its engines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field, model_validator

from spurline.config.section import Section, expand_shorthand, sections_within
from spurline.errors import Problem
from spurline_ranks.group import ClusterNeed, ClusterRequest

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig

_HOST_AND_PORT = re.compile(r"(?:\[[^\s\[\]]+\]|[^\s:/\[\]]+):\d{1,5}")


class RuntimeEnvConfig(Section):
    """The environment of processes on a Ray cluster, in addition to the environment of their machine."""

    retired: ClassVar[tuple[str, ...]] = ("working_dir",)
    env_vars: dict[str, str] = {}
    """Environment variables, such as `{NCCL_SOCKET_IFNAME: eth0}`. The variables of the `spurline` process do not reach
    other machines."""


class ClusterConfig(Section):
    """The Ray cluster for the whole run. A bare string is short for its `address`."""

    address: str = Field(default="none", min_length=1)
    """`HOST:PORT` is the head of a cluster. `auto` joins the cluster at RAY_ADDRESS or, if that is not set, the cluster
    that `ray start` started on this machine. With `auto` or `HOST:PORT`, ranks and engines use the cluster by default.
    With `none`, only ranks with `launch: ray` and engines with `placement: ray` use a cluster."""
    runtime_env: RuntimeEnvConfig = RuntimeEnvConfig()
    """The environment of all processes on the cluster."""
    room_timeout_s: float = Field(default=180.0, ge=0)
    """Seconds to wait, if too few resources are free, until machines join the cluster or other runs end."""

    @model_validator(mode="before")
    @classmethod
    def _from_address(cls, value: Any) -> Any:
        return expand_shorthand(value, "address")

    @property
    def is_used(self) -> bool:
        """True if the run as a whole is placed on a cluster."""
        return self.address != "none"

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.address not in ("none", "auto") and _HOST_AND_PORT.fullmatch(self.address) is None:
            yield Problem(
                "address",
                f"is {self.address!r}, which is not an address of a cluster. Set it to auto, none, or the HOST:PORT "
                "that `ray start --head` prints, without a scheme such as ray://.",
            )
        if self.is_used and not cluster_needs(run):
            yield Problem(
                "address",
                f"is {self.address}, but nothing of this run is placed on a cluster. Choose a backend with ranks, such "
                "as fsdp, or remove cluster.address.",
            )


def cluster_needs(run: RunConfig) -> list[ClusterNeed]:
    """Return the CPUs and GPUs that this run needs on its cluster, for its ranks and its engines.

    The section of a component has a method `cluster_need(run)` if it may need a cluster. Ranks come first, because
    they need whole machines, and engines only parts of machines.
    """
    asked = [getattr(section, "cluster_need", None) for _, section in sections_within(run)]
    needs = [need for ask in asked if ask is not None and (need := ask(run)) is not None]
    return sorted(needs, key=lambda need: not need.together)


def cluster_request(run: RunConfig) -> ClusterRequest:
    """Return the settings of this run's cluster as plain data."""
    cluster = run.section(ClusterConfig)
    return ClusterRequest(
        cluster.address if cluster.is_used else "auto",
        cluster.runtime_env.env_vars,
        cluster.room_timeout_s,
        str(run.run_dir.absolute() / "logs"),
    )


@contextmanager
def room_on_cluster(run: RunConfig) -> Iterator[None]:
    """Reserve the run's CPUs and GPUs on the cluster while the context is open, and check the machines' software.

    Raises:
        ConfigError: If too few are free, or if machines differ or do not share the run directory.
        UserError: If the cluster cannot be joined.
    """
    needs = cluster_needs(run)
    if not needs:
        yield
        return
    # These imports are slow, and few runs have a cluster.
    from spurline_models.machine import check_ray
    from spurline_ranks.cluster_checks import check_machines

    check_ray()
    from spurline_ranks.cluster_room import reserved_room

    with reserved_room(cluster_request(run), needs) as ask:
        check_machines(run, ask)
        yield


def names_cluster(values: Mapping[str, Any]) -> bool:
    """Return whether the settings of a file, before validation, place the run on a cluster."""
    section: Any = expand_shorthand(values.get("cluster"), "address")
    settings: Mapping[str, Any] = cast("Mapping[str, Any]", section) if isinstance(section, Mapping) else {}
    return settings.get("address", "none") != "none"
