"""The examples work: data and model can be made again, GRPO makes a sorter better, tutorials quote their plugins."""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from every_run import SOAK
from run_helpers import Spurline, read_metrics
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = ("sort_train.jsonl", "sort_eval.jsonl")
STEPS = 80 if SOAK else 6
ON_RANKS = {"plugins": "[collation_fast,fsdp_backend]", "backend.name": "fsdp", "backend.ranks": 2}
TUTORIALS = {
    "write-a-plugin.md": "plugin_template",
    "ema-tutorial.md": "plugin_ema",
    "write-a-source.md": "sources_and_columns",
    "grpo-with-a-column.md": "sources_and_columns",
}
"""Page -> the example that it quotes."""


def run_script(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str | Path) -> None:
    """Run a script of the examples in this process."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    monkeypatch.syspath_prepend(str((EXAMPLES / script).parent))
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def rows_of(name: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for line in (EXAMPLES / "data" / name).read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        rows.append((question["content"], answer["content"]))
    return rows


def test_the_data_is_reproducible_and_every_answer_is_the_prompts_seven_digits_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script(monkeypatch, "data/make_sort_data.py", tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "data" / name).read_bytes()
        for prompt, answer in rows_of(name):
            digits = prompt.removeprefix("Sort: ").split(" ")
            assert len(digits) == 7
            assert answer.split(" ") == sorted(digits)


def test_preference_pairs_are_reproducible_and_differ_in_one_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script(monkeypatch, "data/make_preference_data.py", tmp_path)
    sort_prompts = {prompt for name in FILES for prompt, _ in rows_of(name)}
    prompts: list[str] = []
    for name, count in (("sort_pairs_train.jsonl", 2_000), ("sort_pairs_eval.jsonl", 400)):
        content = (tmp_path / name).read_bytes()
        assert content == (EXAMPLES / "data" / name).read_bytes()
        assert len(content.splitlines()) == count
        for line in content.splitlines():
            (prompt,), (chosen,), (rejected,) = (json.loads(line)[side] for side in ("prompt", "chosen", "rejected"))
            prompts.append(prompt["content"])
            right, wrong = chosen["content"].split(" "), rejected["content"].split(" ")
            assert right == sorted(prompt["content"].removeprefix("Sort: ").split(" "))
            assert sorted(wrong) == right
            assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 2
    assert len(set(prompts)) == len(prompts)
    assert set(prompts) <= sort_prompts
    for name in ("sort_ranked_train.jsonl", "sort_ranked_eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "data" / name).read_bytes()


def test_the_tiny_model_is_one_of_the_hubs_kind_and_the_same_for_one_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    for each in (folder, tmp_path / "again"):
        run_script(monkeypatch, "make_tiny_model.py", each, "--seed", "3")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.num_parameters() < 500_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    messages = [{"role": "user", "content": "Sort: 2 1"}, {"role": "assistant", "content": "1 2"}]
    encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, trained in pairs if trained]) == "1 2<|im_end|>"
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", (0, 1, 2) if SOAK else (0,))
# `test_rank_runs.py` compares what ranks learn with what one process learns, step by step.
@pytest.mark.parametrize("backend", [{}, ON_RANKS] if SOAK else [{}], ids=["local", "fsdp"] if SOAK else ["local"])
def test_grpo_makes_a_weak_sorter_a_good_one(
    spurline: Spurline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: dict[str, object], seed: int
) -> None:
    """The quickstart reaches nine in ten held-out prompts in long runs; with fewer steps it comes nearer."""

    def train(example: str, overrides: dict[str, object]) -> None:
        settings = {**overrides, **backend, "seed": seed, "evaluation.every_steps": "null"}
        options = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
        code, _, err = spurline("train", f"examples/{example}", *options)
        assert code == 0, err

    monkeypatch.chdir(ROOT)
    run_script(monkeypatch, "make_tiny_model.py", tmp_path / "tiny", "--seed", str(seed))
    overrides: dict[str, object] = {"run_dir": tmp_path / "warmup", "model.path": tmp_path / "tiny"}
    train("sft_sort.yaml", overrides | {"steps": 180, "schedule": "constant"})
    train("rl_sort.yaml", {"run_dir": tmp_path / "rl", "model.path": tmp_path / "warmup/model", "steps": STEPS})
    before = read_metrics(tmp_path / "warmup")[-1]["eval/exact_match"]
    after = read_metrics(tmp_path / "rl")[-1]["eval/pass@1"]
    assert 0.1 <= before <= 0.65, f"the warm-up should leave a model that is right now and then, not {before:.0%}"
    assert after >= (0.9 if SOAK else before + 0.1), (before, after)
    assert (tmp_path / "rl/report.html").exists()


SMALL_ROLLOUTS = {
    "source.prompts_per_step": 4,
    "source.samples_per_prompt": 2,
    "minibatches.prompts_per_minibatch": 2,
    "source.sampling.max_new_tokens": 4,
}
RECIPES: dict[str, dict[str, object]] = {
    # The reference model scores all rows of the data, so there are few.
    "kto_sort.yaml": {"evaluation.generate.max_samples": 4, "data.train": "examples/data/sort_pairs_eval.jsonl"},
    "orpo_sort.yaml": {"evaluation.generate.max_samples": 4},
    "reward_model_sort.yaml": {},
    "rl_sort_reward_model.yaml": {
        **SMALL_ROLLOUTS,
        "source.sampling.max_new_tokens": 16,
        "source.sampling.stop": "[a, e, i, o, u, s, t, n, r]",
        "source.held_out.max_prompts": 4,
        "model.frozen.judge.path": "DATA",
    },
    "rl_sort_dppo.yaml": {**SMALL_ROLLOUTS, "source.held_out.max_prompts": 4},
    "rl_two_environments.yaml": {**SMALL_ROLLOUTS, "source.held_out.max_prompts": 4, "source.environment.limits": "{}"},
    "rl_sort_anthropic.yaml": {**SMALL_ROLLOUTS, "source.held_out.max_prompts": 4},
    "distill_sort.yaml": {**SMALL_ROLLOUTS, "source.held_out.max_prompts": 4, "model.frozen.teacher.path": "MODEL"},
    "curriculum_sort.yaml": {
        **SMALL_ROLLOUTS,
        "data.train": "DATA/levels_train.jsonl",
        "evaluations.six.data": "DATA/eval_6.jsonl",
        "evaluations.six.max_new_tokens": 2,
    },
}
"""Example -> settings that make it small, beside those of every one. MODEL and DATA are paths."""


@pytest.mark.parametrize("example", RECIPES)
def test_the_example_of_a_recipe_trains(
    spurline: Spurline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spurline_tiny_model: Path, example: str
) -> None:
    monkeypatch.chdir(ROOT)
    if example == "curriculum_sort.yaml":
        run_script(monkeypatch, "data/make_levels_data.py", tmp_path)
    if example == "rl_sort_reward_model.yaml":
        scorer = AutoModelForSequenceClassification.from_pretrained(spurline_tiny_model, num_labels=1)
        scorer.save_pretrained(tmp_path)
    settings = {"run_dir": tmp_path / "run", "model.path": "MODEL", "steps": 2, **RECIPES[example]}
    paths = {"MODEL": str(spurline_tiny_model), "DATA": str(tmp_path)}
    values = {key: re.sub("MODEL|DATA", lambda found: paths[found[0]], str(value)) for key, value in settings.items()}
    options = [argument for key, value in values.items() for argument in ("--set", f"{key}={value}")]
    code, _, err = spurline("train", f"examples/{example}", *options)
    assert code == 0, err
    assert len(read_metrics(tmp_path / "run")) >= 2
    if example == "rl_sort_reward_model.yaml":
        run_script(monkeypatch, "data/make_sampled_pairs.py", tmp_path / "run", tmp_path / "pairs")
        rows = [json.loads(line) for line in (tmp_path / "pairs/eval.jsonl").read_text("utf-8").splitlines()]
        assert rows
        assert all(row["prompt"].startswith("<|im_start|>user") and row["chosen"] != row["rejected"] for row in rows)


def find(example: str, name: str) -> Path:
    folder = EXAMPLES / example
    (path,) = [path for path in folder.rglob(Path(name).name) if path.as_posix().endswith(f"/{name}")]
    return path


def lines_of(text: str) -> str:
    """Return the text without indentation and empty lines: formatting changes both in a block that stands alone."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_tutorial_quotes_its_example_word_for_word(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    quotes = re.findall(r"^`(\S+)`:\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(quotes) >= 3
    for name, quote in quotes:
        assert lines_of(quote) in lines_of(find(TUTORIALS[page], name).read_text(encoding="utf-8")), name


def test_the_minimal_pyproject_of_the_tutorial_is_that_of_the_template_in_short() -> None:
    text = (ROOT / "docs" / "write-a-plugin.md").read_text(encoding="utf-8")
    (minimal,) = re.findall(r"```toml\n(\[build-system\].*?)```", text, re.DOTALL)
    shown, whole = tomllib.loads(minimal), tomllib.loads(find("plugin_template", "pyproject.toml").read_text("utf-8"))
    assert shown["build-system"] == whole["build-system"]
    assert shown["tool"]["hatch"] == whole["tool"]["hatch"]
    for name in ("name", "version", "requires-python", "dependencies"):
        assert shown["project"][name] == whole["project"][name]
    entry = "spurline.plugins"
    assert shown["project"]["entry-points"][entry] == whole["project"]["entry-points"][entry]
