"""Settings of the local backend. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.plugins.registry import resolve
from spurline.protocols.backend import BackendFacts
from spurline_models.backend_config import MemoryEstimate, TransformersBackendConfig


class LocalBackendConfig(TransformersBackendConfig):
    """One process, on CPU or one GPU."""

    missing_settings: ClassVar[Mapping[str, str]] = {
        "ranks": "It runs in one process. To use more: `plugins: [fsdp_backend]`, `backend: {name: fsdp, ranks: N}`.",
        **dict.fromkeys(
            ("tensor", "pipeline"),
            "Backend 'megatron' has it. To switch to it: `plugins: [megatron_backend]`, `backend: {name: megatron}`.",
        ),
    }
    beyond: ClassVar[str] = (
        "Train adapters (backend.lora) or a smaller model, or use several GPUs (backend fsdp of plugin fsdp_backend)."
    )

    name: str = "local"
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp64"], OnResume.BY_NAME] = "auto"
    """`bf16` keeps fp32 weights and computes under autocast. `auto` is bf16 on GPUs, fp32 on CPU, and a resumed run
    keeps what it was. `fp64` is for numerical tests."""
    weights: Annotated[Literal["fp32", "bf16_masters"], OnResume.BY_NAME] = "fp32"
    """The dtype of trained weights with `precision: bf16`. `bf16_masters` holds matrices in bf16. The optimizer then
    steps on fp32 copies of these matrices."""
    offload_optimizer: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Keep the optimizer's state and fp32 copies of weights in host memory, and compute optimizer steps on the CPU."""
    rows_per_microbatch: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Limit on the rows of a micro-batch. Gradients are accumulated over micro-batches. null sets no limit."""
    max_tokens_per_microbatch: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Limit on the tokens of a micro-batch, without padding. Rows are not split. If neither this nor
    `rows_per_microbatch` is set, all rows are one micro-batch. Only one of the two may be set."""
    num_threads: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """CPU threads. null lets torch choose."""
    probe: Annotated[bool, OnResume.FREE] = True
    """Check at start-up that packed rows and chunked logits do not change the results of this model."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.rows_per_microbatch is not None and self.max_tokens_per_microbatch is not None:
            yield Problem("rows_per_microbatch", "and max_tokens_per_microbatch exclude each other. Remove one.")
        yield from self.reproducibility_problems(run, self.on, self.computes_in, self.num_threads)
        # A config with `auto` may be meant for another machine, so check it as if there was a GPU.
        yield from self.problems_on("cpu" if self.device == "cpu" else "cuda")
        if self.narrow_weights and self.fp8:
            yield Problem("weights", f"is {self.weights}, which is not supported with fp8. Turn one of them off.")
        if self.narrow_weights and self.lora is not None:
            yield Problem("weights", f"is {self.weights}, which is not for adapters. Set lora.base_dtype instead.")

    def problems_on(self, device: Literal["cpu", "cuda"]) -> Iterable[Problem]:
        """Yield the problems of these settings on this device."""
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if device == "cuda" else "fp32"
        yield from self.computing_problems(device, precision)
        if self.is_reproducible and self.narrow_weights:
            yield Problem("weights", f"is {self.weights}, which is not supported with sums: reproducible. Set one.")
        if self.narrow_weights and precision != "bf16":
            yield Problem(
                "weights", f"is {self.weights}, which needs precision: bf16. Set precision: bf16, or weights: fp32."
            )

    @property
    def narrow_weights(self) -> bool:
        """True if trained matrices are held in half precision, and the optimizer has fp32 masters of them."""
        return self.weights != "fp32"

    @property
    def facts(self) -> BackendFacts:
        return replace(
            super().facts,
            generates=True,
            lends_model=True,
            lends_parameters=True,
            yields_device=True,
            takes_snapshots=True,
            verifies_files=False,
            freezes=True,
            checkpoint_reader="spurline_models.local.checkpoint:read_weights",
            adapter_reader="spurline_models.local.checkpoint:read_adapter",
            stays_on_cpu=self.device == "cpu",
            # Replay and balancing need hooks in routers, and hooks would make torch compile the decoder again.
            replays_experts=not self.compile,
            balances_experts=not self.compile,
        )

    def check_model(self, run: RunConfig) -> None:
        self.check_computing(run, self.on, self.computes_in)

    def missing_here(self) -> str | None:
        # A config must not import torch, and only torch knows about GPUs.
        if self.on == "cuda" and not resolve("torch.cuda:is_available", "GPU check of backend 'local'")():
            return f"backend.device is {self.device}, but torch sees no GPU here: this config can train only elsewhere"
        return None

    def device_bytes(self) -> int | None:
        if self.missing_here():
            return None
        return resolve("spurline_models.device_profile:device_bytes", "memory of backend 'local'")(self.device)

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        may_be_narrow = self.computes_in == "bf16" and self.lora is None and not self.fp8
        if may_be_narrow and not self.narrow_weights:
            yield {"weights": "bf16_masters"}
        if self.activation_checkpointing is not True:
            yield {"activation_checkpointing": True}
        if not (self.offload_activations or self.compile) and self.on == "cuda":
            yield {"offload_activations": True}
        if self.lora is not None and self.lora.base_dtype in ("auto", "fp32"):
            yield {"lora.base_dtype": "bf16"}
        yield from self._smaller_microbatches(row_length, tokens)
        if self.lora is not None and not self.lora.is_quantized:
            yield {"lora.base_dtype": "nf4"}
        if not self.offload_optimizer and self.on == "cuda":
            yield {"offload_optimizer": True}

    def _smaller_microbatches(self, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        if self.rows_per_microbatch is not None:
            yield {"rows_per_microbatch": 1}
        else:
            bound = self.max_tokens_per_microbatch or tokens
            while bound > row_length:
                bound = max(row_length, bound // 2)
                yield {"max_tokens_per_microbatch": bound}

    def microbatch_tokens(self, row_length: int, tokens: int) -> int:
        """Return the largest number of tokens that a micro-batch may have, in a step of `tokens` tokens."""
        if self.is_reproducible:
            return min(tokens, row_length)
        if self.rows_per_microbatch is not None:
            tokens = min(tokens, self.rows_per_microbatch * row_length)
        return min(tokens, self.max_tokens_per_microbatch or tokens)

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate:
        # The estimate builds the architecture with torch, which a config must not import.
        estimate = resolve("spurline_models.local.memory:estimate_memory", "memory estimate of backend 'local'")
        return estimate(self, run, row_length, tokens)
