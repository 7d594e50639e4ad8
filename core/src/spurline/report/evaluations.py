"""Which recorded metrics are evaluation losses, which scores and which rewards. Shared by the panels that show them.

Rollouts of held-out prompts leave `eval/pass@1`, mean rewards and the number of prompts given up. The rewards are drawn
beside those of training, so they are no scores here, even where they stay within 0..1.
"""

from __future__ import annotations

from spurline.protocols.report_panel import RunRecord

_PREFIX = "eval/"
_DURATION = "eval/time"
_PASS_RATE = "eval/pass@1"
HELD_OUT_REWARD = "eval/reward"
HELD_OUT_TERM = "eval/rewards/"
GIVEN_UP = "eval/failed"


def recorded_names(record: RunRecord, prefix: str) -> list[str]:
    """Sorted names of the metrics that begin with `prefix`."""
    return sorted({name for line in record.metrics for name in line if name.startswith(prefix)})


def evaluation_losses(record: RunRecord) -> list[str]:
    """Names of held-out losses, such as `eval/loss` or `eval/loss/math`."""
    return [name for name in _evaluation_names(record) if "loss" in name.split("/")]


def evaluation_scores(record: RunRecord) -> tuple[list[str], list[str]]:
    """Names of all other evaluation metrics: those that stay within 0..1, where more is better, and the rest."""
    shares: list[str] = []
    others: list[str] = []
    names = _evaluation_names(record)
    is_rollouts = _PASS_RATE in names
    for name in names:
        if "loss" in name.split("/") or (is_rollouts and _is_of_rollouts(name)):
            continue
        _, values = record.series(name)
        (shares if all(0 <= value <= 1 for value in values) else others).append(name)
    return shares, others


def label_of(name: str, kind: str = "") -> str:
    """`eval/exact_match` -> `exact match`; with a kind in front where the bare name says too little."""
    label = name.removeprefix(_PREFIX).replace("_", " ")
    return f"{kind} {label}" if kind else label


def _is_of_rollouts(name: str) -> bool:
    return name in (HELD_OUT_REWARD, GIVEN_UP) or name.startswith(HELD_OUT_TERM)


def _evaluation_names(record: RunRecord) -> list[str]:
    return [name for name in recorded_names(record, _PREFIX) if name != _DURATION]
