"""Adapters alone in a vLLM engine: which of them it takes, and how a worker puts one into its model from memory.

Place on the way: RunConfig -> `engine_adapter`, before an engine starts -> its arguments -> buckets with the adapter's
tensors -> `AdapterUpdate` in every worker -> vLLM's own layers, which add the adapter to what the weights compute. The
weights below stay as they were read from `model.path`. vLLM is imported where an engine runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spurline.errors import ConfigError, RunFailedError, listing
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.backend_config import adapters_of
from spurline_models.placement.narrow_weights import base_dtype
from spurline_models.weight_files import stored_dtype

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig
    from spurline_async_rl.engines.configs import VllmEngineConfig
    from spurline_models.configs import LoraConfig

_ID = 1
"""What vLLM calls the one adapter of an engine. Every publish replaces it, and every request names it."""
_NAME = "spurline"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM may be asked to have room for."""


@dataclass(frozen=True)
class EngineAdapter:
    """The room for an adapter that an engine is started with.

    rank: of its matrices. targets: the last parts of the names of the modules that have one, such as `q_proj`.
    """

    rank: int
    targets: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """Fields of vLLM's AsyncEngineArgs."""
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": min(rank for rank in _RANKS if rank >= self.rank),
            # Else vLLM would make room at every layer, the embedding and the output layer too, and compute with it.
            "lora_target_modules": list(self.targets),
        }


def engine_adapter(config: VllmEngineConfig, run: RunConfig) -> EngineAdapter | None:
    """The adapter that this run's engines are sent alone; None where they are sent whole weights, adapters merged.

    Raises ConfigError where `weight_sync.adapters` asks for what vLLM cannot do, ModelError for a model or for targets
    that do not exist.
    """
    lora, is_wanted = adapters_of(run), run.source.facts.sends_adapters
    # Servers that run already have room for one or not; they are asked when they are reached.
    if lora is None or is_wanted is False or config.mode == "server":
        return None
    modules = {} if run.model.init == "random" else _adapted_modules(run, lora)
    obstacle = _obstacle(config, run, lora, modules)
    if obstacle is None:
        return EngineAdapter(lora.rank, tuple(sorted({name.rpartition(".")[2] for name in modules})))
    if is_wanted:
        raise ConfigError.at(
            "source.weight_sync.adapters", f"is true, but {obstacle}. Set it to false: adapters are then sent merged."
        )
    return None


def adapter_request() -> Any:
    """What a request to vLLM names, so that it is computed with the adapter."""
    from vllm.lora.request import LoRARequest

    # vLLM wants a path, and would read it where a worker did not have the adapter yet.
    return LoRARequest(_NAME, _ID, "an adapter that is sent from memory")


def _adapted_modules(run: RunConfig, lora: LoraConfig) -> Mapping[str, str]:
    """Names of the modules that get an adapter, and what each is."""
    # Only runs with adapters have the library for them.
    from spurline_models.adapters.lora import adapted_layers, add_adapters

    causal = build_without_memory(load_model_config(run.model), run.model)
    add_adapters(causal, lora, run.seed)
    return {name: type(layer.get_base_layer()).__name__ for name, layer in adapted_layers(causal)}


def _obstacle(config: VllmEngineConfig, run: RunConfig, lora: LoraConfig, modules: Mapping[str, str]) -> str | None:
    """Why engines cannot take the adapter alone, to follow a `but`; None when they can."""
    if run.model.init == "random":
        return "the weights below the adapter are random ones (model.init), which engines cannot read from model.path"
    if lora.merged_because is not None:
        return lora.merged_because
    if config.dtype == "float32" and base_dtype(lora, run.model).itemsize < stored_dtype(run.model).itemsize:
        return "engines in float32 would not round the weights below the adapter, as backend.lora.base_dtype does"
    if lora.rank > _RANKS[-1]:
        return f"vLLM takes adapters of rank {_RANKS[-1]} at most, and backend.lora.rank is {lora.rank}"
    others = {f"{name} ({kind})" for name, kind in modules.items() if kind != nn.Linear.__name__}
    if others:
        return f"vLLM takes adapters of linear layers only, and backend.lora adapts {listing(sorted(others)[:4])}"
    return None


class AdapterUpdate:
    """The tensors of an adapter while they come, in a worker; `install` puts the whole adapter into the model.

    It holds copies in fp32 on the CPU, where vLLM keeps the one that is in use too.
    """

    def __init__(self, runner: Any, settings: Mapping[str, Any]) -> None:
        """runner: vLLM's model runner. settings: as of `TakesWeights.begin_adapter_update`.

        Raises RunFailedError for an adapter of a kind that vLLM does not compute.
        """
        from vllm.lora.peft_helper import PEFTHelper

        self._manager: Any = lora_manager(runner)
        self._patterns = [key for name in ("rank_pattern", "alpha_pattern") for key in settings.get(name) or ()]
        try:
            self._settings: Any = PEFTHelper.from_dict(dict(settings))
            self._settings.validate_legal(self._manager.lora_config)
        except ValueError as error:
            raise RunFailedError(f"vLLM does not take this adapter: {error}") from error
        self._tensors: dict[str, Tensor] = {}

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these; what comes twice replaces what came before."""
        from vllm.lora.utils import is_base_embedding_weights

        for name, tensor in tensors:
            if is_base_embedding_weights(name):
                # PEFT adds what is under an adapter of the output layer, which the engine has.
                continue
            # The scale is multiplied in place, and rounded only then to what the engine computes in.
            self._tensors[name] = tensor.to("cpu", torch.float32, copy=True)

    def install(self) -> None:
        """Replace the adapter that the model has. Raises RunFailedError when tensors are missing, or are not those of
        its layers."""
        from vllm.lora.lora_model import LoRAModel

        self._check()
        adapter = LoRAModel.from_lora_tensors(
            _ID, self._tensors, self._settings, device="cpu", weights_mapper=_renaming(self._manager.model)
        )
        # The slot of the old one is free again, and the only one: a request in flight finds the new one there.
        self._manager.remove_adapter(_ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(_ID)

    def _check(self) -> None:
        targets = _own_targets(self._manager.model, self._settings.target_modules)
        sizes = [sizes for sizes in _adaptable(self._manager) if _is_target(sizes[0], targets)]
        for module, pattern in itertools.product((module for module, _, _ in sizes), self._patterns):
            # PEFT writes patterns for experts also where it adapts none.
            if re.match(rf"(.*\.)?({pattern})$", module):
                raise RunFailedError(
                    f"vLLM has one rank and scale for all layers, and the adapter others for {module}."
                )
        shapes = {
            name: shape
            for module, inputs, outputs in sizes
            for name, shape in (
                (f"{module}.lora_A", (self._settings.r, inputs)),
                (f"{module}.lora_B", (outputs, self._settings.r)),
            )
        }
        names = {self._own_name(name): name for name in self._tensors}
        if unknown := [name for own, name in names.items() if own not in shapes]:
            raise RunFailedError(f"The adapter has tensors that no layer of this engine takes: {listing(unknown[:4])}.")
        if missing := [name for name in shapes if name not in names]:
            raise RunFailedError(f"The adapter came without {listing(missing[:4])}; it must be published as a whole.")
        for own, name in names.items():
            if (got := tuple(self._tensors[name].shape)) != shapes[own]:
                raise RunFailedError(f"{name} has shape {got}, and this engine's layer takes {shapes[own]}.")

    def _own_name(self, name: str) -> str:
        """The name of a tensor with vLLM's name of the module, or the name as it is where it is no adapter's."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            module, is_a = parse_fine_tuned_lora_name(name, _renaming(self._manager.model))
        except ValueError:
            return name
        return f"{module}.lora_{'A' if is_a else 'B'}"


def lora_manager(runner: Any) -> Any:
    """What puts adapters into the layers of this worker. Raises RunFailedError in an engine without room for one."""
    if not hasattr(runner, "lora_manager"):
        raise RunFailedError("This engine was started without room for an adapter, and an adapter came alone.")
    return runner.lora_manager._adapter_manager


def prepare_adapters(runner: Any, targets: Sequence[str]) -> list[str]:
    """Before the first adapter. Returns those of the targets that no layer of vLLM's model takes an adapter for."""
    manager = lora_manager(runner)
    _compute_together(manager)
    modules = [module for module, _, _ in _adaptable(manager)]
    return [target for target in targets if not any(_is_target(module, [target]) for module in modules)]


def _compute_together(manager: Any) -> None:
    """On CPUs vLLM copies the matrices for every token, as each could have another adapter: 20 times as long for a
    prompt of 2,000 tokens, and a GiB of memory in a large layer. Here all tokens have the same adapter."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    for wrapper in manager.punica_wrapper_mapping.values():
        if isinstance(wrapper, PunicaWrapperCPU):
            wrapper.add_lora_linear = _add_to_linear
            wrapper.add_lora_logits = _add_to_logits


def _add_to_linear(
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Add the adapters of the layer's parts to its output `y` [tokens, sum of `output_slices`], in place.

    The parameters have the names of vLLM's, which it may call them by. x: the layer's inputs [tokens, in].
    lora_a_stacked: of each part [1, 1, rank, in]. lora_b_stacked: [1, 1, size of the part, rank].
    """
    parts = y.view(-1, y.shape[-1]).split(list(output_slices), dim=-1)
    rows = x.view(-1, x.shape[-1])
    for part, a, b in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
        part.add_((rows @ a[0, 0].T) @ b[0, 0].T, alpha=scale)


def _add_to_logits(
    y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
) -> None:
    """The same of the output layer, whose logits [tokens, ...] may be more than the adapter's tokens."""
    size = lora_b_stacked.shape[2]
    _add_to_linear(y[:, :size], x, (lora_a_stacked,), (lora_b_stacked,), scale, (size,))


def _adaptable(manager: Any) -> Iterator[tuple[str, int, int]]:
    """(name of a module of the original model, its inputs, its outputs): whole sizes, for everything that an adapter
    may be put to here. vLLM computes some of them as parts of one layer."""
    for name, layer in manager.modules.items():
        parts: list[str] = manager.packed_modules.get(name) or [name]
        for part, (inputs, outputs) in zip(parts, _sizes(layer, len(parts)), strict=False):
            yield part, inputs, outputs


def _sizes(layer: Any, num_parts: int) -> Iterator[tuple[int, int]]:
    """Inputs and outputs of each part, not divided by tensor parallelism."""
    from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

    base: Any = layer.base_layer
    if isinstance(base, QKVParallelLinear) and num_parts == 3:
        # Its `output_sizes` count heads of keys and values anew for every worker that has a copy of them.
        keys = base.total_num_kv_heads
        heads = ((base.total_num_heads, base.head_size), (keys, base.head_size), (keys, base.v_head_size))
        yield from ((base.input_size, count * size) for count, size in heads)
    elif isinstance(base, LinearBase):
        outputs: Any = [base.output_size] if num_parts == 1 else getattr(base, "output_sizes", ())
        yield from ((base.input_size, size) for size in outputs)
    else:
        # The output layer: vLLM adds its adapter where logits are made.
        yield layer.hidden_size, base.org_vocab_size


def _is_target(module: str, targets: str | Sequence[str]) -> bool:
    """As PEFT chooses modules: by a regular expression of the whole name, or by the name or the end of it."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _own_targets(model: Any, targets: str | Sequence[str]) -> str | Sequence[str]:
    """The targets, whole names of modules also as vLLM has them."""
    renaming = _renaming(model)
    if renaming is None or isinstance(targets, str):
        return targets
    return [*targets, *filter(None, map(renaming._map_name, targets))]


def _renaming(model: Any) -> Any:
    """vLLM's mapping from names of checkpoints to its own, without what joins tensors; None where they are equal."""
    mapping: Any = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapping is None else mapping.get_rename_mapper()
