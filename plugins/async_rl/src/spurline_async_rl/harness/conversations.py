"""The conversations of a session: which tokens stand for the messages that a request sends again.

Place on the way: messages of a request -> the longest conversation they go on from -> ChatFront -> the model's turn.
An API without state sends the whole conversation each time. What the model wrote in it is found by its text and kept as
the tokens it wrote; messages that no turn of this session led to begin a conversation of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spurline.data.messages import Message
from spurline.protocols.environment import PolicyHandle
from spurline.rl.chat_front import ChatFront


class Conversations:
    """All conversations that one policy handle has had."""

    def __init__(
        self,
        policy: PolicyHandle,
        tokenizer: PreTrainedTokenizerBase,
        history: Literal["exact", "retokenize"],
        where: str,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._history: Literal["exact", "retokenize"] = history
        self._where = where
        self._known: dict[bytes, ChatFront] = {}
        self.num_begun = 0
        """Requests that went on from no earlier turn."""

    def find(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> tuple[ChatFront, bytes]:
        """A conversation that ends with these messages, and the key that `remember` wants.

        Raises DataError for a tokenizer without chat template.
        """
        # The template shows the tools at the beginning, so that with others it is another conversation.
        key = _digest(b"", tools)
        known, start = None, 0
        for number, message in enumerate(messages):
            key = _digest(key, _identity(message))
            if key in self._known:
                known, start = self._known[key], number + 1
        if known is not None:
            chat = known.fork()
            chat.add(*messages[start:])
            return chat, key
        self.num_begun += 1
        chat = ChatFront(self._policy, self._tokenizer, messages, tools=tools, history=self._history, where=self._where)
        return chat, key

    def remember(self, key: bytes, message: Mapping[str, Any], chat: ChatFront) -> None:
        """`chat` has taken its turn, which the client is told as `message`."""
        self._known[_digest(key, _identity(message))] = chat


def _identity(message: Mapping[str, Any]) -> Any:
    """What has to be equal for two messages to be the same one.

    Clients leave out, add or rename much of an assistant message that they send back, and some strip white space.
    """
    if message["role"] != "assistant":
        return message
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    content = (message.get("content") or "").strip()
    return ["assistant", content, [[call["name"], call["arguments"]] for call in calls]]


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
