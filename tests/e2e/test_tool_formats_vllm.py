"""Tool calls as of Qwen 3.5 and gpt-oss go round real vLLM: called, answered and trained, with equal tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_every_prompt_ended_once, asynchronous
from reward_functions import in_process
from rl_attempts import core_registry, decode, encode, extends
from run_helpers import Config, train
from tool_families import tokenizer_of
from vllm_engines import SMALL_VLLM, memorize

from spurline_environments.calculator import calculator
from spurline_environments.configs import AutoFormatConfig
from spurline_environments.tool_formats import Turns, result_message
from spurline_environments.tools import Toolbox
from spurline_models.testing.inputs import write_tiny_model
from spurline_rl.trajectory import Group

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(2400), pytest.mark.usefixtures("warm_vllm")]

QUESTION = {"role": "user", "content": "What is 6 * 7?"}
WRITTEN = {
    "qwen3_coder": (
        "6 and 7\n</think>\n\n<tool_call>\n<function=calculator>\n<parameter=expression>\n6 * 7\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
        "so\n</think>\n\n42<|im_end|>",
    ),
    "harmony": (
        "<|channel|>analysis<|message|>6 and 7<|end|><|start|>assistant<|channel|>commentary to=functions.calculator "
        '<|constrain|>json<|message|>{"expression": "6 * 7"}<|call|>',
        "<|channel|>final<|message|>42<|return|>",
    ),
}
LENGTH = 2048


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_made_and_trained_on_with_the_tokens_that_vllm_sampled(
    name: str, rl_config: Config, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
    tokenizer = tokenizer_of(name)
    shape = {
        "head_dim": 64,
        "max_position_embeddings": LENGTH,
        "vocab_size": 320,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = write_tiny_model(tmp_path / "model", **shape)
    tokenizer.save_pretrained(model)
    turns, schemas = (
        Turns(AutoFormatConfig(), core_registry(), tokenizer),
        Toolbox({"calculator": "calculator"}, 1).schemas(),
    )
    call, answer = WRITTEN[name]

    def prompt(*messages: Any) -> list[int]:
        text = tokenizer.apply_chat_template(list(messages), tools=schemas, tokenize=False, add_generation_prompt=True)
        return encode(tokenizer, str(text))

    turn = turns.read(call[: call.rindex("<|")], schemas, 1)
    begun = [QUESTION, turns.message(call, turn), result_message(turn.calls[0], calculator("6 * 7"))]
    first, second = prompt(QUESTION), prompt(*begun)
    # The second prompt has the call as it is sampled, which the template may write differently.
    shown = prompt(*begun[:1])
    after = decode(tokenizer, second).partition(call[call.rindex("<|") :])[2]
    if name == "harmony":
        second = [*shown, *encode(tokenizer, call + after)]
    memorize(model, [first, second], [encode(tokenizer, call), encode(tokenizer, answer)])

    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"messages": [QUESTION, {"role": "assistant", "content": "42"}]}) + "\n", encoding="utf-8"
    )
    rl_config |= {"steps": 2, "model": {"path": str(model)}, "data": {"train": str(rows), "max_length": LENGTH}}
    rl_config["minibatches"]["prompts_per_minibatch"] = 1
    rewards = {"right": "exact_match", "chance": in_process("reward_functions:by_chance")}
    environment = {"name": "tools", "rewards": rewards, "tools": {"calculator": "calculator"}}
    source = rl_config["source"] | {"prompts_per_step": 1, "environment": environment, "reward_weights": {}}
    config = asynchronous(
        rl_config | {"source": source},
        max_staleness=0,
        # At a low temperature, the model almost always writes what it has learned.
        sampling={"max_new_tokens": 256, "temperature": 0.3},
        engine=SMALL_VLLM | {"max_model_len": LENGTH},
    )
    scored: list[Group] = []
    lines = train(config, on_rollouts_scored=lambda step, groups: scored.extend(groups)).lines

    assert_every_prompt_ended_once(config)
    assert lines[0]["rewards/right"] > 0.7
    assert lines[0]["tools/calls"] > 0.7
    assert lines[0]["tools/unparsed"] < 0.3
    assert lines[0]["grad_norm"] > 0
    # The trainer computes for the tokens of its rows what vLLM computed when it sampled them.
    assert all(line["mismatch/logprob_diff/max"] < 1e-3 for line in lines)
    attempts = [attempt for attempt in scored[0].trajectories if len(attempt.turns) == 2]
    assert all(extends(*attempt.turns) for attempt in attempts)
    written = [encode(tokenizer, call), encode(tokenizer, answer)]
    exact = [attempt for attempt in attempts if [turn.response_ids.tolist() for turn in attempt.turns] == written]
    assert exact, "no attempt has the call and the answer that the model has learned"
    assert exact[0].info["messages"][2]["content"] == "42"
    assert exact[0].rewards["right"] == 1
