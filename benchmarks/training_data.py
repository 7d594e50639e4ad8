"""Make the data of the memory benchmark: chats as JSON lines, configs for them, and cache entries of random tokens.

Chats and tokens use seed 0. The real cache writer writes the entries under their real keys.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "tiny-qwen3"

BATCH_SIZE = 256
ROWS_PER_WRITE = 4096


def write_rows(path: Path, count: int) -> None:
    """Write chats with 23 to 63 tokens of the tiny tokenizer, drawn from a few thousand chats."""
    source = random.Random(0)
    lines: list[str] = []
    for _ in range(5000):
        digits = source.choices("123456789", k=source.randint(3, 13))
        question, answer = f"Sort: {' '.join(digits)}", " ".join(sorted(digits))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    with path.open("w", encoding="utf-8") as file:
        file.writelines(source.choices(lines, k=count))


def write_config(folder: Path, rows: int, steps: int, **tokenization: object) -> Path:
    """Write a usual config for a run over this many rows, and return its path. JSON is valid YAML."""
    config = {
        "plugins": ["collation_fast"],
        "run_dir": str(folder / f"run-{rows}"),
        "model": {"path": str(MODEL)},
        "data": {"train": str(folder / f"{rows}.jsonl"), "max_length": 64},
        "batch_size": BATCH_SIZE,
        "steps": steps,
        "tokenization": {"name": "parallel", "cache_dir": str(folder / "cache"), **tokenization},
        "collator": {"name": "packed", "max_tokens": 512},
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
    }
    path = folder / f"{rows}.yaml"
    path.write_text(json.dumps(config))
    return path


def fill_cache(config: Path, rows: int) -> None:
    """Put an entry for the data of this config into its cache, with one sample for each row."""
    from spurline import load_config
    from spurline.data.token_store import SampleBlock, Tokenized
    from spurline_collation_fast.cache.folder import TokenCache
    from spurline_collation_fast.cache.key import cache_key
    from spurline_text.tokenization import open_datasets
    from spurline_text.tokenizer import load_tokenizer

    loaded = load_config(config)
    run = loaded.config
    datasets = open_datasets(run.data.train, loaded.host.registry)
    numbers, vocabulary = np.random.default_rng(0), json.loads((MODEL / "config.json").read_text())["vocab_size"]
    key = cache_key(datasets, load_tokenizer(run.model), run.data)
    cache = TokenCache(config.parent / "cache")
    with cache.writer(key) as writer:
        for first in range(0, rows, ROWS_PER_WRITE):
            lengths = numbers.integers(16, 65, min(ROWS_PER_WRITE, rows - first))
            tokens = numbers.integers(0, vocabulary, int(lengths.sum()), dtype=np.int32)
            # The answer is the second half of each sample.
            inside = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            mask = (2 * inside >= np.repeat(lengths, lengths)).astype(np.uint8)
            writer.extend(SampleBlock(0, tokens, mask, lengths, np.arange(first, first + len(lengths))))
        writer.finish(Tokenized(writer.build()))
        cache.commit(writer.folder, key)
