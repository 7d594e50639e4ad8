"""Answer prompts with an opened model: the prompt's tokens in, texts out, token by token where somebody watches.

Each prompt is computed by itself, so that no padding can change an answer; several answers to it are drawn together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tokenizers import Encoding
from transformers import GenerationConfig, StoppingCriteria, TextStreamer

from spurline.errors import UserError
from spurline_models.answering.target import Sampling, Target
from spurline_text.chats.chat import ChatRenderer
from spurline_text.encoding import encode_batch, require_chat_template
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import BadRowError
from spurline_text.stop_texts import StopTexts


@dataclass(frozen=True)
class Answer:
    """An answer without special tokens, the number of its tokens, and `length` if it was cut off."""

    text: str
    tokens: int
    finish_reason: Literal["stop", "length"]


def chat_prompt(target: Target, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Return the tokens of a conversation that waits for the model's turn.

    Raises:
        UserError: For a model without a chat template, and for a prompt that cannot be answered.
    """
    if target.tokenizer.chat_template is None:
        raise UserError(f"{target.words} has no chat template. Give --raw to have it go on from plain text.")
    require_chat_template(target.tokenizer, target.words)
    try:
        text = ChatRenderer(target.tokenizer).render(messages, tools, add_generation_prompt=True)
    except BadRowError as error:
        raise UserError(f"the chat template refuses the conversation: {error}") from error
    return list(_encoded(target, text, is_chat=True).ids)


def raw_prompt(target: Target, text: str) -> list[int]:
    """Return the tokens of plain text to go on from. Raises UserError for a prompt that cannot be answered."""
    encoding = _encoded(target, text, is_chat=False)
    ids = list(encoding.ids)
    # A tokenizer that ends every text would ask the model to go on after the end.
    if ids and ids[-1] == target.tokenizer.eos_token_id and encoding.special_tokens_mask[-1]:
        ids.pop()
    return ids


def _encoded(target: Target, text: str, *, is_chat: bool) -> Encoding:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not Unicode text: {error}. Write it in UTF-8.") from error
    [encoding] = encode_batch(target.tokenizer, [text], is_chat=is_chat)
    length = len(encoding.ids)
    if target.context is not None and length >= target.context:
        raise UserError(f"the prompt has {length:,} tokens, and the model sees {target.context:,} in all. Shorten it.")
    return encoding


def answer(
    target: Target, prompt: Sequence[int], sampling: Sampling, count: int = 1, seen: Callable[[str], None] | None = None
) -> list[Answer]:
    """Answer one prompt, `count` times. `seen` is given the text of a single answer as it grows.

    Raises:
        UserError: For a prompt without tokens, and several answers without sampling.
    """
    room = sampling.max_new_tokens if target.context is None else target.context - len(prompt)
    if not prompt:
        raise UserError("the prompt has no tokens. Write something.")
    if count > 1 and sampling.temperature == 0:
        raise UserError(f"{count} answers would be equal without sampling. Give --temperature as well, such as 0.8.")
    drawn = sampling.temperature > 0
    config = GenerationConfig(
        do_sample=drawn,
        **({"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k} if drawn else {}),
        max_new_tokens=min(sampling.max_new_tokens, room),
        num_return_sequences=count,
        eos_token_id=list(target.stops) or None,
        pad_token_id=target.stops[0] if target.stops else 0,
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
                stopping_criteria=[_Stops(target, sampling.stop, len(prompt), count)] if sampling.stop else None,
                streamer=None if seen is None or count > 1 else _Watched(target, seen),
            )
    finally:
        target.causal.generation_config = own
    return [_read(target, tokens, sampling.stop) for tokens in output[:, len(prompt) :].tolist()]


def _read(target: Target, tokens: list[int], stop: Sequence[str]) -> Answer:
    texts = StopTexts(target.tokenizer, stop) if stop else None
    # Tokens behind the end pad the answer to the length of the others.
    ends = next(
        (
            place
            for place, token in enumerate(tokens, 1)
            if token in target.stops or (texts is not None and texts.completed_by(token))
        ),
        None,
    )
    tokens = tokens[:ends]
    text = str(target.tokenizer.decode(tokens, skip_special_tokens=True))
    return Answer(text, len(tokens), "length" if ends is None else "stop")


class _Stops(StoppingCriteria):
    """Ends an answer with the token that completes a text in it; that of transformers also looks at the prompt."""

    def __init__(self, target: Target, stop: Sequence[str], prompt_tokens: int, count: int) -> None:
        self._texts = [StopTexts(target.tokenizer, stop) for _ in range(count)]
        self._seen = prompt_tokens
        self._is_done = [False] * count

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        for row, tokens in enumerate(input_ids[:, self._seen :].tolist()):
            for token in tokens:
                self._is_done[row] = self._is_done[row] or self._texts[row].completed_by(token)
        self._seen = input_ids.shape[1]
        return torch.tensor(self._is_done, device=input_ids.device)


class _Watched(TextStreamer):
    """Passes the text on as it grows, in pieces that are whole words."""

    def __init__(self, target: Target, seen: Callable[[str], None]) -> None:
        super().__init__(target.tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
        self._seen = seen

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._seen(text)
