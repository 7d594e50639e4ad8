"""The endpoint answers as OpenAI's, and a run trains on what the engine wrote, whatever an agent sends back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import numpy as np
import openai
import pytest
from harness_requests import QUESTION, TOKENIZER
from harness_runs import Harness, attempt, client
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from rl_attempts import core_registry, decode, encode, extends, make_policy, says, tokenizer_with

from spurline.testing.fuzzing import fuzzing
from spurline_agents.agents import Session
from spurline_agents.configs import HarnessConfig
from spurline_agents.sessions import LiveSession
from spurline_environments.configs import AutoFormatConfig
from spurline_environments.tool_formats import Turns
from spurline_rl.testing import EnvironmentContract
from spurline_rl.testing.environment_contract import ScriptedEngine, random_text
from spurline_rl.trajectory import Trajectory, Turn
from spurline_text.rows.messages import read_messages

END = TOKENIZER.eos_token_id
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

Ask = Callable[[openai.AsyncOpenAI, Session], Awaitable[Any]]


def asked(ask: Ask, engine: ScriptedEngine) -> tuple[Any, Trajectory]:
    """What `ask` gets, as the agent of one attempt; and the attempt's trajectory."""
    answers: list[Any] = []

    async def agent(session: Session) -> float:
        async with client(session) as api:
            answers.append(await ask(api, session))
        return 1.0

    trajectory = attempt(agent, engine)
    return answers[0], trajectory


def chat(**settings: Any) -> Ask:
    """Ask for one chat completion; a stream gives the list of its chunks."""

    async def ask(api: openai.AsyncOpenAI, session: Session) -> Any:
        answer: Any = await api.chat.completions.create(**{"model": session.model, "messages": QUESTION, **settings})
        return [chunk async for chunk in answer] if settings.get("stream") else answer

    return ask


def test_a_chat_completion_is_the_turn_that_is_trained_on() -> None:
    engine = ScriptedEngine(says(TOKENIZER, "hi there"))

    answer, trajectory = asked(chat(model="gpt-any"), engine)
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

    settings: Any = {"tools": TOOLS, "n": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
    chunks, from_stream = asked(chat(**settings, stream=True, stream_options={"include_usage": True}), engine())
    answer, from_whole = asked(chat(**settings), engine())
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
    chunks, trajectory = asked(chat(stream=True), ScriptedEngine(says(TOKENIZER, "x")))
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
    answer, _ = asked(chat(**settings), ScriptedEngine(says(TOKENIZER, text)))
    [choice] = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_several_choices_are_turns_with_the_same_prompt_and_different_seeds() -> None:
    engine = ScriptedEngine(random_text(encode(TOKENIZER, "0123456789abcdef"), END))
    answer, trajectory = asked(chat(n=5), engine)
    assert [choice.index for choice in answer.choices] == list(range(5))
    texts = [decode(TOKENIZER, turn.response_ids).removesuffix("<|im_end|>") for turn in trajectory.turns]
    assert [choice.message.content for choice in answer.choices] == texts
    assert len({request.seed for request in engine.requests}) == 5
    assert len({tuple(turn.prompt_ids.tolist()) for turn in trajectory.turns}) == 1
    assert answer.usage.prompt_tokens == len(trajectory.turns[0].prompt_ids)


def test_logprobs_and_token_ids_are_those_that_are_trained_on() -> None:
    wanted = {"logprobs": True, "top_logprobs": 1, "extra_body": {"return_token_ids": True}}
    answer, trajectory = asked(chat(**wanted), ScriptedEngine(says(TOKENIZER, "abc")))
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
    # A call that the limit cuts off is not malformed.
    _, cut = asked(chat(tools=TOOLS, max_tokens=20), ScriptedEngine(says(TOKENIZER, CALL)))
    assert cut.info["metrics"] == {"tools/calls": 0, "turns/forked": 0}


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

    names, _ = asked(ask, ScriptedEngine(says(TOKENIZER, "y")))
    assert names == ["policy"]


async def say(api: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> Any:
    answer = await api.chat.completions.create(model="policy", messages=messages, **settings)
    return answer.choices[0].message


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "sent_back",
    [
        lambda message: message,
        lambda message: {"role": "assistant", "content": message.content},
        lambda message: {"role": "assistant", "content": message.content.strip()},
        lambda message: {"role": "assistant", "content": [{"type": "text", "text": message.content}]},
        lambda message: {"role": "assistant", "content": message.content, "annotations": [], "tool_calls": None},
    ],
)
def test_a_turn_is_known_in_every_form_in_which_clients_send_it_back(sent_back: Any) -> None:
    # Random bytes, which no text would be encoded to in the same way.
    written = [*encode(TOKENIZER, " so "), 200, 201, *encode(TOKENIZER, "be it \n")]
    answers = iter([[*written, END], [*written, END], [*encode(TOKENIZER, "end"), END]])

    async def agent(session: Session) -> float:
        async with client(session) as api:
            messages: list[Any] = [user("one")]
            for question in ("two", "three"):
                messages += [sent_back(await say(api, messages)), user(question)]
            await say(api, messages)
        return 1.0

    trajectory = attempt(agent, ScriptedEngine(lambda request: next(answers)))
    assert [turn.response_ids.tolist() for turn in trajectory.turns[:2]] == [[*written, END]] * 2
    assert all(extends(before, after) for before, after in pairwise(trajectory.turns))
    assert trajectory.info["conversations"] == 1


def test_conversations_side_by_side_and_anew_are_turns_of_their_own() -> None:
    async def agent(session: Session) -> float:
        async with client(session) as api:
            first: list[Any] = [user("main")]
            first += [await say(api, first), user("go on")]
            other: list[Any] = [{"role": "system", "content": "You are a sub-agent."}, user("task")]
            other += [await say(api, other), user("more")]
            await say(api, first)
            await say(api, other)
            await say(api, [user("anew")])
        return 1.0

    engine = ScriptedEngine(says(TOKENIZER, "a", "b", "c", "d", "e"))
    trajectory = attempt(agent, engine)
    a, b, c, d, e = trajectory.turns
    assert extends(a, c)
    assert extends(b, d)
    assert decode(TOKENIZER, e.prompt_ids).startswith("<|im_start|>user\nanew")
    assert trajectory.info["conversations"] == 3
    assert [message["content"] for message in trajectory.info["messages"]] == ["anew", "e"]


def test_a_conversation_may_go_on_from_any_of_its_turns_and_choices() -> None:
    async def agent(session: Session) -> float:
        async with client(session) as api:
            answer = await api.chat.completions.create(model="policy", messages=[user("q")], n=2)  # type: ignore[list-item]
            for choice in answer.choices:
                await say(api, [user("q"), choice.message, user("why")])
            await say(api, [user("q"), answer.choices[0].message, user("really")])
        return 1.0

    trajectory = attempt(agent, ScriptedEngine(says(TOKENIZER, "left", "right", "l2", "r2", "l3")))
    left, right, left_on, right_on, left_again = trajectory.turns
    assert extends(left, left_on)
    assert extends(right, right_on)
    assert extends(left, left_again)
    assert "why" not in decode(TOKENIZER, left_again.prompt_ids)
    assert trajectory.info["conversations"] == 1


def test_a_turn_that_the_agent_changed_is_the_agents_text() -> None:
    async def agent(session: Session) -> float:
        async with client(session) as api:
            await say(api, [user("q")])
            await say(api, [user("q"), {"role": "assistant", "content": "short"}, user("and")])
        return 1.0

    trajectory = attempt(agent, ScriptedEngine(says(TOKENIZER, "a long story", "yes")))
    assert trajectory.info["conversations"] == 2
    assert "assistant\nshort<|im_end|>" in decode(TOKENIZER, trajectory.turns[1].prompt_ids)


def test_with_other_tools_it_is_another_conversation() -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}

    async def agent(session: Session) -> float:
        async with client(session) as api:
            message = await say(api, [user("q")], tools=[tool])
            await say(api, [user("q"), message, user("and")])
        return 1.0

    assert attempt(agent, ScriptedEngine(says(TOKENIZER, "a", "b"))).info["conversations"] == 2


def test_a_template_that_drops_thinking_forks_the_conversation_and_the_client_gets_the_thinking_apart() -> None:
    async def agent(session: Session) -> float:
        async with client(session) as api:
            message = await say(api, [user("q")])
            assert (message.content, message.reasoning_content) == ("yes", "hm")
            await say(api, [user("q"), message, user("and")])
        return 1.0

    def think(**settings: Any) -> Trajectory:
        engine = ScriptedEngine(says(TOKENIZER, "<think>\nhm\n</think>\n\nyes", "no"))
        return attempt(agent, engine, tokenizer=tokenizer_with("strips_thinking"), **settings)

    for trajectory, forks in ((think(), 1), (think(history="retokenize"), 0)):
        assert (len(trajectory.turns), trajectory.info["conversations"]) == (2, 1)
        assert trajectory.info["metrics"] == {"tools/calls": 0, "turns/forked": forks}
        assert "hm" not in decode(TOKENIZER, trajectory.turns[1].prompt_ids)


@given(data=st.data())
@fuzzing(40)
def test_random_tokens_in_random_trees_of_conversations_are_kept_exactly(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(3, len(TOKENIZER) - 1), max_size=6)
    engine = ScriptedEngine(lambda request: [*data.draw(tokens), END])
    policy = make_policy(engine)
    turns = Turns(AutoFormatConfig(), core_registry(), TOKENIZER)
    session = LiveSession(policy, TOKENIZER, HarnessConfig(agent="a:b"), "here", None, turns)  # type: ignore[arg-type]
    tree: list[tuple[list[Any], Turn | None]] = [([user("begin")], None)]

    def texts(messages: list[Any]) -> list[str]:
        # Clients may strip them.
        return [message["content"].strip() for message in messages]

    async def grow() -> None:
        for step in range(data.draw(st.integers(2, 6))):
            messages, parent = data.draw(st.sampled_from(tree))
            chat, key = session.find(messages, None)
            reply = await chat.reply()
            message = {"role": "assistant", "content": reply.text}
            session.remember(key, read_messages([message], "m")[0], chat)
            turn = policy.turns[-1]
            assert parent is None or extends(parent, turn)
            # Equal texts of two turns could not be told apart by anyone: the later one is meant.
            tree[:] = [(other, written) for other, written in tree if texts(other[:-1]) != texts([*messages, message])]
            tree.append(([*messages, message, user(f"step {step}")], turn))

    asyncio.run(grow())


class TestContract(EnvironmentContract):
    def make_environment(self, tokenizer: Any) -> Any:
        async def agent(session: Session) -> float:
            async with client(session) as api:
                messages: list[Any] = [*session.messages]
                messages += [await say(api, messages), user("sure?")]
                return float(len((await say(api, messages)).content))

        return Harness(agent, ScriptedEngine(lambda request: [END]), tokenizer=tokenizer).environment


def test_many_attempts_at_once_each_get_their_own_turns() -> None:
    async def agent(session: Session) -> float:
        name = f"attempt {session.sample}"
        # Making a client takes longer than all that it asks here.
        api = shared.with_options(base_url=session.base_url, api_key=session.api_key)
        messages: list[Any] = [user(name)]
        messages += [await say(api, messages), user(f"{name} again")]
        last = await say(api, messages)
        assert last.content == f"answer to {name} again"
        return float(session.sample)

    shared = openai.AsyncOpenAI(api_key="of nobody", max_retries=0)

    def answer(request: Any) -> list[int]:
        text = decode(TOKENIZER, request.prompt_ids).rpartition("user\n")[2].partition("<|im_end|>")[0]
        return [*encode(TOKENIZER, f"answer to {text}"), END]

    async def run() -> list[Any]:
        async with shared, Harness(agent, ScriptedEngine(answer)) as harness:
            return await asyncio.gather(*(harness.attempt(sample=sample) for sample in range(200)))

    trajectories = asyncio.run(run())
    for sample, trajectory in enumerate(trajectories):
        assert trajectory.rewards == {"reward": float(sample)}
        first, second = trajectory.turns
        assert extends(first, second)
        assert f"attempt {sample} again<" in decode(TOKENIZER, second.prompt_ids)
