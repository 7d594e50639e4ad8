"""Tasks, policies and components for tests of environments, without a model and without a config file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DatasetConfig
from spurline.plugins.host import PluginHost
from spurline.plugins.registry import Registry
from spurline_rl.policy import EnginePolicy
from spurline_rl.protocols.environment import Task
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Turn
from spurline_text.testing.inputs import tiny_tokenizer

T = TypeVar("T")

TEMPLATES = Path(__file__).parents[1] / "plugins" / "text" / "chat_templates"
SORT_ROW = {"messages": [{"role": "user", "content": "Sort: 3 1 2"}, {"role": "assistant", "content": "1 2 3"}]}


def run(coroutine: Coroutine[Any, Any, T], limit_s: float = 60.0) -> T:
    """Return the result of a coroutine, which has a time limit."""
    return asyncio.run(asyncio.wait_for(coroutine, limit_s))


def in_loop(environment: Any, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that uses the environment, which is closed on the same event loop."""

    async def played() -> T:
        try:
            return await work
        finally:
            await environment.close()

    return run(played(), limit_s=120.0)


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    """The byte-level test tokenizer with a template of tests/plugins/text/chat_templates."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text().rstrip("\n")
    return tokenizer


def make_task(row: Mapping[str, Any] = SORT_ROW, *, sample: int = 0, **dataset: Any) -> Task:
    return Task(row, DatasetConfig(name="rows", **dataset), "train:0@0", sample, "rows.jsonl:1")


def make_policy(engine: ScriptedEngine, task: Task | None = None, attempt: int = 0, **sampling: Any) -> EnginePolicy:
    return EnginePolicy(engine, Sampling(**sampling), run_seed=0, task=task or make_task(), attempt=attempt)


def core_registry() -> Registry:
    """Core's components, and nothing else."""
    return PluginHost.load([]).registry


def says(tokenizer: PreTrainedTokenizerBase, *texts: str, end: bool = True) -> Callable[[GenerationRequest], list[int]]:
    """A script that writes these texts in turn, each followed by the end token."""
    left: Iterator[str] = iter(texts)

    def script(request: GenerationRequest) -> list[int]:
        ids = encode(tokenizer, next(left))
        assert isinstance(tokenizer.eos_token_id, int)
        return [*ids, tokenizer.eos_token_id] if end else ids

    return script


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))


def extends(before: Turn, after: Turn) -> bool:
    """Whether the later turn's prompt begins with all tokens of the earlier turn."""
    seen = [*before.prompt_ids.tolist(), *before.response_ids.tolist()]
    return after.prompt_ids.tolist()[: len(seen)] == seen
