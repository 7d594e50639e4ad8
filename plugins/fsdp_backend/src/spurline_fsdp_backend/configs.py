"""Settings of the backend `fsdp`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.backend import BackendFacts
from spurline.protocols.collator import ParallelLayout
from spurline_models.configs import (
    Fp8,
    Kernels,
    LoraConfig,
    adapter_notes,
    check_kernels,
    check_peft,
    check_torchao,
    fp8_problems,
)
from spurline_ranks.configs import RankBackendConfig


class FsdpBackendConfig(RankBackendConfig):
    """FSDP2: every rank holds a part of weights, gradients and optimizer, and trains on a part of the batch."""

    missing_settings: ClassVar[Mapping[str, str]] = {
        **RankBackendConfig.missing_settings,
        **dict.fromkeys(
            ("tensor", "pipeline"),
            "The backend 'megatron' divides layers so: `plugins: [megatron_backend]`, `backend: {name: megatron}`.",
        ),
    }
    package: ClassVar[str] = "spurline_fsdp_backend"
    doctor_rank: ClassVar[str] = "spurline_fsdp_backend.mesh:FsdpDoctorRank"
    beyond: ClassVar[str] = "Train adapters (backend.lora), a smaller model, or on more machines."

    name: str = "fsdp"
    replicas: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Copies of the sharded model, usually one for each machine: less traffic between machines, more memory."""
    context: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Ranks that share each sequence, for sequences too long for one."""
    expert: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Ranks that divide the experts of a mixture-of-experts model."""
    activation_checkpointing: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    offload_activations: Annotated[bool, OnResume.FREE] = False
    """Keep the activations of the decoder's layers in the memory of the host until the backward pass. For GPUs."""
    compile: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Run each decoder layer through torch.compile."""
    kernels: Annotated[Kernels, OnResume.TO_ROUNDING] = "auto"
    """Fused norms and gated activations by Liger-Kernel: `auto` takes them on GPUs where Liger-Kernel
    is installed and knows the model, `none` leaves them to PyTorch."""
    fp8: Annotated[Fp8, OnResume.BY_NAME] = False
    """Compute linear layers in fp8, approximately: for GPUs from Hopper on. `emulated` rounds in the same way on any
    device, slowly."""
    cpu_offload: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Keep weights, gradients and optimizer in the memory of the host: slower, for models that do not fit."""
    reshard_after_forward: Annotated[bool, OnResume.TO_ROUNDING] = True
    """Free a layer's gathered weights after its forward pass. False keeps them for its backward pass: more memory,
    less to send."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        yield from fp8_problems(self.fp8, self.on, self.computes_in, self.lora)

    def division_problems(self, ranks: int) -> Iterable[Problem]:
        for key in ("replicas", "context", "expert"):
            if ranks % getattr(self, key):
                fitting = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
                yield Problem(
                    key,
                    f"is {getattr(self, key)}, which does not divide the {ranks} ranks. Choose one of "
                    f"{fitting}, or change backend.ranks.",
                )
        if self.replicas > 1 and self.expert > 1:
            yield Problem("expert", "together with replicas is not supported. Set one of them to 1.")
        if self.lora is not None and self.expert > 1:
            yield Problem("lora", "together with expert is not supported: adapters of experts would not be divided.")
        if self.lora is not None and self.lora.is_quantized:
            yield Problem(
                "lora.base_dtype",
                f"is {self.lora.base_dtype}, whose blocks of values cannot be divided over ranks. Choose bf16, or the "
                "backend local on one GPU.",
            )
        if self.compile and self.offload_activations:
            yield Problem("offload_activations", "together with compile is not supported. Turn one of them off.")
        if self.compile and self.expert > 1:
            yield Problem(
                "compile", "together with expert is not supported: tokens travel within a layer. Turn one off."
            )

    def layout(self) -> ParallelLayout:
        # Ranks align their own streams for context parallelism.
        return ParallelLayout(data=self.num_ranks // self.context, deals_rows=True)

    @property
    def facts(self) -> BackendFacts:
        return replace(
            super().facts,
            generates=True,
            freezes=True,
            checkpoint_reader="spurline_fsdp_backend.checkpoint:read_weights",
            adapter_reader="spurline_fsdp_backend.checkpoint:read_adapter",
            optimizes_on_host=self.cpu_offload,
            # A hook replaces a router's choice, so layers would be compiled again.
            replays_experts=not self.compile,
            # This needs hooks too, and a rank that shares sequences sees only parts of them.
            balances_experts=not self.compile and self.context == 1,
        )

    @property
    def adapters(self) -> LoraConfig | None:
        return self.lora

    def check_model(self, run: RunConfig) -> None:
        if self.lora is not None:
            check_peft(self.lora)
        check_torchao(self.fp8)
        check_kernels(self.kernels, run.model, self.on, self.computes_in)
        super().check_model(run)

    def notes(self, run: RunConfig) -> Sequence[str]:
        return [] if self.lora is None else adapter_notes(run.model, self.lora)
