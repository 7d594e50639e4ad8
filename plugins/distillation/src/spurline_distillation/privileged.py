"""Scorer `privileged_prompt`: give the teacher a prompt that shows more than the policy's, such as the solution.

In: a finished group and its row. Out: the group with another prompt for one role, in which only the last user message
differs. The teacher then scores the policy's answer as a continuation of its own prompt (on-policy self-distillation,
Zhao et al. 2026, "Self-Distilled Reasoner"; SDPO, Huebotter et al. 2026, arXiv:2601.20802).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import RunConfig
from spurline.errors import DataError, listing
from spurline_distillation.configs import PrivilegedPromptConfig
from spurline_rl.draws import Draw
from spurline_rl.trajectory import Group
from spurline_text.chats.chat import ChatRenderer
from spurline_text.prompts import ChatQuestion, prompt_and_reference, read_question


class PrivilegedPrompt:
    """The scorer `privileged_prompt`."""

    def __init__(self, config: PrivilegedPromptConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._data, self._tokenizer = config, run.data, tokenizer
        self._renderer = ChatRenderer(tokenizer)

    async def score(self, group: Group, prompt: Draw) -> Group:
        plain = prompt.dataset.model_copy(update={"columns": {}, "format": "auto"})
        example = prompt_and_reference(
            self._row(prompt), plain, self._tokenizer, self._data, location=prompt.location, renderer=self._renderer
        )
        ids = np.array(example.prompt_ids, np.int32)
        return replace(group, prompts={**group.prompts, self._config.role: ids})

    def _row(self, prompt: Draw) -> dict[str, Any]:
        """Return a row that asks the teacher."""
        question = read_question(prompt.row, prompt.dataset)
        if not isinstance(question, ChatQuestion):
            return {"prompt": self._filled(prompt, question.text, question.reference)}
        messages: list[Any] = [*question.messages[: question.answer_at]]
        last = max((number for number, one in enumerate(messages) if one["role"] == "user"), default=None)
        if last is None:
            raise DataError(f"{prompt.location}: the conversation has no user message to change for the teacher.")
        content = self._filled(prompt, str(messages[last]["content"]), question.reference)
        messages[last] = {**messages[last], "content": content}
        return {"messages": messages, **({"tools": question.tools} if question.tools else {})}

    def _filled(self, prompt: Draw, question: str, reference: str | None) -> str:
        known: Mapping[str, Any] = {**prompt.row, "question": question}
        known = known if reference is None else {**known, "reference": reference}
        try:
            return self._config.text.format_map(known)
        except KeyError as error:
            raise DataError(
                f"{prompt.location}: source.scorers: the text of privileged_prompt names {error}, which the row does "
                f"not have. It has: {listing(known)}."
            ) from error
