"""Environment `single_turn`: one prompt, one answer, scored by rewards.

Data flow: row -> prompt tokens -> policy -> Answer -> reward terms -> Trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.plugins.registry import Registry
from spurline_rl.environments.configs import SingleTurnConfig
from spurline_rl.protocols.environment import PolicyHandle, Task
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.matching import check_reference
from spurline_rl.scoring import close_all, make_rewards, reward_terms
from spurline_rl.trajectory import Trajectory
from spurline_text.chats.chat import ChatRenderer
from spurline_text.prompts import GenerationExample, prompt_and_reference

_PROMPTS_KEPT = 256


class SingleTurn:
    """Scores the answer to a row's prompt. A trajectory's `info` has prompt, response and reference as texts."""

    def __init__(
        self, config: SingleTurnConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer)
        self._data = data
        self._examples: dict[tuple[str, str], GenerationExample] = {}
        self._config = config
        self._rewards = make_rewards(config.rewards, registry)

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        example = self._example(task)
        result = await policy.generate(example.prompt_ids)
        response = str(self._tokenizer.decode(result.token_ids.tolist(), skip_special_tokens=True))
        answer = Answer(example.prompt_text, response, example.reference_text, task.row)
        info = {"prompt": answer.prompt, "response": response, "reference": answer.reference}
        terms = await reward_terms(self._rewards, answer)
        return policy.finish(terms, info=info | ({"metrics": answer.metrics} if answer.metrics else {}))

    def first_prompt(self, task: Task) -> Sequence[int]:
        """See `ShowsPrompt`."""
        example = self._example(task)
        check_reference(self._config.rewards, example.reference_text, task.row)
        return example.prompt_ids

    def _example(self, task: Task) -> GenerationExample:
        """Return the prompt and the reference of the row. They are computed once for all attempts of a group."""
        key = task.uid, task.location
        example = self._examples.get(key)
        if example is None:
            example = prompt_and_reference(
                task.row, task.dataset, self._tokenizer, self._data, location=task.location, renderer=self._renderer
            )
            self._examples[key] = example
            if len(self._examples) > _PROMPTS_KEPT:
                del self._examples[next(iter(self._examples))]
        return example

    def close(self) -> None:
        close_all(self._rewards)
