"""Play an episode of an environment that others wrote: a reset, then one step for each turn of the model.

Data flow: row -> seed -> reset -> first messages -> the model's turn -> action -> step -> the observation as the user's
message -> the next turn ... -> Trajectory with the reward of each step on its turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash
from transformers import PreTrainedTokenizerBase as Tokenizer

from spurline.errors import DataError, PluginError
from spurline_environments.configs import EpisodeConfig
from spurline_environments.grammars import ParsedTurn
from spurline_environments.tool_formats import Turns, readable
from spurline_rl.chat_front import ChatFront
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.trajectory import Trajectory
from spurline_text.prompts import ChatQuestion, read_question
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import BadRowError, RowView


class InvalidActionError(ValueError):
    """The model's turn is no action. The model gets the message, and the episode goes on."""


@dataclass(frozen=True)
class Step:
    """The answer of an environment. `ended` says why the episode has ended, and is empty if it goes on."""

    observation: str
    reward: float = 0.0
    ended: str = ""


class Episode(Protocol):
    """One attempt in an environment. An error fails the attempt."""

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        """Begin the episode."""
        ...

    async def step(self, text: str) -> Step:
        """Make the action that the model's turn asks for. Raises InvalidActionError if it asks for none."""
        ...


def seed_of(task: Task) -> int:
    """Return the seed of an episode: the column `seed`, or a number below 2**31 derived from the prompt's uid.

    All attempts at a prompt have the same seed, so they begin in the same state and their rewards can be compared.
    """
    seed = RowView(task.row, task.dataset.columns).get("seed")
    if seed is None:
        return xxhash.xxh3_64_intdigest(task.uid.encode()) % 2**31
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise DataError(f"{task.location}: the column seed is {seed!r}. It must be a whole number, 0 or larger.")
    return seed


def function_setting(path: str | None, what: str) -> Callable[[Any], Any] | None:
    """Import a function that turns texts into actions or observations into texts; None if the setting names none."""
    return load_function(path, what) if path is not None and ":" in path else None


async def converted(action: Awaitable[Any]) -> Any:
    """Return the action that a text asks for. A ValueError becomes an InvalidActionError."""
    try:
        return await action
    except ValueError as error:
        raise InvalidActionError(str(error)) from error


async def play(
    episode: Episode, config: EpisodeConfig, turns: Turns, task: Task, policy: PolicyHandle, tokenizer: Tokenizer
) -> Trajectory:
    """Play one episode and return its trajectory.

    `info` has prompt and response (the last turn without reasoning) as texts, messages, and `ended`: what the
    environment says, `max_turns`, `length` (a turn was cut off, so its action is not made), `context` (another turn
    does not fit) or `refused` (the template refuses an observation, or what the model wrote).
    """
    where = f"{task.location} (prompt {task.uid}, sample {task.sample})"
    opening = await episode.reset(seed_of(task), task.row)
    if opening.ended:
        raise AttemptFailedError(f"{where}: the episode has already ended at its reset ({opening.ended}).")
    messages = _first_messages(task, opening.observation)
    chat = ChatFront(policy, tokenizer, messages, history=config.history, where=where, agree=turns.agree)
    rewards: list[float] = []
    ended, num_invalid, response = "", 0, ""
    while not ended:
        reply = await chat.reply_if_possible(turns.sampling(policy.sampling))
        if isinstance(reply, str):
            ended = reply
            break
        rewards.append(0.0)
        turn = turns.read(reply.text)
        if turn.calls:
            # The model has no tools, so what looks like a call belongs to its action.
            turn = ParsedTurn(reply.text, None, ())
        chat.restate(turns.message(reply.text, turn))
        response = readable(reply, turn, tokenizer)
        if reply.result.finish_reason == "length":
            ended = "length"
            break
        try:
            step = await episode.step(response)
        except InvalidActionError as error:
            num_invalid += 1
            step = Step(f"error: {error}")
        rewards[-1] = step.reward
        ended = step.ended or ("max_turns" if len(rewards) == config.max_turns else "")
        if step.observation or not ended:
            chat.add({"role": "user", "content": step.observation})
    info = {
        "prompt": str(tokenizer.decode(policy.turns[0].prompt_ids.tolist(), skip_special_tokens=False)),
        "response": response,
        "messages": list(chat.messages),
        "ended": ended,
        "metrics": {"episode/turns": len(rewards), "episode/invalid_actions": num_invalid},
    }
    return policy.finish(turn_rewards=rewards, info=info)


def number_of(value: Any, what: str) -> float:
    """Return a reward as a float. Raises PluginError that names `what` if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{what} gave the reward {value!r:.200}, which is no number.") from error


def _first_messages(task: Task, observation: str) -> list[Message]:
    """Return the row's conversation up to its answer, with the first observation at the end of the user's message."""
    try:
        question = read_question(task.row, task.dataset)
    except BadRowError as error:
        raise error.at(task.location) from error
    except DataError:
        messages: list[Message] = []
    else:
        is_chat = isinstance(question, ChatQuestion)
        messages = question.messages[: question.answer_at] if is_chat else [{"role": "user", "content": question.text}]
    if observation and messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
        # Many chat templates refuse two messages of the user in a row.
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{observation}"}]
    if observation:
        return [*messages, {"role": "user", "content": observation}]
    if not messages:
        raise DataError(
            f"{task.location}: the row has no prompt, and the reset gives no observation, so the model has nothing to "
            "answer. Give the row a column `prompt`, or return a text from `reset`."
        )
    return messages
