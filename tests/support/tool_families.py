"""How model families write tool calls, with tokenizers and templates in the shape of their own."""

# ruff: noqa: RUF001 - DeepSeek's special tokens have these letters

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_attempts import tokenizer_with
from transformers import PreTrainedTokenizerBase

from spurline_text.testing.inputs import tiny_tokenizer

TEMPLATES = Path(__file__).parents[1] / "plugins" / "environments" / "chat_templates"
SCHEMAS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "object"}, "c": {"type": "string"}},
            },
        },
    }
]
CALLS = [("add", {"a": 1, "b": {"x": ["é", True]}}), ("add", {"c": "2\n3"})]


@dataclass(frozen=True)
class Family:
    """How a family writes.

    Attributes:
        special: Its special tokens. The first one ends a turn with calls, and the second one an answer.
        call: A turn with `CALLS`, or with one of them, which reasoning precedes in place of THOUGHT.
        answer: A turn without calls.
        thought: Reasoning, and what stands in its place if there is none.
        forks: How often the conversation forks with reasoning, and without.
    """

    special: str
    call: str
    answer: str = "THOUGHT42"
    thought: tuple[str, str] = ("<think>\nuse it\n</think>\n\n", "")
    forks: tuple[int, int] = (1, 0)
    num_calls: int = 2


_JSON = ['{"a":1,"b":{"x":["\\u00e9",true]}}', '{"c": "2\\n3"}']
FAMILIES = {
    "hermes": Family(
        "<|im_end|> <|im_end|>",
        f'THOUGHTLook.\n<tool_call>{{"name":"add","arguments":{_JSON[0]}}}</tool_call><tool_call>\n'
        f'{{"name": "add", "arguments": {_JSON[1]}}}\n</tool_call>',
    ),
    # The prompt has begun the thinking, which therefore always ends.
    "qwen3_coder": Family(
        "<|im_end|> <|im_end|>",
        "THOUGHTLook.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        '{"x":["é",true]}\n</parameter>\n</function></tool_call>\n<tool_call>\n<function=add>\n<parameter=c>\n2\n3\n'
        "</parameter>\n</function>\n</tool_call>",
        thought=("use it\n</think>\n\n", "\n</think>\n\n"),
        forks=(1, 1),
    ),
    "glm45": Family(
        "<|observation|> <|user|> <|assistant|> <|system|>",
        "THOUGHT\nLook.\n<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        '<arg_value>{"x":["é",true]}</arg_value>\n</tool_call>\n<tool_call>add\n<arg_key>c</arg_key>\n'
        "<arg_value>2\n3</arg_value>\n</tool_call>",
        answer="THOUGHT\n42",
        thought=("\n<think>use it</think>", "\n<think></think>"),
    ),
    # Its template drops all thinking at once: of the call, and of the answer.
    "deepseek_v3": Family(
        "<｜end▁of▁sentence｜> <｜end▁of▁sentence｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜>",
        "THOUGHTLook.<｜tool▁calls▁begin｜>"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{_JSON[0]}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{_JSON[1]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        forks=(2, 0),
    ),
    "mistral": Family(
        "</s> </s> [TOOL_CALLS] [ARGS] [THINK] [/THINK]",
        f"THOUGHT[TOOL_CALLS]add[ARGS]{_JSON[0]}[TOOL_CALLS]add[ARGS]{_JSON[1]}",
        thought=("[THINK]use it[/THINK]", ""),
        forks=(0, 0),
    ),
    "kimi_k2": Family(
        "<|im_end|> <|im_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        "THOUGHTLook.<|tool_calls_section_begin|>"
        f"<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{_JSON[0]}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{_JSON[1]}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        thought=("<think>use it</think>", "<think></think>"),
    ),
    # A call ends the turn, so that there is one.
    "harmony": Family(
        "<|call|> <|return|> <|start|> <|end|> <|channel|> <|message|> <|constrain|>",
        "THOUGHT<|channel|>commentary to=functions.add <|constrain|>json<|message|>" + _JSON[0],
        answer="THOUGHT<|channel|>final<|message|>42",
        thought=("<|channel|>analysis<|message|>use it<|end|><|start|>assistant", ""),
        num_calls=1,
    ),
    "llama3_json": Family(
        "<|eot_id|> <|eot_id|> <|python_tag|>",
        f'THOUGHT{{"name": "add", "parameters": {_JSON[0]}}}',
        thought=("", ""),
        forks=(0, 0),
        num_calls=1,
    ),
    "pythonic": Family(
        "<|eot|> <|eot|> <|python_start|> <|python_end|>",
        "THOUGHT[add(a=1, b={'x': ['é', True]}), add(c='2\\n3')]",
        thought=("", ""),
        forks=(0, 0),
    ),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with the special tokens and a template of the family's kind."""
    if name == "hermes":
        return tokenizer_with("qwen3")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*dict.fromkeys(FAMILIES[name].special.split())]})
    tokenizer.eos_token = FAMILIES[name].special.split()[1]
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer
