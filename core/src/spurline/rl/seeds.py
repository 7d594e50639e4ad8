"""Seeds of sampled text: a pure function of who asks, so that a resumed run samples what the first would have."""

from __future__ import annotations

import xxhash


def derive_seed(run_seed: int, uid: str, sample: int, turn: int, attempt: int = 0) -> int:
    """A seed in [0, 2**63) for one model call.

    uid: names the draw of the prompt, and with it the epoch. attempt: counts retries of a failed attempt, so that a
    retry does not repeat what failed.
    """
    name = "\0".join(map(str, (run_seed, uid, sample, turn, attempt)))
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1
