"""Evaluation `lm_eval`: scores of the trained model on tasks of lm-eval.

lm-eval reads the tasks, asks its questions of `TrainedModel`, extracts the answers and computes the metrics.
"""

from __future__ import annotations

import json
import logging
import math
import random
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import datasets
import numpy as np
import torch

from spurline.data.token_store import fingerprint_of
from spurline.errors import ConfigError, DataError, RunFailedError, suggestion
from spurline.importing import importing
from spurline.protocols.backend import Backend
from spurline.protocols.evaluation import EvaluationContext
from spurline.protocols.held_out import HeldOutEvaluation
from spurline_evals.configs import LmEvalConfig
from spurline_models.abilities import Generates
from spurline_models.architecture import load_model_config
from spurline_models.lengths import position_limit
from spurline_rl.draws import Draw
from spurline_rl.evaluation_configs import HeldOutConfig
from spurline_rl.held_out import HELD_OUT, MakesAttempts
from spurline_rl.protocols.environment import PolicyHandle, Task
from spurline_rl.trajectory import Group, Trajectory
from spurline_text.datasets.local_files import neighbours
from spurline_text.hub import asked_once, hub_answers

with importing():
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.evaluator_utils
    from lm_eval.api.metrics import acc_all, acc_all_stderr, mean, mean_stderr
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    from spurline_evals.language_model import Question, TrainedModel

_FEWSHOT_SEED = 1234
"""lm-eval's own default."""
_SHOWN = 20
"""Number of answers of each task that the report gets."""


class LmEvalEvaluation(HeldOutEvaluation):
    """Scores on the tasks of the config. Answers that are drawn, and not greedy, need a source with an engine."""

    def __init__(self, config: LmEvalConfig, context: EvaluationContext) -> None:
        self._config, self._context = config, context
        facts, backend = context.run.config.source.facts, context.run.config.backend
        with _apart():
            self._tasks, self._groups = _load(config, context.where)
        generating = [name for name, task in self._tasks.items() if task.OUTPUT_TYPE == "generate_until"]
        if generating and not (facts.makes_attempts or backend.facts.generates):
            raise self._refusal(
                f"{generating[0]}, which needs generated answers, but backend '{backend.name}' does not generate, and "
                f"source '{context.run.config.source.name}' has no engine. Set backend.name: local, or keep to tasks "
                "that compare logprobs."
            )
        unsafe = [name for name, task in self._tasks.items() if getattr(task, "UNSAFE_CODE", False)]
        if unsafe and not config.run_unsafe_code:
            raise self._refusal(
                f"{unsafe[0]}, which runs code that the model wrote, here and with your rights. Remove it, or set "
                "run_unsafe_code: true on a machine that you can lose."
            )
        self.measures_copies = bool(generating) and facts.makes_attempts and self._source.generates_with_copies
        for task in self._tasks.values():
            if config.num_fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=config.num_fewshot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError.at(f"{self._context.where}.tasks", f"has {what}")

    @property
    def _source(self) -> MakesAttempts:
        return cast("MakesAttempts", self._context.source)

    def _sizes(self) -> dict[str, int]:
        """Return the number of rows that are used of each task."""
        limit = self._config.limit
        return {name: min(len(task.eval_docs), limit or sys.maxsize) for name, task in self._tasks.items()}

    def summary(self) -> Mapping[str, Any]:
        sizes = self._sizes()
        return {"prompts": sum(sizes.values()), "sources": sizes, "read_in_part": False, "notes": []}

    def fingerprint(self) -> str:
        settings = self._config.model_dump_json(exclude={"every_steps", "at_start", "batch_size", "include_path"})
        sizes = self._sizes()
        rows = (
            json.dumps([name, task.VERSION, task.eval_docs[number]], default=str)
            for name, task in self._tasks.items()
            for number in range(sizes[name])
        )
        return fingerprint_of([settings, *rows])

    def metrics(self) -> Collection[str] | None:
        names = {"cut_texts"}
        groups = [group.name for group in self._groups.values() if group.has_aggregation]
        for name, task in self._tasks.items():
            chosen = [each["metric"] for each in task.get_config("metric_list") or ()]
            if any(map(callable, [task.get_config("process_results"), *chosen])):
                # A function of the task names its metrics.
                return None
            measured = [f"{metric}{error}" for metric in task.aggregation() for error in ("", "_stderr")]
            keys = [f"{each},{used.name}" for each in measured for used in task._filters]
            names |= {_metric_name(owner, key) for owner in (name, *groups) for key in keys}
        return names

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the metrics of tasks and groups, and answers for the report.

        `cut_texts` counts the texts that lost their beginning, since they were too long.
        """
        config, run = self._config, self._context.run
        model = TrainedModel(
            backend,
            run.tokenizer,
            run.layout,
            self._ask_engine if run.config.source.facts.makes_attempts else partial(self._ask_backend, backend),
            max_length=self._max_length(),
            max_new_tokens=config.max_new_tokens,
            batch_size=config.batch_size,
            reads_greedy=any(map(_reads_greedy, self._tasks.values())),
        )
        with _apart():
            for task in self._tasks.values():
                task.set_fewshot_seed(seed=_FEWSHOT_SEED)
            found: Any = evaluate(
                model,
                {"tasks": self._tasks, "groups": self._groups},
                limit=config.limit,
                system_instruction=config.system_instruction,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=True,
                confirm_run_unsafe_code=config.run_unsafe_code,
            )
        metrics = {
            _metric_name(owner, key): float(value)
            for owner, values in found["results"].items()
            for key, value in values.items()
            if "," in key and isinstance(value, Real)
        }
        if model.num_cut:
            metrics["cut_texts"] = float(model.num_cut)
        samples = [shown for name in self._tasks for shown in _shown(name, found["samples"][name])]
        return metrics, samples

    def _max_length(self) -> int:
        run = self._context.run.config
        positions = position_limit(load_model_config(run.model))
        limits = [self._config.max_length, positions and positions.tokens, run.source.facts.context_tokens]
        return min((limit for limit in limits if limit is not None), default=sys.maxsize)

    def _ask_backend(self, backend: Backend, questions: Sequence[Question]) -> list[list[int]]:
        assert isinstance(backend, Generates), f"{type(backend).__name__} does not generate, contrary to its config"
        answers: list[list[int]] = [[] for _ in questions]
        for most in {sampling.max_new_tokens for _, sampling in questions}:
            members = [n for n, (_, sampling) in enumerate(questions) if sampling.max_new_tokens == most]
            if any(questions[number][1].temperature for number in members):
                raise self._refusal(
                    "a task that draws its answers (do_sample: true), which the backend cannot. Set do_sample: false "
                    "and temperature: 0 in its generation_kwargs, or train with source: rollouts."
                )
            made = backend.generate([questions[number][0] for number in members], max_new_tokens=most)
            for number, tokens in zip(members, made, strict=True):
                answers[number] = tokens
        return answers

    def _ask_engine(self, questions: Sequence[Question]) -> list[list[int]]:
        data, where = self._context.run.config.data.train[0], self._context.where
        draws = [
            Draw(
                number, f"{HELD_OUT}{where}:{number}@{number}", data, f"{where}: question {number}", {"asked": question}
            )
            for number, question in enumerate(questions)
        ]
        outcomes = self._source.make_attempts(draws, HeldOutConfig(), environment=_Continuation())
        answers: list[list[int]] = []
        for outcome in outcomes:
            if not isinstance(outcome, Group):
                raise RunFailedError(f"{where}: no answer to a question: {outcome.reason}")
            answers.append(outcome.trajectories[0].turns[0].response_ids.tolist())
        return answers


_ASKED = "asked"


class _Continuation:
    """An environment in which the row of a task is a question."""

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        ids, sampling = task.row[_ASKED]
        await policy.generate(ids, sampling)
        return policy.finish({"answered": 1.0})


def _load(config: LmEvalConfig, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tasks and groups by name. Raises ConfigError for an unknown name, DataError for a task without data."""
    folder = config.include_path
    if folder is not None and not folder.is_dir():
        raise ConfigError.at(f"{where}.include_path", f"is {folder}, which is not a folder.{neighbours(folder)}")
    manager = TaskManager(include_path=config.include_path, include_defaults=False)
    if any(name not in manager.task_index and not Path(name).is_file() for name in config.tasks):
        # Reading all tasks of lm-eval takes seconds.
        manager = TaskManager(include_path=config.include_path)
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for name in config.tasks:
        if name not in manager.task_index and not Path(name).is_file():
            more = "" if config.include_path else " For a task of your own, set include_path."
            hint = suggestion(name, manager.task_index)
            raise ConfigError.at(f"{where}.tasks", f"has {name}, which is neither a task nor a file.{hint}{more}")
        try:
            with asked_once():
                found = manager.load([name])
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            if not hub_answers():
                reason += (
                    "\nThe Hugging Face hub does not answer, or HF_HUB_OFFLINE is set. For local rows, `include` the "
                    "task's file in one of yours, with dataset_path: json and dataset_kwargs: {data_files: ...}."
                )
            raise DataError(f"{where}.tasks: {name} cannot be loaded: {reason}") from error
        tasks |= found["tasks"]
        groups |= found.get("groups", {})
    return tasks, groups


@contextmanager
def _apart() -> Iterator[None]:
    """Seed the random generators as lm-eval does, and restore them at the end. Keep lm-eval quiet and in one process.

    Only standard errors with a formula are computed: others take thousands of samples in other processes.
    """
    formulas = {mean: mean_stderr, acc_all: acc_all_stderr}
    before = random.getstate(), np.random.get_state()
    logger = logging.getLogger("lm_eval")
    level, shows_bars = logger.level, not datasets.are_progress_bars_disabled()
    with (
        torch.random.fork_rng(devices=[]),
        patch.object(lm_eval.api.model, "tqdm", lambda items, **_: items),
        patch.object(lm_eval.api.task, "tqdm", lambda items, **_: items),
        patch.object(lm_eval.evaluator_utils, "stderr_for_metric", lambda metric, **_: formulas.get(metric)),
    ):
        random.seed(0)
        np.random.seed(1234)
        torch.default_generator.manual_seed(1234)
        logger.setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            logger.setLevel(level)
            if shows_bars:
                datasets.enable_progress_bars()
            random.setstate(before[0])
            np.random.set_state(before[1])


def _reads_greedy(task: Any) -> bool:
    """Return whether the metrics of a task depend on whether a text is the likeliest one."""
    if task.OUTPUT_TYPE == "multiple_choice":
        return "exact_match" in task.aggregation() or task.get_config("process_results") is not None
    return task.OUTPUT_TYPE == "loglikelihood"


def _metric_name(owner: str, key: str) -> str:
    """Return `TASK/METRIC/FILTER` for lm-eval's `METRIC,FILTER`, without the filter `none`. `_stderr` comes last."""
    metric, _, chosen = key.partition(",")
    name = "/".join([owner, metric.removesuffix("_stderr"), *([] if chosen == "none" else [chosen])])
    return f"{name}_stderr" if metric.endswith("_stderr") else name


def _shown(name: str, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first answers to a task, for the report. If a task has several filters, each has scores."""
    shown: dict[int, dict[str, Any]] = {}
    for sample in samples:
        asked, replies = sample["arguments"], [replies[0] for replies in sample["resps"]]
        if len(asked[0]) < 2 or (len(shown) == _SHOWN and sample["doc_id"] not in shown):
            # A text that is only scored has no answer.
            continue
        likeliest = max(range(len(asked)), key=lambda n: replies[n][0]) if isinstance(replies[0], tuple) else None
        answer = replies[0] if likeliest is None else asked[likeliest][1]
        entry = {"prompt": asked[0][0], "response": answer, "reference": str(sample["target"]), "scores": {}}
        scores = {
            _metric_name(name, f"{metric},{sample['filter']}"): float(sample[metric])
            for metric in sample["metrics"]
            if isinstance(sample[metric], Real) and math.isfinite(sample[metric])
        }
        shown.setdefault(sample["doc_id"], entry)["scores"].update(scores)
    return [*shown.values()]
