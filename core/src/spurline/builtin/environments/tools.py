"""Environment `tools`: a conversation in which the model may call functions before it answers.

Place on the way: chat row -> first messages -> the model's turn -> tool calls in it -> their results as messages -> the
next turn ... -> a turn without calls is the answer -> reward terms -> Trajectory with one Turn per model turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from spurline.builtin.environments.tool_calls import Toolbox, parse_calls
from spurline.config.run_config import DataConfig
from spurline.data.bad_row import BadRowError
from spurline.data.messages import Message
from spurline.data.prompt_rows import ChatQuestion, read_question
from spurline.errors import DataError
from spurline.protocols.environment import PolicyHandle, Task
from spurline.protocols.reward import Answer, Reward
from spurline.registry import Registry
from spurline.rl.chat_front import ChatFront, PrefixError, Reply
from spurline.rl.reward_calls import close_all, reward_terms
from spurline.rl.trajectory import Trajectory

if TYPE_CHECKING:
    from spurline.builtin.environment_configs import ToolsConfig


class Tools:
    """Runs conversations with tools.

    A row is asked up to its last question; the calls that it shows after that, if any, are not given away, and its last
    assistant turn is the reference. The template shows the model the row's own tools where it has some, otherwise the
    configured ones.

    `info`: prompt, response (the last turn) and reference as texts; messages; `ended` with `answer`, `max_turns`,
    `length` (a turn was cut off) or `context` (no room for another turn); calls and failed_calls.
    """

    def __init__(
        self, config: ToolsConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._toolbox = Toolbox(config.tools, config.tool_timeout_s)
        self._schemas = self._toolbox.schemas()
        self._rewards: dict[str, Reward] = {
            name: registry.create("reward", reward) for name, reward in config.rewards.items()
        }

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        question = self._read(task)
        chat = ChatFront(
            policy,
            self._tokenizer,
            question.messages[: _beginning(question.messages, question.answer_at)],
            tools=question.tools or self._schemas,
            history=self._config.history,
            where=f"{task.location} (prompt {task.uid}, sample {task.sample})",
        )
        ended, calls, failed = await self._converse(chat)
        answer = self._answer(chat, policy, question.reference, task)
        info = {
            "prompt": answer.prompt,
            "response": answer.response,
            "reference": answer.reference,
            "messages": list(chat.messages),
            "ended": ended,
            "calls": sum(calls),
            "failed_calls": sum(failed),
        }
        penalties = [self._config.failed_call_reward if number else 0.0 for number in failed]
        terms = await reward_terms(self._rewards, answer)
        return policy.finish(terms, turn_rewards=penalties if any(penalties) else None, info=info)

    def close(self) -> None:
        """Close the rewards."""
        close_all(self._rewards)

    async def _converse(self, chat: ChatFront) -> tuple[str, Sequence[int], Sequence[int]]:
        """Talk until an answer or a limit. Returns how it ended, and per turn the numbers of calls and failed calls."""
        calls: list[int] = []
        failed: list[int] = []
        while True:
            reply = await self._reply(chat, is_first=not calls)
            if reply is None:
                return "context", calls, failed
            found = parse_calls(reply.text)
            was_cut = reply.result.finish_reason == "length"
            calls.append(len(found))
            failed.append(0)
            if not found or was_cut:
                return "length" if was_cut else "answer", calls, failed
            if len(calls) == self._config.max_turns:
                return "max_turns", calls, failed
            for call in found:
                result = await self._toolbox.answer(call)
                failed[-1] += result.failed
                chat.add(result.message())

    async def _reply(self, chat: ChatFront, *, is_first: bool) -> Reply | None:
        """The model's turn, or None when the conversation has grown out of the model's context."""
        try:
            return await chat.reply()
        except PrefixError:
            raise
        except DataError:
            # A row that is too long from the start is the data's fault; later on it is how the attempt went.
            if is_first:
                raise
            return None

    def _answer(self, chat: ChatFront, policy: PolicyHandle, reference: str | None, task: Task) -> Answer:
        first, last = policy.turns[0], policy.turns[-1]
        prompt = str(self._tokenizer.decode(first.prompt_ids.tolist(), skip_special_tokens=False))
        response = str(self._tokenizer.decode(last.response_ids.tolist(), skip_special_tokens=True))
        return Answer(prompt, response, reference, task.row, chat.messages)

    def _read(self, task: Task) -> ChatQuestion:
        """The row as a conversation. Raises DataError for any other."""
        try:
            has_template = self._tokenizer.chat_template is not None
            question = read_question(task.row, task.dataset, has_chat_template=has_template)
        except BadRowError as error:
            raise error.at(task.location) from error
        except DataError as error:
            raise DataError(f"{task.location}: {error}") from error
        if not isinstance(question, ChatQuestion):
            raise DataError(
                f"{task.location}: this row is plain text and no conversation; the environment tools needs chat rows "
                "('messages'), a list of messages as prompt, or alpaca rows."
            )
        return question


def _beginning(messages: Sequence[Message], answer_at: int) -> int:
    """Number of messages up to the last of the user before the answer; all before the answer when there is none."""
    asked = [index for index in range(answer_at) if messages[index]["role"] == "user"]
    return asked[-1] + 1 if asked else answer_at
