"""Write digits to sort, with the column `level` for their number: levels_train.jsonl, and eval_N.jsonl for each level.

    python examples/data/make_levels_data.py OUT_DIR

Rows depend only on the constants below. The script needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SEED = 20261129
LEVELS = (4, 6, 9, 14)
"""Numbers of digits. The warm-up of the example leaves out the last level, so that the model cannot solve it."""
NUM_TRAIN, NUM_EVAL = 1_200, 200
"""Rows of each level."""


def row(digits: str) -> str:
    messages = [
        {"role": "user", "content": "Sort: " + " ".join(digits)},
        {"role": "assistant", "content": " ".join(sorted(digits))},
    ]
    return json.dumps({"level": len(digits), "messages": messages})


def main() -> None:
    parser = argparse.ArgumentParser(description="Write digits to sort in three levels.")
    parser.add_argument("out_dir", type=Path, help="folder to write to")
    folder: Path = parser.parse_args().out_dir
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(SEED)
    files: dict[str, list[str]] = {"levels_train": []}
    for level in LEVELS:
        seen: set[str] = set()
        while len(seen) < NUM_TRAIN + NUM_EVAL:
            digits = "".join(str(chance.randrange(10)) for _ in range(level))
            if digits not in seen:
                name = "levels_train" if len(seen) < NUM_TRAIN else f"eval_{level}"
                files.setdefault(name, []).append(row(digits))
                seen.add(digits)
    for name, rows in files.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f"{each}\n" for each in rows), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
