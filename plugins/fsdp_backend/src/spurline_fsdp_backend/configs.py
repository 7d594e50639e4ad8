"""Settings of the backend `fsdp`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, ClassVar

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.backend import BackendFacts
from spurline.protocols.collator import ParallelLayout
from spurline_models.backend_config import TransformersBackendConfig
from spurline_ranks.configs import RankBackendConfig


class FsdpBackendConfig(TransformersBackendConfig, RankBackendConfig):
    """FSDP2: each rank holds a part of the weights, gradients and optimizer, and trains on a part of the batch."""

    missing_settings: ClassVar[Mapping[str, str]] = {
        **RankBackendConfig.missing_settings,
        **dict.fromkeys(
            ("tensor", "pipeline"),
            "Backend 'megatron' has it. To switch to it: `plugins: [megatron_backend]`, `backend: {name: megatron}`.",
        ),
    }
    package: ClassVar[str] = "spurline_fsdp_backend"
    worker: ClassVar[str] = "spurline_fsdp_backend.rank:FsdpRank"
    doctor_rank: ClassVar[str] = "spurline_fsdp_backend.mesh:FsdpDoctorRank"
    beyond: ClassVar[str] = "Train adapters (backend.lora), train a smaller model, or use more machines."

    name: str = "fsdp"
    replicas: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of copies of the sharded model, usually one for each machine. More copies need more memory on each rank,
    but less communication between machines."""
    context: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of ranks that share each sequence. Use it for sequences that are too long for one rank."""
    expert: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of ranks that divide the experts of a mixture-of-experts model."""
    cpu_offload: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Keep weights, gradients and optimizer state in host memory. This saves device memory, but is slower."""
    reshard_after_forward: Annotated[bool, OnResume.TO_ROUNDING] = True
    """Free the gathered weights of a layer after its forward pass. With `false`, they stay until the backward pass
    of the layer. This needs more memory, but less communication."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        yield from self.computing_problems(self.on, self.computes_in)
        yield from self.reproducibility_problems(run, self.on, self.computes_in, self.num_threads)
        if self.is_reproducible and self.on == "cuda" and not self.deterministic:
            yield Problem("deterministic", "is false, and sums: reproducible needs deterministic kernels. Set it.")

    def division_problems(self, ranks: int) -> Iterable[Problem]:
        for key in ("replicas", "context", "expert"):
            if ranks % getattr(self, key):
                fitting = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
                yield Problem(
                    key,
                    f"is {getattr(self, key)}, which does not divide the {ranks} ranks. Choose one of "
                    f"{fitting}, or change backend.ranks.",
                )
            if self.is_reproducible and getattr(self, key) > 1:
                yield Problem(
                    "sums",
                    f"is reproducible, which {key}: {getattr(self, key)} does not support, since sums over these ranks "
                    f"are not exact. Set {key}: 1, or sums: fast.",
                )
        if self.expert > 1 and tuple(int(part) for part in version("transformers").split(".")[:2]) < (5, 23):
            yield Problem("expert", f"needs transformers 5.23. {version('transformers')} is installed. Set expert: 1.")
        if self.replicas > 1 and self.expert > 1:
            yield Problem("expert", "together with replicas is not supported. Set one of them to 1.")
        if self.lora is not None and self.expert > 1:
            yield Problem("lora", "together with expert is not supported, since adapters of experts cannot be divided.")
        if self.lora is not None and self.lora.is_quantized:
            yield Problem(
                "lora.base_dtype",
                f"is {self.lora.base_dtype}, which cannot be divided over ranks. Choose bf16, or the backend local on "
                "one GPU.",
            )
        if self.compile and self.expert > 1:
            yield Problem(
                "compile",
                "together with expert is not supported, since ranks exchange tokens within a layer. Turn off one of "
                "them.",
            )

    def share_of(self, rank: int) -> int:
        return rank // self.context

    def counts(self, rank: int) -> bool:
        return rank % self.context == 0

    def layout(self) -> ParallelLayout:
        # Collators need not align rows for `context`, since ranks do this themselves.
        return ParallelLayout(data=self.num_ranks // self.context, deals_rows=True)

    @property
    def facts(self) -> BackendFacts:
        return replace(
            super().facts,
            generates=True,
            freezes=True,
            checkpoint_reader="spurline_fsdp_backend.trained_model:read_weights",
            adapter_reader="spurline_fsdp_backend.trained_model:read_adapter",
            # Expert replay and load balancing add hooks to routers, and compiled layers would be recompiled for them.
            replays_experts=not self.compile,
            # If `context` is above 1, a rank sees only parts of sequences.
            balances_experts=not self.compile and self.context == 1,
        )

    def check_model(self, run: RunConfig) -> None:
        self.check_computing(run, self.on, self.computes_in)
        super().check_model(run)
