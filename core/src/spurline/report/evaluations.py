"""Which recorded metrics are evaluation losses, and which are scores. Shared by the panels that show them."""

from __future__ import annotations

from spurline.protocols.report_panel import RunRecord

_PREFIX = "eval/"
_DURATION = "eval/time"


def evaluation_losses(record: RunRecord) -> list[str]:
    """Names of held-out losses, such as `eval/loss` or `eval/loss/math`."""
    return [name for name in _evaluation_names(record) if "loss" in name.split("/")]


def evaluation_scores(record: RunRecord) -> tuple[list[str], list[str]]:
    """Names of all other evaluation metrics: those that stay within 0..1, where more is better, and the rest."""
    shares: list[str] = []
    others: list[str] = []
    for name in _evaluation_names(record):
        if "loss" not in name.split("/"):
            _, values = record.series(name)
            (shares if all(0 <= value <= 1 for value in values) else others).append(name)
    return shares, others


def label_of(name: str, kind: str = "") -> str:
    """`eval/exact_match` -> `exact match`; with a kind in front where the bare name says too little."""
    label = name.removeprefix(_PREFIX).replace("_", " ")
    return f"{kind} {label}" if kind else label


def _evaluation_names(record: RunRecord) -> list[str]:
    return sorted({name for line in record.metrics for name in line if name.startswith(_PREFIX)} - {_DURATION})
