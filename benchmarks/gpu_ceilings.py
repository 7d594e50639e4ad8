"""Count the ceilings of supervised steps on an H200, on any machine. Nothing is measured.

    python benchmarks/gpu_ceilings.py [--tokens 4096 ...] [--json]

A step trains all weights of a model in the shape of Qwen3-0.6B, 4B or 8B, on one micro-batch of sequences with the
given numbers of tokens (8 of 4,096 by default), with AdamW and clipped gradients. `tests/support/counted_kernels.py`
says how kernels, bytes and time are counted. A real step takes longer: launches, waits for the host and kernels below
the assumed speeds are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from counted_kernels import QWEN3, ceiling

CANDIDATES: dict[str, dict[str, Any]] = {
    "kernels: none": {"kernels": "none"},
    "default": {},
    "logits_chunk_tokens: 4096": {"logits_chunk_tokens": 4096},
    "weights: bf16_masters": {"weights": "bf16_masters"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096] * 8, help="tokens of each sequence")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    if not given.json:
        print("| model | settings | kernels | GB | tokens/s, at most | MFU, at most |\n|---|---|---|---|---|---|")
    for model in QWEN3:
        for name, settings in CANDIDATES.items():
            with TemporaryDirectory() as folder:
                found = ceiling(Path(folder), model, given.tokens, **settings)
            if given.json:
                print(json.dumps({"model": model, "settings": settings, **asdict(found)}), flush=True)
            else:
                traffic = f"{found.kernels:,.0f} | {found.bytes / 1e9:,.0f}"
                print(f"| {model} | `{name}` | {traffic} | {found.tokens_per_s:,.0f} | {found.mfu:.1%} |", flush=True)


if __name__ == "__main__":
    main()
