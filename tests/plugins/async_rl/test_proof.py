"""The proof of a publish when an engine's answer is doubted, when scoring it fails, and while it is open."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from publish_proofs import proof_of

from spurline.errors import RunFailedError
from spurline_async_rl.engines.commands import Command, ControlledEngine
from spurline_async_rl.proof.proof import PublishProof
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits
from spurline_async_rl.source.configs import ProofConfig
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_async_rl.source.watchdog import ObservedEngine, stall_report
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, TakesWeights
from spurline_rl.trajectory import Turn
from spurline_text.testing.inputs import tiny_tokenizer


class Engines(ControlledEngine):
    """Engines whose first answers to a publish are these nats from a logprob of -1. Second answers are exact."""

    transports = ()

    awaiting_weights: Sequence[TakesWeights] = ()

    def __init__(self, **first: float) -> None:
        self.first, self.version = first, 1
        self.asked: list[Collection[str] | None] = []
        self.crossed: dict[str, list[int]] = {}

    async def control(self, command: Command) -> None: ...

    async def generate_on_each(
        self, request: GenerationRequest, names: Collection[str] | None = None
    ) -> Mapping[str, GenerationResult]:
        self.asked.append(names)
        off = self.first if names is None else dict.fromkeys(names, 0.0)
        return {name: answer([self.version] * 4, nats, 5 if names is None else 15) for name, nats in off.items()}

    async def take_crossed(self, version: int, num_tokens: int) -> Mapping[str, GenerationResult]:
        return {name: answer(versions) for name, versions in self.crossed.items()}


def answer(versions: Sequence[int], nats: float = 0.0, first: int = 5) -> GenerationResult:
    tokens, logprobs = np.arange(first, first + len(versions)), np.full(len(versions), nats - 1)
    return GenerationResult(tokens.astype(np.int32), logprobs.astype(np.float32), np.array(versions), "length")


def score(turns: Sequence[Turn]) -> list[NDArray[np.float32]]:
    return [np.full(len(turn.response_ids), -1.0, np.float32) for turn in turns]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("proof")
    yield made
    made.close()


def published(engines: Engines, loop: LoopThread, **settings: Any) -> PublishProof:
    """The proof of version 1, which the engines have just got."""
    proof = proof_of(engines, loop, tiny_tokenizer(), **({"crosses": False} | settings))
    proof.before_publish(None)
    proof.ask(1, None)
    return proof


def test_only_engines_whose_answer_is_doubted_are_asked_again(loop: LoopThread) -> None:
    engines = Engines(one=0.0, other=1.0)
    assert published(engines, loop).settle(score)["publish/rejected"] == 0
    assert engines.asked == [None, ["other"]]


def test_engines_whose_second_answer_did_not_cross_the_update_are_counted(loop: LoopThread) -> None:
    engines = Engines(one=0.0)
    assert "publish/uncrossed" not in published(engines, loop, crosses=True).settle(score)
    engines.crossed = {"one": [0, 1, 1], "ended before": [0, 0], "began after": [1, 1], "died": []}
    assert published(engines, loop, crosses=True).settle(score)["publish/uncrossed"] == 2


def test_a_publish_that_also_goes_to_an_engine_that_was_started_again_is_always_proven(loop: LoopThread) -> None:
    engines = Engines(one=0.0)
    proof = published(engines, loop, config=ProofConfig(every=3))
    proof.settle(score)
    for version, awaiting in ((2, ()), (3, (engines,))):
        engines.awaiting_weights = awaiting
        proof.before_publish(None)
        proof.ask(version, None)
        assert proof.unproven == (version if awaiting else None)


def test_a_second_answer_that_shows_nothing_of_the_update_does_not_excuse_an_engine_that_has_not_moved(
    loop: LoopThread,
) -> None:
    """Its tokens are others, so the trainer never scored them with earlier weights."""
    engines = Engines(one=0.0, other=0.0)
    proof = proof_of(engines, loop, tiny_tokenizer(), crosses=False, config=ProofConfig(on_undelivered="stop"))
    for engines.version, moved in ((1, 0.0), (2, 2e-4)):
        engines.first["one"] = moved
        proof.before_publish(None)
        proof.ask(engines.version, None)
        if engines.version == 1:
            assert proof.settle(score)["publish/rejected"] == 0
    with pytest.raises(RunFailedError, match=r"other does not .* moved only 0\.00 times as far"):
        proof.settle(lambda turns: [np.full(len(turn.response_ids), -1 + 2e-4, np.float32) for turn in turns])
    assert engines.asked == [None, None, ["other"]]


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
