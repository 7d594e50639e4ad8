"""Write a config for `spurline init`, from facts about data and model, from options, and from the user's answers.

The values in the file are usual starting points. Comments explain the settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ruamel.yaml import YAML
from ruamel.yaml.compat import StringIO

from spurline.config.loading import load_config
from spurline.errors import UserError
from spurline.plugins.host import installed_plugins
from spurline.plugins.official import install_command
from spurline.progress import Progress
from spurline.terminal import printable
from spurline_models.machine import num_gpus
from spurline_planning.first_config.init_command import Asker
from spurline_planning.first_config.survey import DataFacts, ModelFacts, Task, data_facts, model_facts

_LARGE = 3_000_000_000
"""Adapters are proposed for models with at least this many parameters."""
_USUAL_PLUGINS = ("collation_fast",)
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
_ROUNDED_TO = 64
"""`data.max_length` is rounded up to a multiple of this."""
_MAX_NEW_TOKENS = 1_024
_COMMENTS_AT = 33
"""The column of comments."""


@dataclass(frozen=True)
class Choices:
    """The decisions of the user.

    Attributes:
        model: Folder or name of the model.
        data: File, folder or hub name of the training rows.
        run_dir: The folder of the run.
        length: The config line that sets the length of the run, such as `epochs: 1` or `steps: 200`.
        lora: Whether adapters are trained.
        eval: File, folder or hub name of the held-out rows.
        reward: The name of a reward component, or `file.py:function`.
        plugins: Plugins to enable.
        source: Lines of the section `source:`, for a run with rollouts.
    """

    model: str
    data: str
    run_dir: str
    length: str
    lora: bool
    eval: str | None = None
    reward: str | None = None
    plugins: tuple[str, ...] = ()
    source: tuple[str, ...] = ()


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


def write_first_config(path: Path, options: Options, ask: Asker, progress: Progress) -> list[str]:
    """Write the file, and return lines about the facts that were found. Raises UserError, ModelError or DataError."""
    model, data = options.model, options.data
    source, task = _SYNCHRONOUS_SOURCE, options.task
    plugins = [name for name in _USUAL_PLUGINS if name in installed_plugins()]
    if task == "async":
        source, task = _asynchronous_source(), "rl"
        plugins.append(_ASYNC_PLUGIN)
    progress("reading the model's config")
    facts = model_facts(model)
    progress("reading the data")
    rows = data_facts(model, facts, data, task, options.columns)
    found = [
        f"model: {facts.parameters:,} parameters"
        + ("" if facts.context is None else f", {facts.context:,} positions")
        + ("" if facts.has_chat_template else ", no chat template"),
        f"data: {rows.words}; the longest {'prompt' if rows.task == 'rl' else 'sample'} of the first rows has "
        f"{rows.longest:,} tokens",
    ]
    if rows.has_guessed:
        names = ", ".join(f"{column} is read as {name}" for name, column in rows.columns.items())
        found.append(f"columns: {names}. This is a guess from their names. --column NAME=COLUMN changes it")
    lora = options.lora
    if lora is None:
        lora = ask.yes("Train adapters (LoRA) instead of all weights?", default=facts.parameters >= _LARGE)
    length, reward = _length(options, rows), _reward(options, rows, ask)
    choices = Choices(
        model, data, f"runs/{path.stem}", length, lora, options.eval, reward, tuple(plugins), tuple(source)
    )
    if rows.task == "rl" and facts.context is not None and rows.longest >= facts.context:
        raise UserError(
            f"a prompt of {data} has {rows.longest:,} tokens, but the model can see only {facts.context:,}, prompt and "
            "answer together. Leave such rows out, or choose another model."
        )
    text = config_text(choices, facts, rows)
    # Find mistakes in the options, such as an unknown reward or a negative number of epochs.
    load_config(YAML(typ="safe", pure=True).load(text))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    return [printable(line) for line in found]


_SYNCHRONOUS_SOURCE = ["  name: rollouts  # with `spurline init --task async`, the run generates while it trains"]


def _asynchronous_source() -> list[str]:
    """Return config lines of the source that generates while the run trains. Raises UserError without the plugin."""
    if _ASYNC_PLUGIN not in installed_plugins():
        raise UserError(f"--task async needs the plugin {_ASYNC_PLUGIN}: {install_command(_ASYNC_PLUGIN)}")
    gpus = num_gpus()
    # On a CPU, vLLM would take most of the memory and cores.
    engine = "vllm" if gpus and find_spec("vllm") else "child_process"
    lines = [
        "  name: async_rollouts  # generates while the model trains; `spurline simulate` predicts its speed",
        f"  max_staleness: {1 if gpus == 1 else 2}  # how many updates old a token's weights may be; 0 is synchronous",
        "  correction: tis  # reweighs tokens that older versions of the model generated",
    ]
    if gpus == 1:
        placed = "    placement: colocated  # engine and trainer take turns on one GPU; with two GPUs, remove this line"
        return [*lines, "  engine:", f"    name: {engine}", placed]
    comment = "Hugging Face, in its own process" if engine == "child_process" else "on its own GPUs"
    return [*lines, f"  engine: {engine}  # {comment}"]


def _length(options: Options, rows: DataFacts) -> str:
    if options.steps is not None:
        return f"steps: {options.steps}"
    if options.epochs is not None:
        return f"epochs: {options.epochs:g}"
    if rows.task == "rl":
        return "steps: 200  # each step generates, scores and trains on a batch"
    return "epochs: 1  # passes over the data"


def _reward(options: Options, rows: DataFacts, ask: Asker) -> str | None:
    if rows.task == "rl":
        default = "exact_match" if rows.has_reference else None
        question = "Which reward (a name that `spurline plugins` lists, or file.py:function)"
        return options.reward or ask.text(question, "--reward", default)
    if options.reward is not None:
        raise UserError(f"--reward is for reinforcement learning, and this is --task {rows.task}. Give --task rl.")
    return None


def config_text(choices: Choices, model: ModelFacts, data: DataFacts) -> str:
    """Return the config as YAML, with comments."""
    parts = [_heading(data), _run(choices, model, data)]
    parts += [_rollouts(choices, model, data)] if data.task == "rl" else []
    parts += [_training(choices, data)]
    return "".join(f"{_aligned(line)}\n" for line in "\n".join(parts).splitlines())


def _aligned(line: str) -> str:
    """Return the line with its comment moved to column `_COMMENTS_AT`."""
    setting, mark, comment = line.partition("  # ")
    return f"{setting.rstrip():{_COMMENTS_AT}} # {comment}" if mark else line


def _heading(data: DataFacts) -> str:
    task = {"sft": "Supervised fine-tuning", "dpo": "Direct preference optimisation", "rl": "Reinforcement learning"}
    return (
        f"# {task[data.task]} on {data.words}. `spurline schema` and the config reference explain all settings.\n"
        "# `spurline plan` says what a run of this file will do. `spurline data` shows its tokens.\n"
    )


def _run(choices: Choices, model: ModelFacts, data: DataFacts) -> str:
    lines = [f"plugins: [{', '.join(choices.plugins)}]", ""] if choices.plugins else []
    lines += [
        f"run_dir: {_scalar(choices.run_dir)}  # metrics, checkpoints, the report and the trained model",
        "seed: 0",
        "",
        "model:",
        f"  path: {_scalar(choices.model)}",
    ]
    if data.is_chat and not model.has_chat_template:
        lines += ["  chat_template: chatml  # the model has none; see `model.chat_template`"]
    lines += ["", "data:", *_dataset("train", choices.data, data)]
    lines += _dataset("eval", choices.eval, data) if choices.eval else []
    if data.task != "rl":
        limit = max(2, -(-data.longest // _ROUNDED_TO) * _ROUNDED_TO)
        limit = limit if model.context is None else min(limit, model.context)
        lines += [f"  max_length: {limit}  # tokens; the longest of the first rows has {data.longest}"]
    if data.task == "sft" and data.is_chat:
        lines += ["  train_on: last_assistant  # or all_assistants"]
    return "\n".join([*lines, ""])


def _dataset(key: str, path: str, data: DataFacts) -> list[str]:
    if not data.columns:
        return [f"  {key}: {_scalar(path)}"]
    comment = (
        "guessed from their names; check with `spurline data`" if data.has_guessed else "usual name: name in the data"
    )
    named = [f"      {name}: {_scalar(column)}" for name, column in data.columns.items()]
    return [f"  {key}:", f"    path: {_scalar(path)}", f"    columns:  # {comment}", *named]


def _rollouts(choices: Choices, model: ModelFacts, data: DataFacts) -> str:
    most = _MAX_NEW_TOKENS if model.context is None else min(_MAX_NEW_TOKENS, model.context - data.longest)
    return "\n".join(
        [
            "source:",
            *choices.source,
            "  prompts_per_step: 32",
            "  samples_per_prompt: 8  # attempts at each prompt",
            "  environment:",
            "    name: single_turn  # for tools and agents, see Environments in the docs",
            f"    rewards: {_scalar(choices.reward or '')}",
            "  advantage: grpo",
            "  sampling:",
            "    temperature: 1.0",
            f"    max_new_tokens: {most}",
            "",
            "minibatches:",
            "  name: by_prompt",
            "  prompts_per_minibatch: 16  # two optimizer steps on each batch",
            "",
        ]
    )


def _training(choices: Choices, data: DataFacts) -> str:
    lines = ["source: preference  # the loss becomes dpo", ""] if data.task == "dpo" else []
    if data.task != "rl":
        lines += ["batch_size: 32  # samples per optimizer step, over all devices"]
    lines += [
        choices.length,
        "",
        "optimizer:",
        f"  learning_rate: {_LEARNING_RATES[data.task, choices.lora]}  # tune this first, by factors of 3",
        "",
        "schedule:",
        "  name: cosine",
        "  warmup_ratio: 0.05",
        "",
        "backend:",
        "  name: local  # fsdp and megatron are plugins, for many GPUs",
        "  device: auto  # a GPU if there is one",
    ]
    if choices.lora:
        lines += ["  lora:  # adapters; remove this section to train all weights", "    rank: 16"]
    if choices.eval:
        lines += ["", "evaluation:", "  at_start: true  # also evaluate before training", "  every_steps: 50"]
    lines += [
        "",
        "checkpoint:",
        "  every_minutes: 15  # the same command continues from the last checkpoint",
        "  export_hf: true  # write RUN_DIR/model at the end, for from_pretrained",
    ]
    return "\n".join([*lines, ""])


def _scalar(value: str) -> str:
    """Return the value as YAML, on one line."""
    if "  # " in value:
        # `_aligned` would read this as the beginning of a comment.
        return json.dumps(value, ensure_ascii=False).replace("  # ", " \\x20# ")
    out, yaml = StringIO(), YAML(typ="safe", pure=True)
    yaml.width = sys.maxsize
    yaml.dump([value], out)
    return out.getvalue().strip().removeprefix("- ").removeprefix("[").removesuffix("]")
