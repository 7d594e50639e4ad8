"""Send only the adapter to a vLLM engine, which keeps the weights from `model.path`.

`engine_adapter` decides whether this is possible, before an engine starts. `AdapterUpdate` puts an adapter from memory
into a worker's model, and vLLM's own layers compute with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spurline.errors import RunFailedError, listing
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.backend_config import adapters_of
from spurline_models.placement.narrow_weights import base_dtype
from spurline_models.weight_files import stored_dtype

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig
    from spurline_async_rl.engines.configs import VllmEngineConfig
    from spurline_models.configs import LoraConfig

_ID = 1
"""vLLM's id of the adapter. An engine has only one adapter, and each publish replaces it."""
_NAME = "spurline"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for the argument `max_lora_rank`."""


@dataclass(frozen=True)
class EngineAdapter:
    """The rank and targets of the adapter that an engine is started for.

    `targets` are the last parts of the names of the adapted modules, such as `q_proj`.
    """

    rank: int
    targets: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """Return fields of vLLM's AsyncEngineArgs."""
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": min(rank for rank in _RANKS if rank >= self.rank),
            # By default, vLLM would reserve memory for an adapter at every layer, and compute with it.
            "lora_target_modules": list(self.targets),
        }


def engine_adapter(config: VllmEngineConfig, run: RunConfig) -> EngineAdapter | None:
    """Return the adapter of this run, or None if its engines must get all weights.

    Raises:
        ModelError: If the model or a target does not exist.
    """
    lora = adapters_of(run)
    if lora is None or lora.merged_because is not None:
        return None
    if config.mode == "server" or run.source.facts.sends_adapters is False:
        return None
    # Engines cannot read random weights from `model.path`.
    if run.model.init == "random" or lora.rank > _RANKS[-1]:
        return None
    # The trainer rounds the base weights to `base_dtype`, and an engine in float32 would not.
    if config.dtype == "float32" and base_dtype(lora, run.model).itemsize < stored_dtype(run.model).itemsize:
        return None
    modules = _adapted_modules(run, lora)
    # vLLM takes adapters of linear layers only.
    if any(kind != nn.Linear.__name__ for kind in modules.values()):
        return None
    return EngineAdapter(lora.rank, tuple(sorted({name.rpartition(".")[2] for name in modules})))


def adapter_request() -> Any:
    """Return the object that names the adapter to vLLM. Each request for tokens includes it."""
    from vllm.lora.request import LoRARequest

    # vLLM requires a path, but never reads it, because the adapter is in memory.
    return LoRARequest(_NAME, _ID, "an adapter that is sent from memory")


def _adapted_modules(run: RunConfig, lora: LoraConfig) -> Mapping[str, str]:
    """Return the names of the modules that get an adapter, with their classes."""
    # PEFT is installed only for runs with adapters.
    from spurline_models.adapters.lora import adapted_layers, add_adapters

    causal = build_without_memory(load_model_config(run.model), run.model)
    add_adapters(causal, lora, run.seed)
    return {name: type(layer.get_base_layer()).__name__ for name, layer in adapted_layers(causal)}


class AdapterUpdate:
    """Collects the tensors of an adapter in a worker, as copies in fp32 on the CPU, and installs the adapter."""

    def __init__(self, runner: Any, settings: Mapping[str, Any]) -> None:
        """Prepare for an adapter with these settings (see `TakesWeights.begin_adapter_update`) for vLLM's model runner.

        Raises:
            RunFailedError: If the engine was started without adapters, or vLLM does not support this adapter.
        """
        from vllm.lora.peft_helper import PEFTHelper

        if not hasattr(runner, "lora_manager"):
            raise RunFailedError("This engine was started without adapters, but only an adapter was sent.")
        self._manager: Any = runner.lora_manager._adapter_manager
        try:
            self._settings: Any = PEFTHelper.from_dict(dict(settings))
            self._settings.validate_legal(self._manager.lora_config)
        except ValueError as error:
            raise RunFailedError(f"vLLM does not take this adapter: {error}") from error
        self._tensors: dict[str, Tensor] = {}

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these tensors. A later tensor with the same name replaces the earlier one."""
        from vllm.lora.utils import is_base_embedding_weights

        for name, tensor in tensors:
            if is_base_embedding_weights(name):
                # If the output layer has an adapter, PEFT adds the layer's base weights. The engine has them already.
                continue
            # vLLM multiplies these tensors by the scale in place, and rounds them to the engine's dtype afterwards.
            self._tensors[name] = tensor.to("cpu", torch.float32, copy=True)

    def install(self) -> None:
        """Replace the model's adapter. Raises RunFailedError if tensors are missing or fit no layer."""
        from vllm.lora.lora_model import LoRAModel

        self._check()
        adapter = LoRAModel.from_lora_tensors(
            _ID, self._tensors, self._settings, device="cpu", weights_mapper=_renaming(self._manager.model)
        )
        # There is only one slot, so unfinished requests use the new adapter.
        self._manager.remove_adapter(_ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(_ID)

    def _check(self) -> None:
        targets = _own_targets(self._manager.model, self._settings.target_modules)
        # vLLM joins some modules of the original model in one layer.
        packed = self._manager.packed_modules
        adaptable = (part for name in self._manager.modules for part in packed.get(name) or [name])
        modules = [module for module in adaptable if _is_target(module, targets)]
        expected = {f"{module}.lora_{part}" for module in modules for part in "AB"}
        names = {self._own_name(name): name for name in self._tensors}
        if unknown := [name for own, name in names.items() if own not in expected]:
            raise RunFailedError(
                f"The adapter has tensors that fit no layer of vLLM's model: {listing(unknown[:4])}. Remove these "
                "modules from backend.lora.target_modules, or set source.weight_sync.adapters: false to send merged "
                "weights."
            )
        if missing := sorted(expected - names.keys()):
            raise RunFailedError(f"The adapter lacks {listing(missing[:4])}, but all its tensors must be published.")

    def _own_name(self, name: str) -> str:
        """Return a tensor's name in vLLM, or the unchanged name if vLLM does not know it."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            module, is_a = parse_fine_tuned_lora_name(name, _renaming(self._manager.model))
        except ValueError:
            return name
        return f"{module}.lora_{'A' if is_a else 'B'}"


def _is_target(module: str, targets: str | Sequence[str]) -> bool:
    """Return whether PEFT would adapt the module. `targets` is a regular expression, or a list of ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _own_targets(model: Any, targets: str | Sequence[str]) -> str | Sequence[str]:
    """Return the targets together with their names in vLLM."""
    renaming = _renaming(model)
    if renaming is None or isinstance(targets, str):
        return targets
    return [*targets, *filter(None, map(renaming._map_name, targets))]


def _renaming(model: Any) -> Any:
    """Return vLLM's mapping from names in checkpoints to its own names, or None if they are equal."""
    mapping: Any = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapping is None else mapping.get_rename_mapper()
