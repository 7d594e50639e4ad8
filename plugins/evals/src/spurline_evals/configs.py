"""Settings of evaluations on benchmarks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from spurline.config.paths import PathSetting
from spurline.config.section import as_list
from spurline.errors import Problem
from spurline.protocols.dataset import DatasetList
from spurline.protocols.evaluation import EvaluationConfig


class LmEvalConfig(EvaluationConfig):
    """Scores on tasks of lm-eval (EleutherAI's lm-evaluation-harness). Needs `pip install spurline-evals[lm-eval]`.

    Metrics are `TASK/METRIC`, or `TASK/METRIC/FILTER` if the task names its filters. Means also have a standard error,
    whose name ends in `_stderr`.
    """

    name: str = "lm_eval"
    data: DatasetList = Field(default=(), max_length=0)
    """Not used: the tasks name their own data."""
    tasks: Annotated[tuple[str, ...], BeforeValidator(as_list)] = Field(min_length=1)
    """Names of tasks, groups or tags, or paths of task files."""
    include_path: Annotated[Path | None, PathSetting(reads=True)] = None
    """Folder with task files of your own. They are found before lm-eval's tasks of the same name."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first rows of each task. Null uses all rows."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Solved examples before each question, in place of the task's own number. A task with 0 stays at 0."""
    apply_chat_template: bool = False
    """Ask in the chat format of the model's tokenizer."""
    system_instruction: str | None = None
    """Text of a system message."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Largest number of tokens of an answer, in place of the task's own number, which is 256 by default."""
    max_length: int | None = Field(default=None, gt=1)
    """Largest number of tokens of a question and its answer. Longer questions lose their beginning. Null takes the
    limit of the model or the engine."""
    batch_size: int = Field(default=32, gt=0)
    """Number of texts that are scored at once."""
    run_unsafe_code: bool = False
    """Allow tasks that run code that the model wrote. Such code can do anything that you can do."""

    def problems(self, run: Any) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.model.head == "score":
            yield Problem("name", f"is {self.name}, which needs logprobs, and model.head: score gives none. Remove it.")
        if find_spec("lm_eval") is None:
            yield Problem("name", f"is {self.name}, which needs lm-eval. Run `pip install 'spurline-evals[lm-eval]'`.")
