"""Settings of all backends with ranks. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.plugins.registry import resolve
from spurline.protocols.backend import BackendFacts
from spurline.protocols.optimizer import OptimizerConfig
from spurline.protocols.ranks import Launch, RankRequest
from spurline_models.backend_config import MemoryEstimate, ModelBackendConfig
from spurline_models.machine import Finding, check_ray, num_gpus
from spurline_ranks.cluster import names_cluster
from spurline_ranks.group import ClusterNeed, TimeLimits


class RankBackendConfig(ModelBackendConfig):
    """The settings of a backend whose model is divided among ranks.

    This module must not import torch. So the methods `check_model`, `describe_layout`, `savings` and `estimate_memory`
    call functions with the same names in the module `planning` of the backend's package. Each function takes the
    config, and then the arguments of the method.
    """

    missing_settings: ClassVar[Mapping[str, str]] = {
        "runtime_env": "Write it in the section `cluster`, where it applies to all processes on the cluster."
    }
    package: ClassVar[str] = ""
    """The package with the module `planning`, such as `spurline_fsdp_backend`."""
    worker: ClassVar[str] = ""
    """`module:Class` of the `RankWorker` in every rank."""
    doctor_rank: ClassVar[str] = ""
    """`module:Class` of the backend's `DoctorRank`."""

    ranks: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Number of processes, each with one GPU. null means one process for each GPU of this machine, or 2 processes on
    CPU. `launch: ray` needs a number."""
    launch: Annotated[Launch, OnResume.FREE] = "local"
    """`local` starts the ranks on this machine, `ray` starts them on a Ray cluster. If `cluster.address` is set, the
    default is `ray`."""
    ranks_per_node: Annotated[int | None, OnResume.FREE] = Field(default=None, gt=0)
    """Ranks on each machine of a cluster. null uses one machine if it has enough GPUs, else fills several machines."""
    gpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, OnResume.FREE] = None
    """Numbers of the GPUs of this machine that ranks may use; null means all. Rollout engines get unused GPUs."""
    max_tokens_per_microbatch: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Maximum tokens, without padding, in one micro-batch of a rank, or of a group of ranks that share sequences. A row
    is never divided. null puts all rows of a step in one micro-batch."""
    num_threads: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """CPU threads of each rank. null divides the cores of a machine among its ranks."""
    deterministic: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Use deterministic kernels. Equal runs on GPUs then give bit-identical results, but are slower."""
    probe: Annotated[bool, OnResume.FREE] = True
    """Check at start-up that packed rows and chunked logits are exact for this model."""
    start_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds that ranks may take to start and find each other, before weights are loaded."""
    call_timeout_s: Annotated[float, OnResume.FREE] = Field(default=3600.0, gt=0)
    """Maximum seconds of an update, an evaluation or a checkpoint, and of downloading and loading the model."""
    collective_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Maximum seconds of one exchange between ranks, such as an all-reduce."""

    @classmethod
    def defaults_beside(cls, given: Mapping[str, Any], file: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"launch": "ray"} if names_cluster(file) else {}

    def cluster_need(self, run: RunConfig) -> ClusterNeed | None:
        return ClusterNeed.of_ranks(self.rank_request())

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from self._launch_problems()
        ranks = self.num_ranks
        if not ranks:
            yield Problem(
                "ranks",
                "takes all GPUs of this machine, and there are none. To try it here, set device: cpu. To plan for "
                "another machine, set the number of its GPUs, such as ranks: 8.",
            )
            return
        yield from self.division_problems(ranks)
        if self.gpus is not None:
            yield from self._gpu_problems(self.gpus)
        if self.ranks_per_node is not None and ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            yield Problem(
                "ranks_per_node",
                f"is {self.ranks_per_node}, which does not divide the {ranks} ranks. All machines get the same number.",
            )
        optimizers = [("optimizer", run.optimizer)]
        if run.trained_critic is not None:
            optimizers.append(("critic.optimizer", run.trained_critic.optimizer))
        for key, optimizer in optimizers:
            reason = self.optimizer_refusal(optimizer)
            if reason is not None:
                yield Problem(
                    "name",
                    f"is {self.name}, which gives each rank a part of every parameter, and {key} '{optimizer.name}' "
                    f"{reason}. Use adamw.",
                )

    def optimizer_refusal(self, optimizer: OptimizerConfig) -> str | None:
        """Return why this optimizer cannot update sharded parameters, such as `needs X`. Return None if it can."""
        reason = optimizer.needs_whole_parameters
        return None if reason is None else f"needs whole ones: {reason}"

    def division_problems(self, ranks: int) -> Iterable[Problem]:
        """Yield problems of the settings that divide the ranks into groups."""
        return ()

    def share_of(self, rank: int) -> int:
        """Return the number of this rank's share of the rows. Ranks that compute rows together get the same share."""
        return rank

    def counts(self, rank: int) -> bool:
        """Return whether the controller uses this rank's answer. It uses the answer of one rank for each share.

        The lowest of the ranks whose answers are used has share 0, the next one share 1, and so on.
        """
        return True

    def _launch_problems(self) -> Iterable[Problem]:
        if self.launch != "ray":
            if self.ranks_per_node is not None:
                yield Problem("ranks_per_node", "is for the machines of a cluster. Set launch: ray, or remove it.")
            return
        if self.ranks is None:
            yield Problem("ranks", "is needed with launch: ray. Set it to the number of GPUs of all machines.")
        if self.device == "auto" and not num_gpus():
            yield Problem(
                "device",
                "is auto, which looks at this machine, and this machine has no GPU. Set the device of the cluster's "
                "machines: device: cuda, or device: cpu.",
            )

    def _gpu_problems(self, gpus: tuple[int, ...]) -> Iterable[Problem]:
        if self.launch == "ray":
            yield Problem("gpus", "names GPUs of this machine, and launch: ray lets the cluster choose. Remove gpus.")
        different = len(set(gpus))
        if self.num_ranks > different:
            yield Problem(
                "gpus",
                f"names {different} GPUs, and each of the {self.num_ranks} ranks needs one. Name "
                f"{self.num_ranks - different} more, or set ranks: {different}.",
            )

    @property
    def facts(self) -> BackendFacts:
        return replace(super().facts, yields_device=True, device=f"on {self.num_ranks} ranks, {self.device_words}")

    @property
    def num_ranks(self) -> int:
        """The setting `ranks`. If it is null, the number of GPUs, or 2 on CPU."""
        if self.ranks is not None:
            return self.ranks
        if self.on == "cpu":
            return 2
        return len(self.gpus) if self.gpus is not None else num_gpus()

    def rank_request(self) -> RankRequest:
        return RankRequest(
            self.num_ranks, self.on, self.launch, self.ranks_per_node, self.gpus, self.num_threads, self.rank_variables
        )

    @property
    def rank_variables(self) -> Mapping[str, str]:
        """Environment variables that the ranks need from the start."""
        if not self.deterministic:
            return {}
        # Matrix products on a GPU are deterministic only if their workspace has a fixed size.
        name = "CUBLAS_WORKSPACE_CONFIG"
        return {name: os.environ.get(name, ":4096:8")}

    @property
    def limits(self) -> TimeLimits:
        return TimeLimits(self.start_timeout_s, self.call_timeout_s, self.collective_timeout_s)

    def missing_here(self) -> str | None:
        if self.launch == "ray" or self.on == "cpu" or self.num_ranks <= num_gpus():
            return None
        return (
            f"backend.ranks is {self.num_ranks}, each with a GPU, and this machine has {num_gpus()}: this config "
            "can train only on another machine"
        )

    def check_model(self, run: RunConfig) -> None:
        if self.launch == "ray":
            check_ray()
        self._part("planning:check_model")(self, run)

    def describe_layout(self, run: RunConfig) -> Sequence[str]:
        """Return sentences for `spurline plan` that describe the ranks, their machines and their groups."""
        return list(self._part("planning:describe_layout")(self, run))

    def suggested_layouts(self, run: RunConfig, row_length: int, tokens: int, usable_bytes: int) -> Iterable[str]:
        """Return lines with other ways to divide the ranks, the best way first."""
        return ()

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        return self._part("planning:savings")(self, run, row_length, tokens)

    def device_bytes(self) -> int | None:
        return resolve("spurline_ranks.layout:device_bytes", f"backend '{self.name}'")(self)

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate:
        return self._part("planning:estimate_memory")(self, run, row_length, tokens)

    def doctor(self, run: RunConfig) -> Iterator[Finding]:
        """Start the ranks without a model, and yield findings for `spurline doctor`."""
        return resolve("spurline_ranks.doctor:examine", f"backend '{self.name}'")(self, run, self.doctor_rank)

    def _part(self, name: str) -> Callable[..., Any]:
        return resolve(f"{self.package}.{name}", f"backend '{self.name}'")
