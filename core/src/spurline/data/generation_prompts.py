"""Split a row into the prompt a model answers and the reference answer, for held-out generation.

In: a chat, alpaca or prompt/completion row. Out: prompt tokens as the model sees them at inference, and the reference
as plain text. Nothing here is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig, DatasetConfig
from spurline.data.bad_row import BadRowError
from spurline.data.chat import ChatRenderer
from spurline.data.encoding import encode_batch, require_chat_template, require_offsets
from spurline.data.formats import TextPair, detect_format, read_row
from spurline.data.messages import assistant_turns
from spurline.data.pretokenized import TokenRow
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize


@dataclass(frozen=True)
class GenerationExample:
    """One prompt with its reference answer. prompt_ids encode prompt_text, plus a BOS if the tokenizer adds one."""

    prompt_ids: list[int]
    prompt_text: str
    reference_text: str


def prompt_and_reference(
    row: Mapping[str, Any],
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    location: str = "row",
) -> GenerationExample:
    """Everything before the last assistant turn, with the generation prompt, and that turn's content.

    Raises DataError with `location` in front for malformed and for pretokenized rows, and for a prompt over
    `data.max_length` when `data.too_long` is `error`; otherwise prompts are used whole.
    """
    require_offsets(tokenizer)
    try:
        example = _split(row, config, tokenizer, location)
    except BadRowError as error:
        raise error.at(location) from error
    if data.too_long == "error" and len(example.prompt_ids) > data.max_length:
        raise DataError(
            f"{location}: the prompt has {len(example.prompt_ids)} tokens, over data.max_length: {data.max_length}."
        )
    return example


def read_examples(
    source: DatasetToTokenize, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> Iterator[tuple[Mapping[str, Any], GenerationExample]]:
    """Rows of a dataset with their examples, in order; malformed rows are passed over when `on_bad_row: skip`."""
    dataset = source.dataset
    for number in range(len(dataset)):
        try:
            row = dataset[number]
            example = prompt_and_reference(row, source.config, tokenizer, data, location=dataset.location(number))
        except DataError:
            if source.config.on_bad_row == "skip":
                continue
            raise
        yield row, example


def _split(
    row: Mapping[str, Any], config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, location: str
) -> GenerationExample:
    try:
        name = detect_format(config, row)
    except DataError as error:
        raise DataError(f"{location}: {error}") from error
    item = read_row(row, config, name, has_chat_template=tokenizer.chat_template is not None)
    if isinstance(item, TokenRow):
        raise BadRowError(
            item.field,
            "holds token ids; answers cannot be generated and scored as text for pretokenized rows. Use chat, alpaca "
            "or prompt_completion rows for evaluation.generate.",
        )
    if isinstance(item, TextPair):
        [encoding] = encode_batch(tokenizer, [item.prompt], is_chat=False)
        ids = list(encoding.ids)
        # A tokenizer that ends every text would ask the model to answer after the end.
        if ids and ids[-1] == tokenizer.eos_token_id and encoding.special_tokens_mask[-1]:
            ids.pop()
        return GenerationExample(ids, item.prompt, item.completion)
    require_chat_template(tokenizer, location)
    turn = assistant_turns(item.messages)[-1]
    text = ChatRenderer(tokenizer).render(item.messages[:turn], item.tools, add_generation_prompt=True)
    [encoding] = encode_batch(tokenizer, [text], is_chat=True)
    return GenerationExample(list(encoding.ids), text, str(item.messages[turn].get("content", "")))
