"""Save what ranks have trained, and continue it on others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spurline.digests import FileDigest
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_rl.testing.backend_cases import minibatch, values_batch, weights_of, without_times

ONE = ParallelLayout(data=1)
"""Batches of all layouts are the same ones."""


def train(backend: Backend, steps: range, critic: bool = False) -> list[dict[str, float]]:
    """Return the metrics of these steps, each followed by the step of the critic if there is one."""
    metrics: list[dict[str, float]] = []
    for step in steps:
        metrics.append(without_times(backend.update(*minibatch("packed", ONE, step))))
        if critic:
            metrics.append(without_times(backend.update(*values_batch(ONE, step), role="critic")))
    return metrics


@dataclass(frozen=True)
class Saved:
    """A checkpoint after one step. weights: as they were then. expected: metrics of the next two steps."""

    path: Path
    model: Path
    digests: Mapping[str, FileDigest]
    weights: Mapping[str, Tensor]
    expected: list[dict[str, float]]
    critic: bool


def save_after_a_step(folder: Path, model: Path, backend: Backend, critic: bool) -> Saved:
    train(backend, range(1), critic)
    path = folder / "saved"
    path.mkdir()
    digests = backend.save(path)
    weights = weights_of(backend)
    return Saved(path, model, digests, weights, train(backend, range(1, 3), critic), critic)


def assert_continues(backend: Backend, saved: Saved, *, tolerance: float) -> None:
    """Assert that the next two steps equal the steps of the ranks that saved, with tolerance 0 bit for bit.

    tolerance: of the next loss; twice that of the one after, for which weights have changed.
    """
    backend.load(saved.path, saved.digests)
    weights = weights_of(backend)
    assert weights.keys() == saved.weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, saved.weights[name]), name
    got = train(backend, range(1, 3), saved.critic)
    if not tolerance:
        assert got == saved.expected
    for index, (mine, theirs) in enumerate(zip(got, saved.expected, strict=True)):
        allowed = tolerance if 2 * index < len(got) else 2 * tolerance
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=allowed)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * allowed)
        assert mine["lr"] == theirs["lr"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Flip a bit in the last byte of a file."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
