"""What `spurline plan` says, and that it refuses what training refuses: in the same words, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Config, Spurline, WriteConfig, train, write_rows

from spurline import load_config
from spurline.errors import ConfigError, UserError
from spurline_models import loading
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_planning.plan import make_plan

NOWHERE = [{"match": "*nope*", "learning_rate": 1e-4}]
PLUGINS = {"plugins": ["fsdp_backend", "megatron_backend", "async_rl"]}
EVALUATED = {"evaluation": {"every_steps": 1}}
ASYNC = {
    "backend.lora": {"rank": 2},
    "source.name": "async_rollouts",
    "source.max_staleness": 1,
    "source.correction": "tis",
}
RIGHT = {"messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]}
EXACT_MATCH = {"source.environment": {"name": "single_turn", "rewards": "exact_match"}, "source.reward_weights": {}}
WITHOUT_REFERENCE = {"messages": RIGHT["messages"][:1], "answer": "4"}


def changed(config: Config, changes: Config) -> Config:
    """The config with other values, by dotted key; EVAL stands for its own training data."""
    config = dict(config)
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        value = config["data"]["train"] if value == "EVAL" else value
        config[first] = changed(config.get(first, {}), {rest: value}) if rest else value
    return config


def refusals(config: Config) -> tuple[list[str], str]:
    """Return the problems that a plan finds, and the error that training raises."""
    found = [str(problem) for problem in make_plan(load_config(config)).problems]
    with pytest.raises(UserError) as raised:
        train(config)
    return found, str(raised.value)


def test_a_plan_begins_with_what_the_run_will_do(base_config: Config) -> None:
    plan = make_plan(load_config(base_config))
    assert plan.problems == []
    [sentence] = next(iter(plan.sections.values()))
    assert sentence.startswith(f"Train {base_config['model']['path']} (41.4k parameters)")
    assert "on 64 samples for 6 steps (0.75 epochs)" in sentence
    assert sentence.endswith(f"go to {base_config['run_dir']}.")


def test_a_plan_shows_the_first_prompt_as_the_model_gets_it(rl_config: Config) -> None:
    said = make_plan(load_config(rl_config)).sections["prompts"]
    assert said[0].startswith("64 checked, 25 tokens on average, longest 25 (")
    assert said[2:] == ["  | <|im_start|>user", "  | say 0<|im_end|>", "  | <|im_start|>assistant"]


def test_a_plan_shows_tools_in_the_prompt_of_an_environment_that_has_some(rl_config: Config) -> None:
    rewards = rl_config["source"]["environment"]["rewards"]
    rl_config["source"]["environment"] = {
        "name": "tools",
        "tools": ["calculator"],
        # The template below has no marks of a family.
        "tool_format": "hermes",
        "rewards": rewards,
    }
    template = Path(rl_config["run_dir"]).parent / "tools.jinja"
    turns = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}{% endfor %}"
    template.write_text("{{ tools[0]['function']['name'] }} for " + turns, encoding="utf-8")
    rl_config["model"] |= {"chat_template": str(template)}
    plan = make_plan(load_config(rl_config))
    assert plan.sections["prompts"][2] == "  | calculator for user: say 0"


def test_a_plan_sizes_generation_and_updates_by_the_settings(rl_config: Config) -> None:
    rl_config["minibatches"] = {"name": "by_prompt", "prompts_per_minibatch": 2}
    plan = make_plan(load_config(rl_config))
    # 2 prompts x 4 samples of 25 + 6 tokens.
    assert "at most 248 tokens in an optimizer step, rows of up to 31" in plan.sections["batches"][0]
    assert plan.sections["generation"] == ["engine in_process: 16 responses decoded together, in this process"]
    memory = " ".join(plan.sections["memory (estimate)"])
    for part in ("weights:", "activations:", "logits:", "keys and values, while generating:", "not all parts"):
        assert part in memory


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_row_that_is_no_prompt_is_found_before_anything_is_generated(
    spurline: Spurline, rl_config: Config, tmp_path: Path, command: str, held_out: bool
) -> None:
    rows: list[Config] = [{"messages": [{"role": "user", "content": f"say {number}"}]} for number in range(40)]
    rows[30] = {"messages": [{"role": "user"}]}
    path = write_rows(tmp_path / "rows.jsonl", rows)
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


def test_a_plan_sizes_a_run_whose_weights_are_not_there_yet(
    spurline: Spurline, write_config: WriteConfig, base_config: Config, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "fetched")
    config = write_config(base_config | {"model": {"path": str(folder)}})
    _, expected, _ = spurline("plan", config)
    (folder / "model.safetensors").unlink()
    code, out, err = spurline("plan", config)
    assert code == 2
    assert "(41.4k parameters)" in out
    assert "memory (estimate)" in out
    assert out == expected.partition("No problems found.")[0]
    assert err.count("no weights can be loaded from folder") == 1
    assert "Copy or download the weights into it" in err


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
    mixture = write_tiny_moe_model(tmp_path / "mixture", output_router_logits=True)
    base_config["model"] = {"path": str(mixture), "tokenizer": base_config["model"]["path"]}
    [problem] = make_plan(load_config(base_config)).problems
    assert f"{mixture} (Qwen3MoeForCausalLM) sets output_router_logits. transformers then adds" in str(problem)


def test_plan_names_the_row_whose_tools_the_template_leaves_out(
    base_config: Config, spurline: Spurline, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    write_rows(tmp_path / "rows.jsonl", [RIGHT | {"tools": [tool]}])
    base_config["data"] = {"train": "rows.jsonl"}
    base_config["collator"]["max_tokens"] = 4096
    code, _, problems = spurline("plan", base_config)
    assert code == 2
    assert f"{tmp_path}/rows.jsonl:1: tools: the chat template of the tokenizer" in problems
    base_config["model"]["chat_template"] = "chatml"
    assert spurline("plan", base_config)[0] == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backend.lora": {"target_modules": ["nope"]}}, "backend.lora.target_modules.0 is 'nope', but no module"),
        ({"model.freeze": ["*"]}, "model.freeze leaves nothing to train"),
        ({"optimizer.groups": NOWHERE}, "no trained parameter has such a name"),
        ({"optimizer.groups": [{"match": "*norm*", "weight_decay": 0.5}], "backend.lora": {}}, "no trained parameter"),
        ({"model.router_aux_loss": 0.1}, "has no routers to balance"),
        (
            PLUGINS | {"model.router_aux_loss": 0.1, "backend": {"name": "fsdp", "device": "cpu", "ranks": 2}},
            "has no routers to balance",
        ),
        (
            PLUGINS | {"optimizer.groups": NOWHERE, "backend": {"name": "megatron", "device": "cpu", "ranks": 2}},
            "optimizer.groups.0.match is '*nope*'",
        ),
        (
            PLUGINS
            | {
                "optimizer.groups": [{"match": "*q_proj*", "learning_rate": 1e-4}],
                "backend": {"name": "megatron", "device": "cpu", "ranks": 2},
            },
            "q_proj.weight and model.layers.0.self_attn.k_proj.weight and",
        ),
        ({"data.eval": "EVAL", "checkpoint.keep_best": "eval/nope"} | EVALUATED, "keep_best.metric is eval/nope"),
        (
            {"data.eval": "EVAL", "stop_when": {"metric": "eval/lossy", "patience": 1}} | EVALUATED,
            "Did you mean 'eval/loss'?",
        ),
    ],
)
def test_what_is_refused_before_weights_are_loaded(
    base_config: Config, changes: Config, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(loading, "_with_weights", load)
    found, raised = refusals(changed(base_config, changes))
    assert found == [raised]
    assert says in raised


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source.engine": "child_process"}, "but the source 'rollouts' does not publish weights"),
        ({"source.router_replay": True}, "no router is known"),
        ({"source.router_replay": True, "backend": {"name": "fsdp", "device": "cpu", "ranks": 2}}, "no router"),
        ({"source.router_replay": True, "backend": {"name": "megatron", "device": "cpu", "ranks": 2}}, "no router"),
        ({"source.carry": ["weight"]}, "chat.jsonl:1: the column 'weight' of source.carry is missing"),
        (
            {
                "data.eval": "EVAL",
                "source.held_out": {"success": {"reward": "early"}},
                "checkpoint.keep_best": {"metric": "eval/pass@2", "mode": "max"},
            }
            | EVALUATED,
            "Metrics: eval/failed, eval/pass@1, eval/reward, eval/rewards/brevity, eval/rewards/early,",
        ),
        (
            {"critic": {"optimizer": {"learning_rate": 1e-3, "groups": NOWHERE}}, "source.advantage": "gae"},
            "critic.optimizer.groups.0.match is '*nope*'",
        ),
        (
            ASYNC | {"source.engine": "in_process", "source.weight_sync": "disk"},
            "weight_sync.name is disk, but source.engine supports",
        ),
        (
            ASYNC | {"source.engine": "child_process", "source.weight_sync": "cuda_ipc"},
            "supports only collective, disk, shared_memory",
        ),
    ],
)
def test_what_is_refused_of_rollouts(rl_config: Config, changes: Config, says: str) -> None:
    found, raised = refusals(changed(rl_config, PLUGINS | changes))
    assert found == [raised]
    assert says in raised


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.config_overrides": {"hidden_size": 64}}, "21 weights of"),
        (
            {"model.config_overrides": {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}},
            "lack 11 weights that its config asks for",
        ),
        (
            {"loss": "ppo"},
            "loss.name is ppo, which needs advantages, old_logprobs, but the batches of source 'sft' have of such "
            "columns: (none). Choose another loss or source.",
        ),
        ({"model.init": "random", "model.config_overrides": {"vocab_size": 50}}, "and the model knows 0 to 49"),
    ],
)
def test_what_is_refused_as_weights_and_batches_do_not_fit(base_config: Config, changes: Config, says: str) -> None:
    found, raised = refusals(changed(base_config, changes))
    if "model.init" in changes:
        # Of each batch that is laid out, its largest token.
        found = found[:1]
    assert found == [raised]
    assert says in raised


def test_a_reward_that_an_order_goes_by_must_be_one_of_the_environment(rl_config: Config) -> None:
    config = changed(rl_config, {"data.order": {"name": "reward_adaptive", "reward": "earl"}})
    with pytest.raises(ConfigError, match=r"data\.order\.reward is 'earl', .* Did you mean 'early'"):
        load_config(config)


def test_a_run_dir_that_cannot_be_written_is_a_problem_of_a_plan_for_this_machine(
    base_config: Config, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    loaded = load_config(base_config | {"run_dir": str(tmp_path / "file" / "run")})
    (problem,) = make_plan(loaded).problems
    assert f"{tmp_path}/file is not a folder. Choose another with --set run_dir=PATH" in str(problem)
    assert make_plan(loaded, device_bytes=2**40).problems == []


def test_metrics_that_only_an_evaluation_tells_are_not_refused_before(base_config: Config) -> None:
    # The loss has metrics of its own, and no columns that it needs.
    config = changed(base_config, {"loss": "dft", "data.eval": "EVAL"} | EVALUATED)
    kept = changed(config, {"checkpoint.keep_best": "eval/dft/probability"})
    assert make_plan(load_config(kept)).problems == []
    wrong = changed(config, {"checkpoint.keep_best": "eval/dft/likelihood"})
    [problem] = make_plan(load_config(wrong)).problems
    assert "eval/dft/cross_entropy, eval/dft/probability, eval/loss, eval/objective, eval/time" in str(problem)


def test_a_model_that_cannot_be_trained_is_refused_before_its_data_is_read(base_config: Config) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="is 'nope', but no module"):
        train(changed(base_config, {"backend.lora": {"target_modules": ["nope"]}}), progress=said.append)
    assert "reading the data" not in said


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"data.train": "BAD"}, ""),
        ({"data.eval": "BAD", "evaluation": {"every_steps": 1}}, "data.eval: "),
        ({"evaluations.hard": {"name": "rollouts", "data": "BAD"}}, "evaluations.hard: "),
        ({"evaluations.asked": {"name": "answers", "data": "BAD", "rewards": "exact_match"}}, "evaluations.asked: "),
    ],
)
def test_rows_without_the_reference_that_a_reward_needs_are_found_before_anything_is_generated(
    rl_config: Config, tmp_path: Path, changes: Config, where: str
) -> None:
    good = write_rows(tmp_path / "good.jsonl", [RIGHT] * 8)
    bad = write_rows(tmp_path / "bad.jsonl", [RIGHT, WITHOUT_REFERENCE] * 4)
    config = changed(rl_config, EXACT_MATCH | {"data.train": str(good)} | changes)
    found, problem = refusals(json.loads(json.dumps(config).replace("BAD", str(bad))))
    assert found == [problem]
    assert problem.startswith(f"{where}{bad}:2: exact_match needs a reference answer")
    assert "`columns: {reference: answer}`" in problem


def test_a_row_without_its_reference_is_left_out_where_bad_rows_are(rl_config: Config, tmp_path: Path) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [RIGHT, WITHOUT_REFERENCE] * 8)
    skipping = {"data.train": [{"path": str(bad), "on_bad_row": "skip"}]}
    plan = make_plan(load_config(changed(rl_config, EXACT_MATCH | skipping)))
    assert not plan.problems
    assert "8 rows will be left out" in plan.sections["prompts"][0]
