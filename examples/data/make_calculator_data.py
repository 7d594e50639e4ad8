"""Write calculator_train.jsonl and calculator_eval.jsonl: chats in which the assistant calls a calculator.

    python examples/data/make_calculator_data.py OUT_DIR

SFT with `data.train_on: all_assistants` trains on the calls and on the answers. The environment `tools` uses only the
question, and compares the model's answer with the last turn. This script needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path


def rows(count: int, seed: int) -> Iterator[str]:
    """Yield `count` lines without their newlines. Equal seeds give equal lines."""
    rng = random.Random(seed)
    for _ in range(count):
        left, right, extra = rng.randrange(10, 100), rng.randrange(10, 100), rng.randrange(10)
        formula, result = f"{left} * {right} + {extra}", str(left * right + extra)
        call = json.dumps({"name": "calculator", "arguments": {"expression": formula}})
        messages = [
            {"role": "user", "content": f"Compute {formula}."},
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
        yield json.dumps({"messages": messages})


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the calculator datasets.")
    parser.add_argument("out_dir", type=Path, help="folder to write to")
    folder: Path = parser.parse_args().out_dir
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", 2_000, 1), ("eval", 200, 2)):
        path = folder / f"calculator_{name}.jsonl"
        path.write_text("".join(f"{row}\n" for row in rows(count, seed)), encoding="utf-8", newline="\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
