"""Render chats by the chat templates of models, so that a hostile one ends soon and takes little memory.

In: messages and tools. Out: their text, and where the template says that the model wrote. Each rendering has a budget
that grows with the chat; `metered_jinja` says what is paid from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers.utils.chat_template_utils import _alias_reasoning_fields, _plain_template_data

from spurline_text.chats.metered_jinja import BudgetContext, compile_template
from spurline_text.chats.template_budget import Budget, TemplateTooCostlyError

_STEPS = 5_000_000
"""Of a rendering, whatever the row; an ordinary one takes some hundreds for each message."""
_STEPS_PER_MESSAGE = 100_000
_STEPS_PER_CHARACTER = 4
_LARGE_ROW = 50_000
"""Steps: a million characters, or some ten thousand messages."""
_TEXT = {str}
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields that transformers gives to templates under each other's names."""


@dataclass(frozen=True)
class PlainChat:
    """Messages and tools as templates may see them: lists, mappings, texts and numbers, and nothing with methods."""

    messages: list[Any]
    tools: list[Any] | None

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None) -> PlainChat:
        """What transformers makes of them, faster for messages of texts alone."""
        chat: list[Any] = []
        for message in messages:
            if type(message) is dict and set(map(type, message.values())) <= _TEXT:
                plain: Any = message.copy()
            else:
                plain = _plain_template_data(message)
            if type(plain) is not dict or (len(plain) > 2 and not plain.keys().isdisjoint(_REASONING)):
                [plain] = _alias_reasoning_fields([plain])
            chat.append(plain)
        return cls(chat, tools and _plain_template_data(tools))

    def beginning(self, num_messages: int) -> PlainChat:
        """The first messages alone; they are shared, which is safe as templates change nothing."""
        return PlainChat(self.messages[:num_messages], self.tools)


class ChatTemplate:
    """A compiled template, with the variables that are the same in all its renderings."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """special_tokens: the tokenizer's, by name. Raises ValueError with what is wrong with the source."""
        self._compiled = compile_template(source)
        self._globals = set(self._compiled.globals)
        self._shared = {**self._compiled.globals, "documents": None, **_plain_template_data(dict(special_tokens))}

    def render(
        self, chat: PlainChat, *, add_generation_prompt: bool = False, track_generation: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of the messages, and where `{% generation %}` blocks wrote, `[start, stop)` in characters.

        Raises TemplateTooCostlyError when the rendering spends its budget, and whatever else a template raises.
        """
        compiled, context = self._compiled, self._context(chat, add_generation_prompt)
        if not track_generation:
            return "".join(compiled.root_render_func(context)), []
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        with cast("Any", compiled.environment).activate_tracker(blocks, spans):
            for block in compiled.root_render_func(context):
                # The tracker joins what there is so far to see where a span begins.
                context.budget.spend(len(blocks) >> 6)
                blocks.append(block)
        return "".join(blocks), spans

    def _context(self, chat: PlainChat, add_generation_prompt: bool) -> BudgetContext:
        """What `new_context` of jinja makes, without going through the globals for each rendering."""
        given = {"messages": chat.messages, "tools": chat.tools, "add_generation_prompt": add_generation_prompt}
        compiled = self._compiled
        context = BudgetContext(compiled.environment, {**self._shared, **given}, compiled.name, compiled.blocks)
        context.globals_keys = self._globals
        size = 0
        for message in chat.messages:
            content = message.get("content")
            if isinstance(content, str):
                size += len(content)
        context.budget = Budget(_STEPS + _STEPS_PER_MESSAGE * len(chat.messages) + _STEPS_PER_CHARACTER * size)
        return context


def is_large(row: object) -> bool:
    """Whether the messages and tools of a row may themselves be why a rendering takes so long."""
    try:
        Budget(_LARGE_ROW).weigh(row)
    except TemplateTooCostlyError:
        return True
    return False
