"""Write sort_pairs_train.jsonl and sort_pairs_eval.jsonl: preference pairs of sorted and wrongly sorted digits.

    python examples/data/make_preference_data.py [OUT_DIR]

The script writes the shipped files byte for byte. It uses the prompts of `make_sort_data.py`, and the mistakes depend
only on the constants below. It needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from make_sort_data import NUM_EVAL, NUM_TRAIN, SEED, distinct_prompts

NUM_PAIRS = 2_000
MISTAKE_SEED = 20240608


def with_one_swap(digits: list[str], rng: random.Random) -> list[str]:
    """Return the digits with two different neighbours exchanged, which is the smallest possible mistake."""
    places = [place for place in range(len(digits) - 1) if digits[place] != digits[place + 1]]
    place = rng.choice(places)
    return [*digits[:place], digits[place + 1], digits[place], *digits[place + 2 :]]


def pair_row(digits: str, rng: random.Random) -> str:
    """Return one line of the file without its newline."""
    in_order = sorted(digits)
    row = {
        "prompt": [{"role": "user", "content": "Sort: " + " ".join(digits)}],
        "chosen": [{"role": "assistant", "content": " ".join(in_order)}],
        "rejected": [{"role": "assistant", "content": " ".join(with_one_swap(in_order, rng))}],
    }
    return json.dumps(row)


def write_datasets(folder: Path) -> tuple[Path, Path]:
    """Write both files and return their paths. Prompts of seven equal digits have no wrong order and are left out."""
    rng = random.Random(MISTAKE_SEED)
    prompts = list(distinct_prompts(NUM_TRAIN + NUM_EVAL, random.Random(SEED)))
    train, held_out = folder / "sort_pairs_train.jsonl", folder / "sort_pairs_eval.jsonl"
    for path, chosen in ((train, prompts[:NUM_PAIRS]), (held_out, prompts[NUM_TRAIN:])):
        _write(path, (digits for digits in chosen if len(set(digits)) > 1), rng)
    return train, held_out


def _write(path: Path, prompts: Iterable[str], rng: random.Random) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(pair_row(digits, rng) + "\n" for digits in prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the digit-sorting preference pairs.")
    parser.add_argument("out_dir", nargs="?", type=Path, default=Path(__file__).parent, help="folder to write to")
    folder: Path = parser.parse_args().out_dir
    folder.mkdir(parents=True, exist_ok=True)
    for path in write_datasets(folder):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
