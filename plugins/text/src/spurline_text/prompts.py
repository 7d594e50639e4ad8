"""Turn a row into the prompt that a model answers, and the reference answer if the row has one.

In: a chat, alpaca or prompt/completion row, with or without an answer. The column `reference` may hold the reference.
Out: the tokens of the prompt, encoded as at inference, and the reference as plain text. Rollouts and held-out
generation use both. This module makes no training targets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import DataError
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.chats.chat import ChatRenderer, is_doubtful
from spurline_text.chats.left_out import find_left_out, refuse_left_out
from spurline_text.encoding import encode_batch, require_chat_template, require_offsets
from spurline_text.rows.formats import ANSWER_COLUMNS, Conversation, TextPair, TokenRow, detect_format, read_row
from spurline_text.rows.messages import Message, assistant_turns
from spurline_text.rows.rows import BadRowError, RowView, describe, explain_bad_row, require_text


@dataclass(frozen=True)
class ChatQuestion:
    """A conversation to answer.

    Attributes:
        messages: The whole conversation of the row.
        answer_at: Index of the answer in `messages`. If the row has no answer, it is the number of messages.
        reference: The expected answer, or None.
        tools: Schemas of tools in the row.
    """

    messages: list[Message]
    answer_at: int
    reference: str | None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TextQuestion:
    """Plain text to continue, and the expected answer or None."""

    text: str
    reference: str | None


def read_question(row: Mapping[str, Any], config: DatasetConfig) -> ChatQuestion | TextQuestion:
    """Return the question of a row. If a conversation ends with an assistant turn, that turn is the answer.

    Raises BadRowError, which names the field, for a malformed or pretokenized row. Raises DataError if the columns fit
    no format.
    """
    name = detect_format(config, row, needs_answer=False)
    item = read_row(row, config, name, needs_answer=False)
    view = RowView(row, config.columns)
    reference = view.get("reference")
    if isinstance(reference, (int, float)) and not isinstance(reference, bool):
        reference = str(reference)
    if reference is not None and not isinstance(reference, str):
        raise BadRowError(view.label("reference"), f"is {describe(reference)}, expected text or a number.")
    if isinstance(item, TokenRow):
        raise BadRowError(
            item.field,
            "holds token ids; answers cannot be generated and scored as text for pretokenized rows. Use chat, alpaca "
            "or prompt_completion rows.",
        )
    if isinstance(item, TextPair):
        has_answer = any(view.get(column) is not None for column in ANSWER_COLUMNS)
        return TextQuestion(item.prompt, item.completion if reference is None and has_answer else reference)
    messages = item.messages
    if messages[-1]["role"] != "assistant":
        return ChatQuestion(messages, len(messages), reference, item.tools)
    answer_at = assistant_turns(messages)[-1]
    answer = str(messages[answer_at].get("content", ""))
    return ChatQuestion(messages, answer_at, answer if reference is None else reference, item.tools)


@dataclass(frozen=True)
class GenerationExample:
    """A prompt with its reference answer. `prompt_ids` encode `prompt_text`, with a BOS if the tokenizer adds one."""

    prompt_ids: list[int]
    prompt_text: str
    reference_text: str | None
    location: str = "row"


def question_key(row: Mapping[str, Any], config: DatasetConfig) -> int:
    """Return a hash of the question. If the row has no question in a known format, the whole row is hashed."""
    asked: Any = row
    with suppress(DataError):
        question = read_question(row, config)
        asked = question.messages[: question.answer_at] if isinstance(question, ChatQuestion) else question.text
    return xxhash.xxh3_64_intdigest(json.dumps(asked, sort_keys=True, default=str).encode())


def prompt_and_reference(
    row: Mapping[str, Any],
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    location: str = "row",
    renderer: ChatRenderer | None = None,
) -> GenerationExample:
    """Return the prompt of a row as text and tokens, and its reference answer.

    Args:
        row: A row of a dataset.
        config: Settings of the dataset.
        tokenizer: Renders and encodes the prompt.
        data: Settings of the section `data`.
        location: Location of the row, for errors.
        renderer: A renderer for this tokenizer that several calls share. If None, a new renderer is made.

    Raises:
        DataError: If the row is malformed or pretokenized, or if the prompt is longer than `data.max_length` and
            `data.too_long` is `error`. With other values of `data.too_long`, a long prompt is returned whole.
    """
    require_offsets(tokenizer)
    try:
        question = read_question(row, config)
        is_chat = isinstance(question, ChatQuestion)
        require_text(question.reference or "", row)
        if is_chat:
            text = _chat_prompt(question, tokenizer, data, location, renderer or ChatRenderer(tokenizer))
        else:
            text = question.text
        require_text(text, row)
    except DataError as error:
        raise explain_bad_row(location, error) from error
    ids = encode_prompt(tokenizer, text, is_chat=is_chat)
    if data.too_long == "error" and len(ids) > data.max_length:
        raise DataError(
            f"{location}: the prompt has {len(ids)} tokens, over data.max_length: {data.max_length}. "
            "Raise data.max_length, leave the row out, or remove data.too_long: error to use long prompts too."
        )
    return GenerationExample(ids, text, question.reference, location)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, is_chat: bool) -> list[int]:
    """Return the tokens of a rendered conversation, or of plain text, for the model to continue."""
    [encoding] = encode_batch(tokenizer, [text], is_chat=is_chat)
    ids = list(encoding.ids)
    # Some tokenizers add an end-of-sequence token to plain text, after which the model would not answer.
    if not is_chat and ids and ids[-1] == tokenizer.eos_token_id and encoding.special_tokens_mask[-1]:
        ids.pop()
    return ids


def read_examples(
    source: DatasetToTokenize,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    check: Callable[[Mapping[str, Any], GenerationExample], None] = lambda row, example: None,
) -> Iterator[tuple[Mapping[str, Any], GenerationExample]]:
    """Yield the rows of a dataset with their examples, in order.

    `check` may refuse a row by raising DataError. With `on_bad_row: skip`, rows that cannot be used are left out.
    """
    dataset, renderer = source.dataset, ChatRenderer(tokenizer)
    for number in range(len(dataset)):
        try:
            row = dataset[number]
            location = dataset.location(number)
            example = prompt_and_reference(row, source.config, tokenizer, data, location=location, renderer=renderer)
            check(row, example)
        except DataError as error:
            if source.config.on_bad_row == "skip":
                continue
            raise explain_bad_row(dataset.location(number), error) from error
        yield row, example


def _chat_prompt(
    question: ChatQuestion, tokenizer: PreTrainedTokenizerBase, data: DataConfig, location: str, renderer: ChatRenderer
) -> str:
    require_chat_template(tokenizer, location)
    conversation = Conversation(question.messages[: question.answer_at], question.tools)
    text = renderer.render(conversation.messages, conversation.tools, add_generation_prompt=True)
    if data.on_ignored == "error" and is_doubtful(conversation, text):
        found = find_left_out(renderer, conversation, add_generation_prompt=True)
        refuse_left_out(found, tokenizer, location)
    return text
