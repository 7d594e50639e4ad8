"""Settings of the backend `megatron`. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import ConfigError, Problem
from spurline.protocols.backend import BackendFacts
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.optimizer import OptimizerConfig
from spurline_megatron_backend.grid import Grid
from spurline_models.machine import Finding
from spurline_ranks.configs import RankBackendConfig

_FSDP = "Backend fsdp (plugin fsdp_backend) has this setting: set backend.name: fsdp."

INSTALL_CORE = "Run `pip install 'megatron-core>=0.16.1,<0.17'`."
"""The advice when Megatron-core is missing."""


def has_megatron_core() -> bool:
    """Return whether this process can import Megatron-core, without importing it."""
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


class MegatronBackendConfig(RankBackendConfig):
    """Megatron-core: ranks divide each matrix, the layers, the sequences, the experts and the optimizer's state."""

    retired: ClassVar[tuple[str, ...]] = ("sequence_parallel", "reference")
    package: ClassVar[str] = "spurline_megatron_backend"
    worker: ClassVar[str] = "spurline_megatron_backend.open_rank:open_rank"
    doctor_rank: ClassVar[str] = "spurline_megatron_backend.doctor:MegatronDoctorRank"
    beyond: ClassVar[str] = "Choose another layout (see layouts), train a smaller model, or use more machines."
    missing_settings: ClassVar[Mapping[str, str]] = {
        **RankBackendConfig.missing_settings,
        "lora": f"Megatron-core has no adapters. {_FSDP}",
        "cpu_offload": f"To save memory, divide the model further (pipeline, tensor). {_FSDP}",
        "activation_checkpointing": "Use recompute: none, selective or full.",
        "sums": f"Megatron-core adds up gradients in an order that depends on the ranks. {_FSDP}",
        "sequence_parallel": "It is always on if tensor is more than 1.",
        "reference": "It is called `frozen` now, and is for all models that are not trained.",
    }

    name: str = "megatron"
    tensor: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of ranks that divide the matrices of every layer, and the tokens in layers without divided matrices, such
    as norms. They exchange much data, so keep them on one machine."""
    pipeline: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of stages of a pipeline. Each stage has some of the layers. Micro-batches go from stage to stage."""
    virtual_stages: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of parts of the model that each stage computes in turn. With more parts, ranks wait less and send more."""
    context: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of ranks that share each sequence. Use it for sequences that are too long for one rank."""
    expert: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of ranks that divide the experts of a mixture-of-experts model."""
    expert_tensor: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of ranks that divide each expert. Use it for very large experts."""
    recompute: Annotated[Literal["none", "selective", "full"], OnResume.TO_ROUNDING] = "none"
    """The parts that the backward pass computes again: nothing (`none`), attention (`selective`), or whole layers
    (`full`). `full` needs least memory and about a third more time."""
    frozen: Annotated[Literal["device", "host"], OnResume.FREE] = "device"
    """The memory that holds the reference and the models of `model.frozen` while they are not used. `host` copies a
    model to the device for each use."""

    @property
    def facts(self) -> BackendFacts:
        return replace(
            super().facts, checkpoint_reader="spurline_megatron_backend.checkpoint:read_weights", replays_experts=True
        )

    @property
    def grid(self) -> Grid:
        """The division of the ranks into groups."""
        return Grid(
            self.num_ranks,
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual_stages=self.virtual_stages,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    def share_of(self, rank: int) -> int:
        return self.grid.place(rank).data

    def counts(self, rank: int) -> bool:
        return self.grid.speaks(rank)

    def layout(self) -> ParallelLayout:
        # Collators need not align rows for `tensor` and `context`: ranks do this themselves.
        return ParallelLayout(data=self.grid.data, deals_rows=True)

    def check_model(self, run: RunConfig) -> None:
        # Ranks on a Ray cluster use the packages of its machines, not of this machine.
        if self.launch != "ray" and self.missing_here() is None and not has_megatron_core():
            raise ConfigError.at("backend.name", f"is {self.name}, which needs megatron-core. {INSTALL_CORE}")
        super().check_model(run)

    def suggested_layouts(self, run: RunConfig, row_length: int, tokens: int, usable_bytes: int) -> Iterable[str]:
        return self._part("layout_search:suggested_layouts")(self, run, row_length, tokens, usable_bytes)

    def doctor(self, run: RunConfig) -> Iterator[Finding]:
        yield self._part("doctor:look_for_core")()
        # Machines of a cluster have their own packages.
        if has_megatron_core() or self.launch == "ray":
            yield from super().doctor(run)

    @property
    def rank_variables(self) -> Mapping[str, str]:
        # Megatron-core requires this variable, so that an exchange starts before kernels that are launched later.
        return {**super().rank_variables, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def division_problems(self, ranks: int) -> Iterable[Problem]:
        # How a stage divides its experts does not depend on tensor and context.
        of_rows, of_experts = ("tensor", "pipeline", "context"), ("pipeline", "expert", "expert_tensor")
        problem = self._size_problem(ranks, of_rows) or self._size_problem(ranks, of_experts)
        if problem is not None:
            yield problem
        if self.virtual_stages > 1 and self.pipeline == 1:
            yield Problem(
                "virtual_stages",
                f"is {self.virtual_stages}, but there is only one stage. Set pipeline above 1, or virtual_stages to 1.",
            )

    def optimizer_refusal(self, optimizer: OptimizerConfig) -> str | None:
        if optimizer.is_elementwise:
            return None
        return "is not `is_elementwise`. It needs whole parameters, but a rank has only a flat part of each"

    def _size_problem(self, ranks: int, keys: tuple[str, ...]) -> Problem | None:
        """Return a problem if the product of these sizes does not divide the number of ranks."""
        sizes = {key: getattr(self, key) for key in keys if getattr(self, key) > 1}
        needed = math.prod(sizes.values())
        if ranks % needed == 0:
            return None
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        more = math.ceil(ranks / needed) * needed
        key = next(reversed(sizes))
        return Problem(
            key,
            f"is {sizes[key]}, and {ranks} ranks are not a multiple of {product}. Set backend.ranks: {more}, or make "
            f"{' or '.join(sizes)} smaller.",
        )
