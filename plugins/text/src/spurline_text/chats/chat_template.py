"""Render conversations by chat templates as Hugging Face transformers does, in its sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

_MOST_CHARACTERS = 1 << 17
"""Templates of known models have up to some 20,000 characters."""


class ChatTemplate:
    """A chat template, with the tokens that it may write."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """Compile the template. Raises ValueError, which says what is wrong with it, if that is not possible."""
        if len(source) > _MOST_CHARACTERS:
            raise ValueError(f"it has {len(source):,} characters; at most {_MOST_CHARACTERS:,} are read")
        try:
            # transformers caches the result, and compiles it in the same way for every rendering.
            self._compiled = _compile_jinja_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
        track_generation: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render messages.

        Args:
            messages: The conversation, or its beginning.
            tools: JSON schemas of the tools that it may call.
            add_generation_prompt: Whether the text ends with what the model is given to answer.
            track_generation: Whether to return where `{% generation %}` blocks wrote.

        Returns:
            The text, and the characters `[start, stop)` of each block; none without `track_generation`.

        Raises:
            Exception: Whatever the template raises.
        """
        if tools is None and not track_generation and all(map(_is_plain, messages)):
            # The same as `render_jinja_template` for such messages, in half of the time.
            text = self._compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            return text, []
        # Untyped: its annotations are too narrow.
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
    """Return whether a message has a role and a content of text alone, so that transformers has nothing to convert."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("role")) is str
        and type(message.get("content")) is str
    )
