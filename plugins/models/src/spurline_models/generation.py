"""Generate greedy continuations with the trained model, for evaluation during a run.

In RL, rollout engines generate instead. An engine that runs the trained model itself gets it from `generation_model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_models.abilities import GenerationModel
from spurline_models.device_profile import DeviceProfile
from spurline_models.lengths import LengthLimit, position_limit
from spurline_models.streams.stream_model import StreamModel, evaluation_mode, library_attention, other_attention
from spurline_text.tokenizer import load_tokenizer

_TOKENS_PER_BATCH = 65536
"""Limit on the tokens of prompts and responses in a batch, with padding. It limits the key-value cache."""


def generate_greedily(
    model: StreamModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_tokens: Sequence[int]
) -> list[list[int]]:
    """Return one continuation per prompt, in the prompts' order, up to and including the first stop token."""
    causal = model.causal
    assert all(len(prompt) > 0 for prompt in prompts), "a prompt has no tokens"
    responses: list[list[int]] = [[] for _ in prompts]
    pad = stop_tokens[0] if stop_tokens else 0
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_tokens) or None,
        pad_token_id=pad,
        use_cache=True,
    )
    generate: Any = causal.generate
    with evaluation_mode(causal), model.uncompiled(), _generation_setup(causal):
        # Models that read rows may mix tokens outside of attention, and padding on the left would change their results.
        for members in _batches([len(prompt) for prompt in prompts], max_new_tokens, pads=model.reading == "stream"):
            rows = [torch.as_tensor(prompts[member], dtype=torch.int64) for member in members]
            input_ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
            # By default, transformers waits for other ranks at each token. Do not wait: ranks have their own prompts.
            output = generate(
                input_ids.to(causal.device),
                attention_mask=mask.to(causal.device),
                generation_config=config,
                synced_gpus=False,
            )
            assert isinstance(output, torch.Tensor)
            for member, tokens in zip(members, output[:, input_ids.shape[1] :].tolist(), strict=True):
                ends = (position for position, token in enumerate(tokens, start=1) if token in stop_tokens)
                responses[member] = tokens[: next(ends, None)]
    return responses


def _batches(lengths: Sequence[int], max_new_tokens: int, *, pads: bool) -> Iterator[list[int]]:
    """Yield batches of prompt indices. If `pads` is false, all prompts of a batch have the same length."""
    members: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        is_full = (len(members) + 1) * (lengths[index] + max_new_tokens) > _TOKENS_PER_BATCH
        if members and (is_full or (not pads and lengths[index] != lengths[members[-1]])):
            yield members
            members = []
        members.append(index)
    if members:
        yield members


@contextmanager
def _generation_setup(causal: PreTrainedModel) -> Iterator[None]:
    """Use attention that supports left padding and a cache, and ignore the sampling defaults of the model's files.

    Restore the state of rotary embeddings at the end, since those of type `dynamic` remember the longest sequence.
    """
    own_defaults = causal.generation_config
    rotary = [module for module in causal.modules() if hasattr(module, "rope_type")]
    before = [(dict(vars(module)), dict(module._buffers)) for module in rotary]
    causal.generation_config = GenerationConfig()
    try:
        with other_attention(causal, library_attention(causal)):
            yield
    finally:
        causal.generation_config = own_defaults
        for module, (attributes, buffers) in zip(rotary, before, strict=True):
            # This also removes attributes that generation added.
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def generation_model(
    model: StreamModel, profile: DeviceProfile, limit: LengthLimit | None, *, allow_extrapolation: bool = False
) -> GenerationModel:
    """Return the model for a rollout engine. `limit` is the result of `check_config`."""
    positions = position_limit(model.causal.config)
    context = None if positions is None or (positions.extends and allow_extrapolation) else positions.tokens
    limits = [tokens for tokens in (context, limit and limit.tokens) if tokens is not None]

    @contextmanager
    def computing() -> Iterator[None]:
        with profile.computing(), model.uncompiled():
            yield

    return GenerationModel(model.causal, computing, min(limits, default=None), reads_streams=model.reading == "stream")


def stop_tokens(causal: PreTrainedModel, model: ModelConfig) -> list[int]:
    """Return the end-of-sequence ids of the model and of its tokenizer. The tokenizer's id ends turns in chats."""
    found = model_stop_tokens(causal)
    try:
        eos = load_tokenizer(model).eos_token_id
    except ModelError:
        # Runs on pretokenized data may have no tokenizer.
        return found
    return [*found, eos] if isinstance(eos, int) and eos not in found else found


def model_stop_tokens(causal: PreTrainedModel) -> list[int]:
    """Return the end-of-sequence ids of the model's generation config, or else of its config."""
    for config in (causal.generation_config, causal.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []
