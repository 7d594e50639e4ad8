"""Environment `single_turn`, and the config of rewards."""

from __future__ import annotations

from typing import Any

import pytest
from reward_functions import in_process
from rl_attempts import SORT_ROW, core_registry, encode, make_policy, make_task, run, says

from spurline.config.assembly import assemble
from spurline.config.run_config import DataConfig, DatasetConfig
from spurline.config.section import BARE
from spurline.errors import DataError
from spurline_rl.environments.configs import SingleTurnConfig
from spurline_rl.environments.single_turn import SingleTurn
from spurline_rl.protocols.environment import Environment
from spurline_rl.testing.environment_contract import EnvironmentContract, ScriptedEngine
from spurline_text.testing.inputs import tiny_tokenizer

DATA = DataConfig(train=(DatasetConfig(name="rows"),))


def read_config(rewards: Any) -> SingleTurnConfig:
    """The environment's section as a config file would be read."""
    run_model = assemble(core_registry(), {"environment": SingleTurnConfig})
    section: Any = run_model.model_fields["environment"].annotation
    return section.model_validate({"rewards": rewards})


def make_environment(rewards: Any = "exact_match", data: DataConfig = DATA) -> SingleTurn:
    return SingleTurn(read_config(rewards), core_registry(), tiny_tokenizer(), data)


def attempt(answer: str, rewards: Any = "exact_match", row: Any = SORT_ROW, **sampling: Any):
    engine = ScriptedEngine(says(tiny_tokenizer(), answer))
    task = make_task(row)
    trajectory = run(make_environment(rewards).run(task, make_policy(engine, task, **sampling)))
    return trajectory, engine


class TestSingleTurn(EnvironmentContract):
    def make_environment(self, tokenizer: Any) -> Environment:
        return SingleTurn(read_config("exact_match"), core_registry(), tokenizer, DATA)


def test_the_answer_to_the_rows_prompt_is_scored():
    trajectory, engine = attempt("1 2 3")
    tokenizer = tiny_tokenizer()
    prompt = "<|im_start|>user\nSort: 3 1 2<|im_end|>\n<|im_start|>assistant\n"
    assert list(engine.requests[0].prompt_ids) == encode(tokenizer, prompt)
    [turn] = trajectory.turns
    assert turn.response_ids.tolist() == [*encode(tokenizer, "1 2 3"), tokenizer.eos_token_id]
    assert trajectory.rewards == {"exact_match": 1.0}
    assert trajectory.info == {"prompt": prompt, "response": "1 2 3", "reference": "1 2 3"}
    assert attempt("1 3 2")[0].rewards == {"exact_match": 0.0}


def test_an_empty_response_is_scored_as_an_empty_text():
    trajectory, _ = attempt("", {"right": "exact_match", "length": in_process("reward_functions:length")})
    assert trajectory.rewards == {"right": 0.0, "length": 0.0}
    assert trajectory.turns[0].response_ids.tolist() == [tiny_tokenizer().eos_token_id]


def test_a_response_cut_off_is_scored_and_says_so():
    trajectory, _ = attempt("1 2 3", max_new_tokens=3)
    assert trajectory.turns[0].finish_reason == "length"
    assert trajectory.info["response"] == "1 2"


def test_plain_text_rows_are_answered_as_they_are():
    trajectory, engine = attempt("4", row={"prompt": "2 + 2 =", "completion": "4"})
    assert list(engine.requests[0].prompt_ids) == encode(tiny_tokenizer(), "2 + 2 =")
    assert trajectory.rewards == {"exact_match": 1.0}


def test_a_prompt_over_max_length_is_refused_where_the_data_section_says_so():
    data = DATA.model_copy(update={"max_length": 8, "too_long": "error"})
    engine = ScriptedEngine(lambda request: [1])
    with pytest.raises(DataError, match=r"^rows\.jsonl:1: the prompt has \d+ tokens, over data\.max_length: 8"):
        run(make_environment(data=data).run(make_task(), make_policy(engine)))
    assert not engine.requests


def test_a_reward_that_needs_a_reference_it_does_not_get_is_the_datas_fault():
    environment = make_environment("exact_match")
    reward: Any = environment._rewards["exact_match"]
    from spurline_rl.protocols.reward import Answer

    with pytest.raises(DataError, match="needs a reference answer"):
        run(reward.score(Answer("p", "r", None, {})))
    with pytest.raises(DataError, match=r"`columns: \{reference: solution\}`"):
        run(reward.score(Answer("p", "r", None, {"prompt": "p", "solution": "4"})))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("exact_match", {"exact_match": {"name": "exact_match"}}),
        ({"name": "exact_match"}, {"exact_match": {"name": "exact_match"}}),
        ({BARE: "exact_match", "ignore_case": True}, {"exact_match": {"name": "exact_match", "ignore_case": True}}),
        ({"name": "function", "path": "my:grade"}, {"grade": {"name": "function", "path": "my:grade"}}),
        ({"name": {"name": "exact_match"}}, {"name": {"name": "exact_match"}}),
        ({"right": "exact_match"}, {"right": {"name": "exact_match"}}),
        ("my.module:grade", {"grade": {"name": "function", "path": "my.module:grade"}}),
        ({"x": "my:grade"}, {"x": {"name": "function", "path": "my:grade"}}),
        (
            {"x": {"name": "function", "path": "my:grade", "timeout_s": 2}},
            {"x": {"name": "function", "path": "my:grade", "timeout_s": 2.0}},
        ),
        ({"x": {BARE: "my:grade", "timeout_s": 2}}, {"x": {"name": "function", "path": "my:grade", "timeout_s": 2.0}}),
    ],
)
def test_rewards_may_be_written_short(written, read):
    assert read_config(written).model_dump(exclude_unset=True)["rewards"] == read


def test_the_schema_of_the_config_accepts_what_loading_accepts():
    from jsonschema import Draft202012Validator

    run_model = assemble(core_registry(), {"environment": SingleTurnConfig})
    section: Any = run_model.model_fields["environment"].annotation
    check = Draft202012Validator(section.model_json_schema())
    one = {"name": "exact_match", "ignore_case": True}
    for rewards in ("exact_match", "my:grade", {"x": "my:grade"}, {"x": one}, one, {"x": one, "y": "exact_match"}):
        check.validate({"rewards": rewards})
    assert not check.is_valid({"rewards": {"x": {"name": "exact_match", "ignore_cas": True}}})
    assert not check.is_valid({"rewards": 3})
