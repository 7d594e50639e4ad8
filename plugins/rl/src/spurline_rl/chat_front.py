"""Hold a conversation with a policy that takes and returns tokens. By default, responses are not tokenized again.

The chat template renders the messages as text, the tokenizer encodes it, and the policy answers. A turn's prompt
consists of the last turn's prompt, the tokens of the last response, and the encoding of the text that the template has
added since. Some templates change earlier text when messages follow. A prompt made in this way would then differ from
the prompts at inference, so a PrefixError that shows the change is raised.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline_rl.protocols.environment import PolicyHandle
from spurline_rl.protocols.rollout_engine import GenerationResult, Sampling
from spurline_text.chats.chat import ChatRenderer
from spurline_text.encoding import encode_batch, require_chat_template
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import BadRowError, require_text

_SHOWN_CHARACTERS = 60


class PrefixError(DataError):
    """The chat template rewrites earlier turns or messages.

    Args:
        turn: Number of the model's turn that is rewritten, or None if another message is rewritten.
    """

    def __init__(self, message: str, turn: int | None) -> None:
        self.turn = turn
        super().__init__(message)


@dataclass(frozen=True)
class Reply:
    """The model's turn. `text` includes special tokens, but not the end token."""

    text: str
    result: GenerationResult


@dataclass(frozen=True)
class _Stretch:
    """A part of the conversation. `turn` is the number of the model's turn, or None for other text."""

    text: str
    ids: Sequence[int]
    turn: int | None = None


class ChatFront:
    """One conversation.

    Args:
        policy: The model. It may be None if `reply` is not called.
        messages: The first messages of the conversation.
        tools: JSON schemas of the tools, for the chat template.
        history: `exact` keeps the tokens of earlier turns, as the module's docstring describes. `retokenize` encodes
            the whole text again for each turn, so the tokens of earlier turns may change.
        where: The name of the dataset row, for errors.
    """

    def __init__(
        self,
        policy: PolicyHandle | None,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        history: Literal["exact", "retokenize"] = "exact",
        where: str = "conversation",
    ) -> None:
        require_chat_template(tokenizer, where)
        self._policy = policy
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer)
        self._messages = list(messages)
        self._tools = tools
        self._history = history
        self._where = where
        self._stretches: list[_Stretch] = []
        self._num_turns = 0
        self._ending: tuple[str, int] | None = None
        self._opened: list[int] | None = None

    def fork(self) -> ChatFront:
        """Return a copy of the conversation that continues independently."""
        twin = copy.copy(self)
        twin._messages = list(self._messages)
        twin._stretches = list(self._stretches)
        return twin

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return all messages so far, including the model's turns."""
        return tuple(self._messages)

    def add(self, *messages: Mapping[str, Any]) -> None:
        """Append messages of the user, of tools or of the system."""
        assert self._opened is None, "the prompt of the next turn is already encoded"
        self._messages += [dict(message) for message in messages]

    def open_turn(self) -> Sequence[int]:
        """Encode the prompt of the model's next turn before `reply`, and return its token ids.

        This is slow for long conversations, and may be done on any thread. Later forks share this prompt. Raises
        DataError if the template refuses the messages, and PrefixError if it rewrites earlier turns or messages.
        """
        if self._opened is None:
            text = self._render()
            if self._history == "retokenize" or not self._stretches:
                self._stretches = [_Stretch(text, self._encode(text))]
            else:
                self._append(text)
            self._opened = list(chain.from_iterable(stretch.ids for stretch in self._stretches))
        return self._opened

    async def reply(self, sampling: Sampling | None = None) -> Reply:
        """Let the model answer, and append the answer to the messages.

        Raises the errors of `open_turn` and of the policy.
        """
        assert self._policy is not None, "there is no policy to reply"
        prompt_ids, self._opened = self.open_turn(), None
        result = await self._policy.generate(prompt_ids, sampling)
        ids = written = [int(token) for token in result.token_ids]
        ends = {*self._tokenizer.all_special_ids, *(sampling or self._policy.sampling).stop_token_ids}
        self._ending = None
        if result.finish_reason == "stop" and ids and ids[-1] in ends:
            self._ending = self._decode(ids[-1:]), ids[-1]
            written = ids[:-1]
        text = self._decode(written)
        self._stretches.append(_Stretch(text, ids, self._num_turns))
        self._num_turns += 1
        self._messages.append({"role": "assistant", "content": text})
        return Reply(text, result)

    def _render(self) -> str:
        try:
            text = self._renderer.render(self._messages, self._tools, add_generation_prompt=True)
            require_text(text, {"messages": self._messages, "tools": self._tools})
        except BadRowError as error:
            raise error.at(self._where) from error
        return text

    def _append(self, text: str) -> None:
        """Add the part of `text` after the known text. Raises PrefixError if `text` does not begin with that text."""
        known = "".join(stretch.text for stretch in self._stretches)
        if not text.startswith(known):
            raise self._prefix_error(known, text)
        added = text[len(known) :]
        if self._ending is None or not added.startswith(self._ending[0]):
            # The model did not write the text that the template puts at the end of a turn.
            self._stretches.append(_Stretch(added, self._encode(added)))
            return
        ending, end_token = self._ending
        self._stretches[-1] = replace(self._stretches[-1], text=self._stretches[-1].text + ending)
        # The model has already written the end token. It is encoded again and then removed, because some tokenizers
        # encode text differently at the beginning.
        ids = self._encode(added)
        after = ids[1:] if ids[:1] == [end_token] else self._encode(added[len(ending) :])
        self._stretches.append(_Stretch(added[len(ending) :], after))

    def _encode(self, text: str) -> list[int]:
        [encoding] = encode_batch(self._tokenizer, [text], is_chat=True)
        return list(encoding.ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _prefix_error(self, known: str, text: str) -> PrefixError:
        """Return an error that shows the first difference."""
        pairs = enumerate(zip(known, text, strict=False))
        start = next((place for place, (before, now) in pairs if before != now), len(text))
        ends = accumulate(len(stretch.text) for stretch in self._stretches)
        number = next(number for number, end in enumerate(ends) if end > start)
        turn = self._stretches[number].turn
        name = f"turn {turn}" if turn is not None else f"the messages before turn {number // 2}"
        return PrefixError(
            f"{self._where}: the chat template rewrites {name} when the conversation goes on, so the prompt of turn "
            f"{self._num_turns} does not begin with the tokens that the model saw and wrote. There was "
            f"{_excerpt(known, start)}, now there is {_excerpt(text, start)}. Use a template that does not change "
            "earlier turns (model.chat_template), or set the environment's history: retokenize.",
            turn,
        )


def _excerpt(text: str, start: int) -> str:
    part = text[start : start + _SHOWN_CHARACTERS]
    return f"{part!r}{'...' if len(text) > start + _SHOWN_CHARACTERS else ''}" if part else "the end"
