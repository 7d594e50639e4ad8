"""Settings of engine `in_process`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.plugins.registry import resolve
from spurline.protocols.ranks import RankRequest
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class DecodingConfig(RolloutEngineConfig):
    """Base of the settings of engines that generate with the Hugging Face model."""

    deterministic: bool = False
    """Generate each response alone, so that other responses never change any bit of it. This is many times slower. If
    false, responses that are generated together change each other's logprobs by about 1e-6."""
    max_batch: Annotated[int, OnResume.TO_ROUNDING] = Field(default=256, gt=0)
    """Largest number of responses that are decoded together. Further requests wait."""
    max_cache_tokens: Annotated[int, OnResume.TO_ROUNDING] = Field(default=262_144, gt=0)
    """Largest size of the KV cache in tokens: the number of responses decoded together, times the length of the longest
    prompt with its response. A request that needs more is decoded alone."""
    device: Annotated[Literal["auto", "cpu", "cuda"], OnResume.TO_ROUNDING] = "auto"
    """Device of the engine's own model copy. `auto` is a GPU, or the CPU if there is no GPU or ranks use the GPUs."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the engine's own copy. `bf16` keeps fp32 weights and computes under autocast. `auto` is bf16 if the
    trainer computes in bf16, else fp32, and a resumed run keeps what it was."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Treatment of the KV cache of unfinished responses when the weights change. `recompute` computes it again with the
    new weights. `keep` is faster, but later tokens come from a mixture of old and new weights."""

    def computes_in(self, run: RunConfig) -> Literal["fp32", "bf16"]:
        """Return the precision, with `auto` replaced by the trainer's."""
        if self.precision == "auto":
            return "bf16" if run.backend.facts.computes_in == "bf16" else "fp32"
        return self.precision

    def choices(self, run: RunConfig) -> Mapping[str, Any]:
        return {"precision": self.computes_in(run)} if self.precision == "auto" else {}

    @property
    def notes_experts(self) -> bool:
        return True


class InProcessEngineConfig(DecodingConfig):
    """Generate in this process with the Hugging Face model."""

    borrows_model: ClassVar[bool] = True
    holds_copy: ClassVar[bool] = True

    name: str = "in_process"
    timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Time limit in seconds for one decode step, and for loading the model."""

    def copy_device(self, run: RunConfig) -> Literal["auto", "cpu", "cuda"]:
        """Return the device of the engine's own copy."""
        if self.device == "auto" and not _first_gpu_is_free(run.backend.rank_request()):
            return "cpu"
        return self.device

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        ranks = run.backend.rank_request()
        if self.device == "cuda" and ranks is not None and not _first_gpu_is_free(ranks):
            if ranks.launch == "ray":
                text = "a GPU that Ray may give to the backend. Set device"
            else:
                text = "the first GPU, which a rank uses. Name other GPUs in backend.gpus, or set device"
            yield Problem("device", f"is cuda, which takes {text} to cpu.")

    def estimate_memory(self, run: RunConfig, responses: int, length: int) -> dict[str, int]:
        if not run.backend.facts.lends_model:
            # The engine has its own copy, which is not on a device of the backend.
            return {}
        # Resolve the function by name, since its module imports torch, which this module must not.
        estimate = resolve("spurline_models.memory:estimate_cache", "memory estimate of engine 'in_process'")
        together = min(responses, self.max_batch)
        tokens = max(length, min(together * length, self.max_cache_tokens))
        return {"keys and values": estimate(run.model, tokens, precision=run.backend.facts.computes_in)}

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        lines = [f"engine {self.name}: {min(responses, self.max_batch):,} responses decoded together, in this process"]
        if not run.backend.facts.lends_model:
            count = resolve("spurline_models.memory:count_parameters", "memory estimate of engine 'in_process'")
            words = {"auto": "the first GPU if there is one", "cuda": "the first GPU", "cpu": "the CPU"}
            where = words[self.copy_device(run)]
            lines.append(
                f"backend '{run.backend.name}' has its model in other processes, so the engine has its own copy here, "
                f"on {where}; it takes {4 * count(run.model) / 2**20:,.0f} MiB and gets the new weights every step"
            )
        return lines


def _first_gpu_is_free(request: RankRequest | None) -> bool:
    """Return whether this process may use the first GPU that it sees, because no rank uses it."""
    if request is None or request.device != "cuda":
        return True
    # Ray may assign any GPU of this machine to a rank.
    return request.launch == "local" and 0 not in (request.gpus or range(request.count))[: request.count]
