"""Look at data and model for `spurline init`, ask for what is left open, and write the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ruamel.yaml import YAML

from spurline.config.loading import load_config
from spurline.errors import UserError
from spurline.plugins.host import installed_plugins
from spurline.plugins.official import install_command
from spurline.progress import Progress
from spurline.terminal import printable
from spurline_models.machine import num_gpus
from spurline_planning.first_config.init_command import Asker
from spurline_planning.first_config.survey import DataFacts, Task, data_facts, model_facts
from spurline_planning.first_config.text import Choices, Engine, config_text

_LARGE = 3_000_000_000
"""Parameters from which on adapters are proposed."""
_USUAL_PLUGINS = ("collation_fast",)
_ASYNC_PLUGIN = "async_rl"


@dataclass(frozen=True)
class Wishes:
    """The options of the command line; None was not given."""

    model: str
    data: str
    task: Task | Literal["async"] | None
    eval: str | None
    reward: str | None
    lora: bool | None
    epochs: float | None
    steps: int | None
    columns: Mapping[str, str] = field(default_factory=dict[str, str])


def write_first_config(path: Path, wishes: Wishes, ask: Asker, progress: Progress) -> list[str]:
    """Write the file, and return lines on what was found and chosen. Raises UserError, ModelError, DataError."""
    engine = _engine() if wishes.task == "async" else None
    model, data = wishes.model, wishes.data
    progress("reading the model's config")
    facts = model_facts(model)
    progress("reading the data")
    rows = data_facts(model, facts, data, "rl" if wishes.task == "async" else wishes.task, wishes.columns)
    found = [
        f"model: {facts.parameters:,} parameters"
        + ("" if facts.context is None else f", {facts.context:,} positions")
        + ("" if facts.has_chat_template else ", no chat template"),
        f"data: {rows.words}, the longest {'prompt' if rows.task == 'rl' else 'sample'} of the first rows has "
        f"{rows.longest:,} tokens",
    ]
    if rows.has_guessed:
        names = ", ".join(f"{column} is read as {name}" for name, column in rows.columns.items())
        found.append(f"columns: {names}. That is a guess by their names; --column NAME=COLUMN says otherwise")
    choices = Choices(
        model,
        data,
        f"runs/{path.stem}",
        _length(wishes, rows),
        _lora(wishes, facts.parameters, ask),
        wishes.eval,
        _reward(wishes, rows, ask),
        (*(name for name in _USUAL_PLUGINS if name in installed_plugins()), *((_ASYNC_PLUGIN,) if engine else ())),
        engine,
    )
    if rows.task == "rl" and facts.context is not None and rows.longest >= facts.context:
        raise UserError(
            f"a prompt of {data} has {rows.longest:,} tokens, and the model sees {facts.context:,} in all: none is "
            "left for an answer. Leave such rows out, or choose another model."
        )
    text = config_text(choices, facts, rows)
    # Check the options, such as an unknown reward or a negative number of epochs.
    load_config(YAML(typ="safe", pure=True).load(text))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    return [printable(line) for line in found]


def _engine() -> Engine:
    """Return the engine that generates beside training on this machine. Raises UserError without the plugin."""
    if _ASYNC_PLUGIN not in installed_plugins():
        raise UserError(f"--task async needs the plugin {_ASYNC_PLUGIN}: {install_command(_ASYNC_PLUGIN)}")
    gpus = num_gpus()
    # vLLM on a CPU is for those who ask for it: it takes most of its memory and cores.
    name = "vllm" if gpus and find_spec("vllm") else "child_process"
    return Engine(name, shares_device=gpus == 1)


def _length(wishes: Wishes, rows: DataFacts) -> str:
    if wishes.steps is not None:
        return f"steps: {wishes.steps}"
    if wishes.epochs is not None:
        return f"epochs: {wishes.epochs:g}"
    if rows.task == "rl":
        return "steps: 200                       # each generates, scores and trains on a batch"
    return "epochs: 1                        # passes over the data"


def _lora(wishes: Wishes, parameters: int, ask: Asker) -> bool:
    if wishes.lora is not None:
        return wishes.lora
    return ask.yes("Train adapters (LoRA) instead of all weights?", default=parameters >= _LARGE)


def _reward(wishes: Wishes, rows: DataFacts, ask: Asker) -> str | None:
    if rows.task != "rl":
        if wishes.reward is not None:
            raise UserError(f"--reward is for reinforcement learning, and this is --task {rows.task}. Give --task rl.")
        return None
    if wishes.reward is not None:
        return wishes.reward
    default = "exact_match" if rows.has_reference else None
    return ask.text("Which reward (a name that `spurline plugins` lists, or file.py:function)", "--reward", default)
