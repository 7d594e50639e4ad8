"""Extend vLLM's worker: load weights in buckets, and end when the process that owns the engine ends.

vLLM imports this module in each worker process. An `EngineMember` calls the methods of `WorkerExtension` through vLLM's
`collective_rpc`. An update needs memory for one bucket and for the layers that still lack a part of their new weights.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import psutil
import torch
from torch import nn

from spurline.errors import BucketLostError, RunFailedError
from spurline_async_rl.engines.vllm.adapters import AdapterUpdate
from spurline_async_rl.engines.vllm.launch import LOST, OWNER
from spurline_async_rl.engines.vllm.lease import WorkerClaim
from spurline_async_rl.weights.reading import BucketReader
from spurline_models.weight_buckets import WeightBucket


def _end_with(owner: int) -> None:
    """Wait until the owner ends, and then kill this worker and its parent, the engine."""
    engine = psutil.Process().parent()
    # psutil raises this error if the owner has ended already.
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(owner).wait()
    if engine is not None and engine.pid not in (owner, 1):
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()
    os.kill(os.getpid(), signal.SIGKILL)


if OWNER in os.environ:
    threading.Thread(target=_end_with, args=(int(os.environ[OWNER]),), daemon=True, name="spurline-owner").start()


class WorkerExtension:
    """A mixin for vLLM's worker class. All methods that it adds begin with `spurline_` or `_spurline_`."""

    model_runner: Any
    vllm_config: Any
    rank: int
    device: torch.device
    _spurline_adapter: AdapterUpdate | None = None

    def spurline_call(self, owner: str, lease_s: float, method: str, *arguments: Any) -> dict[str, Any]:
        """Call one of the other methods for a run, unless this worker belongs to another run; see `WorkerClaim`.

        Args:
            owner: The name of the run.
            lease_s: The claim of the run lasts this many seconds from now on.
            method: The name of the method. If it is empty, only the claim is extended.

        Returns:
            The result of `WorkerClaim.extend`. The key `answer` is added, with the method's result, or None if it was
            not called.
        """
        answer: dict[str, Any] = _CLAIM.extend(owner, lease_s)
        if method and "claim" in answer:
            answer["answer"] = getattr(self, method)(*arguments)
        return {"answer": None, **answer}

    def spurline_end_claim(self, owner: str) -> None:
        """Let other runs use this worker."""
        _CLAIM.end(owner)

    def spurline_begin_update(self) -> None:
        """Prepare the model's layers for new weights.

        Weights cannot be written into linear layers directly, because these may be packed for the hardware. vLLM's
        layerwise reloading loads a new layer beside the old one, packs it, and then copies it into place.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if hasattr(self.model_runner, "lora_manager"):
            raise RunFailedError("This engine was started for adapters, but was sent whole weights.")
        self._spurline_buckets.end_update()
        model = self.model_runner.get_model()
        _forget_half_an_update(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        _forget_kernels_of_experts(model)

    def spurline_begin_adapter_update(self, adapter: Mapping[str, Any]) -> None:
        """Expect the tensors of an adapter; see `TakesWeights.begin_adapter_update`."""
        self._spurline_buckets.end_update()
        self._spurline_adapter = AdapterUpdate(self.model_runner, adapter)

    def spurline_load_bucket(self, plain: dict[str, Any]) -> dict[str, str] | None:
        """Load a bucket, given as `WeightBucket.to_plain`. If the weights did not arrive, return {LOST: reason}."""
        from vllm.config import set_current_vllm_config

        bucket = WeightBucket.from_plain(plain)
        try:
            weights = self._spurline_buckets.read(bucket)
        except BucketLostError as error:
            # The error is returned, because vLLM would change the class of a raised error.
            return {LOST: str(error)}
        with set_current_vllm_config(self.vllm_config):
            if self._spurline_adapter is not None:
                self._spurline_adapter.add(weights)
            else:
                # The sender overwrites the memory before vLLM has a whole layer, so vLLM gets copies.
                copies = ((name, tensor.clone()) for name, tensor in weights)
                self.model_runner.get_model().load_weights(copies)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return None

    def spurline_finish_update(self) -> list[str]:
        """Finish the update, and return the layers that did not get all of their weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._spurline_buckets.end_update()
        adapter, self._spurline_adapter = self._spurline_adapter, None
        if adapter is not None:
            adapter.install()
            return []
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            missing = list(_layers_without_weights(model))
            finalize_layerwise_reload(model, self.model_runner.model_config)
            _refresh_tied_head(model)
        return missing

    @cached_property
    def _spurline_buckets(self) -> BucketReader:
        return BucketReader(self.rank, self.device)


_CLAIM = WorkerClaim()


def _layers_without_weights(model: nn.Module) -> Iterator[str]:
    """Yield layers that did not get all of their new weights. vLLM would only warn, and keep the old weights."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        wanted = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        # Attention layers have only scales, which may be missing in a checkpoint.
        if not wanted or not info.can_load() or is_deferred_attention_layer(layer):
            continue
        if isinstance(layer, VocabParallelEmbedding):
            # The embedding is padded, so it never gets all elements. A tied head gets none.
            wanted = 0 if tied and name.endswith("lm_head") else 1
        if info.load_numel < wanted:
            yield name


def _forget_half_an_update(model: nn.Module) -> None:
    """Discard the weights of an update that a killed run did not finish.

    Otherwise vLLM would count them in the next update, and install a layer before all of its new weights have come.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def _forget_kernels_of_experts(model: nn.Module) -> None:
    """Make vLLM pack the new weights of experts on CPUs.

    vLLM packs experts only when it makes their kernel. An existing kernel would read the new weights as if they were
    packed.
    """
    from vllm.platforms import current_platform

    # On GPUs vLLM packs weights in every update, and CUDA graphs need the old kernels.
    if current_platform.is_cpu():
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


def _refresh_tied_head(model: Any) -> None:
    """Update the packed copy of the embedding's weights that a tied head has on CPUs."""
    head: Any = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
        head.weight = model.model.embed_tokens.weight
        head.quant_method.process_weights_after_loading(head)
