"""Render conversations with the tokenizer's chat template, and find the characters that have loss.

Data flow: Conversation -> text and trained spans -> encoding. Only the rendering of the whole conversation is
encoded. To find where a turn starts, the messages before it are rendered alone. A trained turn begins after the
generation prompt and ends with its end-of-turn token. White space after this token is not trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import jinja2
import numpy as np
from jinja2.runtime import Context
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from spurline.errors import ModelError
from spurline_text.rows.formats import Conversation
from spurline_text.rows.messages import Message, assistant_turns
from spurline_text.rows.rows import BadRowError
from spurline_text.token_bytes import Span
from spurline_text.tokenizer import template_name


def mask_of_spans(encoding: Encoding, spans: Iterable[Span]) -> NDArray[np.uint8]:
    """Return 1 for every token that covers a character of a span, else 0: uint8 [tokens]."""
    begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(encoding), dtype=np.uint8)
    for start, stop in (span for span in spans if span[0] < span[1]):
        # If the tokenizer trims offsets, a white-space token has an empty range. It belongs to the span around its end.
        mask |= (ends > start) & np.where(begins == ends, ends <= stop, begins < stop)
    return mask


_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE_ANSWER = "spurlineprobeanswer"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys that datasets use for the reasoning of a turn."""
SPOKEN = ("user", "assistant")
"""Roles whose messages every chat template renders."""
_CHANCE_CHARACTERS = 16
"""A text with fewer characters may occur in a rendering by chance, as part of another message."""


def is_doubtful(conversation: Conversation, text: str) -> bool:
    """Return whether the rendering `text` may lack a part of the conversation."""
    if conversation.tools:
        return True
    for message in conversation.messages:
        role = message["role"]
        if role in SPOKEN:
            # Most messages have only a role and content. Others have tool calls or reasoning.
            if len(message) != 2 or "content" not in message:
                return True
            continue
        said = message.get("content", "").strip()
        if "tool_calls" in message or (said and (len(said) < _CHANCE_CHARACTERS or said not in text)):
            return True
    return False


_MOST_CHARACTERS = 1 << 17
"""Characters that a template may have. Templates of known models have up to about 20,000 characters."""


class ChatTemplate:
    """A compiled chat template and the special tokens that it may use. It runs in the sandbox of transformers."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """Compile the template. Raises ValueError if that fails."""
        if len(source) > _MOST_CHARACTERS:
            raise ValueError(f"it has {len(source):,} characters; at most {_MOST_CHARACTERS:,} are read")
        try:
            # transformers compiles each template in this way, and caches the result.
            self._compiled = _compile_jinja_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        self._source = source
        self.has_generation_blocks = _GENERATION_BLOCK.search(source) is not None
        self._special_tokens = dict(special_tokens)
        self._global: dict[str, Any] = {**self._compiled.globals, "tools": None, "documents": None, **special_tokens}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
        track_generation: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render messages. The template may raise any exception.

        Args:
            messages: The conversation, or its first messages.
            tools: JSON schemas of the tools that the model may call.
            add_generation_prompt: Whether to end the text with the generation prompt.
            track_generation: Whether to return the positions of `{% generation %}` blocks.

        Returns:
            The text, and the characters `[start, stop)` of each block (empty unless `track_generation` is true).
        """
        if tools is None and not track_generation and all(map(_is_plain, messages)):
            # `render_jinja_template` would give the same text, but jinja would copy all global names for it, which
            # takes twice as long as the rest.
            names = {**self._global, "messages": messages, "add_generation_prompt": add_generation_prompt}
            context = Context(self._compiled.environment, names, self._compiled.name, self._compiled.blocks)
            text = "".join(self._compiled.root_render_func(context))
            return text, []
        # The function's annotations are too narrow for these arguments.
        render: Any = render_jinja_template
        texts, spans = render(
            conversations=[list(messages)],
            tools=tools,
            chat_template=self._source,
            return_assistant_tokens_mask=track_generation,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )
        return texts[0], spans[0] if track_generation else []


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Return whether a message has only a role and text content. transformers converts nothing in such a message."""
    return message.keys() == {"role", "content"} and type(message["content"]) is str


class TemplateRewritesHistory(Exception):  # noqa: N818 - a finding about one sample that gets counted, not a failure
    """Raised if the rendered text does not show exactly where a trained turn begins or ends."""


@dataclass(frozen=True)
class RenderedChat:
    """The text of a conversation, and its trained characters in order. The encoder must not add special tokens."""

    text: str
    spans: tuple[Span, ...]


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._templates: dict[str, ChatTemplate] = {}
        self._end_of_turn: dict[ChatTemplate, str] = {}

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of the messages. Raises BadRowError when the template refuses them."""
        return self._rendered(self._template(tools), messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def render_for_training(self, conversation: Conversation, train_on: str) -> RenderedChat:
        """Render a conversation and find its trained characters.

        Args:
            conversation: Messages and tools of a row.
            train_on: `last_assistant` or `all_assistants`. It has no effect if `conversation.first_trained` is set.

        Raises:
            BadRowError: If the template refuses the messages.
            TemplateRewritesHistory: If the exact position of a trained turn in the text cannot be found.
        """
        messages, tools = conversation.messages, conversation.tools
        template = self._template(tools)
        text, indices = self._rendered(template, messages, tools, track_generation=template.has_generation_blocks)
        if template.has_generation_blocks:
            return RenderedChat(text, tuple(self._marked_spans(text, indices, conversation, train_on)))
        spans: list[Span] = []
        for turn in conversation.trained_turns(train_on):
            prompt, _ = self._rendered(template, messages[:turn], tools, add_generation_prompt=True)
            if not text.startswith(prompt):
                raise TemplateRewritesHistory
            spans.append((len(prompt), self._turn_end(text, conversation, turn, len(prompt))))
        return RenderedChat(text, tuple(spans))

    def _marked_spans(self, text: str, indices: list[Span], conversation: Conversation, train_on: str) -> list[Span]:
        """Return the trained spans among the `{% generation %}` blocks."""
        spans = [span for span in indices if span[0] < span[1]]
        first = conversation.first_trained
        if first is None:
            turns = assistant_turns(conversation.messages)
            first = turns[-1] if train_on == "last_assistant" and len(turns) > 1 else 0
        if first == 0:
            return spans
        # The turn cannot be found by counting spans: a turn may have several (thinking and content), or none.
        before = self.render(conversation.messages[:first], conversation.tools).rstrip()
        if not text.startswith(before):
            raise TemplateRewritesHistory
        return [span for span in spans if span[0] >= len(before)]

    def _turn_end(self, text: str, conversation: Conversation, turn: int, start: int) -> int:
        """Return the position after the end-of-turn token of the turn whose content starts at `start`."""
        messages = conversation.messages
        if turn == len(messages) - 1:
            return max(start, len(text.rstrip()))
        message, end_of_turn = messages[turn], self._learn_end_of_turn(conversation.tools)
        content = str(message.get("content", ""))
        if end_of_turn and not message.keys() - {"role", "content"}:
            # Usually the content and the end of turn follow at `start`, and no other rendering is needed.
            for candidate in (content, content.strip()):
                if text.startswith(candidate + end_of_turn, start):
                    return start + len(candidate) + len(end_of_turn)
        through = self.render(messages[: turn + 1], conversation.tools).rstrip()
        if text.startswith(through) and len(through) > start:
            return len(through)
        return _search_turn_end(text, message, start, end_of_turn)

    def _learn_end_of_turn(self, tools: list[dict[str, Any]] | None) -> str:
        """Return the text that the template writes after every answer, found by rendering a short conversation.

        If there is no such text, the result is empty. Turn ends are then found by more renderings or by the content.
        """
        template = self._template(tools)
        if template not in self._end_of_turn:
            question = {"role": "user", "content": "spurlineprobequestion"}
            answered = [question, {"role": "assistant", "content": _PROBE_ANSWER}]
            try:
                texts = [self.render(messages, tools) for messages in (answered, [*answered, question])]
            except BadRowError:
                texts = []
            tails = [text.partition(_PROBE_ANSWER)[2] for text in texts]
            self._end_of_turn[template] = commonprefix(tails).rstrip()  # noqa: RUF071 - characters are meant, not paths
        return self._end_of_turn[template]

    def _template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        try:
            source = self._tokenizer.get_chat_template(tools=tools)  # type: ignore[arg-type]
            if source not in self._templates:
                self._templates[source] = ChatTemplate(source, self._tokenizer.special_tokens_map)
        except ValueError as error:
            raise ModelError(
                f"the chat template {template_name(self._tokenizer)} cannot be used: {error}. Set another template "
                "(`model.chat_template`: a file, or a name such as chatml)."
            ) from error
        return self._templates[source]

    def _rendered(
        self, template: ChatTemplate, messages: Sequence[Message], tools: list[dict[str, Any]] | None, **how: bool
    ) -> tuple[str, list[Span]]:
        try:
            return template.render(messages, tools, **how)
        except Exception as error:
            # A template is a program, and may raise any exception.
            reason = str(error) or type(error).__name__
            raise BadRowError(
                "messages",
                f"are refused by the chat template {template_name(self._tokenizer)}: {reason}. Set a template that "
                "accepts them (`model.chat_template`: a file, or a name such as chatml), or correct the row.",
            ) from error


def _search_turn_end(text: str, message: Message, start: int, end_of_turn: str) -> int:
    """Find the end of a turn by searching for its content. Raises TemplateRewritesHistory if a part is missing."""
    content = str(message.get("content", "")).strip()
    first_end = text.find(end_of_turn, start) if end_of_turn else len(text)
    place = text.find(content, start)
    if first_end < 0 or not 0 <= place <= first_end:
        raise TemplateRewritesHistory
    end = text.find(end_of_turn, place + len(content))
    if end < 0:
        raise TemplateRewritesHistory
    stop = end + len(end_of_turn)
    said = [str(message[key]).strip() for key in REASONING_KEYS if message.get(key)]
    if stop <= start or any(words not in text[start:stop] for words in said):
        raise TemplateRewritesHistory
    return stop
