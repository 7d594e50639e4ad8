"""Measure the tokenization of conversations: `parallel` against the usual two calls, and the tokenizer alone.

    python benchmarks/tokenization.py [--json] [--samples 1000] [--repeats 7]

The benchmark trains a byte-level BPE of 16,000 tokens on random words, and makes conversations of about 1.8 KB and 475
tokens from these words. Then it makes four times as many short conversations of two messages and about 75 tokens.
These candidates take turns in one process:

- two calls: the usual way. `apply_chat_template(tokenize=True)` tokenizes the prompt, and then the whole conversation.
  The difference of their lengths gives the mask.
- encode_batch: the floor. The tokenizer alone encodes rendered texts in chunks.
- parallel: makes a token store with masks from rows, in this process (`workers: 0`) and without a cache.
- sequential: `text/sequential` does the same, for information.

They run on two threads and on one thread, in processes with this number of threads. For information, the benchmark also
runs two worker processes on eight times as many samples, including their start. Before timing, it checks that all
candidates give the same tokens and masks.

Gates: parallel is >= 2.5 x as fast as two calls on two threads, >= 1.5 x on one thread, and takes at most 1.3 x the
time of encode_batch on two threads. With short conversations, it takes at most 1.35 x the time of encode_batch, on two
threads and on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from timing import Gate, Timing, cost_gate, gates_as_json, print_gates, print_timings, round_robin, speedup_gate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spurline.config.run_config import DataConfig
from spurline.data.token_store import TokenStore
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.configs import ParallelTokenizationConfig
from spurline_collation_fast.tokenization.parallel import ROWS_PER_CHUNK, ParallelTokenization
from spurline_text.configs import SequentialTokenizationConfig
from spurline_text.testing.inputs import CHAT_TEMPLATE
from spurline_text.testing.tokenization_contract import ListDataset
from spurline_text.tokenization import SequentialTokenization

WORDS_PER_MESSAGE = 70
MESSAGES = 4
SHORT_WORDS_PER_MESSAGE = 15
SHORT_MESSAGES = 2
MORE_SHORT = 4
MORE_FOR_WORKERS = 8

Chat = list[dict[str, str]]


class Inputs:
    """The tokenizer and the conversations, which are equal in all processes."""

    def __init__(self, num_samples: int, short: bool = False) -> None:
        self._random = random.Random(0)
        letters = "abcdefghijklmnop"
        self._words = ["".join(self._random.choices(letters, k=self._random.randint(2, 9))) for _ in range(20_000)]
        self.tokenizer = self._train()
        messages, words = (SHORT_MESSAGES, SHORT_WORDS_PER_MESSAGE) if short else (MESSAGES, WORDS_PER_MESSAGE)
        self.chats: list[Chat] = [
            [{"role": ("user", "assistant")[turn % 2], "content": self._text(words)} for turn in range(messages)]
            for _ in range(num_samples)
        ]
        self.texts = [str(self.tokenizer.apply_chat_template(chat, tokenize=False)) for chat in self.chats]

    def _text(self, num_words: int) -> str:
        return " ".join(self._random.choices(self._words, k=num_words))

    def _train(self) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=16_000,
            special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator((self._text(300) for _ in range(800)), trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>")
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer


def two_calls(inputs: Inputs) -> list[tuple[list[int], int]]:
    """Return the tokens of each conversation, and the number of its prompt tokens."""
    apply = inputs.tokenizer.apply_chat_template
    made: list[tuple[Any, int]] = []
    for chat in inputs.chats:
        prompt = apply(chat[:-1], tokenize=True, add_generation_prompt=True, return_dict=False)
        made.append((apply(chat, tokenize=True, return_dict=False), len(prompt)))
    return made


def encode_batch(inputs: Inputs) -> None:
    """Run only the tokenizer, with chunks of the same size as in `parallel`."""
    for start in range(0, len(inputs.texts), ROWS_PER_CHUNK):
        inputs.tokenizer.backend_tokenizer.encode_batch(inputs.texts[start : start + ROWS_PER_CHUNK])


def parallel(inputs: Inputs, workers: int = 0) -> TokenStore:
    """Make a token store in memory from the rows."""
    config = DatasetConfig(name="rows", format="chat")
    tokenization = ParallelTokenization(
        ParallelTokenizationConfig(workers=workers, disable_cache=True),
        tokenizer=inputs.tokenizer,
        data=DataConfig(train=(config,), max_length=100_000),
    )
    rows = ListDataset([{"messages": chat} for chat in inputs.chats])
    return tokenization.tokenize([DatasetToTokenize(rows, config)]).store


def sequential(inputs: Inputs) -> TokenStore:
    """Make the same token store with `text/sequential`."""
    config = DatasetConfig(name="rows", format="chat")
    data = DataConfig(train=(config,), max_length=100_000)
    tokenization = SequentialTokenization(SequentialTokenizationConfig(), tokenizer=inputs.tokenizer, data=data)
    return tokenization.tokenize(
        [DatasetToTokenize(ListDataset([{"messages": chat} for chat in inputs.chats]), config)]
    ).store


def check_equal(inputs: Inputs) -> None:
    """Assert that `two_calls` and `parallel` give the same tokens and masks."""
    store = parallel(inputs)
    view = store.view(store.row)
    for row, (tokens, prompt) in enumerate(two_calls(inputs)):
        assert view.tokens(row).tolist() == tokens
        # The template adds a line break after the end of the turn, which the model does not generate.
        trained = len(tokens) - prompt - 1
        assert view.loss_mask(row).tolist() == [0] * prompt + [1] * trained + [0]


def measure(num_samples: int, repeats: int, short: bool) -> dict[str, Timing]:
    """Time each candidate on all samples."""
    inputs = Inputs(num_samples, short)
    check_equal(inputs)
    functions = {
        "two calls": lambda: two_calls(inputs),
        "encode_batch": lambda: encode_batch(inputs),
        "parallel": lambda: parallel(inputs),
        "sequential": lambda: sequential(inputs),
    }
    return round_robin(functions, dict.fromkeys(functions, repeats) | {"two calls": min(3, repeats)})


def measure_on(num_threads: int, num_samples: int, repeats: int, short: bool = False) -> dict[str, Timing]:
    """Run `measure` in a new process, since a process chooses the tokenizer's number of threads only once."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "true"}
    arguments = ["--threads", num_threads, "--samples", num_samples, "--repeats", repeats, *["--short"] * short]
    result = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, check=True
    )
    return {name: Timing(**timing) for name, timing in json.loads(result.stdout).items()}


def measure_workers(num_samples: int) -> dict[str, float]:
    """Return the rows per second with and without worker processes, from one run on more samples and all cores."""
    inputs = Inputs(num_samples)
    rates: dict[str, float] = {}
    for workers in (0, 2):
        begin = time.perf_counter()
        parallel(inputs, workers)
        rates[f"workers: {workers}"] = num_samples / (time.perf_counter() - begin)
    return rates


def gates_of(
    two: dict[str, Timing], one: dict[str, Timing], short_two: dict[str, Timing], short_one: dict[str, Timing]
) -> list[Gate]:
    return [
        speedup_gate("parallel over two calls, 2 threads", two["two calls"], two["parallel"], 2.5),
        speedup_gate("parallel over two calls, 1 thread", one["two calls"], one["parallel"], 1.5),
        cost_gate("parallel against encode_batch, 2 threads", two["parallel"], two["encode_batch"], 1.3),
        cost_gate("short, against encode_batch, 2 threads", short_two["parallel"], short_two["encode_batch"], 1.35),
        cost_gate("short, against encode_batch, 1 thread", short_one["parallel"], short_one["encode_batch"], 1.35),
    ]


def main() -> None:
    """Print the figures and whether the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="with --threads: short conversations")
    parser.add_argument("--threads", type=int, help="measure in this process, on so many cores, and print JSON")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
        timings = measure(arguments.samples, arguments.repeats, arguments.short)
        print(json.dumps({name: asdict(timing) for name, timing in timings.items()}))
        return
    two, one = (measure_on(threads, arguments.samples, arguments.repeats) for threads in (2, 1))
    num_short = arguments.samples * MORE_SHORT
    short_two, short_one = (measure_on(threads, num_short, arguments.repeats, short=True) for threads in (2, 1))
    workers = measure_workers(arguments.samples * MORE_FOR_WORKERS)
    gates = gates_of(two, one, short_two, short_one)
    ways = (
        ("2 threads", two, arguments.samples),
        ("1 thread", one, arguments.samples),
        ("2 threads, short", short_two, num_short),
        ("1 thread, short", short_one, num_short),
    )
    per_sample = {
        f"{name}, {threads}": timing.min_s / samples * 1e6
        for threads, timings, samples in ways
        for name, timing in timings.items()
    }
    if arguments.json:
        figures = {"us_per_sample": per_sample, "rows_per_s": workers, "samples": arguments.samples}
        print(json.dumps({**figures, "gates": gates_as_json(gates)}, indent=2))
        return
    for threads, timings, samples in ways:
        print_timings(f"{samples} samples, {threads}", timings)
    for name, microseconds in per_sample.items():
        print(f"{name}: {microseconds:.0f} us a sample")
    for name, rate in workers.items():
        print(f"{name}, start included, {arguments.samples * MORE_FOR_WORKERS} samples: {rate:,.0f} rows/s")
    print_gates(gates)


if __name__ == "__main__":
    main()
