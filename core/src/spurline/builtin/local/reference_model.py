"""The reference model of full fine-tuning: the weights that the run started from, loaded a second time.

Place on the way: `model` section -> this -> logprobs of role `reference`. Checkpoints hold a digest of these weights,
not the weights themselves: files that changed since are refused instead of measured against. Runs with adapters need
no second model: they turn the adapters off.
"""

from __future__ import annotations

from spurline.builtin.local.device_profile import DeviceProfile
from spurline.builtin.local.frozen_digest import weights_digest
from spurline.builtin.local.model_loading import load_model
from spurline.builtin.local.stream_model import StreamModel
from spurline.config.run_config import RunConfig
from spurline.errors import CheckpointError


def load_reference(
    run: RunConfig, profile: DeviceProfile, initial_weights: str, logits_chunk_tokens: int
) -> StreamModel:
    """The frozen model. Raises CheckpointError when it is not the one with the digest `initial_weights`."""
    with profile.keeping_generators():
        causal = load_model(run.model, profile, run.seed)
    if weights_digest(causal) != initial_weights:
        raise CheckpointError(
            f"model.path: the weights of {run.model.path} are not those this run started from, and its reference model "
            "is loaded from there. Restore them (and model.revision, where it names a branch), or start anew with "
            "another run_dir."
        )
    return StreamModel(causal.requires_grad_(False).eval(), logits_chunk_tokens)
