"""Write pairs of sorted and wrongly sorted digits: sort_pairs_*.jsonl and sort_ranked_*.jsonl.

    python examples/data/make_preference_data.py [OUT_DIR]

The script writes the shipped files byte for byte. It uses the prompts of `make_sort_data.py`, and the mistakes depend
only on the constants below. It needs only the standard library. The wrong answers of sort_pairs have the smallest
mistake in order. Those of sort_ranked, for reward models, have all mistakes that a policy can make: wrong order, wrong
digits, and both.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from make_sort_data import NUM_EVAL, NUM_TRAIN, SEED, distinct_prompts

Mistake = Callable[[list[str], random.Random], list[str]]


def with_one_swap(digits: list[str], rng: random.Random) -> list[str]:
    """Return the digits with two different neighbours exchanged, which is the smallest possible mistake."""
    places = [place for place in range(len(digits) - 1) if digits[place] != digits[place + 1]]
    place = rng.choice(places)
    return [*digits[:place], digits[place + 1], digits[place], *digits[place + 2 :]]


def with_mistakes(digits: list[str], rng: random.Random) -> list[str]:
    """Return other digits: two neighbours exchanged, one to three digits replaced, or any order."""
    found = list(digits)
    while found == digits:
        kind = rng.randrange(3)
        if kind == 0:
            found = with_one_swap(digits, rng)
        elif kind == 1:
            for place in rng.sample(range(len(digits)), rng.randint(1, 3)):
                found[place] = rng.choice("0123456789")
            found = sorted(found) if rng.random() < 0.5 else found
        else:
            rng.shuffle(found)
    return found


SETS: dict[str, tuple[Mistake, int, int]] = {
    "sort_pairs": (with_one_swap, 20240608, 2_000),
    "sort_ranked": (with_mistakes, 20240609, 4_000),
}
"""The mistake, the seed of the mistakes and the number of training prompts, by the beginning of the file names."""


def pair_row(digits: str, mistake: Mistake, rng: random.Random) -> str:
    """Return one line of the file without its newline."""
    in_order = sorted(digits)
    row = {
        "prompt": [{"role": "user", "content": "Sort: " + " ".join(digits)}],
        "chosen": [{"role": "assistant", "content": " ".join(in_order)}],
        "rejected": [{"role": "assistant", "content": " ".join(mistake(in_order, rng))}],
    }
    return json.dumps(row)


def write_datasets(folder: Path) -> list[Path]:
    """Write all files and return their paths. Prompts of seven equal digits have no wrong order and are left out."""
    prompts = list(distinct_prompts(NUM_TRAIN + NUM_EVAL, random.Random(SEED)))
    written: list[Path] = []
    for name, (mistake, seed, count) in SETS.items():
        rng = random.Random(seed)
        for part, chosen in (("train", prompts[:count]), ("eval", prompts[NUM_TRAIN:])):
            written.append(folder / f"{name}_{part}.jsonl")
            _write(written[-1], (digits for digits in chosen if len(set(digits)) > 1), mistake, rng)
    return written


def _write(path: Path, prompts: Iterable[str], mistake: Mistake, rng: random.Random) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(pair_row(digits, mistake, rng) + "\n" for digits in prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the digit-sorting preference pairs.")
    parser.add_argument("out_dir", nargs="?", type=Path, default=Path(__file__).parent, help="folder to write to")
    folder: Path = parser.parse_args().out_dir
    folder.mkdir(parents=True, exist_ok=True)
    for path in write_datasets(folder):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
