"""Hold a conversation with a policy that takes and returns tokens. By default, responses are not tokenized again.

The chat template renders the messages as text, the tokenizer encodes it, and the policy answers. A turn's prompt
consists of the last turn's prompt, the tokens of the last response, and the encoding of the text that the template has
added since. Some templates change a turn of the model when messages follow, for example by removing the reasoning. The
conversation then forks: the next prompt has the template's text from this turn on, as at inference. If a template
changes other messages, a PrefixError that shows the change is raised.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from os.path import commonprefix
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
    """The chat template rewrites earlier messages."""


@dataclass(frozen=True)
class Reply:
    """The model's turn. `text` includes special tokens, but not the end token."""

    text: str
    result: GenerationResult


@dataclass(frozen=True)
class _Stretch:
    """A part of the conversation.

    Attributes:
        message: Place of the model's turn among the messages. Other text has the place of its first turn that is
            encoded from text, or of the turn that follows.
        is_turn: Whether this is what the model has written.
        ending: Text of the end token that the model has written. It is part of `ids`, but not of `text`.
    """

    text: str
    ids: Sequence[int]
    message: int
    is_turn: bool = False
    ending: str = ""


class ChatFront:
    """One conversation.

    Args:
        policy: The model. It may be None if `reply` is not called.
        messages: The first messages of the conversation.
        tools: JSON schemas of the tools, for the chat template.
        history: `exact` keeps the tokens of earlier turns, as the module's docstring describes. `retokenize` encodes
            the whole text again for each turn, so the tokens of earlier turns may change.
        where: The name of the dataset row, for errors.
        agree: Returns whether two texts of a turn, the model's and the template's, say the same. If so, the model's
            tokens are kept. By default, only equal texts do.

    Attributes:
        num_forked: How often the conversation forked.
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
        agree: Callable[[str, str], bool] = operator.eq,
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
        self._agree = agree
        self.num_forked = 0
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

        This is slow for long conversations, and may be done on any thread. Copies made later share this prompt. Raises
        DataError if the template refuses the messages, and PrefixError if it rewrites messages of others.
        """
        if self._opened is None:
            text = self._render(self._messages)
            if self._history == "retokenize" or not self._stretches:
                self._stretches = [_Stretch(text, self._encode(text), len(self._messages))]
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
        ending = ""
        if result.finish_reason == "stop" and ids and ids[-1] in ends:
            ending, written = self._decode(ids[-1:]), ids[:-1]
        text = self._decode(written)
        self._stretches.append(_Stretch(text, ids, len(self._messages), is_turn=True, ending=ending))
        self._messages.append({"role": "assistant", "content": text})
        return Reply(text, result)

    async def reply_if_possible(self, sampling: Sampling) -> Reply | str:
        """Return the reply, `refused` if the template refuses earlier messages, or `context` if the context is full.

        In the first turn, the last two are errors of the row, which are raised. A PrefixError always is.
        """
        assert self._policy is not None, "there is no policy to reply"
        why = "refused"
        try:
            self.open_turn()
            why = "context"
            return await self.reply(sampling)
        except DataError as error:
            if isinstance(error, PrefixError) or not self._policy.turns:
                raise
            return why

    def restate(self, message: Mapping[str, Any]) -> None:
        """Replace the message of the turn that the model has just taken, for example to give its tool calls apart."""
        assert self._messages[-1]["role"] == "assistant", "the last message is not the model's"
        self._messages[-1] = dict(message)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        try:
            text = self._renderer.render(messages, self._tools, add_generation_prompt=add_generation_prompt)
            require_text(text, {"messages": messages, "tools": self._tools})
        except BadRowError as error:
            raise error.at(self._where) from error
        return text

    def _append(self, text: str) -> None:
        """Continue with `text`, and keep the tokens of what it has in common with the known text."""
        kept: list[_Stretch] = []
        place, message = 0, len(self._messages)
        for number, stretch in enumerate(self._stretches):
            if not text.startswith(stretch.text + stretch.ending, place):
                shown = self._shown_turn(stretch, text, place)
                if shown is not None:
                    stretch = replace(stretch, text=shown)
                elif not text.startswith(stretch.text, place):
                    kept, message = self._before_change(number, text, place), stretch.message
                    self.num_forked += 1
                    break
            kept.append(stretch)
            place += len(stretch.text)
        added = text[sum(len(stretch.text) for stretch in kept) :]
        self._stretches = [*kept, _Stretch(added, self._encode_after(kept[-1] if kept else None, added), message)]

    def _shown_turn(self, stretch: _Stretch, text: str, place: int) -> str | None:
        """Return the template's text of a turn, which begins at `place`, if it says the same as the model's text."""
        stop = text.find(stretch.ending, place) if stretch.ending else -1
        return text[place:stop] if stop >= 0 and self._agree(stretch.text, text[place:stop]) else None

    def _before_change(self, number: int, text: str, place: int) -> list[_Stretch]:
        """Return the stretches to keep when the one of this number changes. Raises PrefixError if that is no turn."""
        stretch = self._stretches[number]
        if stretch.is_turn:
            return self._stretches[: number - 1]
        # A template may also change the generation prompt of a turn, for example `<think>`.
        if not text.startswith(self._render(self._messages[: stretch.message], add_generation_prompt=False)):
            raise self._prefix_error(stretch, text, place)
        return self._stretches[:number]

    def _encode_after(self, before: _Stretch | None, text: str) -> list[int]:
        """Encode a text. If it begins with the end token that the model has already written, leave that out."""
        ids = self._encode(text)
        if before is None or not before.ending or not text.startswith(before.ending):
            return ids
        # The whole is encoded, because some tokenizers encode text differently at the beginning.
        return ids[1:] if ids[0] == before.ids[-1] else self._encode(text[len(before.ending) :])

    def _encode(self, text: str) -> list[int]:
        [encoding] = encode_batch(self._tokenizer, [text], is_chat=True)
        return list(encoding.ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _prefix_error(self, stretch: _Stretch, text: str, place: int) -> PrefixError:
        """Return an error that shows the first difference."""
        same = len(commonprefix([stretch.text, text[place:]]))  # noqa: RUF071 - characters are meant, not paths
        return PrefixError(
            f"{self._where}: the chat template rewrites messages before the model's turn messages[{stretch.message}] "
            "when the conversation goes on, so the next prompt does not begin with the tokens that the model saw. "
            f"There was {_excerpt(stretch.text, same)}, now there is {_excerpt(text, place + same)}. Use a template "
            "that keeps earlier messages (model.chat_template), or set the environment's history: retokenize."
        )


def _excerpt(text: str, start: int) -> str:
    part = text[start : start + _SHOWN_CHARACTERS]
    return f"{part!r}{'...' if len(text) > start + _SHOWN_CHARACTERS else ''}" if part else "the end"
