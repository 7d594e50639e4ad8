"""The proof of a publish when an engine's answer is doubted, when scoring it fails, and while it is open."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spurline_async_rl.engines.commands import Command, ControlledEngine
from spurline_async_rl.proof.proof import ProofSettings, PublishProof
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits
from spurline_async_rl.source.configs import ProofConfig
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_async_rl.source.watchdog import ObservedEngine, stall_report
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.trajectory import Turn
from spurline_text.testing.inputs import tiny_tokenizer

SETTINGS = ProofSettings(
    ProofConfig(),
    temperature=1.0,
    context=None,
    vocabulary=None,
    in_fp32=True,
    crosses=False,
    restarts=True,
    timeout_s=30.0,
    report_s=30.0,
)


class Engines(ControlledEngine):
    """Two engines, whose first answers are these nats from the trainer's logprobs."""

    transports = ()

    def __init__(self, **first: float) -> None:
        self.first = first
        self.asked: list[Collection[str] | None] = []

    async def control(self, command: Command) -> None: ...

    async def generate_on_each(
        self, request: GenerationRequest, names: Collection[str] | None = None
    ) -> Mapping[str, GenerationResult]:
        self.asked.append(names)
        off = self.first if names is None else dict.fromkeys(names, 0.0)
        tokens, versions = np.arange(5, 9, dtype=np.int32), np.ones(4, np.int32)
        return {
            name: GenerationResult(tokens, np.full(4, nats - 1, np.float32), versions, "length")
            for name, nats in off.items()
        }


def score(turns: Sequence[Turn]) -> list[NDArray[np.float32]]:
    return [np.full(len(turn.response_ids), -1.0, np.float32) for turn in turns]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("proof")
    yield made
    made.close()


def published(engines: Engines, loop: LoopThread) -> PublishProof:
    """The proof of version 1, which the engines have just got."""
    producer: Any = SimpleNamespace(trust=lambda *_: None, distrust=lambda *_: None)
    proof = PublishProof(engines, SETTINGS, tiny_tokenizer(), loop, producer, notify=lambda: None)
    proof.before_publish(None)
    proof.ask(1, None)
    return proof


def test_only_engines_whose_answer_is_doubted_are_asked_again(loop: LoopThread) -> None:
    engines = Engines(one=0.0, other=1.0)
    assert published(engines, loop).settle(score)["publish/rejected"] == 0
    assert engines.asked == [None, ["other"]]


def test_weights_whose_proof_the_trainer_cannot_score_stay_unproven_so_that_no_checkpoint_is_written(
    loop: LoopThread,
) -> None:
    def fail(turns: Sequence[Turn]) -> list[NDArray[np.float32]]:
        raise MemoryError("no room for the probe")

    proof = published(Engines(one=0.0), loop)
    for scored in (fail, score):
        with pytest.raises(MemoryError, match="no room for the probe"):
            proof.settle(scored)
    assert proof.unproven == 1


def test_a_report_of_a_stall_names_the_proof_that_is_open(loop: LoopThread) -> None:
    engines = Engines(one=0.0)
    proof = published(engines, loop)
    scheduler = Scheduler(SchedulerLimits(1, 2, 2, "window", 8, 4))
    producer: Any = SimpleNamespace(scheduler=scheduler, began_at={})
    observed: Any = ObservedEngine(SimpleNamespace(pause=None, resume=None, close=None))  # type: ignore[arg-type]
    assert "tokens of version 1 or newer wait for the proof" in stall_report(producer, observed, proof, 2, 5.0)
    proof.settle(score)
    assert "wait for the proof" not in stall_report(producer, observed, proof, 2, 5.0)
