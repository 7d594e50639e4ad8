"""Anthropic's clients and the Responses API record the same turns as chat completions, whoever asks and however."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from harness_requests import TOKENIZER, hello, post
from harness_runs import LIMIT_S, Harness, attempt
from rl_attempts import decode, encode, extends, says

from spurline_agents.agents import Session
from spurline_agents.responses import Dialect
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory

END = TOKENIZER.eos_token_id
SYSTEM, ASKED = "Be brief.", "1 + 2, and 3 + 4?"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
NAMED = {"name": "add", "description": "Add."}
CHAT_TOOLS: Any = [{"type": "function", "function": {**NAMED, "parameters": SCHEMA}}]
ANTHROPIC_TOOLS: Any = [{**NAMED, "input_schema": SCHEMA}]
RESPONSES_TOOLS: Any = [{"type": "function", **NAMED, "parameters": SCHEMA, "strict": False}]
CALLS = "".join(
    f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>' for a, b in ((1, 2), (3, 4))
)
SETTINGS: Any = {"max_retries": 0, "timeout": LIMIT_S}


def calculating() -> ScriptedEngine:
    """Calls a tool twice, in bytes that no text would be encoded to in the same way, and then answers."""
    written = iter([[200, 201, *encode(TOKENIZER, f" let me see {CALLS}"), END], [*encode(TOKENIZER, "3 and 7"), END]])
    return ScriptedEngine(lambda request: next(written))


def added(arguments: Any) -> str:
    return str(arguments["a"] + arguments["b"])


def by_chat(session: Session) -> str:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key, **SETTINGS) as api:
        while True:
            answer = api.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
            message: Any = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                result = added(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def anthropic_client(session: Session) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=session.anthropic_base_url, api_key=session.api_key, **SETTINGS)


MESSAGES: Any = {"model": "policy", "max_tokens": 200, "system": SYSTEM, "tools": ANTHROPIC_TOOLS}


def results_of(content: Any) -> list[Any]:
    uses = [block for block in content if block.type == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": use.id, "content": added(use.input)} for use in uses]


def by_anthropic(session: Session) -> str:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    with anthropic_client(session) as api:
        while True:
            answer = api.messages.create(messages=messages, **MESSAGES)
            if answer.stop_reason != "tool_use":
                assert answer.stop_reason == "end_turn"
                return answer.content[0].text  # type: ignore[union-attr]
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": results_of(answer.content)},
            ]


async def by_anthropic_stream(session: Session) -> str:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]
    async with anthropic.AsyncAnthropic(
        base_url=session.anthropic_base_url, api_key=session.api_key, **SETTINGS
    ) as api:
        while True:
            async with api.messages.stream(messages=messages, **MESSAGES) as stream:
                texts = [text async for text in stream.text_stream]
                answer = await stream.get_final_message()
            if answer.stop_reason != "tool_use":
                return "".join(texts)
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": results_of(answer.content)},
            ]


def by_anthropic_tool_runner(session: Session) -> str:
    """The loop that Anthropic's own library makes."""

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    # The library describes the tool in its own words, which are other tokens.
    add.to_dict = lambda: ANTHROPIC_TOOLS[0]  # type: ignore[method-assign]
    with anthropic_client(session) as api:
        runner = api.beta.messages.tool_runner(
            messages=[{"role": "user", "content": ASKED}], **{**MESSAGES, "tools": [add]}
        )
        return runner.until_done().content[0].text  # type: ignore[union-attr]


RESPONSES: Any = {"model": "policy", "instructions": SYSTEM, "tools": RESPONSES_TOOLS}


def outputs_of(items: Any) -> list[Any]:
    calls = [item for item in items if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": added(json.loads(call.arguments))}
        for call in calls
    ]


def by_responses(session: Session) -> str:
    items: list[Any] = [{"role": "user", "content": ASKED}]
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key, **SETTINGS) as api:
        while True:
            answer = api.responses.create(input=items, store=False, **RESPONSES)
            outputs = outputs_of(answer.output)
            if not outputs:
                return answer.output_text
            items += [*answer.output, *outputs]


async def by_responses_stream(session: Session) -> str:
    """Sends only what is new, after the id of what was before."""
    items: Any = ASKED
    before: Any = {}
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **SETTINGS) as api:
        while True:
            async with api.responses.stream(input=items, **before, **RESPONSES) as stream:
                events = [event async for event in stream]
                answer = await stream.get_final_response()
            assert [event.sequence_number for event in events] == list(range(len(events)))
            items, before = outputs_of(answer.output), {"previous_response_id": answer.id}
            if not items:
                assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
                return answer.output_text


ROUTES: list[Callable[[Session], Any]] = [
    by_anthropic,
    by_anthropic_stream,
    by_anthropic_tool_runner,
    by_responses,
    by_responses_stream,
]


def recorded(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    return [(turn.prompt_ids.tolist(), turn.response_ids.tolist()) for turn in trajectory.turns]


def shown(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in trajectory.info["messages"]]


@pytest.mark.parametrize("route", ROUTES)
def test_two_calls_and_their_results_are_recorded_as_through_chat_completions(route: Callable[[Session], Any]) -> None:
    def through(ask: Callable[[Session], Any]) -> Trajectory:
        if asyncio.iscoroutinefunction(ask):

            async def agent(session: Session) -> float:
                return float(await ask(session) == "3 and 7")

            return attempt(agent, calculating())
        return attempt(lambda session: float(ask(session) == "3 and 7"), calculating())

    trajectory, expected = through(route), through(by_chat)
    assert trajectory.rewards == {"reward": 1.0}
    assert recorded(trajectory) == recorded(expected)
    assert extends(*trajectory.turns)
    assert trajectory.info["conversations"] == 1
    # The ids of calls are random.
    assert shown(trajectory) == shown(expected)


def as_anthropic(messages: list[Any]) -> dict[str, Any]:
    """A request with these messages of chat completions, to the Messages API."""
    turns: list[Any] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            use = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            block: Any = {"type": "tool_result", **use}
            if turns[-1]["role"] == "user":
                turns[-1]["content"].append(block)
                continue
            turns.append({"role": "user", "content": [block]})
            continue
        blocks: list[Any] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            made = {"name": function["name"], "input": json.loads(function["arguments"])}
            blocks.append({"type": "tool_use", "id": call["id"], **made})
        turns.append({"role": message["role"], "content": blocks})
    return {**MESSAGES, "messages": turns}


def from_anthropic(answer: Any) -> dict[str, Any]:
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return {"role": "assistant", "content": "".join(texts) or None, **({"tool_calls": calls} if calls else {})}


def as_responses(messages: list[Any]) -> dict[str, Any]:
    items: list[Any] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return {**RESPONSES, "input": items}


def from_responses(answer: Any) -> dict[str, Any]:
    texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    calls = [
        {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "content": "".join(texts) or None, **({"tool_calls": calls} if calls else {})}


RAW: dict[str, tuple[Callable[[list[Any]], dict[str, Any]], Callable[[Any], dict[str, Any]]]] = {
    "/chat/completions": (
        lambda messages: {"messages": messages, "tools": CHAT_TOOLS},
        lambda answer: answer["choices"][0]["message"],
    ),
    "/messages": (as_anthropic, from_anthropic),
    "/responses": (as_responses, from_responses),
}


def test_a_conversation_that_goes_on_through_any_other_api_keeps_the_sampled_tokens() -> None:
    async def agent(session: Session) -> float:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
        for path in paths:
            to, back = RAW[path]
            status, answer = await post(session, to(messages), path)
            assert status == 200, answer
            messages.append(back(answer))
            calls = messages[-1].get("tool_calls") or ()
            for call in calls:
                result = added(json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                messages.append({"role": "user", "content": "and?"})
        return 1.0

    async def run() -> Trajectory:
        texts = iter([f"a {CALLS}", CALLS, "so"])
        engine = ScriptedEngine(lambda request: [200, *encode(TOKENIZER, next(texts)), END])
        async with Harness(agent, engine) as harness:
            return await harness.attempt()

    kept: list[Any] = []
    for paths in itertools.product(RAW, repeat=3):
        trajectory = asyncio.run(run())
        assert trajectory.info["conversations"] == 1, paths
        assert all(extends(*pair) for pair in itertools.pairwise(trajectory.turns)), paths
        kept.append(recorded(trajectory))
    assert all(turns == kept[0] for turns in kept)


def told(path: str, body: Any, *texts: str, **headers: str) -> tuple[int, Any, Trajectory]:
    """The status and the answer to one raw request, after which the agent asks once more."""
    answers: list[Any] = []

    async def agent(session: Session) -> float:
        answers.append(await post(session, body, path, **headers))
        await post(session, {"messages": [{"role": "user", "content": "x"}]})
        return 1.0

    trajectory = attempt(agent, ScriptedEngine(says(TOKENIZER, *texts, "y")))
    return *answers[0], trajectory


USER: Any = [{"role": "user", "content": "hello"}]
SMALL: Any = {"messages": USER, "max_tokens": 9}


def test_why_a_turn_of_anthropics_api_has_ended_and_what_it_has_used() -> None:
    status, answer, trajectory = told("/messages", {**SMALL, "stop_sequences": ["END", "o"]}, "oneEND")
    assert (status, answer["stop_reason"], answer["stop_sequence"]) == (200, "stop_sequence", "o")
    assert answer["content"] == [{"type": "text", "text": ""}]
    status, answer, trajectory = told("/messages", SMALL, "123456789abc")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(trajectory.turns[0].prompt_ids), 9)
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "policy")


def test_a_response_that_is_cut_off_is_incomplete() -> None:
    def agent(session: Session) -> float:
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key, **SETTINGS) as api:
            answer = api.responses.create(model="m", input="hello", max_output_tokens=3)
            assert answer.incomplete_details is not None
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (answer.output_text, answer.usage.output_tokens) == ("one", 3)  # type: ignore[union-attr]
            with api.responses.stream(model="m", input="hello", max_output_tokens=3) as stream:
                assert [event.type for event in stream][-1] == "response.incomplete"
        return 1.0

    assert len(attempt(agent, ScriptedEngine(says(TOKENIZER, "onetwo", "onetwo"))).turns) == 2


def test_tokens_are_counted_without_a_turn_or_a_conversation() -> None:
    counts: list[int] = []

    def agent(session: Session) -> float:
        with anthropic_client(session) as api:
            for _ in range(3):
                settings = {name: MESSAGES[name] for name in ("model", "system", "tools")}
                counts.append(api.messages.count_tokens(messages=USER, **settings).input_tokens)
            api.messages.create(messages=USER, **MESSAGES)
        return 1.0

    trajectory = attempt(agent, hello(), max_turns=1)
    assert counts == [len(trajectory.turns[0].prompt_ids)] * 3
    assert (len(trajectory.turns), trajectory.info["conversations"]) == (1, 1)


def test_thoughts_that_are_told_apart_come_and_go_as_thinking_and_as_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Dialect._choice
    monkeypatch.setattr(Dialect, "_choice", lambda *given: replace(choose(*given), reasoning="hm"))

    def agent(session: Session) -> float:
        with anthropic_client(session) as api, openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as gpt:
            with api.messages.stream(messages=USER, **MESSAGES) as stream:
                said = stream.get_final_message().content
            assert [block.type for block in said] == ["thinking", "text"]
            assert said[0].thinking == "hm"  # type: ignore[union-attr]
            api.messages.create(messages=[*USER, {"role": "assistant", "content": said}, *USER], **MESSAGES)  # type: ignore[list-item]
            with gpt.responses.stream(input=USER, **RESPONSES) as events:
                output = events.get_final_response().output
            assert [item.type for item in output] == ["reasoning", "message"]
            assert output[0].content[0].text == "hm"  # type: ignore[union-attr, index]
            gpt.responses.create(input=[*USER, *output, *USER], **RESPONSES)
        return 1.0

    first, second, third, fourth = attempt(agent, ScriptedEngine(says(TOKENIZER, *"abcd"))).turns
    assert extends(first, second)
    assert extends(third, fourth)


def test_a_request_as_coding_agents_make_it_is_read() -> None:
    def body(number: int, messages: list[Any]) -> dict[str, Any]:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"},
            {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
        ]
        asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "me"}, "stream": True}
        choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "temperature": 1}
        return {**MESSAGES, **asked, **choice, "system": system, "messages": messages}

    streams: list[bytes] = []

    async def agent(session: Session) -> float:
        import aiohttp

        messages: list[Any] = [*USER]
        for number in range(2):
            key = {"x-api-key": session.api_key, "anthropic-version": "2023-06-01"}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{session.base_url}/messages?beta=true", json=body(number, messages), headers=key) as answer,
            ):
                streams.append(await answer.read())
            text: Any = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
            thoughts = [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking"}]
            messages += [{"role": "assistant", "content": [*thoughts, text]}, *USER]
        return 1.0

    trajectory = attempt(agent, ScriptedEngine(says(TOKENIZER, "a", "b")))
    assert streams[0].startswith(b"event: message_start\ndata: {")
    assert trajectory.info["conversations"] == 1
    assert extends(*trajectory.turns)
    assert "billing" not in decode(TOKENIZER, trajectory.turns[0].prompt_ids)


def test_the_anthropic_client_raises_its_own_errors() -> None:
    raised: list[anthropic.APIStatusError] = []

    def agent(session: Session) -> float:
        # Retries are the client's own: what is refused must not be asked again.
        with anthropic_client(session).with_options(max_retries=2) as api:
            wrong_key = api.with_options(api_key="wrong")
            image: Any = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]
            for asked, content in ((wrong_key, "x"), (api, image), (api, "x"), (api, "x")):
                try:
                    asked.messages.create(**{**MESSAGES, "messages": [{"role": "user", "content": content}]})
                except anthropic.APIStatusError as error:
                    raised.append(error)
        return 1.0

    assert len(attempt(agent, hello(), max_turns=1).turns) == 1
    assert [type(error) for error in raised] == [
        anthropic.AuthenticationError,
        anthropic.BadRequestError,
        anthropic.RateLimitError,
    ]
    bodies: list[Any] = [error.body for error in raised]
    assert [body["type"] for body in bodies] == ["error"] * 3
    types = [body["error"]["type"] for body in bodies]
    assert types == ["authentication_error", "invalid_request_error", "rate_limit_error"]
    assert "messages[0].content[0] is a part of type 'image'" in bodies[1]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/responses", {"input": "x", "previous_response_id": "resp_0"}),
        ("/messages", {**SMALL, "thread": {"type": "continue", "previous_message_id": ["msg_0"]}}),
    ],
)
def test_an_answer_that_this_attempt_has_not_received_cannot_be_continued(path: str, body: Any) -> None:
    status, answer, _ = told(path, body)
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
