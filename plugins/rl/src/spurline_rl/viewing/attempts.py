"""One attempt token by token, and the difference between two, as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline_rl.kept_rollouts import KeptAttempt, KeptTurn

MOST_COMPARED = 4_000
"""Tokens of each response that are compared one with another; what differs in longer ones is shown as a whole."""


def attempt_facts(attempt: KeptAttempt) -> dict[str, Any]:
    """The attempt with its turns; lists of a turn have an entry per token, None in place of what is not told."""
    return {
        "step": attempt.step,
        "status": attempt.status,
        "uid": attempt.uid,
        "draw": attempt.draw,
        "epoch": attempt.epoch,
        "sample": attempt.sample,
        "reward": attempt.reward,
        "rewards": dict(attempt.rewards),
        "advantage": attempt.advantage,
        "retries": attempt.retries,
        "finish": attempt.finish_reason,
        "tags": {**attempt.columns, **attempt.tags},
        "info": dict(attempt.info),
        "turns": [_turn_facts(turn) for turn in attempt.turns],
    }


def _turn_facts(turn: KeptTurn) -> dict[str, Any]:
    special = turn.special_ids
    return {
        "finish": turn.finish_reason,
        "reward": turn.reward,
        "prompt": {
            "pieces": turn.prompt_pieces,
            "special": [place for place, token in enumerate(turn.prompt_ids.tolist()) if token in special],
        },
        "response": {
            "pieces": turn.response_pieces,
            "special": [place for place, token in enumerate(turn.response_ids.tolist()) if token in special],
            "ids": turn.response_ids.tolist(),
            "logprobs": _numbers(turn.logprobs),
            "gap": _numbers(turn.gap),
            "advantages": _numbers(turn.advantages),
            "ages": None if turn.ages is None else turn.ages.tolist(),
            "trained": turn.loss_mask.tolist(),
        },
    }


def difference(left: KeptAttempt, right: KeptAttempt) -> list[dict[str, Any]]:
    """Runs of tokens that two attempts share, or that one of them has alone, over the responses of all turns.

    kind: `same`, `left` or `right`. pieces: the texts of the tokens.
    """
    ids, pieces = zip(_responses(left), _responses(right), strict=True)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids[0], ids[1], strict=False)))
    ends = [len(ids[0]), len(ids[1])]
    while min(ends) > start and ids[0][ends[0] - 1] == ids[1][ends[1] - 1]:
        ends = [end - 1 for end in ends]
    found = [("same", pieces[0][:start])]
    middle = [ids[side][start : ends[side]] for side in (0, 1)]
    if max(map(len, middle)) > MOST_COMPARED:
        blocks: list[tuple[str, int, int, int, int]] = [("replace", 0, len(middle[0]), 0, len(middle[1]))]
    else:
        blocks = list(SequenceMatcher(None, middle[0], middle[1], autojunk=False).get_opcodes())
    for kind, left_from, left_to, right_from, right_to in blocks:
        if kind == "equal":
            found.append(("same", pieces[0][start + left_from : start + left_to]))
        else:
            found.append(("left", pieces[0][start + left_from : start + left_to]))
            found.append(("right", pieces[1][start + right_from : start + right_to]))
    found.append(("same", pieces[0][ends[0] :]))
    return [{"kind": kind, "pieces": tokens} for kind, tokens in found if tokens]


def _responses(attempt: KeptAttempt) -> tuple[list[int], list[str]]:
    """Tokens and their texts of all turns, one after another."""
    ids = [token for turn in attempt.turns for token in turn.response_ids.tolist()]
    return ids, [piece for turn in attempt.turns for piece in turn.response_pieces]


def _numbers(values: NDArray[Any] | None) -> Sequence[float | None] | None:
    """Short enough for the page; JSON has no form for what is not finite."""
    if values is None:
        return None
    return [round(value, 5) if np.isfinite(value) else None for value in values.astype(np.float64).tolist()]
