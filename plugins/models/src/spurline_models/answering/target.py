"""Open the model that answers, a checkpoint of a run or any model, and let it answer.

The weights of a checkpoint are read as `spurline export` would write them: adapters merged, in the dtype of the files.
Each prompt is computed alone, so that no padding can change an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import ModelConfig
from spurline.errors import UserError
from spurline.progress import Progress
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.directory import RunDirectory
from spurline_models.architecture import load_model_config
from spurline_models.device_profile import device_profile
from spurline_models.export import exported_weights, generation_config
from spurline_models.generation import stop_tokens
from spurline_models.lengths import position_limit
from spurline_models.loading import load_model
from spurline_text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; `temperature` 0 takes the likeliest token, `top_k` 0 any, `stop` texts end an answer."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def words(self) -> str:
        """Describe the sampling for people."""
        how = ["greedy"]
        if self.temperature:
            how = [f"temperature {self.temperature:g}"]
            how += [f"top_p {self.top_p:g}"] * (self.top_p < 1) + [f"top_k {self.top_k}"] * (self.top_k > 0)
        return ", ".join([*how, f"at most {self.max_new_tokens:,} new tokens"])


@dataclass(frozen=True)
class Answer:
    """An answer without special tokens, the number of its tokens, and `length` if it was cut off."""

    text: str
    tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Target:
    """A model that answers.

    Attributes:
        words: A description for people.
        causal: The model.
        tokenizer: Its tokenizer.
        sampling: The sampling that the run or the model's files recommend.
        stops: Tokens that end an answer.
        context: Tokens that it can see; None without a limit.
    """

    words: str
    causal: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    stops: tuple[int, ...]
    context: int | None


def open_run(loaded: LoadedConfig, checkpoint: str, progress: Progress) -> Target:
    """Open a checkpoint of a run: `latest`, `best`, or a folder. Raises CheckpointError if there is none."""
    directory = RunDirectory(loaded.config.run_dir)
    store = CheckpointStore(directory.checkpoints)
    found = store.chosen(None if checkpoint == "latest" else checkpoint)
    progress(f"reading {found.path}")
    target = _open(loaded.config.model, progress, exported_weights(loaded, found))
    own = loaded.config.source.facts.sampling
    sampling = target.sampling
    if own is not None:
        sampling = Sampling(own.max_new_tokens, own.temperature, own.top_p, own.top_k, own.stop)
    return replace(target, words=f"{directory.path}, step {found.step:,}", sampling=sampling)


def open_model(path: str, progress: Progress) -> Target:
    """Open a folder of a model, or its name on the hub. Raises ModelError."""
    return _open(ModelConfig(path=path), progress)


def _open(model: ModelConfig, progress: Progress, weights: dict[str, Tensor] | None = None) -> Target:
    """Open a model, with these weights instead of its own if they are given."""
    progress("loading the tokenizer")
    tokenizer = load_tokenizer(model)
    progress("loading weights")
    is_trained = weights is not None
    causal = load_model(model, device_profile(setting="device"), seed=0, weights=weights).eval()
    if is_trained:
        causal.generation_config = generation_config(model, tokenizer)
    limit = position_limit(load_model_config(model))
    context = None if limit is None else limit.tokens
    sampling, advised = Sampling(), causal.generation_config
    if advised is not None and advised.do_sample:
        sampling = Sampling(
            temperature=1.0 if advised.temperature is None else advised.temperature,
            top_p=1.0 if advised.top_p is None else advised.top_p,
            top_k=advised.top_k or 0,
        )
    return Target(model.path, causal, tokenizer, sampling, tuple(stop_tokens(causal, model)), context)


def answer(
    target: Target, prompt: Sequence[int], sampling: Sampling, count: int = 1, seen: Callable[[str], None] | None = None
) -> list[Answer]:
    """Answer one prompt.

    Args:
        target: The model.
        prompt: Tokens of the prompt, fewer than the model can see.
        sampling: How answers are drawn.
        count: The number of answers.
        seen: Is given the text of a single answer as it grows.

    Raises:
        UserError: For a prompt without tokens, and for several answers without sampling.
    """
    if not prompt:
        raise UserError("the prompt has no tokens. Write something.")
    if count > 1 and sampling.temperature == 0:
        raise UserError(f"{count} answers would be equal without sampling. Give --temperature as well, such as 0.8.")
    room = sampling.max_new_tokens if target.context is None else target.context - len(prompt)
    drawn: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        drawn = {"do_sample": True, "temperature": sampling.temperature}
        drawn |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
    config = GenerationConfig(
        **drawn,
        max_new_tokens=min(sampling.max_new_tokens, room),
        num_return_sequences=count,
        eos_token_id=list(target.stops) or None,
        pad_token_id=target.stops[0] if target.stops else 0,
        stop_strings=list(sampling.stop) or None,
    )
    ids = torch.tensor([list(prompt)], device=target.causal.device)
    generate: Any = target.causal.generate
    own, target.causal.generation_config = target.causal.generation_config, GenerationConfig()
    try:
        with torch.inference_mode():
            output = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                tokenizer=target.tokenizer,
                streamer=None if seen is None or count > 1 else _Watched(target, seen),
            )
    finally:
        target.causal.generation_config = own
    return [_read(target, tokens, config.max_new_tokens) for tokens in output[:, len(prompt) :].tolist()]


def _read(target: Target, tokens: list[int], most: int | None) -> Answer:
    """Read an answer up to its end; padding up to the length of the other answers may follow."""
    end = next((place for place, token in enumerate(tokens, 1) if token in target.stops), None)
    text = str(target.tokenizer.decode(tokens[:end], skip_special_tokens=True))
    return Answer(text, len(tokens[:end]), "length" if end is None and len(tokens) == most else "stop")


class _Watched(TextStreamer):
    """Passes the text on as it grows, in pieces that are whole words."""

    def __init__(self, target: Target, seen: Callable[[str], None]) -> None:
        super().__init__(target.tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
        self._seen = seen

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._seen(text)
