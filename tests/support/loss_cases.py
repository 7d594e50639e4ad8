"""Every loss with every reduction and correction, on one batch that has all columns any of them reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from backend_batches import VOCABULARY, lay_out, make_samples
from every_run import SOAK
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.plugins.host import PluginHost
from spurline.protocols.backend import Backend
from spurline.protocols.loss import Loss, Objective
from spurline.update.reduction import REDUCTIONS, fixed_norm, reduce_corrected
from spurline.update.update import with_prepared
from spurline_rl.losses.corrections import compare
from spurline_rl.testing.backend_cases import assert_gradients_close

REGISTRY = PluginHost.load(["objectives", "distillation", "reward_models"]).registry
EXTRAS: dict[str, Any] = {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.05}
LOSSES: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "dft": {},
    "distillation": {"divergence": "jensen_shannon", "temperature": 1.5, "cross_entropy": 0.1},
    "distillation:served": {"served": True, "divergence": "reverse_kl", "cross_entropy": 0.1},
    "dpo": {"beta": 0.5, "label_smoothing": 0.1, "sft_weight": 0.3},
    "simpo": {},
    "cpo": {},
    "orpo": {"beta": 0.5},
    "bradley_terry": {"margin": 0.3, "margin_column": "clip_high", "centering": 0.1},
    "step_reward": {"kind_of_label": "number"},
    "kto": {"beta": 0.5, "undesirable_weight": 1.3},
    "policy_gradient": {"importance_ratio": True},
    "ppo": {"dual_clip": 3.0, **EXTRAS},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"clip_high": 0.3},
    "sapo": EXTRAS,
    "value": {},
    "dppo": {"divergence": "kl", "threshold_low": 0.005, "threshold_high": 0.005, **EXTRAS},
    "ppo_per_row": {},
    "ppo_entropy_target": {"entropy_target": 100.0},
}
"""Settings of each case. A case is the name of a loss, and may have a suffix after a colon."""
REDUCE = {**REDUCTIONS, "fixed_norm": fixed_norm(16)}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": {"level": "sequence", "cap": 1.2},
    "mis": {"low": 0.7, "high": 1.5},
    "geometric_rejection": {"low": 0.9, "high": 1.1},
    "sequence_rejection": {"low": 0.5, "high": 2.0},
    "kpop": {"threshold": 0.005},
}


def batch_for_all(local: Backend) -> TrainingBatch:
    """Make ten answers to five prompts, two of a prompt in one unit. Columns are near the logprobs of `local`."""
    samples = make_samples([9, 21, 4, 33, 12, 8, 17, 5, 26, 13], seed=2)
    pairs = [row // 2 for row in range(len(samples))]
    named = [replace(sample, uid=f"prompt-{pair}") for pair, sample in zip(pairs, samples, strict=True)]
    batch = lay_out(named, unit_ids=pairs)
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch.num_rows, batch.length, generator=generator)

    logprobs = local.logprobs(batch)
    others = {name: (logprobs + noise(0.3)).clamp(max=0) for name in ("old_logprobs", "rollout_logprobs")}
    reference = {"reference_logprobs": (logprobs + noise(0.3)).clamp(max=0), "values": logprobs + noise(0.3)}
    advantages = torch.randn(batch.num_rows, 1, generator=generator).expand(-1, batch.length)
    sign = torch.tensor([1, -1] * (batch.num_rows // 2))
    pair_ids = ((torch.tensor(pairs) + 1) * sign)[:, None].expand(-1, batch.length)
    labels = torch.tensor([1, -1, -1, 0, 1, 0, 1, -1, 0, 1])[:, None].expand(-1, batch.length)
    bounds = torch.rand(3, batch.num_rows, 1, generator=generator).expand(-1, -1, batch.length)
    of_rows = dict(zip(("clip_low", "clip_high", "entropy_coefficients"), 0.3 * bounds, strict=True))
    top_ids = torch.rand(batch.num_rows, batch.length, VOCABULARY, generator=generator).argsort(-1)[..., :4].int()
    top_logprobs = -1.5 - torch.rand(top_ids.shape, generator=generator)
    served = {"teacher_top_ids": top_ids, "teacher_top_logprobs": top_logprobs}
    columns = {**others, **reference, **of_rows, **served, "advantages": advantages, "returns": noise(1.0)}
    return batch.with_tokens(**columns, pair_ids=pair_ids, labels=labels, step_labels=noise(1.0))


class LossGradients:
    """Return the gradients of the local backend. Each case is computed once."""

    def __init__(self, local: Backend) -> None:
        self._local = local
        self.batch = batch_for_all(local)
        self._wanted: dict[tuple[str, str, str], dict[str, Tensor]] = {}

    def assert_equal_those_of(self, backend: Backend, listed: str) -> None:
        """This loss, with every reduction and correction it goes with."""
        name = listed.partition(":")[0]
        settings = {"name": name, **LOSSES[listed]}
        loss = REGISTRY.create("loss", REGISTRY.get("loss", name).config.model_validate(settings))
        for reduction, correction in _cases(name, loss.config.trains_on):
            case = (listed, reduction, correction)
            if case not in self._wanted:
                self._wanted[case] = self._gradients(self._local, loss, reduction, correction)
            assert_gradients_close(self._gradients(backend, loss, reduction, correction), self._wanted[case], 1e-5)

    def _gradients(self, backend: Backend, loss: Loss, reduction: str, correction: str) -> dict[str, Tensor]:
        weighted, normalizer = self._reduced(with_prepared(self.batch, loss, backend, 0.8), reduction, correction)
        return dict(backend.gradients(weighted, Objective(loss, normalizer, 0.8)))

    def _reduced(self, batch: TrainingBatch, reduction: str, correction: str) -> tuple[TrainingBatch, float]:
        if correction == "none":
            return REDUCE[reduction](batch)
        config = REGISTRY.get("correction", correction).config
        made = REGISTRY.create("correction", config.model_validate({"name": correction, **CORRECTIONS[correction]}))
        factors = compare(batch, made)[0].tokens["correction_factors"]
        assert not bool((factors == 1).all()), f"{correction} corrects nothing here"
        return reduce_corrected(batch, factors, REDUCE[reduction])


def _cases(name: str, trains_on: str) -> Iterator[tuple[str, str]]:
    # A correction may reject one answer of a pair. No source has both of them, or labels and corrections.
    corrections = ["none", *CORRECTIONS] if trains_on not in ("pairs", "labels") else ["none"]
    for reduction, correction in product(REDUCE, corrections):
        # Ranks see both as weights. In short runs one loss has all of them, each with the usual one of the other.
        unusual = (reduction != "token_mean") + (correction != "none")
        if SOAK or unusual <= (name == "ppo"):
            yield reduction, correction
