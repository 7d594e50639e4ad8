"""The functions of `spurline generate`: open a model, read prompts, answer them, and print the answers.

For a checkpoint, the model gets the weights that `spurline export` would write. Prompts are answered one at a time,
since padding could change an answer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from spurline.config.loading import LoadedConfig, load_config
from spurline.config.run_config import ModelConfig
from spurline.errors import DataError, UserError
from spurline.progress import Progress
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.tokenization import DatasetToTokenize
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.directory import RunDirectory
from spurline.terminal import printable
from spurline_models.abilities import check_generates
from spurline_models.architecture import load_model_config
from spurline_models.device_profile import device_profile
from spurline_models.export import exported_weights, generation_config
from spurline_models.generation import stop_tokens
from spurline_models.lengths import position_limit
from spurline_models.loading import load_model
from spurline_text.chats.chat import ChatRenderer
from spurline_text.encoding import require_chat_template
from spurline_text.prompts import TextQuestion, encode_prompt, read_question
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import BadRowError
from spurline_text.tokenization import open_datasets
from spurline_text.tokenizer import load_tokenizer

_RESET = "/reset"


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. At temperature 0, the most likely token is chosen. Each text in `stop` ends an answer."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def words(self) -> str:
        """Describe the sampling."""
        how = ["greedy"]
        if self.temperature:
            how = [f"temperature {self.temperature:g}"]
            how += [f"top_p {self.top_p:g}"] * (self.top_p < 1) + [f"top_k {self.top_k}"] * (self.top_k > 0)
        return ", ".join([*how, f"at most {self.max_new_tokens:,} new tokens"])


@dataclass(frozen=True)
class Answer:
    """An answer: its text without special tokens, its number of tokens, and why it ended."""

    text: str
    tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Target:
    """A model that answers.

    Attributes:
        words: A description of the model for the user.
        sampling: The default sampling settings, from the run's source or else from the model's files.
        stops: Tokens that end an answer.
        context: The largest number of tokens of prompt and answer together, or None if there is no limit.
    """

    words: str
    causal: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    stops: tuple[int, ...]
    context: int | None


def opened(target: str, load_run: Callable[[Path], LoadedConfig], checkpoint: str, progress: Progress) -> Target:
    """Open a run or a model. `load_run` reads the config of a run. Raises UserError if the target is neither."""
    path = Path(target)
    try:
        config: Any = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        config = None
    # A model folder has a config.json too, but without `run_dir`.
    if isinstance(config, dict) and "run_dir" in config:
        return open_run(load_run(path), checkpoint, progress)
    if checkpoint != "latest":
        raise UserError(f"--checkpoint is for runs, but {target} is not a run.")
    return open_model(ModelConfig(path=target), progress)


def open_run(loaded: LoadedConfig, checkpoint: str, progress: Progress) -> Target:
    """Open a checkpoint of a run: `latest`, `best`, or a folder. Raises CheckpointError if there is none."""
    directory = RunDirectory(loaded.config.run_dir)
    found = CheckpointStore(directory.checkpoints).chosen(checkpoint)
    progress(f"reading {found.path}")
    target = open_model(loaded.config.model, progress, exported_weights(loaded, found))
    own = loaded.config.source.facts.sampling
    sampling = target.sampling
    if own is not None:
        sampling = Sampling(own.max_new_tokens, own.temperature, own.top_p, own.top_k, own.stop)
    return replace(target, words=f"{directory.path}, step {found.step:,}", sampling=sampling)


def open_model(model: ModelConfig, progress: Progress, weights: dict[str, Tensor] | None = None) -> Target:
    """Open a model with `weights`, or with those of its files if `weights` is None. Raises ModelError."""
    check_generates(model)
    progress("loading the tokenizer")
    tokenizer = load_tokenizer(model)
    progress("loading weights")
    causal = load_model(model, device_profile(), seed=0, weights=weights).eval()
    if weights is not None:
        causal.generation_config = generation_config(model, tokenizer)
    limit = position_limit(load_model_config(model))
    context = None if limit is None else limit.tokens
    stops, sampling, advised = tuple(stop_tokens(causal, model)), Sampling(), causal.generation_config
    if advised is not None and advised.do_sample:
        sampling = Sampling(
            temperature=1.0 if advised.temperature is None else advised.temperature,
            top_p=1.0 if advised.top_p is None else advised.top_p,
            top_k=advised.top_k or 0,
        )
    # Remove the defaults of the model's files, since `answer` sets everything that it wants.
    causal.generation_config = GenerationConfig()
    return Target(model.path, causal, tokenizer, sampling, stops, context)


def prompt_rows(path: str, columns: Mapping[str, str]) -> DatasetToTokenize:
    """Open the dataset at `path` as a run opens `data.train`, with these `columns`. Raises DataError if it is empty."""
    train = {"path": path, "columns": dict(columns)}
    # Only `data` is used, but a config must also set `model` and `steps`.
    loaded = load_config({"model": {"path": "none"}, "steps": 1, "data": {"train": train}})
    [rows] = open_datasets(loaded.config.data.train, loaded.host.registry)
    if not len(rows.dataset):
        raise DataError(f"{path} has no rows.")
    return rows


class Prompts:
    """An encoder that turns prompts into tokens for one model.

    `system` is the text of a system message. With `raw`, prompts are plain text, without the chat template.
    """

    def __init__(self, target: Target, system: str | None, *, raw: bool) -> None:
        if raw and system is not None:
            raise UserError("--system is for conversations, and --raw continues plain text. Remove one of them.")
        self._target, self._raw = target, raw
        self.begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def of_text(self, text: str) -> list[int]:
        """Return the tokens of a prompt. Raises UserError if it cannot be answered."""
        if self._raw:
            return self._encoded(text, is_chat=False)
        return self.of_messages([*self.begin, {"role": "user", "content": text}])

    def of_messages(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the tokens of a conversation up to the answer. Raises UserError if it cannot be answered."""
        if self._target.tokenizer.chat_template is None:
            raise UserError(f"{self._target.words} has no chat template. Give --raw to continue plain text.")
        require_chat_template(self._target.tokenizer, self._target.words)
        try:
            text = ChatRenderer(self._target.tokenizer).render(messages, tools, add_generation_prompt=True)
        except BadRowError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from error
        return self._encoded(text, is_chat=True)

    def of_rows(self, rows: DatasetToTokenize) -> Iterator[tuple[str, list[int]]]:
        """Yield (question, prompt tokens) of each row. Raises UserError, with the row's place, if it has no prompt."""
        for number in range(len(rows.dataset)):
            try:
                yield self._of_row(rows.dataset[number], rows.config)
            except (DataError, UserError) as error:
                names = " To set `columns` here, give --column prompt=NAME." if "`columns" in str(error) else ""
                raise UserError(f"{rows.dataset.location(number)}: {error}{names}") from error

    def _of_row(self, row: Mapping[str, Any], config: DatasetConfig) -> tuple[str, list[int]]:
        question = read_question(row, config)
        if isinstance(question, TextQuestion):
            return question.text, self._encoded(question.text, is_chat=False)
        asked = question.messages[: question.answer_at]
        if not asked:
            raise UserError("begins with an assistant's turn. Add a user's turn before it.")
        begin = [] if asked[0]["role"] == "system" else self.begin
        return str(asked[-1].get("content", "")), self.of_messages([*begin, *asked], question.tools)

    def _encoded(self, text: str, *, is_chat: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the prompt is not Unicode text: {error}. Write it in UTF-8.") from error
        ids, context = encode_prompt(self._target.tokenizer, text, is_chat=is_chat), self._target.context
        if context is not None and len(ids) >= context:
            raise UserError(
                f"the prompt has {len(ids):,} tokens, and prompt and answer together may have at most {context:,}. "
                "Shorten the prompt."
            )
        return ids


def answer(
    target: Target, prompt: Sequence[int], sampling: Sampling, count: int = 1, seen: Callable[[str], None] | None = None
) -> list[Answer]:
    """Return `count` answers to one prompt, whose tokens must be fewer than `target.context`.

    If `count` is 1, `seen` is called with each new piece of text during generation.

    Raises:
        UserError: If the prompt has no tokens, or if `count` is above 1 at temperature 0.
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
    with torch.inference_mode():
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            tokenizer=target.tokenizer,
            streamer=None if seen is None or count > 1 else _Watched(target, seen),
        )
    return [_read(target, tokens, config.max_new_tokens) for tokens in output[:, len(prompt) :].tolist()]


def _read(target: Target, tokens: list[int], most: int | None) -> Answer:
    """Decode an answer up to its end token. `generate` pads all answers to one length, so padding may follow."""
    end = next((place for place, token in enumerate(tokens, 1) if token in target.stops), None)
    text = str(target.tokenizer.decode(tokens[:end], skip_special_tokens=True))
    return Answer(text, len(tokens[:end]), "length" if end is None and len(tokens) == most else "stop")


class _Watched(TextStreamer):
    """A streamer that passes each finished piece of text to a function."""

    def __init__(self, target: Target, seen: Callable[[str], None]) -> None:
        super().__init__(target.tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
        self._seen = seen

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._seen(text)


def answer_all(
    target: Target,
    prompts: Sequence[tuple[str, list[int]]],
    sampling: Sampling,
    *,
    count: int,
    seed: int,
    as_json: bool,
) -> None:
    """Print the answers to prompts, given as pairs (question, tokens). With `as_json`, each line is a JSON object.

    If `count` is 1 and `as_json` is false, a terminal shows each answer while it is generated.
    """
    watches = not as_json and count == 1 and sys.stdout.isatty()
    for number, (asked, prompt) in enumerate(prompts):
        # Set the seed for each prompt, so that an answer does not depend on earlier prompts.
        torch.manual_seed(seed)
        if not as_json and len(prompts) > 1:
            typer.echo(f"{chr(10) if number else ''}> {printable(asked)}")
        answers = [_shown(target, prompt, sampling)] if watches else answer(target, prompt, sampling, count)
        for place, found in enumerate(answers, 1):
            if as_json:
                content = {"prompt": asked, "response": found.text}
                typer.echo(_json_line(content | {"finish_reason": found.finish_reason, "tokens": found.tokens}))
                continue
            if not watches:
                typer.echo(("" if count == 1 else f"[{place}] ") + printable(found.text))
            _say_cut_off(found)


def talk(target: Target, prompts: Prompts, sampling: Sampling, seed: int) -> None:
    """Hold a conversation in the terminal until the end of input."""
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
    """Print the text of an answer while it is generated, and end the line even after Ctrl-C."""
    try:
        [found] = answer(target, prompt, sampling, seen=lambda text: typer.echo(printable(text), nl=False))
    finally:
        typer.echo()
    return found


def _say_cut_off(found: Answer) -> None:
    if found.finish_reason == "length":
        typer.echo(f"(cut off after {found.tokens:,} tokens; --max-new-tokens sets the limit)", err=True)


def _json_line(value: Any) -> str:
    """Return one line of JSON in which only control characters are escaped."""
    # JSON itself escapes those below the space.
    hidden = r"[\x7f-\x9f\ud800-\udfff]"
    return re.sub(hidden, lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
