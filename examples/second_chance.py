"""An environment for rl_two_environments.yaml: a wrong answer may be corrected once, for half of the reward."""

from __future__ import annotations

from typing import Any

from spurline_rl.chat_front import ChatFront


class SecondChance:
    """Asks the row's question. After a wrong answer, it asks the same question again."""

    def __init__(self, config: Any, registry: Any, tokenizer: Any, data: Any) -> None:
        self._tokenizer = tokenizer

    async def run(self, task: Any, policy: Any) -> Any:
        *asked, answer = task.row["messages"]
        chat = ChatFront(policy, self._tokenizer, asked, where=task.location)
        right = (await chat.reply()).text.strip() == answer["content"]
        corrected = False
        if not right:
            chat.add({"role": "user", "content": asked[-1]["content"]})
            corrected = (await chat.reply()).text.strip() == answer["content"]
        info = {"messages": list(chat.messages), "metrics": {"second_chance/corrected": float(corrected)}}
        return policy.finish({"right": 1.0 if right else 0.5 * corrected}, info=info)
