"""Write sort_ranked_train.jsonl and sort_ranked_eval.jsonl: pairs of a right answer and one with any kind of mistake.

    python examples/data/make_ranked_data.py [OUT_DIR]

The script writes the shipped files byte for byte. A reward model needs all mistakes that a policy can make: wrong
order, wrong digits, and both. `make_preference_data.py` has only the smallest mistake in order.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from make_preference_data import NUM_PAIRS, with_one_swap
from make_sort_data import NUM_EVAL, NUM_TRAIN, SEED, distinct_prompts

MISTAKE_SEED = 20240609


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


def write_datasets(folder: Path) -> tuple[Path, Path]:
    """Write both files and return their paths. Prompts of seven equal digits are left out."""
    rng = random.Random(MISTAKE_SEED)
    prompts = list(distinct_prompts(NUM_TRAIN + NUM_EVAL, random.Random(SEED)))
    train, held_out = folder / "sort_ranked_train.jsonl", folder / "sort_ranked_eval.jsonl"
    for path, chosen in ((train, prompts[: 2 * NUM_PAIRS]), (held_out, prompts[NUM_TRAIN:])):
        _write(path, (digits for digits in chosen if len(set(digits)) > 1), rng)
    return train, held_out


def _write(path: Path, prompts: Iterable[str], rng: random.Random) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for digits in prompts:
            right = sorted(digits)
            answers = {"chosen": right, "rejected": with_mistakes(right, rng)}
            row = {
                "prompt": [{"role": "user", "content": "Sort: " + " ".join(digits)}],
                **{side: [{"role": "assistant", "content": " ".join(text)}] for side, text in answers.items()},
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pairs of right and wrong answers.")
    parser.add_argument("out_dir", nargs="?", type=Path, default=Path(__file__).parent, help="folder to write to")
    folder: Path = parser.parse_args().out_dir
    folder.mkdir(parents=True, exist_ok=True)
    for path in write_datasets(folder):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
