"""Conversations over tokens: nothing the model wrote is tokenized again, and templates that rewrite are caught."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_attempts import decode, encode, extends, make_policy, run, says, tokenizer_with

from spurline.errors import DataError
from spurline.testing.fuzzing import fuzzing
from spurline_rl.chat_front import ChatFront, PrefixError
from spurline_rl.protocols.rollout_engine import GenerationRequest
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_text.testing.inputs import tiny_tokenizer

QUESTION = [{"role": "user", "content": "add"}]


def converse(tokenizer, engine: ScriptedEngine, *between: str, opening=QUESTION, history="exact", **sampling: Any):
    """A conversation with one user message between each two turns of the model; returns its policy and front."""
    policy = make_policy(engine, **sampling)
    chat = ChatFront(policy, tokenizer, opening, history=history, where="rows.jsonl:1")

    async def talk() -> None:
        await chat.reply()
        for content in between:
            chat.add({"role": "user", "content": content})
            await chat.reply()

    run(talk())
    return policy, chat


def test_each_prompt_is_the_tokens_so_far_and_the_encoding_of_the_new_messages():
    tokenizer = tiny_tokenizer()
    policy, chat = converse(tokenizer, ScriptedEngine(says(tokenizer, "one", "two", "three")), "and", "more")
    first, second, third = policy.turns
    assert extends(first, second)
    assert extends(second, third)
    # The byte-level tokenizer has one encoding for a text, so that the whole must equal the template's rendering.
    conversation = list(chat.messages)
    for number, turn in enumerate(policy.turns):
        text = tokenizer.apply_chat_template(conversation[: 1 + 2 * number], tokenize=False, add_generation_prompt=True)
        assert turn.prompt_ids.tolist() == encode(tokenizer, str(text))
    assert [message["content"] for message in conversation] == ["add", "one", "and", "two", "more", "three"]


@given(data=st.data())
@fuzzing(40)
def test_random_tokens_are_kept_exactly_or_the_rewriting_is_reported(data):
    tokenizer = tiny_tokenizer()
    replies = data.draw(st.lists(st.lists(st.integers(1, len(tokenizer) - 1), max_size=6), min_size=2, max_size=4))
    answers = iter(replies)
    engine = ScriptedEngine(lambda request: next(answers))
    policy, _ = converse(tokenizer, engine, *("go on" for _ in replies[1:]))
    turns = policy.turns
    assert [turn.response_ids.tolist() for turn in turns] == replies
    assert all(extends(before, after) for before, after in pairwise(turns))


def test_a_turn_cut_off_by_its_length_is_ended_in_the_next_prompt():
    tokenizer = tiny_tokenizer()
    policy, _ = converse(tokenizer, ScriptedEngine(says(tokenizer, "onetwo", "x")), "and", max_new_tokens=3)
    first, second = policy.turns
    assert decode(tokenizer, first.response_ids) == "one"
    added = second.prompt_ids.tolist()[len(first.prompt_ids) + 3 :]
    assert decode(tokenizer, added).startswith("<|im_end|>\n<|im_start|>user\nand")


def test_a_turn_ended_by_another_token_keeps_it_and_is_ended_as_the_template_does():
    tokenizer = tiny_tokenizer()
    other_end = tokenizer.convert_tokens_to_ids("<|pad|>")
    engine = ScriptedEngine(lambda request: [*encode(tokenizer, "one"), other_end])
    policy, chat = converse(tokenizer, engine, "and")
    first, second = policy.turns
    assert extends(first, second)
    text = decode(tokenizer, second.prompt_ids)
    assert "assistant\none<|pad|><|im_end|>\n<|im_start|>user\nand<|im_end|>" in text
    assert chat.messages[1]["content"] == "one"


def test_a_template_that_drops_thinking_forks_the_conversation_from_that_turn_on():
    tokenizer = tokenizer_with("strips_thinking")
    thoughtful = "<think>\n6 and 7\n</think>\n\n42"
    # A byte that is no text shows whether a turn was encoded again.
    byte = tokenizer.convert_tokens_to_ids("ÿ")
    answers = iter([[byte, 2], [*encode(tokenizer, thoughtful), 2], [byte, byte, 2], [2]])
    policy, chat = converse(tokenizer, ScriptedEngine(lambda request: next(answers)), "go on", "and then", "so")
    first, second, third, fourth = policy.turns
    assert [extends(before, after) for before, after in pairwise(policy.turns)] == [True, False, True]
    assert extends(first, third)
    assert chat.num_forked == 1
    shown = tokenizer.apply_chat_template(list(chat.messages[:5]), tokenize=False, add_generation_prompt=True)
    assert decode(tokenizer, third.prompt_ids) == shown
    assert "6 and 7" not in shown
    assert decode(tokenizer, second.response_ids) == f"{thoughtful}<|im_end|>"
    assert fourth.prompt_ids.tolist()[: len(third.prompt_ids)] == third.prompt_ids.tolist()


def test_a_template_that_rewrites_messages_of_others_is_caught_with_the_first_changed_text():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "{{ message['content'] }}", "{{ message['content'] | replace('wrong', 'right') if not loop.last else '' }}"
    )
    with pytest.raises(PrefixError) as caught:
        converse(tokenizer, ScriptedEngine(says(tokenizer, "this is wrong", "x")), "go on", opening=QUESTION * 2)
    # The last message's content is not rendered, so that the messages before turn 0 change first.
    message = str(caught.value)
    assert message.startswith("rows.jsonl:1: the chat template rewrites messages before the model's turn messages[2]")
    assert "There was '<|im_end|>\\n" in message
    assert "now there is 'add<|im_end|>" in message
    assert "history: retokenize" in message


def test_qwen3_keeps_thinking_through_tool_results_and_loses_it_at_the_next_question():
    tokenizer = tokenizer_with("qwen3")
    script = says(tokenizer, "<think>\nuse it\n</think>\n\ncall", "<think>\nnow\n</think>\n\n42", "x")
    policy = make_policy(ScriptedEngine(script))
    chat = ChatFront(policy, tokenizer, QUESTION, where="rows.jsonl:1")

    async def talk() -> None:
        await chat.reply()
        chat.add({"role": "tool", "content": "42"})
        await chat.reply()
        assert extends(*policy.turns)
        chat.add({"role": "user", "content": "why"})
        await chat.reply()

    run(talk())
    assert chat.num_forked == 1
    assert not extends(*policy.turns[1:])


def test_retokenize_gives_each_turn_the_templates_own_prompt():
    tokenizer = tokenizer_with("strips_thinking")
    engine = ScriptedEngine(says(tokenizer, "<think>\nhm\n</think>\n\n42", "x"))
    policy, chat = converse(tokenizer, engine, "go on", history="retokenize")
    text = tokenizer.apply_chat_template(list(chat.messages[:3]), tokenize=False, add_generation_prompt=True)
    assert decode(tokenizer, policy.turns[1].prompt_ids) == text
    assert "hm" not in str(text)
    assert "hm" in decode(tokenizer, policy.turns[0].response_ids)


def test_messages_that_the_template_refuses_are_an_error_with_the_place():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: messages are refused .* roles must alternate"):
        converse(tokenizer, ScriptedEngine(lambda request: [1]))


def test_an_error_of_the_engine_leaves_the_conversation_as_it_was():
    tokenizer = tiny_tokenizer()

    def fails(request: GenerationRequest) -> list[int]:
        raise ConnectionError("gone")

    chat = ChatFront(make_policy(ScriptedEngine(fails)), tokenizer, QUESTION)
    with pytest.raises(ConnectionError):
        run(chat.reply())
    assert chat.messages == tuple(QUESTION)
