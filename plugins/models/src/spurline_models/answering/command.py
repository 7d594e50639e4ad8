"""Do the work of `spurline generate`: find the prompts, answer them, and bring the answers to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from spurline.config.loading import LoadedConfig, load_config
from spurline.errors import DataError, UserError, listing, suggestion
from spurline.progress import Progress
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.tokenization import DatasetToTokenize
from spurline.terminal import json_line, printable, standard_input
from spurline_models.answering.answers import Answer, answer, chat_prompt, raw_prompt
from spurline_models.answering.target import Sampling, Target, is_run, open_model, open_run
from spurline_text.hub import refuse_adapter
from spurline_text.prompts import ChatQuestion, TextQuestion, read_question
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import absent_column_problem
from spurline_text.tokenization import open_datasets

_YOU = "you> "
_RESET = "/reset"


def opened(target: str, load_run: Any, checkpoint: str, progress: Progress) -> Target:
    """Open a run, with `load_run` to read its config, or a model."""
    path = Path(target)
    if is_run(path):
        loaded: LoadedConfig = load_run(path)
        return open_run(loaded, checkpoint, progress)
    if not path.exists() and (path.is_absolute() or (path.parent != Path() and path.parent.is_dir())):
        # `org/name` is a name on the hub only if there is no folder `org`.
        there = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir()) if path.parent.is_dir() else []
        raise UserError(f"{path}: there is no such folder.{suggestion(path.name, there)}")
    if checkpoint != "latest":
        raise UserError(f"--checkpoint is for runs, and {target} is not one.")
    refuse_adapter("generate", target)
    if path.is_dir() and not (path / "config.json").is_file():
        there = listing(sorted(entry.name for entry in path.iterdir())[:20])
        raise UserError(
            f"{target} is neither the folder of a run nor that of a model: both have a config.json. It has: {there}."
        )
    return open_model(target, progress)


def prompt_rows(path: str, columns: Mapping[str, str]) -> DatasetToTokenize:
    """Open rows of prompts as `data.train` does. columns: see `DatasetConfig.columns`.

    Raises:
        DataError: If they cannot be found or read, or have none of these columns.
    """
    train = {"path": path, "columns": dict(columns)}
    # Only the data is read; the rest is what a config must have.
    loaded = load_config({"model": {"path": "none"}, "steps": 1, "data": {"train": train}})
    [opened] = open_datasets(loaded.config.data.train, loaded.host.registry)
    if not len(opened.dataset):
        raise DataError(f"{path} has no rows.")
    return opened


def _with_usual_columns(rows: DatasetToTokenize, usual: Mapping[str, str]) -> DatasetToTokenize:
    """Give the rows these columns, if none were given and the first row has them."""
    if rows.config.columns or absent_column_problem(usual, [rows.dataset[0]]) is not None:
        return rows
    return replace(rows, config=rows.config.model_copy(update={"columns": dict(usual)}))


def text_of_input() -> str:
    """Return all of standard input, which is one prompt."""
    stream = standard_input()
    if stream is None:
        raise UserError("there is no standard input to read a prompt from. Give a prompt, or --file.")
    try:
        return stream.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in UTF-8: {error}.") from error


class Prompts:
    """Makes prompts out of what a person wrote.

    system: text of a system message. raw: whether prompts are plain text, without the chat template.
    """

    def __init__(self, target: Target, system: str | None, *, raw: bool) -> None:
        if raw and system is not None:
            raise UserError("--system belongs to a conversation, and --raw goes on from plain text. Leave one out.")
        self._target, self._raw = target, raw
        self.begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def of_text(self, text: str) -> list[int]:
        if self._raw:
            return raw_prompt(self._target, text)
        return chat_prompt(self._target, [*self.begin, {"role": "user", "content": text}])

    def of_rows(self, given: DatasetToTokenize) -> Iterator[tuple[str, list[int]]]:
        """Yield (question, prompt) for each row, in any format that has text. Answers in the rows are not read.

        Raises:
            UserError: If a row cannot be asked; names the row.
        """
        rows = _with_usual_columns(given, self._target.columns)
        for number in range(len(rows.dataset)):
            row, where = rows.dataset[number], rows.dataset.location(number)
            yield self._of_row(where, row, rows.config)

    def _of_row(self, where: str, row: Mapping[str, Any], config: DatasetConfig) -> tuple[str, list[int]]:
        has_template = self._target.tokenizer.chat_template is not None
        try:
            return self._of_question(read_question(row, config, has_chat_template=has_template))
        except (DataError, UserError) as error:
            names = " Here `columns` are given as --column prompt=NAME." if "`columns" in str(error) else ""
            raise UserError(f"{where}: {error}{names}") from error

    def _of_question(self, question: ChatQuestion | TextQuestion) -> tuple[str, list[int]]:
        if isinstance(question, TextQuestion):
            return question.text, raw_prompt(self._target, question.text)
        asked = question.messages[: question.answer_at]
        if not asked:
            raise UserError("has an assistant's turn and nothing before it that it could answer. Add a user's turn.")
        if asked[0]["role"] != "system":
            asked = [*self.begin, *asked]
        if self._raw:
            raise UserError("is a conversation, and --raw goes on from plain text. Leave --raw out.")
        return str(asked[-1].get("content", "")), chat_prompt(self._target, asked, question.tools)


def answer_all(
    target: Target,
    prompts: Sequence[tuple[str, list[int]]],
    sampling: Sampling,
    *,
    count: int,
    seed: int,
    as_json: bool,
) -> None:
    """Print the answers.

    A terminal shows the text of a single answer as it is generated. With `as_json`, each answer is a JSON object on a
    line, its text as the model wrote it.
    """
    watches = not as_json and count == 1 and sys.stdout.isatty()
    for number, (asked, prompt) in enumerate(prompts):
        # Seeded for each prompt, so that a prompt gets the same answer whatever prompts come before it.
        torch.manual_seed(seed)
        if not as_json and len(prompts) > 1:
            typer.echo(f"{chr(10) if number else ''}> {printable(asked)}")
        answers = [_shown(target, prompt, sampling)] if watches else answer(target, prompt, sampling, count)
        for place, found in enumerate(answers):
            if as_json:
                content = {"prompt": asked, "response": found.text}
                typer.echo(json_line(content | {"finish_reason": found.finish_reason, "tokens": found.tokens}))
            elif not watches:
                typer.echo(("" if count == 1 else f"[{place + 1}] ") + printable(found.text))
            _say_cut_off(found, as_json=as_json)


def talk(target: Target, prompts: Prompts, sampling: Sampling, seed: int) -> None:
    """Hold a conversation in the terminal, until its end of input."""
    typer.echo(f"Write to {target.words}; {_RESET} starts over, Ctrl-D ends.", err=True)
    messages = list(prompts.begin)
    torch.manual_seed(seed)
    while True:
        try:
            text = input(_YOU)
        except EOFError:
            typer.echo()
            return
        if text.strip() == _RESET:
            messages = list(prompts.begin)
        elif text.strip():
            asked = [*messages, {"role": "user", "content": text}]
            try:
                found = _shown(target, chat_prompt(target, asked), sampling)
            except UserError as error:
                # Most often the conversation has become too long. It stays as it was before this question.
                typer.echo(printable(f"Error: {error} {_RESET} starts over."), err=True)
                continue
            _say_cut_off(found, as_json=False)
            messages = [*asked, {"role": "assistant", "content": found.text}]


def _shown(target: Target, prompt: Sequence[int], sampling: Sampling) -> Answer:
    """Print the text of an answer as it is generated, and end its line, even after Ctrl-C."""
    try:
        [found] = answer(target, prompt, sampling, seen=lambda text: typer.echo(printable(text), nl=False))
    except KeyboardInterrupt:
        typer.echo()
        raise
    typer.echo()
    return found


def _say_cut_off(found: Answer, *, as_json: bool) -> None:
    if found.finish_reason == "length" and not as_json:
        typer.echo(f"(cut off after {found.tokens:,} tokens; --max-new-tokens sets how many)", err=True)
