"""Scores on tasks of lm-eval, compared with lm-eval's own model, on rows in local files."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import lm_eval
import pytest
from every_run import SOAK
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from run_helpers import Config, Trained, assert_problem, assert_same_weights, deterministic, on_ranks, train, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from spurline import load_config
from spurline.errors import ConfigError, DataError
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.evaluation import EvaluationContext
from spurline.protocols.source import SourceContext
from spurline.trackers.jsonl import read_json_lines
from spurline_evals import configs
from spurline_evals.configs import LmEvalConfig
from spurline_evals.evaluation import LmEvalEvaluation
from spurline_text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]
TASKS = Path(lm_eval.__file__).parent / "tasks"

OWN_SCORES = '''
def score(doc, results):
    """Show the logprob of a continuation and whether it is the greedy one."""
    [(logprob, is_greedy)] = results
    return {"logprob": logprob, "greedy": float(is_greedy)}

def verified(doc, results):
    from math_verify import parse, verify
    return {"math_verify": float(verify(parse(doc["solution"]), parse(results[0])))}
'''


def write_task(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], **settings: Any) -> None:
    """Write a task file and its rows."""
    data = write_rows(folder / f"{name}.jsonl", rows)
    files = {"data_files": {"train": str(data), "test": str(data)}, "cache_dir": str(folder / "cache")}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "dataset_name": None, "test_split": "test"}
    text = json.dumps({**task, **settings}, indent=1)
    # JSON is YAML, except for the mark of a function.
    (folder / f"{name}.yaml").write_text(re.sub('"!function (\\w+)"', r"!function scores.\1", text))


def mean_of(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


@pytest.fixture
def tasks(tmp_path: Path, spurline_tiny_model: Path) -> Path:
    """A task of each kind: choices, continuations of which some are greedy, whole texts, and generated answers."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "scores.py").write_text(OWN_SCORES)
    draw = random.Random(5)
    words = ["one", "two", "three", "a longer word", "z"]
    questions = [" ".join(draw.choices(words, k=draw.randrange(1, 6))) for _ in range(12)]
    choices = [{"q": text, "choices": [" a", " second", " y"], "gold": draw.randrange(3)} for text in questions]
    write_task(
        folder,
        "choices",
        choices,
        output_type="multiple_choice",
        fewshot_split="train",
        num_fewshot=2,
        doc_to_text="Q: {{q}}",
        doc_to_choice="{{choices}}",
        doc_to_target="gold",
        metric_list=mean_of("acc", "acc_norm", "exact_match"),
    )
    tokenizer = AutoTokenizer.from_pretrained(spurline_tiny_model)
    model: Any = AutoModelForCausalLM.from_pretrained(spurline_tiny_model)
    continuations = []
    for number, text in enumerate(questions):
        ids = tokenizer(text, return_tensors="pt").input_ids
        greedy = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=3)[0, ids.shape[1] :])
        continuations.append({"q": text, "a": greedy if number % 2 else " other"})
    write_task(
        folder,
        "continuations",
        continuations,
        output_type="loglikelihood",
        doc_to_text="{{q}}",
        doc_to_target="{{a}}",
        target_delimiter="",
        process_results="!function score",
        metric_list=mean_of("logprob", "greedy"),
    )
    write_task(
        folder,
        "texts",
        [{"text": text} for text in questions],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    )
    write_task(
        folder,
        "answers",
        [{"q": text, "a": text[:1]} for text in questions],
        output_type="generate_until",
        doc_to_text="{{q}}",
        doc_to_target="{{a}}",
        generation_kwargs={"until": ["e"], "max_gen_toks": 6, "do_sample": False},
        metric_list=mean_of("exact_match"),
    )
    return folder


@pytest.fixture
def config(spurline_tiny_model: Path, spurline_chat_file: Path, tasks: Path, tmp_path: Path) -> Config:
    names = ["choices", "continuations", "texts", "answers"]
    return {
        "plugins": ["evals"],
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "max_length": 128},
        "batch_size": 8,
        "steps": 4,
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every_steps": 2, "export_hf": True},
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
        "report": {"enabled": False},
        "evaluations": {"bench": {"name": "lm_eval", "tasks": names, "include_path": str(tasks), "every_steps": 1}},
    }


def scores(run: Trained, step: int = -1) -> dict[str, float]:
    found = {name.removeprefix("eval/bench/"): value for name, value in run.lines[step].items() if "eval/" in name}
    del found["time"]
    return found


@pytest.mark.parametrize(("chat", "max_length"), [(False, None), (True, None), (False, 24)])
def test_scores_equal_those_of_lm_evals_own_model(
    config: Config, tasks: Path, chat: bool, max_length: int | None
) -> None:
    """Also where texts are cut, or scored in windows. Answers are cut to one token less there."""
    names = ["choices", "continuations", "texts", *([] if max_length else ["answers"])]
    changes = {"tasks": names, "apply_chat_template": chat, "max_length": max_length, "batch_size": 5}
    config["evaluations"]["bench"] |= {**changes, "every_steps": None}
    run = train(config)
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(names)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=1234)
    exported = str(Path(config["run_dir"]) / "model")
    limit = {} if max_length is None else {"max_length": max_length - 1}
    model = cast(Any, HFLM)(exported, device="cpu", dtype="float32", batch_size=4, **limit)
    theirs: Any = evaluate(model, loaded, apply_chat_template=chat, fewshot_as_multiturn=True)
    expected = {
        f"eval/bench/{task}/{key.removesuffix(',none')}": value
        for task, values in theirs["results"].items()
        for key, value in values.items()
        if key.endswith(",none") and value != "N/A"
    }
    if max_length:
        expected["eval/bench/cut_texts"] = run.lines[-1]["eval/bench/cut_texts"]
        assert expected["eval/bench/cut_texts"] > 0
    found = {name: value for name, value in run.lines[-1].items() if name.startswith("eval/bench/")}
    del found["eval/bench/time"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert {"choices/acc", "choices/acc_stderr", "texts/word_perplexity"} <= scores(run).keys()
    assert chat or scores(run)["continuations/greedy"] > 0


class Scripted:
    """A backend that answers the prompts with these keys, and goes on with another question."""

    def __init__(self, tokenizer: Any, answers: Mapping[str, str], goes_on: str) -> None:
        self._tokenizer, self._answers, self._goes_on = tokenizer, answers, goes_on

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        texts = [self._tokenizer.decode(list(prompt)) for prompt in prompts]
        # Solved examples come before the question.
        last = [max(self._answers, key=text.rfind) for text in texts]
        return [self._tokenizer.encode(self._answers[key] + self._goes_on)[:max_new_tokens] for key in last]


def evaluation_of(config: Config, **settings: Any) -> LmEvalEvaluation:
    """Build the evaluation of a config with these settings, without a run."""
    bench = {**config["evaluations"]["bench"], **settings}
    loaded = load_config({**config, "evaluations": {"bench": bench}})
    run = SourceContext(loaded.config, loaded.host, load_tokenizer(loaded.config.model), ParallelLayout())
    context = EvaluationContext(run, cast(Any, None), cast(Any, None), "evaluations.bench")
    return LmEvalEvaluation(cast(LmEvalConfig, loaded.config.evaluations["bench"]), context)


def test_usual_benchmarks_on_local_rows_have_their_usual_extraction(
    config: Config, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # IFEval fetches the rules for ends of sentences, which these instructions do not need.
    monkeypatch.setattr("nltk.download", lambda *_: False)
    numbers = {f"How many are {n}?": f"They are many.\n#### {n}" for n in range(40, 46)}
    gsm = [{"question": question, "answer": answer} for question, answer in numbers.items()]
    write_task(tasks, "my_gsm8k", gsm, include=str(TASKS / "gsm8k/gsm8k.yaml"))
    problems = [{"problem": f"Half of {2 * n}?", "solution": f"It is $\\boxed{{\\frac{{{n}}}{{1}}}}$."} for n in (3, 4)]
    write_task(tasks, "my_math", problems, include=str(TASKS / "hendrycks_math/hendrycks_math_algebra.yaml"))
    write_task(
        tasks,
        "my_verified",
        problems,
        doc_to_text="{{problem}}",
        doc_to_target="{{solution}}",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 64},
        process_results="!function verified",
        metric_list=mean_of("math_verify"),
    )
    asked = [("no_comma", "punctuation:no_comma"), ("bullets", "detectable_format:number_bullet_lists")]
    rows = [
        {"key": n, "prompt": key, "instruction_id_list": [name], "kwargs": [{"num_bullets": 2 * n or None}]}
        for n, (key, name) in enumerate(asked)
    ]
    write_task(tasks, "my_ifeval", rows, include=str(TASKS / "ifeval/ifeval.yaml"))
    names = ["my_gsm8k", "my_math", "my_verified", "my_ifeval"]
    evaluation = evaluation_of(config, tasks=names, max_new_tokens=64)
    answers = {
        **dict.fromkeys(numbers, " none"),
        "How many are 40?": " So\n#### 40",
        "How many are 41?": " I think 41",
        "How many are 42?": " #### 43",
        "Half of 6?": " $\\frac{3}{1}$",
        "Half of 8?": " $\\frac{8}{2}$",
        "no_comma": "none here",
        "bullets": "* one\n* two\n",
    }
    tokenizer = load_tokenizer(load_config(config).config.model)
    found, samples = evaluation.evaluate(cast(Any, Scripted(tokenizer, answers, "\n\nQuestion: 7\n#### 7")))
    measured = {name: value for name, value in found.items() if "stderr" not in name}
    assert measured == {
        "my_gsm8k/exact_match/strict-match": pytest.approx(1 / 6),
        "my_gsm8k/exact_match/flexible-extract": pytest.approx(2 / 6),
        "my_math/exact_match": 0.5,
        "my_verified/math_verify": 1.0,
        "my_ifeval/prompt_level_strict_acc": 1.0,
        "my_ifeval/inst_level_strict_acc": 1.0,
        "my_ifeval/prompt_level_loose_acc": 1.0,
        "my_ifeval/inst_level_loose_acc": 1.0,
    }
    # Functions of the tasks give the other names.
    assert evaluation.metrics() is None
    names = evaluation_of(config, tasks=["my_gsm8k", "choices"]).metrics()
    assert {name for name in found if "gsm8k" in name} < {*(names or ())}
    shown = samples[1]["scores"]
    assert shown == {"my_gsm8k/exact_match/strict-match": 0.0, "my_gsm8k/exact_match/flexible-extract": 1.0}
    assert samples[1]["response"] == " I think 41\n\n"


def test_an_evaluation_changes_neither_the_training_nor_its_own_scores_after_a_resume(config: Config) -> None:
    whole = train(config, name="whole")
    assert train(config, stop_after=2).step == 2
    resumed = train(config)
    assert deterministic(resumed.lines) == deterministic(whole.lines)
    without = train(config, name="without", evaluations={})
    trained = [{name: value for name, value in line.items() if "eval/" not in name} for line in whole.without_times]
    assert trained == without.without_times
    assert_same_weights(whole, without)
    assert len({tuple(scores(whole, step).values()) for step in range(4)}) == 4


def test_the_example_measures_both_of_its_tasks_without_bars_of_lm_eval(
    spurline_tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    changes = [f"run_dir={tmp_path / 'run'}", f"model.path={spurline_tiny_model}", "steps=1"]
    run = train(load_config("examples/sft_sort_evals.yaml", [*changes, "evaluations.lm_eval.limit=4"]))
    names = {name.partition("lm_eval/")[2] for name in run.lines[0] if "eval/" in name}
    assert {"sort_answers/exact_match/flexible-extract", "sort_choices/acc", "sort_choices/acc_stderr"} < names
    assert "inputs" not in capsys.readouterr().err


def answers_of(run: Trained) -> list[str]:
    return [line["response"] for line in read_json_lines(run.run_dir / "eval_samples.jsonl")]


@pytest.mark.parametrize("source", ["rollouts", "async_rollouts"])
def test_the_engine_of_a_source_answers_as_the_backend_does(config: Config, tasks: Path, source: str) -> None:
    bench = {**config["evaluations"]["bench"], "tasks": ["answers", "choices"], "at_start": True, "every_steps": None}
    config |= {"evaluations": {"bench": bench}, "steps": 1}
    by_backend = train(config, name="backend")
    del config["batch_size"]
    engine = {"name": "in_process", "deterministic": True}
    config["source"] = {"name": source, "prompts_per_step": 2, "samples_per_prompt": 2, "engine": engine}
    config["source"] |= {"environment": {"rewards": "exact_match"}, "sampling": {"max_new_tokens": 4}}
    config["source"] |= {"max_staleness": 0} if source == "async_rollouts" else {}
    config["plugins"] = [*config["plugins"], *(["async_rl"] if source == "async_rollouts" else [])]
    by_engine = train(config, name="engine")
    assert scores(by_engine, 0) == pytest.approx(scores(by_backend, 0))
    asked = 12 + 12
    assert answers_of(by_engine)[:asked] == answers_of(by_backend)[:asked]
    if source == "async_rollouts":
        return
    drawn = json.loads((tasks / "answers.yaml").read_text())
    drawn["generation_kwargs"] |= {"do_sample": True, "temperature": 2.0}
    (tasks / "answers.yaml").write_text(json.dumps(drawn))
    first, second = (train(config, name=name) for name in ("drawn", "again"))
    assert answers_of(first) == answers_of(second) != answers_of(by_engine)


@pytest.mark.processes
def test_ranks_find_the_same_scores(config: Config) -> None:
    config["evaluations"]["bench"] |= {"at_start": True, "every_steps": None, "batch_size": 5}
    config |= {"steps": 1, "checkpoint": {}}
    whole = scores(train(config, name="whole"), 0)
    assert scores(train(on_ranks(config, 2), name="fsdp"), 0) == pytest.approx(whole, rel=1e-5)
    if not SOAK:
        return
    # This backend generates no answers.
    config["evaluations"]["bench"]["tasks"].remove("answers")
    divided = scores(train(on_ranks(config, 2, backend="megatron", tensor=2), name="megatron"), 0)
    assert divided == pytest.approx({name: whole[name] for name in divided}, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"tasks": ["choice"]}, "evaluations.bench.tasks has choice, which is neither.*Did you mean 'choices'"),
        ({}, {"include_path": "task"}, "evaluations.bench.include_path is task, which is not a folder"),
        ({}, {"tasks": ["gsm8k"]}, "gsm8k cannot be loaded: .*HF_HUB_OFFLINE is set. For local rows, `include`"),
        ({}, {"tasks": ["unsafe"]}, "has unsafe, which runs code that the model wrote"),
        ({}, {"tasks": ["answers"], "max_length": 6}, "allows answers of 6 tokens.*Set max_new_tokens"),
        ({}, {"tasks": ["choices"], "max_length": 5}, "The answer '  second' of a task has 8 tokens"),
        ({}, {"tasks": ["drawn"]}, "draws its answers.*or train with source: rollouts"),
        ({}, {"tasks": ["beams"]}, "setting num_beams: 4, which is not supported"),
        (
            {
                "plugins": ["evals", "reward_models"],
                "model": {"path": "models/tiny", "head": "score"},
                "source": "preference",
                "loss": "bradley_terry",
            },
            {},
            "evaluations.bench.name is lm_eval, which needs logprobs, and model.head: score gives none",
        ),
        (
            {"plugins": ["evals", "megatron_backend"], "backend": {"name": "megatron", "device": "cpu"}},
            {},
            "has answers, which needs generated answers, but backend 'megatron'",
        ),
    ],
)
def test_what_cannot_be_measured_is_said(
    config: Config, tasks: Path, changes: Config, settings: Config, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading all tasks of lm-eval takes long.
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(TASKS / "gsm8k/manager.py"))
    task = json.loads((tasks / "answers.yaml").read_text())
    for name, given in {
        "unsafe": {"unsafe_code": True},
        "drawn": {"generation_kwargs": {"do_sample": True, "temperature": 1.0}},
        "beams": {"generation_kwargs": {"num_beams": 4}},
    }.items():
        (tasks / f"{name}.yaml").write_text(json.dumps({**task, "task": name, **given}))
    with pytest.raises((ConfigError, DataError), match=re.compile(said, re.DOTALL)):
        evaluation_of({**config, **changes}, **settings).evaluate(cast(Any, Scripted(None, {}, "")))


def test_without_lm_eval_the_config_says_how_to_install_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert_problem(caught, key="evaluations.bench.name", fix="Run `pip install 'spurline-evals[lm-eval]'`")
