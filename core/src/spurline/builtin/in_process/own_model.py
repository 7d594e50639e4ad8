"""The engine's own copy of the model, for when it may not use the backend's.

Place on the way: `model` section -> this -> decoder; later the published weights -> this copy. It is loaded with the
local backend's code, so both start from the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spurline.builtin.configs import LocalBackendConfig
from spurline.builtin.engine_configs import InProcessEngineConfig
from spurline.builtin.local.config_checks import check_config
from spurline.builtin.local.device_profile import device_profile
from spurline.builtin.local.generation import generation_model
from spurline.builtin.local.model_loading import load_model
from spurline.builtin.local.probe import check_exactness
from spurline.builtin.local.stream_model import StreamModel
from spurline.builtin.local.weights import named_weights
from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, ModelError, Problem, RunFailedError, listing, suggestion
from spurline.protocols.generation_model import GenerationModel


def load_own_model(config: InProcessEngineConfig, run: RunConfig) -> GenerationModel:
    """Raises ModelError for a model that the engine cannot compute exactly, ConfigError for a GPU that is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            [Problem("source.engine.device", "is cuda, but torch sees no GPU. Set device: auto, or check nvidia-smi.")]
        )
    backend = LocalBackendConfig(device=config.device, precision=config.precision)
    profile = device_profile(backend)
    with profile.keeping_generators():
        causal = load_model(run.model, profile, run.seed)
    limit = check_config(causal, run.model.path, run.data.max_length)
    model = StreamModel(causal.requires_grad_(False).eval(), backend.logits_chunk_tokens)
    check_exactness(model, profile, run.model.path)
    return generation_model(causal, profile, limit)


class WeightWriter:
    """Replaces every weight of a model in place, as they come. Where it raises, some have been replaced."""

    def __init__(self, causal: PreTrainedModel):
        self._targets = dict(named_weights(causal, adapted=False))
        own = {tensor.untyped_storage().data_ptr() for tensor in causal.state_dict().values()}
        if any(target.untyped_storage().data_ptr() not in own for target in self._targets.values()):
            raise ModelError(
                f"{type(causal).__name__} holds weights in another form than its files, so the engine's copy cannot "
                "take new ones in place. Use a source that shares the backend's weights."
            )
        self._missing = set(self._targets)

    @torch.no_grad()
    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """weights: (hf_name, tensor). Raises RunFailedError when they are not of this model."""
        for name, tensor in weights:
            target = self._targets.get(name)
            if target is None:
                raise RunFailedError(f"The engine's model has no weight '{name}'.{suggestion(name, self._targets)}")
            if tensor.shape != target.shape:
                raise RunFailedError(
                    f"Weight {name} has shape {tuple(tensor.shape)}, and the engine's model {tuple(target.shape)}."
                )
            target.copy_(tensor)
            self._missing.discard(name)

    def finish(self) -> None:
        """Raises RunFailedError when weights are missing."""
        if self._missing:
            raise RunFailedError(
                f"New weights came without {listing(self._missing)}; a model must be published as a whole."
            )
