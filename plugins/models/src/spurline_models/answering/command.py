"""What `spurline generate` does with its words: which prompts there are, and how answers reach the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from spurline.config.loading import LoadedConfig
from spurline.errors import DataError, UserError, listing, suggestion
from spurline.progress import Progress
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.tokenization import DatasetToTokenize
from spurline.terminal import json_line, printable, standard_input
from spurline_models.answering.answers import Answer, answer, chat_prompt, raw_prompt
from spurline_models.answering.rows import with_usual_columns
from spurline_models.answering.target import Sampling, Target, is_run, no_run_or_model, open_model, open_run, seeded
from spurline_text.hub import refuse_adapter
from spurline_text.prompts import ChatQuestion, TextQuestion, read_question
from spurline_text.rows.messages import Message

_YOU = "you> "
_RESET = "/reset"


def opened(target: str, load_run: Any, checkpoint: str, progress: Progress) -> Target:
    """load_run: reads the config of a run folder."""
    path = Path(target)
    if is_run(path):
        loaded: LoadedConfig = load_run(path)
        return open_run(loaded, checkpoint, progress)
    if not path.exists() and (path.is_absolute() or (path.parent != Path() and path.parent.is_dir())):
        # `org/name` is a name on the hub only where no folder is called so.
        raise _no_such_folder(path)
    if checkpoint != "latest":
        raise UserError(f"--checkpoint is for runs, and {target} is none.")
    refuse_adapter("generate", target)
    if path.is_dir() and not (path / "config.json").is_file():
        raise no_run_or_model(target)
    return open_model(target, progress)


def _no_such_folder(path: Path) -> UserError:
    folder = path.parent
    there = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    return UserError(f"{path}: there is no such folder.{suggestion(path.name, there)} {folder} has: {listing(there)}.")


def text_of_input() -> str:
    """All of standard input, which is one prompt."""
    stream = standard_input()
    if stream is None:
        raise UserError("there is no standard input to read a prompt from. Give a prompt, or --file.")
    try:
        return stream.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is no text in UTF-8: {error}.") from error


class Prompts:
    """Makes prompts out of what a person wrote. system: text of a system message. raw: no chat template."""

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
        """(what was asked, prompt) of each row, in any format with text; answers in the rows are not read.

        Raises DataError and UserError naming the row."""
        rows = with_usual_columns(given, self._target.columns)
        for number in range(len(rows.dataset)):
            row, where = rows.dataset[number], rows.dataset.location(number)
            yield self._of_row(where, row, rows.config)

    def _of_row(self, where: str, row: Mapping[str, Any], config: DatasetConfig) -> tuple[str, list[int]]:
        has_template = self._target.tokenizer.chat_template is not None
        try:
            return self._of_question(read_question(row, config, has_chat_template=has_template))
        except (DataError, UserError) as error:
            # What fits no format, or lacks a column.
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
    """Print the answers. A terminal sees a single one grow; --json prints an object a line, text as it is."""
    watches = not as_json and count == 1 and sys.stdout.isatty()
    for number, (asked, prompt) in enumerate(prompts):
        # By prompt: the same one gets the same answer, whatever stands before it.
        seeded(seed)
        if not as_json and len(prompts) > 1:
            typer.echo(f"{chr(10) if number else ''}> {printable(asked)}")
        answers = [_shown(target, prompt, sampling)] if watches else answer(target, prompt, sampling, count)
        for place, found in enumerate(answers):
            if as_json:
                typer.echo(_line(asked, found))
            elif not watches:
                typer.echo(("" if count == 1 else f"[{place + 1}] ") + printable(found.text))
            _say_cut_off(found, as_json=as_json)


def talk(target: Target, prompts: Prompts, sampling: Sampling, seed: int) -> None:
    """A conversation in the terminal, until its end of input."""
    typer.echo(f"Write to {target.words}; {_RESET} begins anew, Ctrl-D ends.", err=True)
    messages = list(prompts.begin)
    seeded(seed)
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
                # Too long by now, most often; what was said so far stays.
                typer.echo(printable(f"Error: {error} {_RESET} begins anew."), err=True)
                continue
            _say_cut_off(found, as_json=False)
            messages = [*asked, {"role": "assistant", "content": found.text}]


def _shown(target: Target, prompt: Sequence[int], sampling: Sampling) -> Answer:
    """An answer that the terminal sees grow; its line is ended, also by Ctrl-C."""
    try:
        [found] = answer(target, prompt, sampling, seen=lambda text: typer.echo(printable(text), nl=False))
    except KeyboardInterrupt:
        typer.echo()
        raise
    typer.echo()
    return found


def _line(asked: str, found: Answer) -> str:
    content = {
        "prompt": asked,
        "response": found.text,
        "finish_reason": found.finish_reason,
        "tokens": found.tokens,
    }
    return json_line(content)


def _say_cut_off(found: Answer, *, as_json: bool) -> None:
    if found.finish_reason == "length" and not as_json:
        typer.echo(f"(cut off after {found.tokens:,} tokens; --max-new-tokens sets how many)", err=True)
