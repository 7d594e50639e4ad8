"""Soft punishment of answers that come close to the length limit, as DAPO does (Yu et al. 2025, arXiv:2503.14476).

    0                                   for |y| <= L - B
    ((L - B) - |y|) / B                 for L - B < |y| <= L
    -1                                  beyond

|y|: tokens of the answer, L: `longest`, B: `buffer`. Added to the reward as a term of its own, usually with weight 1.
Pure; what it is added to is not decided here.
"""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, longest: int, buffer: int) -> float:
    """A reward term between -1 and 0. Needs 0 < buffer <= longest."""
    assert 0 < buffer <= longest, (buffer, longest)
    return -min(1.0, max(0.0, (num_tokens - (longest - buffer)) / buffer))
