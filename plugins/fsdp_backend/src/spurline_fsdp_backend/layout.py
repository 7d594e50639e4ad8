"""Describe the groups of ranks, refuse models that they cannot divide, and find settings that need less memory.

Reads the model's config but no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, Problem
from spurline_models.architecture import load_model_config, num_experts
from spurline_ranks.layout import counted, describe_ranks, divisors, more_ranks, ranks_of_machine, smaller_microbatches

if TYPE_CHECKING:
    from spurline_fsdp_backend.configs import FsdpBackendConfig


def describe_layout(config: FsdpBackendConfig, run: RunConfig) -> Iterator[str]:
    """Yield sentences on ranks, machines and groups."""
    ranks, local = config.num_ranks, ranks_of_machine(config)
    sharing = f" x {config.context} context" if config.context > 1 else ""
    yield from describe_ranks(config, f"{config.layout().data} data{sharing}")
    shards = ranks // config.replicas
    if config.replicas > 1:
        yield (
            f"{config.replicas} copies of the model, each divided among {shards} ranks; gradients are summed over the "
            "copies"
        )
    else:
        yield f"weights, gradients and optimizer are divided among {counted(shards, 'rank')}"
    if config.context > 1:
        yield f"{config.context} neighbouring ranks share each sequence"
        if local is not None and local % config.context:
            yield f"groups of context lie across machines, as each has {local} ranks: slow"
    if config.expert > 1:
        yield f"{config.expert} neighbouring ranks divide the experts of each layer"
    if config.cpu_offload:
        yield "weights, gradients and optimizer stay in the memory of the host"


def check_model(config: FsdpBackendConfig, run: RunConfig) -> None:
    """Raise ConfigError for a model that the ranks cannot divide, ModelError for one that cannot be read."""
    model = load_model_config(run.model).get_text_config()
    divided = {"context": (_heads(model), "attention heads"), "expert": (num_experts(model), "experts")}
    problems: list[Problem] = []
    for key, (count, what) in divided.items():
        size = getattr(config, key)
        if size > 1 and count is None:
            problems.append(Problem(f"backend.{key}", f"is {size}, and the model has no {what}. Set {key} to 1."))
        elif count is not None and count % size:
            fitting = ", ".join(str(fits) for fits in divisors(count) if config.num_ranks % fits == 0)
            said = f"is {size}, which does not divide the {count} {what}. Choose one of {fitting}."
            problems.append(Problem(f"backend.{key}", said))
    if problems:
        raise ConfigError(problems)


def _heads(model: Any) -> int | None:
    heads = getattr(model, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def savings(config: FsdpBackendConfig, run: RunConfig, row_length: int, tokens: int) -> Iterator[Mapping[str, Any]]:
    """Yield settings that need less memory, the cheapest in time first."""
    if not config.activation_checkpointing:
        yield {"activation_checkpointing": True}
    if not (config.offload_activations or config.compile) and config.on == "cuda":
        yield {"offload_activations": True}
    if config.lora is not None and config.lora.base_dtype != "bf16":
        yield {"lora.base_dtype": "bf16"}
    yield from smaller_microbatches(config, row_length, tokens)
    heads, local = _heads(load_model_config(run.model).get_text_config()) or 1, ranks_of_machine(config)
    for context in divisors(heads):
        if context > config.context and local is not None and local % context == 0:
            yield {"context": context}
    if config.replicas > 1:
        yield {"replicas": 1}
    if not config.cpu_offload and config.on == "cuda":
        yield {"cpu_offload": True}
    # With more ranks offloading is no longer needed.
    yield from ({"cpu_offload": config.cpu_offload, **change} for change in more_ranks(config))
