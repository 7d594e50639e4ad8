"""What is trained on is what the engine wrote, however an agent sends its conversations."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import openai
import pytest
from harness_runs import Harness, attempt, client
from hypothesis import given
from hypothesis import strategies as st
from rl_attempts import decode, encode, make_policy, make_task, says, tokenizer_with

from spurline.testing.fuzzing import fuzzing
from spurline_agents.agents import Session
from spurline_agents.sessions import Conversations
from spurline_rl.chat_front import PrefixError
from spurline_rl.testing import EnvironmentContract
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Turn
from spurline_text.rows.messages import read_messages
from spurline_text.testing.inputs import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def extends(before: Turn, after: Turn) -> bool:
    seen = [*before.prompt_ids.tolist(), *before.response_ids.tolist()]
    return after.prompt_ids.tolist()[: len(seen)] == seen


async def ask(api: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> Any:
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
                messages += [sent_back(await ask(api, messages)), user(question)]
            await ask(api, messages)
        return 1.0

    trajectory = attempt(agent, ScriptedEngine(lambda request: next(answers)))
    assert [turn.response_ids.tolist() for turn in trajectory.turns[:2]] == [[*written, END]] * 2
    assert all(extends(before, after) for before, after in pairwise(trajectory.turns))
    assert trajectory.info["conversations"] == 1


def test_conversations_side_by_side_and_anew_are_turns_of_their_own() -> None:
    async def agent(session: Session) -> float:
        async with client(session) as api:
            first: list[Any] = [user("main")]
            first += [await ask(api, first), user("go on")]
            other: list[Any] = [{"role": "system", "content": "You are a sub-agent."}, user("task")]
            other += [await ask(api, other), user("more")]
            await ask(api, first)
            await ask(api, other)
            await ask(api, [user("anew")])
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
                await ask(api, [user("q"), choice.message, user("why")])
            await ask(api, [user("q"), answer.choices[0].message, user("really")])
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
            await ask(api, [user("q")])
            await ask(api, [user("q"), {"role": "assistant", "content": "short"}, user("and")])
        return 1.0

    trajectory = attempt(agent, ScriptedEngine(says(TOKENIZER, "a long story", "yes")))
    assert trajectory.info["conversations"] == 2
    assert "assistant\nshort<|im_end|>" in decode(TOKENIZER, trajectory.turns[1].prompt_ids)


def test_with_other_tools_it_is_another_conversation() -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}

    async def agent(session: Session) -> float:
        async with client(session) as api:
            message = await ask(api, [user("q")], tools=[tool])
            await ask(api, [user("q"), message, user("and")])
        return 1.0

    assert attempt(agent, ScriptedEngine(says(TOKENIZER, "a", "b"))).info["conversations"] == 2


def thinking_agent(attempts: list[str]) -> Any:
    async def agent(session: Session) -> float:
        async with client(session) as api:
            message = await ask(api, [user("q")])
            try:
                await ask(api, [user("q"), message, user("and")])
            except openai.BadRequestError as error:
                attempts.append(str(error.code))
        return 1.0

    return agent


def test_a_template_that_rewrites_history_fails_the_attempt_even_where_the_agent_goes_on() -> None:
    codes: list[str] = []
    engine = ScriptedEngine(says(TOKENIZER, "<think>\nhm\n</think>\n\nyes", "no"))
    with pytest.raises(PrefixError, match="rewrites turn 0"):
        attempt(thinking_agent(codes), engine, tokenizer=tokenizer_with("strips_thinking"))


def test_with_retokenize_each_turn_has_the_prompt_it_would_have_at_inference() -> None:
    engine = ScriptedEngine(says(TOKENIZER, "<think>\nhm\n</think>\n\nyes", "no"))
    trajectory = attempt(thinking_agent([]), engine, tokenizer=tokenizer_with("strips_thinking"), history="retokenize")
    assert len(trajectory.turns) == 2
    assert "hm" not in decode(TOKENIZER, trajectory.turns[1].prompt_ids)


@given(data=st.data())
@fuzzing(40)
def test_random_tokens_in_random_trees_of_conversations_are_kept_exactly(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(3, len(TOKENIZER) - 1), max_size=6)
    engine = ScriptedEngine(lambda request: [*data.draw(tokens), END])
    policy = make_policy(engine)
    conversations = Conversations(policy, TOKENIZER, "exact", "here")
    tree: list[tuple[list[Any], Turn | None]] = [([user("begin")], None)]

    def texts(messages: list[Any]) -> list[str]:
        # Clients may strip them.
        return [message["content"].strip() for message in messages]

    async def grow() -> None:
        for step in range(data.draw(st.integers(2, 6))):
            messages, parent = data.draw(st.sampled_from(tree))
            chat, key = conversations.find(messages, None)
            reply = await chat.reply()
            message = {"role": "assistant", "content": reply.text}
            conversations.remember(key, read_messages([message], "m")[0], chat)
            turn = policy.turns[-1]
            assert parent is None or extends(parent, turn)
            # Equal texts of two turns could not be told apart by anyone: the later one is meant.
            tree[:] = [(other, written) for other, written in tree if texts(other[:-1]) != texts([*messages, message])]
            tree.append(([*messages, message, user(f"step {step}")], turn))

    asyncio.run(grow())


class TestContract(EnvironmentContract):
    """The environment with a small agent passes core's contract."""

    def make_environment(self, tokenizer: Any) -> Any:
        async def agent(session: Session) -> float:
            async with client(session) as api:
                messages: list[Any] = [*session.messages]
                messages += [await ask(api, messages), user("sure?")]
                last = await ask(api, messages)
            return float(len(last.content))

        return Harness(agent, ScriptedEngine(lambda request: [END]), tokenizer=tokenizer).environment


def test_many_attempts_at_once_each_get_their_own_turns() -> None:
    async def agent(session: Session) -> float:
        name = f"attempt {session.sample}"
        # Making a client takes longer than all that it asks here.
        api = shared.with_options(base_url=session.base_url, api_key=session.api_key)
        messages: list[Any] = [user(name)]
        messages += [await ask(api, messages), user(f"{name} again")]
        last = await ask(api, messages)
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


def test_equal_attempts_have_equal_trajectories() -> None:
    async def agent(session: Session) -> float:
        async with client(session) as api:
            await ask(api, [user("q")])
        return 1.0

    def digits(request: Any) -> list[int]:
        return [*encode(TOKENIZER, str(request.seed)), END]

    one, other = (attempt(agent, ScriptedEngine(digits)) for _ in range(2))
    assert one.turns[0].response_ids.tolist() == other.turns[0].response_ids.tolist()
    assert one.uid == make_task().uid
