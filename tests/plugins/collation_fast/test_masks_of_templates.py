"""Masks of templates with `{% generation %}` equal those of `apply_chat_template`, which shares no code with ours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from worker_rows import TrappedRows, data_config, source

from spurline_collation_fast.configs import ParallelTokenizationConfig
from spurline_collation_fast.tokenization.parallel import ParallelTokenization

CONVERSATIONS_PER_TEMPLATE = 600

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WITH_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{%- generation %}{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
)

TRIMMED_HEADERS = (
    "{{- '<|begin|>' }}{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if m.role == 'assistant' %}{%- generation %}{{- m.content | trim + '<|eot_id|>' }}{%- endgeneration %}"
    "{%- else %}{{- m.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
)

INSTRUCTIONS = (
    "{{- '<|begin|>' }}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{%- generation %}{{- ' ' + m.content + '<|end|>' }}{%- endgeneration %}"
    "{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}{%- endfor %}"
)

SEVERAL_BLOCKS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content %}{%- generation %}{{- '<think>' + m.reasoning_content + '</think>' }}"
    "{%- endgeneration %}{{- '\n\n' }}{%- endif %}"
    "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "with_tools": WITH_TOOLS,
    "trimmed_headers": TRIMMED_HEADERS,
    "instructions": INSTRUCTIONS,
    "several_blocks": SEVERAL_BLOCKS,
}

SPECIAL = [
    *("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]

PIECES = [
    *("the answer is", "fine", "x", "1234", "def f(a):\n    return a", "café", "naïve", "Привет"),
    *("你好\uff0c世界", "日本語", "🙂", "👩‍👩‍👧", "é", "\u200b", "\ufeff", "ﷺ", "\U0001d518"),
    *("\t", "  ", "\n", "\n\n", "\n\n\n", "\r\n", " ", "   \n", "{{ m }}", "<|im_end|>", "<think>", "</s>"),
    *("user", "assistant\n", "[/INST]", "'", '"', "\\n", "&amp;"),
]

TOOLS = [{"type": "function", "function": {"name": "add", "description": "1 + 2 = 3 ✓", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges reach across headers, white space and parts of characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    generator = random.Random(0)
    backend.train_from_iterator((text(generator) for _ in range(400)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")


def text(generator: random.Random) -> str:
    """From nothing to a few lines, with everything that is hard about characters and tokens."""
    separator = generator.choice(["", " ", "\n"])
    return separator.join(generator.choices(PIECES, k=generator.choice([0, 1, 1, 2, 3, 8, 20])))


def conversations(generator: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Rows with one to five exchanges, some with a system column, tool calls, thinking or a last word by the user."""
    for number in range(count):
        messages: list[dict[str, Any]] = []
        for _ in range(generator.randint(1, 5)):
            messages.append({"role": "user", "content": text(generator)})
            answer: dict[str, Any] = {"role": "assistant", "content": text(generator)}
            if generator.random() < 0.3:
                answer["reasoning_content"] = text(generator)
            if generator.random() < 0.2:
                call = {"name": "add", "arguments": {"text": text(generator)}}
                answer["tool_calls"] = [{"type": "function", "function": call}]
                messages += [answer, {"role": "tool", "content": text(generator)}]
                answer = {"role": "assistant", "content": text(generator)}
            messages.append(answer)
        if generator.random() < 0.1:
            messages.append({"role": "user", "content": text(generator)})
        row: dict[str, Any] = {"messages": messages, "tools": TOOLS if number % 2 else None}
        if generator.random() < 0.3:
            row["system"] = text(generator)
        yield row


def oracle(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Tokens and masks of `apply_chat_template`, in batches of rows with equal tools."""
    expected: dict[int, tuple[list[int], list[int]]] = {}
    for tools in (TOOLS, None):
        chosen = [number for number, row in enumerate(rows) if row["tools"] == tools]
        chats = [
            ([{"role": "system", "content": rows[number]["system"]}] if rows[number].get("system") else [])
            + rows[number]["messages"]
            for number in chosen
        ]
        made: Any = tokenizer.apply_chat_template(
            chats, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        for number, ids, mask in zip(chosen, made["input_ids"], made["assistant_masks"], strict=True):
            expected[number] = ids, mask
    return [expected[number] for number in range(len(rows))]


@pytest.mark.parametrize("template", TEMPLATES)
def test_masks_equal_those_of_apply_chat_template(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = TEMPLATES[template]
    rows = list(conversations(random.Random(template), CONVERSATIONS_PER_TEMPLATE))
    item = source(TrappedRows(rows))
    data = data_config(item, train_on="all_assistants", max_length=1_000_000, on_ignored="warn")
    config = ParallelTokenizationConfig(workers=0, disable_cache=True)
    store = ParallelTokenization(config, tokenizer=tokenizer, data=data).tokenize([item]).store
    assert store.row.tolist() == list(range(len(rows)))
    view = store.view(store.row)
    for row, (ids, mask) in enumerate(oracle(tokenizer, rows)):
        assert view.tokens(row).tolist() == ids, rows[row]
        # Nothing predicts the first token.
        assert view.loss_mask(row).tolist() == [0, *mask[1:]], rows[row]
