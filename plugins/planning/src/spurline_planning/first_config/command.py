"""Write a config for `spurline init`, from options and from facts about data and model.

The values in `run.yaml.jinja` are usual starting points. Comments explain the settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from jinja2 import Environment, StrictUndefined
from ruamel.yaml import YAML

from spurline.config.loading import load_config
from spurline.errors import UserError
from spurline.plugins.host import installed_plugins
from spurline.plugins.official import install_command
from spurline.progress import Progress
from spurline.terminal import printable
from spurline_models.machine import num_gpus
from spurline_planning.first_config.survey import DataFacts, ModelFacts, Task, data_facts, model_facts

_LARGE = 3_000_000_000
"""By default, a model with at least this many parameters is frozen, and adapters are trained."""
_ASYNC_PLUGIN = "async_rl"
_LEARNING_RATES: dict[tuple[Task, bool], str] = {
    ("sft", False): "1.0e-5",
    ("sft", True): "2.0e-4",
    ("dpo", False): "5.0e-7",
    ("dpo", True): "5.0e-6",
    ("rl", False): "1.0e-6",
    ("rl", True): "2.0e-5",
}
"""Learning rates by task, for all weights (False) and for adapters (True)."""
_MAX_LENGTH = 4_096
_MAX_NEW_TOKENS = 1_024


@dataclass(frozen=True)
class Options:
    """The options of the command line. An option that was not given is None."""

    model: str
    data: str
    task: Task | Literal["async"] | None
    eval: str | None
    reward: str | None
    lora: bool | None
    epochs: float | None
    steps: int | None
    columns: Mapping[str, str] = field(default_factory=dict[str, str])


def write_first_config(path: Path, options: Options, progress: Progress) -> list[str]:
    """Write the file, and return lines about the facts that were found. Raises UserError, ModelError or DataError."""
    plugins = ["collation_fast"] if "collation_fast" in installed_plugins() else []
    if options.task == "async":
        if _ASYNC_PLUGIN not in installed_plugins():
            raise UserError(f"--task async needs the plugin {_ASYNC_PLUGIN}: {install_command(_ASYNC_PLUGIN)}")
        plugins.append(_ASYNC_PLUGIN)
    progress("reading the model's config")
    facts = model_facts(options.model)
    progress("reading the data")
    task = "rl" if options.task == "async" else options.task
    rows = data_facts(facts, options.data, task, options.columns)
    found = [
        f"model: {facts.parameters:,} parameters"
        + ("" if facts.context is None else f", {facts.context:,} positions")
        + ("" if facts.has_chat_template else ", no chat template"),
        f"data: {rows.words}",
    ]
    if rows.has_guessed:
        names = ", ".join(f"{column} is read as {name}" for name, column in rows.columns.items())
        found.append(f"columns: {names}. This is a guess from the columns' names. Change it with --column NAME=COLUMN")
    lora = facts.parameters >= _LARGE if options.lora is None else options.lora
    options = replace(options, lora=lora, reward=_reward(options, rows))
    text = config_text(options, facts, rows, f"runs/{path.stem}", plugins)
    # This finds mistakes in the options, such as an unknown reward or a negative number of epochs.
    load_config(YAML(typ="safe", pure=True).load(text))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    return [printable(line) for line in found]


def _reward(options: Options, rows: DataFacts) -> str | None:
    if rows.task != "rl":
        if options.reward is not None:
            raise UserError(f"--reward is for reinforcement learning, and this is --task {rows.task}. Give --task rl.")
        return None
    reward = options.reward or ("exact_match" if rows.has_reference else None)
    if reward is None:
        raise UserError("--reward is missing: give a name that `spurline plugins` lists, or file.py:function.")
    return reward


def config_text(options: Options, model: ModelFacts, data: DataFacts, run_dir: str, plugins: Sequence[str] = ()) -> str:
    """Return the config as YAML, with comments."""
    gpus, context = num_gpus(), sys.maxsize if model.context is None else model.context
    template = files("spurline_planning.first_config").joinpath("run.yaml.jinja").read_text(encoding="utf-8")
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, autoescape=False
    )
    # Every string in JSON notation is also valid YAML.
    environment.filters["scalar"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(template).render(
        options=options,
        model=model,
        data=data,
        run_dir=run_dir,
        plugins=plugins,
        gpus=gpus,
        # On a CPU, vLLM would take most of the memory and cores.
        engine="vllm" if gpus and find_spec("vllm") else "child_process",
        max_length=min(_MAX_LENGTH, context),
        max_new_tokens=min(_MAX_NEW_TOKENS, context // 2),
        learning_rate=_LEARNING_RATES[data.task, bool(options.lora)],
    )
