"""Do the work of `spurline generate`: read the prompts, answer them, and print the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from tokenizers import Encoding

from spurline.config.loading import LoadedConfig, load_config
from spurline.errors import DataError, UserError
from spurline.progress import Progress
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.tokenization import DatasetToTokenize
from spurline.terminal import json_line, printable, standard_input
from spurline_models.answering.target import Answer, Sampling, Target, answer, open_model, open_run
from spurline_text.chats.chat import ChatRenderer
from spurline_text.encoding import encode_batch, require_chat_template
from spurline_text.prompts import TextQuestion, read_question
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import BadRowError
from spurline_text.tokenization import open_datasets

_RESET = "/reset"


def opened(target: str, load_run: Callable[[Path], LoadedConfig], checkpoint: str, progress: Progress) -> Target:
    """Open a run, with `load_run` to read its config, or a model. Raises UserError if the target is neither."""
    path = Path(target)
    try:
        config: Any = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        config = None
    # Models have a config.json too.
    if isinstance(config, dict) and "run_dir" in config:
        return open_run(load_run(path), checkpoint, progress)
    if checkpoint != "latest":
        raise UserError(f"--checkpoint is for runs, and {target} is not one.")
    return open_model(target, progress)


def prompt_rows(path: str, columns: Mapping[str, str]) -> DatasetToTokenize:
    """Open rows of prompts as `data.train` does, with these `columns`. Raises DataError if there are none."""
    train = {"path": path, "columns": dict(columns)}
    # Only the data is used. The other settings are there because a config requires them.
    loaded = load_config({"model": {"path": "none"}, "steps": 1, "data": {"train": train}})
    [rows] = open_datasets(loaded.config.data.train, loaded.host.registry)
    if not len(rows.dataset):
        raise DataError(f"{path} has no rows.")
    return rows


def text_of_input() -> str:
    """Return all of standard input, which is one prompt."""
    stream = standard_input()
    if stream is None:
        raise UserError("there is no standard input to read a prompt from. Give a prompt, or --file.")
    return stream.read().rstrip("\n")


class Prompts:
    """Makes prompts for a model.

    Args:
        target: The model.
        system: Text of a system message, if there is one.
        raw: Whether prompts are plain text, without the chat template.
    """

    def __init__(self, target: Target, system: str | None, *, raw: bool) -> None:
        if raw and system is not None:
            raise UserError("--system belongs to a conversation, and --raw goes on from plain text. Leave one out.")
        self._target, self._raw = target, raw
        self.begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def of_text(self, text: str) -> list[int]:
        if self._raw:
            return self.of_plain_text(text)
        return self.of_messages([*self.begin, {"role": "user", "content": text}])

    def of_plain_text(self, text: str) -> list[int]:
        """Return the tokens of plain text for the model to continue. Raises UserError if it cannot be answered."""
        encoding = self._encoded(text, is_chat=False)
        ids = list(encoding.ids)
        # Some tokenizers append an end token to every text. The model must not continue after one.
        if ids and ids[-1] == self._target.tokenizer.eos_token_id and encoding.special_tokens_mask[-1]:
            ids.pop()
        return ids

    def of_messages(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the tokens of a conversation, ready for the model's turn. Raises UserError as `of_plain_text` does."""
        if self._target.tokenizer.chat_template is None:
            raise UserError(f"{self._target.words} has no chat template. Give --raw to go on from plain text.")
        require_chat_template(self._target.tokenizer, self._target.words)
        try:
            text = ChatRenderer(self._target.tokenizer).render(messages, tools, add_generation_prompt=True)
        except BadRowError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from error
        return list(self._encoded(text, is_chat=True).ids)

    def of_rows(self, rows: DatasetToTokenize) -> Iterator[tuple[str, list[int]]]:
        """Yield (question, prompt) for each row, in any format that has text. Answers in the rows are not read.

        Raises:
            UserError: If a row has no prompt that can be answered. The error names the row.
        """
        for number in range(len(rows.dataset)):
            try:
                yield self._of_row(rows.dataset[number], rows.config)
            except (DataError, UserError) as error:
                names = " Here `columns` are given as --column prompt=NAME." if "`columns" in str(error) else ""
                raise UserError(f"{rows.dataset.location(number)}: {error}{names}") from error

    def _of_row(self, row: Mapping[str, Any], config: DatasetConfig) -> tuple[str, list[int]]:
        question = read_question(row, config)
        if isinstance(question, TextQuestion):
            return question.text, self.of_plain_text(question.text)
        asked = question.messages[: question.answer_at]
        if not asked:
            raise UserError("has an assistant's turn and nothing before it that it could answer. Add a user's turn.")
        if self._raw:
            raise UserError("is a conversation, and --raw goes on from plain text. Leave --raw out.")
        begin = [] if asked[0]["role"] == "system" else self.begin
        return str(asked[-1].get("content", "")), self.of_messages([*begin, *asked], question.tools)

    def _encoded(self, text: str, *, is_chat: bool) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the prompt is not Unicode text: {error}. Write it in UTF-8.") from error
        [encoding] = encode_batch(self._target.tokenizer, [text], is_chat=is_chat)
        length, context = len(encoding.ids), self._target.context
        if context is not None and length >= context:
            raise UserError(f"the prompt has {length:,} tokens, and the model sees {context:,} in all. Shorten it.")
        return encoding


def answer_all(
    target: Target,
    prompts: Sequence[tuple[str, list[int]]],
    sampling: Sampling,
    *,
    count: int,
    seed: int,
    as_json: bool,
) -> None:
    """Print the answers to (question, prompt) pairs: with `as_json` a JSON object on a line for each answer.

    A terminal shows the text of a single answer as it is generated.
    """
    watches = not as_json and count == 1 and sys.stdout.isatty()
    for number, (asked, prompt) in enumerate(prompts):
        # The seed is set for each prompt, so that an answer does not depend on earlier prompts.
        torch.manual_seed(seed)
        if not as_json and len(prompts) > 1:
            typer.echo(f"{chr(10) if number else ''}> {printable(asked)}")
        answers = [_shown(target, prompt, sampling)] if watches else answer(target, prompt, sampling, count)
        for place, found in enumerate(answers, 1):
            if as_json:
                content = {"prompt": asked, "response": found.text}
                typer.echo(json_line(content | {"finish_reason": found.finish_reason, "tokens": found.tokens}))
                continue
            if not watches:
                typer.echo(("" if count == 1 else f"[{place}] ") + printable(found.text))
            _say_cut_off(found)


def talk(target: Target, prompts: Prompts, sampling: Sampling, seed: int) -> None:
    """Hold a conversation in the terminal, until its end of input."""
    typer.echo(f"Write to {target.words}; {_RESET} starts over, Ctrl-D ends.", err=True)
    messages = list(prompts.begin)
    torch.manual_seed(seed)
    while True:
        try:
            text = input("you> ")
        except EOFError:
            typer.echo()
            return
        if text.strip() == _RESET:
            messages = list(prompts.begin)
        elif text.strip():
            asked = [*messages, {"role": "user", "content": text}]
            try:
                found = _shown(target, prompts.of_messages(asked), sampling)
            except UserError as error:
                # Most often the conversation has become too long. The question is not added to it.
                typer.echo(printable(f"Error: {error} {_RESET} starts over."), err=True)
                continue
            _say_cut_off(found)
            messages = [*asked, {"role": "assistant", "content": found.text}]


def _shown(target: Target, prompt: Sequence[int], sampling: Sampling) -> Answer:
    """Print the text of an answer as it is generated, and end its line, even after Ctrl-C."""
    try:
        [found] = answer(target, prompt, sampling, seen=lambda text: typer.echo(printable(text), nl=False))
    finally:
        typer.echo()
    return found


def _say_cut_off(found: Answer) -> None:
    if found.finish_reason == "length":
        typer.echo(f"(cut off after {found.tokens:,} tokens; --max-new-tokens sets how many)", err=True)
