"""What we add to vLLM's worker: it takes weights over bucket by bucket, and ends with the process that started it.

Place on the way: a member calls these methods by `collective_rpc` -> this, in the worker's process, beside the model.
vLLM imports this module there. Peak extra memory is one bucket, and layers that are not complete yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from spurline.errors import RunFailedError
from spurline.protocols.rollout_engine import WeightBucket
from spurline_async_rl.engines.vllm.launch import OWNER
from spurline_async_rl.weights.cuda_ipc import read_handles
from spurline_async_rl.weights.disk import read_file
from spurline_async_rl.weights.shared_memory import MemoryReader


def _end_with(owner: int) -> None:
    """Wait for the end of the owner, then end the engine: this worker and the process it belongs to."""
    engine = psutil.Process().parent()
    # An error here says that it has ended already.
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(owner).wait()
    if engine is not None and engine.pid not in (owner, 1):
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()
    os.kill(os.getpid(), signal.SIGKILL)


if OWNER in os.environ:
    threading.Thread(target=_end_with, args=(int(os.environ[OWNER]),), daemon=True, name="spurline-owner").start()


class WorkerExtension:
    """Mixed into vLLM's worker class; only the names with `spurline_` are ours."""

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def spurline_begin_update(self) -> None:
        """Expect new weights. Linear layers may have been packed for the hardware, so weights cannot be written into
        them: vLLM's layerwise reloading loads each layer beside, packs it, and copies it into place."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self._spurline_model())

    def spurline_load_bucket(self, plain: dict[str, Any]) -> None:
        """plain: as of `WeightBucket.to_plain`."""
        from vllm.config import set_current_vllm_config

        taken = WeightBucket.from_plain(plain)
        with set_current_vllm_config(self.vllm_config):
            if read := _READERS.get(taken.transport):
                self._spurline_model().load_weights(_copies(read(taken)))
            else:
                self._spurline_receive(taken)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def spurline_finish_update(self) -> list[str]:
        """Put the last layers into place. Returns the layers for which no weights have come."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self._spurline_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            missing = list(_layers_without_weights(model))
            finalize_layerwise_reload(model, self.model_runner.model_config)
            _refresh_tied_head(model)
        return missing

    def _spurline_model(self) -> Any:
        return self.model_runner.get_model()

    def _spurline_receive(self, bucket: WeightBucket) -> None:
        """By vLLM's own weight transfer, for which the engine was started with a `weight_transfer_config`."""
        engine = self.weight_transfer_engine
        if engine is None:
            raise RunFailedError(
                f"This engine was started without weight transfer, and weights come by {bucket.transport}."
            )
        if "init" in bucket.where:
            engine.init_transfer_engine(engine.parse_init_info(bucket.where["init"]))
        engine.receive_weights(engine.parse_update_info(bucket.where["update"]))


_READERS: dict[str, Callable[[WeightBucket], Iterable[tuple[str, Tensor]]]] = {
    "shared_memory": MemoryReader().read,
    "disk": read_file,
    "cuda_ipc": read_handles,
}


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """vLLM keeps what it is given until the whole layer has come, the sender reuses the memory before that."""
    for name, tensor in tensors:
        yield name, tensor.clone()


def _layers_without_weights(model: nn.Module) -> Iterator[str]:
    """Layers that have not got all of theirs. vLLM would only warn, and go on with the old ones."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        wanted = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        # Attention layers hold scales only, which checkpoints need not have.
        if not wanted or not info.can_load() or is_deferred_attention_layer(layer):
            continue
        if isinstance(layer, VocabParallelEmbedding):
            # Padded to a round number of tokens, so it never gets all; a tied head gets none.
            wanted = 0 if tied and name.endswith("lm_head") else 1
        if info.load_numel < wanted:
            yield name


def _refresh_tied_head(model: Any) -> None:
    """On CPUs a head that shares the embedding's weights keeps a packed copy of its own, which nothing else renews."""
    head: Any = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
        head.weight = model.model.embed_tokens.weight
        head.quant_method.process_weights_after_loading(head)
