"""Adapters alone in a vLLM engine: which of them it takes, and how a worker puts one into its model from memory.

Place on the way: RunConfig -> `engine_adapter`, before an engine starts -> its arguments -> buckets with the adapter's
tensors -> `AdapterUpdate` in every worker -> vLLM's own layers, which add the adapter to what the weights compute. The
weights below stay as they were read from `model.path`. vLLM is imported where an engine runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
"""vLLM's id of the one adapter of an engine. Every publish replaces the adapter, and every request names it."""
_NAME = "spurline"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for the largest rank of adapters."""


@dataclass(frozen=True)
class EngineAdapter:
    """The room for an adapter that an engine is started with.

    targets: the last parts of the names of the modules that have one, such as `q_proj`.
    """

    rank: int
    targets: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """Return fields of vLLM's AsyncEngineArgs."""
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": min(rank for rank in _RANKS if rank >= self.rank),
            # Else vLLM would make room at every layer, the embedding and the output layer too, and compute with it.
            "lora_target_modules": list(self.targets),
        }


def engine_adapter(config: VllmEngineConfig, run: RunConfig) -> EngineAdapter | None:
    """Return the adapter that this run's engines are sent alone, or None if they are sent whole weights.

    Raises:
        ConfigError: If `weight_sync.adapters` asks for something that vLLM cannot do.
        ModelError: If the model or a target does not exist.
    """
    lora, is_wanted = adapters_of(run), run.source.facts.sends_adapters
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
    """Return the name of the adapter that a request to vLLM gives to be computed with it."""
    from vllm.lora.request import LoRARequest

    # vLLM wants a path, and would read it where a worker did not have the adapter yet.
    return LoRARequest(_NAME, _ID, "an adapter that is sent from memory")


def _adapted_modules(run: RunConfig, lora: LoraConfig) -> Mapping[str, str]:
    """Return the names of the modules that get an adapter, and the class of each."""
    # Only runs with adapters have the library for them.
    from spurline_models.adapters.lora import adapted_layers, add_adapters

    causal = build_without_memory(load_model_config(run.model), run.model)
    add_adapters(causal, lora, run.seed)
    return {name: type(layer.get_base_layer()).__name__ for name, layer in adapted_layers(causal)}


def _obstacle(config: VllmEngineConfig, run: RunConfig, lora: LoraConfig, modules: Mapping[str, str]) -> str | None:
    """Return why engines cannot take the adapter alone, to follow a `but`; None if they can."""
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
        """runner: vLLM's model runner. settings: see `TakesWeights.begin_adapter_update`.

        Raises RunFailedError for an adapter of a kind that vLLM does not compute.
        """
        from vllm.lora.peft_helper import PEFTHelper

        self._manager: Any = lora_manager(runner)
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
        """Replace the model's adapter. Raises RunFailedError if tensors are missing, or belong to none of its
        layers."""
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
        modules = [module for module in _adaptable(self._manager) if _is_target(module, targets)]
        expected = {f"{module}.lora_{part}" for module in modules for part in "AB"}
        names = {self._own_name(name): name for name in self._tensors}
        if unknown := [name for own, name in names.items() if own not in expected]:
            raise RunFailedError(f"The adapter has tensors that no layer of this engine takes: {listing(unknown[:4])}.")
        if missing := sorted(expected - names.keys()):
            raise RunFailedError(f"The adapter came without {listing(missing[:4])}; it must be published as a whole.")

    def _own_name(self, name: str) -> str:
        """Return a tensor's name with vLLM's name of the module, or the name as it is if it belongs to no adapter."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            module, is_a = parse_fine_tuned_lora_name(name, _renaming(self._manager.model))
        except ValueError:
            return name
        return f"{module}.lora_{'A' if is_a else 'B'}"


def lora_manager(runner: Any) -> Any:
    """Return vLLM's manager of adapters in this worker. Raises RunFailedError in an engine without room for one."""
    if not hasattr(runner, "lora_manager"):
        raise RunFailedError("This engine was started without room for an adapter, and an adapter came alone.")
    return runner.lora_manager._adapter_manager


def prepare_adapters(runner: Any, targets: Sequence[str]) -> list[str]:
    """Return those of the targets that no layer of vLLM's model takes an adapter for."""
    modules = _adaptable(lora_manager(runner))
    return [target for target in targets if not any(_is_target(module, [target]) for module in modules)]


def _adaptable(manager: Any) -> list[str]:
    """Return the modules of the original model that take an adapter here. vLLM computes some as parts of one layer."""
    return [part for name in manager.modules for part in manager.packed_modules.get(name) or [name]]


def _is_target(module: str, targets: str | Sequence[str]) -> bool:
    """Choose as PEFT does: by a regular expression of the whole name, or by the name or the end of it."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _own_targets(model: Any, targets: str | Sequence[str]) -> str | Sequence[str]:
    """Return the targets, whole names of modules also as vLLM has them."""
    renaming = _renaming(model)
    if renaming is None or isinstance(targets, str):
        return targets
    return [*targets, *filter(None, map(renaming._map_name, targets))]


def _renaming(model: Any) -> Any:
    """Return vLLM's mapping from names of checkpoints to its own; None if they are equal."""
    mapping: Any = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapping is None else mapping.get_rename_mapper()
