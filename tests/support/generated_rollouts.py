"""Engines in_process on a CPU, and batches of what engines have generated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from backend_batches import run_config

from spurline.config.run_config import ModelConfig
from spurline.data.batch import TrainingBatch
from spurline.protocols.collator import ParallelLayout
from spurline.testing.samples import PAD
from spurline_models.local.backend import LocalBackend
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.engines.in_process.engine import InProcessEngine
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.trajectory import Group, Trajectory, Turn
from spurline_text.tokenizer import load_tokenizer


def in_process_engine(model: Path, run: dict[str, Any] | None = None, **settings: Any) -> InProcessEngine:
    """Make an engine of this model. run: sections of the run's config."""
    model_config = ModelConfig(path=str(model))
    config = InProcessEngineConfig(**({"device": "cpu", "timeout_s": 60.0} | settings))
    whole_run = run_config(model, model=model_config, **(run or {}))
    return InProcessEngine(config, run=whole_run, tokenizer=load_tokenizer(model_config))


def generate(engine: InProcessEngine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """Return the answers to requests that come at the same time, and close the engine."""

    async def use() -> list[GenerationResult]:
        try:
            return list(await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 120))
        finally:
            await engine.close()

    return asyncio.run(use())


def batch_of(requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> TrainingBatch:
    """Lay out a row for each request, each of a prompt of its own."""
    groups: list[Group] = []
    for number, (asked, result) in enumerate(zip(requests, results, strict=True)):
        turn = Turn(
            np.asarray(asked.prompt_ids, np.int32),
            result.token_ids,
            np.ones(len(result.token_ids), np.uint8),
            logprobs=result.logprobs,
            support=result.support,
            routed_experts=result.routed_experts,
        )
        uid = f"prompt-{number}"
        groups.append(Group(uid, number, (Trajectory(uid, 0, (turn,)),)))
    return RolloutsCollator(RolloutsCollatorConfig(), PAD, ParallelLayout()).collate_rollouts(groups)


def largest_mismatch(backend: LocalBackend, batch: TrainingBatch, temperature: float = 1.0) -> float:
    """Return the largest difference of a trained token's logprob in the trainer from that of its engine."""
    trained = batch.tokens["loss_weights"] != 0
    difference = backend.logprobs(batch, temperature=temperature) - batch.tokens["rollout_logprobs"]
    return float(difference[trained].abs().max())
