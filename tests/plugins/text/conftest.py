"""Tiny byte-level tokenizers, the chat templates beside this file, and who is connected to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
SPECIAL_TOKENS += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TRAINING_TEXT = [
    "user assistant system tool hello world, how are you today?\n\nI am fine.\n\n\nThanks  for   asking!    ",
    "The answer is 42. <think>\nreason about it\n</think>\n\nassistant\n\n\nfine [INST] question [/INST] answer",
] * 4


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """make(template, adds_bos=..., adds_eos=..., trim_offsets=...) -> a byte-level BPE tokenizer."""

    def make(
        template: str | None = None, *, adds_bos: bool = False, adds_eos: bool = False, trim_offsets: bool = False
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(TRAINING_TEXT, trainer)
        backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        if adds_bos or adds_eos:
            single = " ".join(["<|begin|>"] * adds_bos + ["$A"] + ["<|end|>"] * adds_eos)
            special = [(token, backend.token_to_id(token)) for token in ("<|begin|>", "<|end|>")]
            backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")
        if template is not None:
            tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text().rstrip("\n")
        return tokenizer

    return make


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The addresses that this process has connected to, or tried to."""
    addresses: list[object] = []
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        addresses.append(address)
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return addresses
