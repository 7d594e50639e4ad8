"""What `spurline plan` says first and last, and what it finds in the prompts of a run that generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Config, Spurline, WriteConfig

from spurline.config.loading import load_config
from spurline_models.testing.inputs import write_tiny_moe_model
from spurline_planning.plan import make_plan
from spurline_planning.protocols import planned


def test_a_plan_begins_with_what_the_run_will_do(base_config: Config) -> None:
    plan = make_plan(load_config(base_config))
    assert plan.problems == []
    [sentence] = next(iter(plan.sections.values()))
    assert sentence.startswith(f"Train {base_config['model']['path']} (41 K parameters)")
    assert "on 64 samples for 6 steps (0.75 epochs)" in sentence
    assert sentence.endswith(f"go to {base_config['run_dir']}.")


def test_a_plan_of_unreadable_data_still_begins_with_the_run(base_config: Config) -> None:
    base_config["data"]["train"] = "./gone.jsonl"
    plan = make_plan(load_config(base_config))
    assert next(iter(plan.sections)) == "this run"
    assert "(41 K parameters) with source 'sft'" in plan.sections["this run"][0]
    assert len(plan.problems) == 1


def test_a_plan_shows_the_first_prompt_as_the_model_gets_it(rl_config: Config) -> None:
    said = make_plan(load_config(rl_config)).sections["prompts"]
    assert said[0].startswith("64 looked at, 25 tokens on average, longest 25 (")
    assert said[2:] == ["  | <|im_start|>user", "  | say 0<|im_end|>", "  | <|im_start|>assistant"]


def test_a_plan_shows_tools_in_the_prompt_of_an_environment_that_has_some(rl_config: Config) -> None:
    rewards = rl_config["source"]["environment"]["rewards"]
    rl_config["source"]["environment"] = {"name": "tools", "tools": ["calculator"], "rewards": rewards}
    template = Path(rl_config["run_dir"]).parent / "tools.jinja"
    turns = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}{% endfor %}"
    template.write_text("{{ tools[0]['function']['name'] }} for " + turns, encoding="utf-8")
    rl_config["model"] |= {"chat_template": str(template)}
    plan = make_plan(load_config(rl_config))
    assert plan.sections["prompts"][2] == "  | calculator for user: say 0"


def test_a_long_prompt_is_shown_shortened(rl_config: Config, tmp_path: Path) -> None:
    rows = tmp_path / "long.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}), encoding="utf-8")
    rl_config["data"]["train"] = str(rows)
    rl_config["model"]["allow_extrapolation"] = True
    shown = "".join(make_plan(load_config(rl_config)).sections["prompts"])
    assert "[... 1,2" in shown
    assert len(shown) < 1200


def test_a_plan_sizes_generation_and_updates_by_the_settings(rl_config: Config) -> None:
    rl_config["minibatches"] = {"name": "by_prompt", "prompts_per_minibatch": 2}
    plan = make_plan(load_config(rl_config))
    # 2 prompts x 4 samples of 25 + 6 tokens.
    assert "at most 248 tokens in an optimizer step, rows of up to 31" in plan.sections["batches"][0]
    assert plan.sections["generation"] == ["engine in_process: 16 responses decoded together, in this process"]
    memory = " ".join(plan.sections["memory (estimate)"])
    for part in ("weights:", "activations:", "logits:", "keys and values, while generating:", "not all of it"):
        assert part in memory


def test_microbatches_bound_the_activations_of_rollouts(rl_config: Config) -> None:
    rl_config["source"]["sampling"] = {"max_new_tokens": 400}

    def activations(**backend: int) -> int:
        loaded = load_config(rl_config | {"backend": rl_config["backend"] | backend})
        rollouts = planned(loaded.config.source)
        assert rollouts is not None
        update = rollouts.largest_update(loaded.config, 25, 512)
        return loaded.config.backend.estimate_memory(loaded.config, update.row_length, update.tokens).parts[
            "activations"
        ]

    assert activations() == 8 * activations(rows_per_microbatch=1)
    assert activations(max_tokens_per_microbatch=850) == 2 * activations(rows_per_microbatch=1)


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_row_that_is_no_prompt_is_found_before_anything_is_generated(
    spurline: Spurline, rl_config: Config, tmp_path: Path, command: str, held_out: bool
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"say {number}"}]} for number in range(40)]
    rows[30] = {"messages": [{"role": "user"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    if held_out:
        rl_config["source"]["held_out"] = {"success": {"reward": "early"}}
    rl_config["data"] |= {"eval" if held_out else "train": str(path)}
    code, _, err = spurline(command, rl_config)
    assert code == 2
    assert f"{path}:31: messages[0] has no 'content'" in err
    assert err.count("has no 'content'") == 1
    assert not (Path(rl_config["run_dir"]) / "metrics.jsonl").exists()
    entry = {"path": str(path), "on_bad_row": "skip"}
    rl_config["data"] |= {"eval" if held_out else "train": entry}
    code, out, err = spurline("plan", rl_config)
    assert (code, err) == (0, "")
    assert held_out or "; 1 rows will be left out" in out


def test_a_plan_finds_broken_weights(spurline: Spurline, base_config: Config, tmp_path: Path) -> None:
    from spurline_models.testing.inputs import write_tiny_model

    folder = write_tiny_model(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"")
    code, _, err = spurline("plan", base_config | {"model": {"path": str(folder)}})
    assert code == 2
    assert "model.safetensors is truncated or not a safetensors file" in err


def test_a_plan_sizes_a_run_whose_weights_are_not_there_yet(
    spurline: Spurline, write_config: WriteConfig, base_config: Config, tmp_path: Path
) -> None:
    from spurline_models.testing.inputs import write_tiny_model

    folder = write_tiny_model(tmp_path / "fetched")
    config = write_config(base_config | {"model": {"path": str(folder)}})
    _, expected, _ = spurline("plan", config)
    (folder / "model.safetensors").unlink()
    code, out, err = spurline("plan", config)
    assert code == 2
    assert "(41 K parameters)" in out
    assert "memory (estimate)" in out
    assert out == expected.partition("No problems found.")[0]
    assert err.count("no weights can be loaded from folder") == 1
    assert "Copy or download its weights into it" in err


def test_a_plan_says_that_a_template_does_not_fit(base_config: Config) -> None:
    base_config["model"]["chat_template"] = "llama3"
    plan = make_plan(load_config(base_config))
    assert any(line.startswith("model.chat_template: llama3 writes") for line in plan.sections["data"])


def test_a_plan_names_the_file_of_a_pattern_that_fits_no_parameter(
    base_config: Config, write_config: WriteConfig
) -> None:
    base_config["optimizer"]["groups"] = [{"match": "*nothing*", "learning_rate_scale": 0.1}]
    path = write_config(base_config)
    [problem] = make_plan(load_config(path)).problems
    assert str(problem).startswith(f"{path}: optimizer.groups.0.match is '*nothing*'")


@pytest.mark.parametrize(
    ("library", "backend", "fix"),
    [
        ("peft", {"name": "local", "lora": {"rank": 2}}, "pip install 'spurline-models[lora]'"),
        ("peft", {"name": "fsdp", "device": "cpu", "lora": {"rank": 2}}, "pip install 'spurline-models[lora]'"),
        ("ray", {"name": "fsdp", "device": "cpu", "ranks": 2, "launch": "ray"}, "pip install 'spurline-ranks[ray]'"),
    ],
)
def test_a_library_that_the_backend_lacks_is_a_problem_of_the_plan(
    base_config: Config, monkeypatch: pytest.MonkeyPatch, library: str, backend: dict[str, Any], fix: str
) -> None:
    for module in ("spurline_models.configs", "spurline_models.machine"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == library else name)
    plan = make_plan(load_config(base_config | {"plugins": ["fsdp_backend"], "backend": backend}))
    assert any(fix in str(problem) for problem in plan.problems)


def test_a_plan_refuses_what_training_refuses_by_the_config_of_the_model(base_config: Config, tmp_path: Path) -> None:
    dense = base_config["model"]
    base_config["model"] = dense | {"router_aux_loss": 0.1}
    [problem] = make_plan(load_config(base_config)).problems
    assert "has no routers to balance" in str(problem)
    mixture = write_tiny_moe_model(tmp_path / "mixture", output_router_logits=True)
    base_config["model"] = {"path": str(mixture), "tokenizer": dense["path"]}
    [problem] = make_plan(load_config(base_config)).problems
    assert f"{mixture} (Qwen3MoeForCausalLM) sets output_router_logits, by which transformers adds" in str(problem)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "tools": [TOOL]}


def test_plan_names_the_row_whose_tools_the_template_leaves_out(
    base_config: Config, spurline: Spurline, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW), encoding="utf-8")
    base_config["data"] = {"train": "rows.jsonl"}
    base_config["collator"]["max_tokens"] = 4096
    code, _, problems = spurline("plan", base_config)
    assert code == 2
    assert f"{tmp_path}/rows.jsonl:1: tools: the chat template of the tokenizer" in problems
    base_config["model"]["chat_template"] = "chatml"
    assert spurline("plan", base_config)[0] == 0


def test_plan_names_the_tools_environment_whose_template_mentions_no_tools(
    rl_config: Config, spurline: Spurline
) -> None:
    rl_config["source"]["environment"] |= {"name": "tools"}
    code, _, problems = spurline("plan", rl_config)
    assert code == 2
    assert "environment tools: tools: the chat template" in problems
