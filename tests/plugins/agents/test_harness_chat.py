"""What OpenAI's own client gets from the endpoint: chat and text completions, streams, tools, choices and logprobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import openai
import pytest
from harness_runs import Harness, attempt, client
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from rl_attempts import decode, encode, says

from spurline_agents.agents import Session
from spurline_rl.testing.environment_contract import ScriptedEngine, random_text
from spurline_rl.trajectory import Trajectory
from spurline_text.testing.inputs import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
QUESTION: Any = [{"role": "user", "content": "hello"}]

Ask = Callable[[openai.AsyncOpenAI, Session], Awaitable[Any]]


def asked(ask: Ask, engine: ScriptedEngine, **settings: Any) -> tuple[Any, Trajectory]:
    """What `ask` gets, as the agent of one attempt; and the attempt's trajectory."""
    answers: list[Any] = []

    async def agent(session: Session) -> float:
        async with client(session) as api:
            answers.append(await ask(api, session))
        return 1.0

    trajectory = attempt(agent, engine, **settings)
    return answers[0], trajectory


def test_a_chat_completion_is_the_turn_that_is_trained_on() -> None:
    engine = ScriptedEngine(says(TOKENIZER, "hi there"))

    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        return await api.chat.completions.create(model="gpt-any", messages=QUESTION)

    answer, trajectory = asked(ask, engine)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hi there", "stop")
    assert (answer.object, answer.model) == ("chat.completion", "gpt-any")
    [turn] = trajectory.turns
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert decode(TOKENIZER, turn.prompt_ids) == prompt
    assert turn.response_ids.tolist() == [*encode(TOKENIZER, "hi there"), END]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(turn.prompt_ids), 9)
    assert usage.total_tokens == usage.prompt_tokens + 9
    assert trajectory.rewards == {"reward": 1.0}


def test_a_stream_brings_the_same_as_a_whole_answer() -> None:
    def engine() -> ScriptedEngine:
        return ScriptedEngine(says(TOKENIZER, f"use it {CALL}", "no"))

    settings: Any = {
        "model": "policy", "messages": QUESTION, "tools": TOOLS, "n": 2, "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip

    async def streamed(api: openai.AsyncOpenAI, session: Session) -> Any:
        options: Any = {"include_usage": True}
        stream = await api.chat.completions.create(**settings, stream=True, stream_options=options)
        return [chunk async for chunk in stream]

    async def whole(api: openai.AsyncOpenAI, session: Session) -> Any:
        return await api.chat.completions.create(**settings)

    chunks, from_stream = asked(streamed, engine())
    answer, from_whole = asked(whole, engine())
    assert [turn.response_ids.tolist() for turn in from_stream.turns] == [
        turn.response_ids.tolist() for turn in from_whole.turns
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    for choice in answer.choices:
        mine = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert "".join(piece.delta.content or "" for piece in mine) == (choice.message.content or "")
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason == choice.finish_reason
        assert [piece.token_ids for piece in mine if hasattr(piece, "token_ids")] == [choice.token_ids]
        [logprobs] = [piece.logprobs for piece in mine if piece.logprobs]
        assert [entry.logprob for entry in logprobs.content] == [entry.logprob for entry in choice.logprobs.content]
        calls = [call.function.name for piece in mine for call in piece.delta.tool_calls or ()]
        assert calls == [call.function.name for call in choice.message.tool_calls or ()]


def test_a_stream_without_usage_ends_with_the_finish_reason() -> None:
    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        stream = await api.chat.completions.create(model="policy", messages=QUESTION, stream=True)
        return [chunk async for chunk in stream]

    chunks, trajectory = asked(ask, ScriptedEngine(says(TOKENIZER, "x")))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert len(trajectory.turns) == 1


def test_tool_calls_come_as_calls_and_their_results_go_on_from_the_exact_tokens() -> None:
    engine = ScriptedEngine(says(TOKENIZER, f"let me see {CALL}{CALL}", "3"))

    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        messages = list(QUESTION)
        first = await api.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = first.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            numbers = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
        second = await api.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        return first, second

    (first, second), trajectory = asked(ask, engine)
    message = first.choices[0].message
    assert (first.choices[0].finish_reason, message.content) == ("tool_calls", "let me see")
    assert [call.function.name for call in message.tool_calls] == ["add", "add"]
    assert len({call.id for call in message.tool_calls}) == 2
    assert second.choices[0].message.content == "3"
    one, two = trajectory.turns
    seen = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
    assert two.prompt_ids.tolist()[: len(seen)] == seen
    assert decode(TOKENIZER, two.prompt_ids.tolist()[len(seen) :]).count("<|im_start|>tool\n3<|im_end|>") == 2
    assert trajectory.info["conversations"] == 1


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ('<tool_call>{"name": }</tool_call>', {"tools": TOOLS}),
        (f'{CALL}<tool_call>{{"name": "add"', {"tools": TOOLS}),
        (CALL, {}),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}),
    ],
)
def test_what_is_no_call_or_was_not_asked_for_stays_text(text: str, settings: dict[str, Any]) -> None:
    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        return await api.chat.completions.create(model="policy", messages=QUESTION, **settings)

    answer, _ = asked(ask, ScriptedEngine(says(TOKENIZER, text)))
    [choice] = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_several_choices_are_turns_with_the_same_prompt_and_different_seeds() -> None:
    engine = ScriptedEngine(random_text(encode(TOKENIZER, "0123456789abcdef"), END))

    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        return await api.chat.completions.create(model="policy", messages=QUESTION, n=5)

    answer, trajectory = asked(ask, engine)
    assert [choice.index for choice in answer.choices] == list(range(5))
    texts = [decode(TOKENIZER, turn.response_ids).removesuffix("<|im_end|>") for turn in trajectory.turns]
    assert [choice.message.content for choice in answer.choices] == texts
    assert len({request.seed for request in engine.requests}) == 5
    assert len({tuple(turn.prompt_ids.tolist()) for turn in trajectory.turns}) == 1
    assert answer.usage.prompt_tokens == len(trajectory.turns[0].prompt_ids)


def test_logprobs_and_token_ids_are_those_that_are_trained_on() -> None:
    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        return await api.chat.completions.create(
            model="policy", messages=QUESTION, logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True}
        )

    answer, trajectory = asked(ask, ScriptedEngine(says(TOKENIZER, "abc")))
    [turn], [choice] = trajectory.turns, answer.choices
    entries = choice.logprobs.content
    assert turn.logprobs is not None
    np.testing.assert_array_equal(np.float32([entry.logprob for entry in entries]), turn.logprobs)
    assert [entry.token for entry in entries] == ["a", "b", "c", "<|im_end|>"]
    assert entries[0].bytes == [ord("a")]
    assert [entry.top_logprobs[0].token for entry in entries] == ["a", "b", "c", "<|im_end|>"]
    assert choice.token_ids == turn.response_ids.tolist()
    assert answer.prompt_token_ids == turn.prompt_ids.tolist()


def test_limits_and_stop_texts_end_an_answer() -> None:
    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        create = api.chat.completions.create
        return [
            await create(model="policy", messages=QUESTION, max_tokens=3),
            await create(model="policy", messages=QUESTION, max_completion_tokens=2, max_tokens=9),
            await create(model="policy", messages=QUESTION, max_tokens=10_000, stop=["END"]),
        ]

    engine = ScriptedEngine(says(TOKENIZER, "onetwo", "onetwo", "oneEND", end=False))
    answers, trajectory = asked(ask, engine)
    contents = [(answer.choices[0].message.content, answer.choices[0].finish_reason) for answer in answers]
    assert contents == [("one", "length"), ("on", "length"), ("one", "stop")]
    assert [request.sampling.max_new_tokens for request in engine.requests] == [3, 2, 256], "no more than the run's"
    assert engine.requests[2].sampling.stop == ("END",)
    assert decode(TOKENIZER, trajectory.turns[2].response_ids) == "oneEND", "what is trained on keeps the stop text"


def test_text_completions_take_texts_and_token_ids() -> None:
    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        create = api.completions.create
        ids: Any = {"return_token_ids": True}
        return [
            await create(model="policy", prompt="ab", logprobs=1, extra_body=ids),
            await create(model="policy", prompt=[5, 6, 7], n=2),
            await create(model="policy", prompt=[[5], [6, 7]], max_tokens=1),
            [chunk async for chunk in await create(model="policy", prompt=["x", "y"], stream=True)],
        ]

    engine = ScriptedEngine(says(TOKENIZER, *"123456789"))
    (texts, ids, lists, chunks), trajectory = asked(ask, engine)
    prompts = [list(request.prompt_ids) for request in engine.requests]
    ab, x, y = (encode(TOKENIZER, text) for text in ("ab", "x", "y"))
    assert prompts == [ab, [5, 6, 7], [5, 6, 7], [5], [6, 7], x, y]
    [choice] = texts.choices
    assert (choice.text, choice.prompt_token_ids, choice.token_ids) == ("1", ab, [*encode(TOKENIZER, "1"), END])
    assert choice.logprobs.tokens == ["1", "<|im_end|>"]
    assert choice.logprobs.text_offset == [0, 1]
    assert trajectory.turns[0].logprobs is not None
    np.testing.assert_array_equal(np.float32(choice.logprobs.token_logprobs), trajectory.turns[0].logprobs)
    assert ids.usage.prompt_tokens == 3
    assert lists.usage.prompt_tokens == 3
    assert [choice.finish_reason for choice in lists.choices] == ["length", "length"]
    told = [choice.text for answer in (texts, ids, lists, *chunks) for choice in answer.choices]
    assert told == [decode(TOKENIZER, turn.response_ids).removesuffix("<|im_end|>") for turn in trajectory.turns]
    assert sorted(told) == list("1234567")


def test_the_list_of_models_has_the_policy() -> None:
    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        await api.completions.create(model=session.model, prompt="x")
        return [model.id async for model in api.models.list()]

    names, _ = asked(ask, ScriptedEngine(says(TOKENIZER, "y")), model_name="sorter")
    assert names == ["sorter"]


def test_a_request_waits_through_a_pause_of_the_engine() -> None:
    class Pausing(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            waiting.set()
            await going.wait()
            return await super().generate(request)

    waiting, going = asyncio.Event(), asyncio.Event()

    async def run() -> tuple[Any, bool]:
        answers: list[Any] = []

        async def agent(session: Session) -> float:
            async with client(session) as api:
                answers.append(await api.chat.completions.create(model="policy", messages=QUESTION))
            return 1.0

        async with Harness(agent, Pausing(says(TOKENIZER, "late"))) as harness:
            running = asyncio.ensure_future(harness.attempt())
            await asyncio.wait_for(waiting.wait(), 30)
            was_done = running.done()
            going.set()
            await running
        return answers[0], was_done

    answer, was_done = asyncio.run(run())
    assert not was_done
    assert answer.choices[0].message.content == "late"
