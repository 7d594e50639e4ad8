"""Find facts for a config: the task that the first row fits, its columns, and the size and context of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spurline.config.loading import LoadedConfig, load_config
from spurline.errors import DataError, UserError, listing
from spurline.protocols.dataset import DatasetConfig
from spurline_models.architecture import load_model_config
from spurline_models.lengths import position_limit
from spurline_models.memory import count_parameters
from spurline_text.prompts import read_question
from spurline_text.rows.formats import FormatName, detect_format
from spurline_text.rows.rows import RowView
from spurline_text.rows.usual_columns import guessed_columns, guessed_reference
from spurline_text.tokenization import open_datasets
from spurline_text.tokenizer import load_tokenizer

Task = Literal["sft", "dpo", "rl"]
_WORDS: Mapping[FormatName, str] = {
    "chat": "conversations",
    "alpaca": "instructions",
    "prompt_completion": "prompts and completions",
    "pretokenized": "token ids",
    "text": "plain text",
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model. `context` is its largest number of tokens, or None if there is no limit."""

    path: str
    parameters: int
    context: int | None
    has_chat_template: bool


@dataclass(frozen=True)
class DataFacts:
    """Facts about the first row of a dataset.

    Attributes:
        task: The kind of training that the row fits.
        words: The kind of row in words, such as `conversations`.
        has_reference: Whether the prompt for `rl` has a reference answer.
        is_chat: Whether a chat template renders the row.
        columns: The setting `data.train.columns`.
        has_guessed: Whether `columns` is guessed from the names of the columns.
    """

    task: Task
    words: str
    has_reference: bool = False
    is_chat: bool = False
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    has_guessed: bool = False


def model_facts(path: str) -> ModelFacts:
    """Read the facts from the model's config and tokenizer, without its weights. Raises ModelError."""
    model = _provisional(path, "x.jsonl", {}).config.model
    limit = position_limit(load_model_config(model))
    template = load_tokenizer(model).chat_template
    return ModelFacts(path, count_parameters(model), None if limit is None else limit.tokens, template is not None)


def data_facts(model: ModelFacts, data: str, task: Task | None, columns: Mapping[str, str]) -> DataFacts:
    """Read the facts from the first row.

    Args:
        model: Facts about the model.
        data: The dataset, as in `data.train`.
        task: The task. If None, it is chosen to fit the row.
        columns: The setting `data.train.columns`. If it is empty and the row fits no format, columns are guessed.

    Raises:
        DataError: If the row fits no format.
        UserError: If the row does not fit the task.
    """
    loaded = _provisional(model.path, data, columns)
    [opened] = open_datasets(loaded.config.data.train, loaded.host.registry)
    if not len(opened.dataset):
        raise DataError(f"{data} has no rows.")
    row, where, guess = opened.dataset[0], opened.dataset.location(0), dict[str, str]()
    if not columns:
        guess = _guess(row, opened.config, task)
        columns = _turns(row, guess, model)
    config, view = opened.config.model_copy(update={"columns": columns}), RowView(row, columns)
    is_pair = "chosen" in view and "rejected" in view
    chosen: Task = task or ("dpo" if is_pair else "rl" if _lacks_answer(row, config) else "sft")
    if (chosen == "dpo") != is_pair:
        needs = "chosen and rejected" if chosen == "dpo" else "answers or prompts, not preference pairs"
        raise UserError(f"--task {chosen} needs rows with {needs}. {where} has: {listing(row)}.")
    if chosen == "dpo":
        return DataFacts("dpo", "preference pairs", is_chat=True, columns=columns, has_guessed=bool(guess))
    try:
        kind = detect_format(config, row, needs_answer=chosen == "sft")
        reference = None if chosen == "sft" else read_question(row, config).reference
    except DataError as error:
        how = " Name them with --column, such as --column instruction=NAME --column output=NAME."
        raise DataError(f"{where}: {error}{how if 'Rename columns' in str(error) else ''}") from error
    return DataFacts(
        chosen,
        _WORDS[kind] if chosen == "sft" else f"prompts of {_WORDS[kind]}",
        has_reference=reference is not None,
        is_chat=kind == "chat" or isinstance(view.get("prompt"), list),
        columns=columns,
        has_guessed=bool(guess),
    )


def _turns(row: Mapping[str, Any], guess: Mapping[str, str], model: ModelFacts) -> dict[str, str]:
    """Return the guessed columns. With a chat template, plain-text prompts and answers are read as chat turns."""
    view, columns = RowView(row, guess), dict(guess)
    # A config for preference pairs sets a chat template if the model has none.
    has_template = model.has_chat_template or "chosen" in view
    others = [view.get(name) for name in ("completion", "chosen", "rejected")]
    if not has_template or not isinstance(view.get("prompt"), str) or any(isinstance(other, list) for other in others):
        return columns
    columns["instruction"] = view.label("prompt")
    if "completion" in view:
        columns["output"] = view.label("completion")
    return {name: label for name, label in columns.items() if name not in ("prompt", "completion")}


def _guess(row: Mapping[str, Any], config: DatasetConfig, task: Task | None) -> dict[str, str]:
    """Guess the columns of a row that fits no format, or the reference column of a prompt without an answer."""
    if _fits(row, config):
        return {}
    if found := guessed_columns(row):
        return found
    is_prompt = task in (None, "rl") and _fits(row, config, needs_answer=False)
    return guessed_reference(row) if is_prompt else {}


def _provisional(model: str, data: str, columns: Mapping[str, str]) -> LoadedConfig:
    train = {"path": data, "columns": dict(columns)}
    return load_config({"model": {"path": model}, "data": {"train": train}, "steps": 1})


def _lacks_answer(row: Mapping[str, Any], config: DatasetConfig) -> bool:
    """Return whether the row is a prompt without an answer."""
    if not _fits(row, config):
        return _fits(row, config, needs_answer=False)
    messages = RowView(row, config.columns).get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "user"


def _fits(row: Mapping[str, Any], config: DatasetConfig, *, needs_answer: bool = True) -> bool:
    try:
        detect_format(config, row, needs_answer=needs_answer)
    except DataError:
        return False
    return True
