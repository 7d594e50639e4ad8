"""Make a tiny untrained chat model that loads like any Hugging Face model.

    python examples/make_tiny_model.py OUT_DIR

The script trains a small tokenizer on a chat JSONL file, and draws the weights of a small Qwen3 from a seed. OUT_DIR
can be `model.path` of a config. The same file and seed always give the same model. No network is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCABULARY_SIZE = 320
MAX_POSITIONS = 512

# This is ChatML. The `generation` block contains the tokens of an assistant turn, including its end token, so that
# `apply_chat_template(return_assistant_tokens_mask=True)` finds them. The newline after the end token is in no turn.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- message['content'] + '<|im_end|>' -}}"
    "{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def chat_texts(data: Path) -> Iterator[str]:
    """Yield each message of each row after its role, as in the chat template."""
    with data.open(encoding="utf-8") as file:
        for line in file:
            for message in json.loads(line)["messages"]:
                yield f"{message['role']}\n{message['content']}"


def train_tokenizer(data: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with one token per digit. The model could not see single digits in merged tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chat_texts(data), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def draw_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random weights and about a third of a million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        use_cache=True,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def make_tiny_model(folder: Path, data: Path, seed: int = 0) -> int:
    """Write tokenizer, config and weights to `folder`, and return the number of parameters."""
    tokenizer = train_tokenizer(data)
    model = draw_model(tokenizer, seed)
    logging.disable_progress_bar()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny untrained chat model.")
    parser.add_argument("out_dir", type=Path, help="folder to write, such as models/tiny-qwen3")
    default_data = Path(__file__).parent / "data" / "sort_train.jsonl"
    parser.add_argument("--data", type=Path, default=default_data, help="chat JSONL file for training the tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    arguments = parser.parse_args()
    num_parameters = make_tiny_model(arguments.out_dir, arguments.data, arguments.seed)
    print(f"wrote {arguments.out_dir} ({num_parameters:,} parameters, seed {arguments.seed})")


if __name__ == "__main__":
    main()
