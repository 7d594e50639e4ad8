"""Write sort_train.jsonl and sort_eval.jsonl: chat rows whose answer is the prompt's seven digits in order.

    python examples/data/make_sort_data.py [OUT_DIR]

The script writes the shipped files byte for byte, since the rows depend only on the constants below. It needs only the
standard library.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

SEED = 20240607
NUM_TRAIN = 4_000
NUM_EVAL = 400
NUM_DIGITS = 7


def distinct_prompts(count: int, rng: random.Random) -> Iterator[str]:
    """Yield `count` different strings of random digits. A string may contain a digit several times."""
    seen: set[str] = set()
    while len(seen) < count:
        digits = "".join(str(rng.randrange(10)) for _ in range(NUM_DIGITS))
        if digits not in seen:
            seen.add(digits)
            yield digits


def chat_row(digits: str) -> str:
    """Return one line of the file without its newline."""
    messages = [
        {"role": "user", "content": "Sort: " + " ".join(digits)},
        {"role": "assistant", "content": " ".join(sorted(digits))},
    ]
    return json.dumps({"messages": messages})


def write_rows(path: Path, prompts: Sequence[str]) -> None:
    """Write one row per prompt, with `\\n` line ends on every platform."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(chat_row(digits) + "\n" for digits in prompts)


def write_datasets(folder: Path) -> tuple[Path, Path]:
    """Write both files and return their paths. All prompts are different, so the files share no prompt."""
    prompts = list(distinct_prompts(NUM_TRAIN + NUM_EVAL, random.Random(SEED)))
    train, held_out = folder / "sort_train.jsonl", folder / "sort_eval.jsonl"
    write_rows(train, prompts[:NUM_TRAIN])
    write_rows(held_out, prompts[NUM_TRAIN:])
    return train, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the digit-sorting datasets.")
    parser.add_argument("out_dir", nargs="?", type=Path, default=Path(__file__).parent, help="folder to write to")
    folder: Path = parser.parse_args().out_dir
    folder.mkdir(parents=True, exist_ok=True)
    for path in write_datasets(folder):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
