"""The FSDP backend as the loop sees it: it deals rows to ranks, calls them, and joins what they answer.

Place on the way: mini-batch -> a share for each rank -> all ranks at once -> one answer. It holds no weights and no
torch process group; those are in the ranks (`rank.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.data.batch import TrainingBatch
from spurline.data.dealing import Dealing, deal
from spurline.digests import FileDigest
from spurline.errors import CheckpointWriteError, NonFiniteLossError
from spurline.model.accumulate import SumsPart, describe_failure
from spurline.model.architecture import load_model_config
from spurline.model.loading import length_limit
from spurline.model.stream_model import ENTROPY
from spurline.model.token_stream import check_columns
from spurline.plugins.registry import Registry
from spurline.protocols.backend import LossSums, Role, check_trained
from spurline.protocols.loss import Objective
from spurline.protocols.rollout_engine import WeightBucket
from spurline.protocols.weight_sync import MakerChoice
from spurline.ranks.cluster_checks import prepare_nodes
from spurline.ranks.launch import open_ranks
from spurline.ranks.messages import check_losses, plain_objective, plain_run
from spurline_fsdp_backend.checkpoint import SavedPart
from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_fsdp_backend.publishing import buckets_of_ranks

_WORKER = "spurline_fsdp_backend.rank:FsdpRank"


class FsdpBackend:
    """A `Backend`; see the protocol for what each method promises."""

    def __init__(self, config: FsdpBackendConfig, run: RunConfig, registry: Registry, total_updates: int) -> None:
        self._config = config
        self._run = run
        # Before ranks start and weights are read.
        config.check_model(run)
        check_losses(run, registry)
        model_config = load_model_config(run.model)
        self._hidden: int = model_config.get_text_config().hidden_size
        self._length_limit = length_limit(model_config)
        request = config.rank_request()
        self._ranks = open_ranks(request, _WORKER, (plain_run(run), total_updates), config.limits, prepare_nodes(run))
        try:
            self._ranks.call("build")
        except BaseException:
            # Nobody else can: there is no backend yet to close.
            self._ranks.close()
            raise

    def update(self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy") -> Mapping[str, float]:
        self._check_trained(role)
        dealing = self._deal(batch, objective.loss.needs)
        answers = self._ranks.call("update", plain_objective(objective), role, per_rank=self._wires(dealing))
        first = answers[0]
        sums = SumsPart.join(answer["part"] for answer in self._counting(answers))
        loss = first["loss"] / objective.normalizer
        if not first["finite"]:
            step = first["updates"] + 1
            raise NonFiniteLossError(describe_failure(role, step, batch, sums, loss, first["grad_norm"]))
        return {
            "loss": loss,
            "grad_norm": first["grad_norm"],
            **first["rates"],
            "tokens": float(batch.num_tokens),
            "loss_tokens": float(sums.tokens),
            **sums.metrics(),
            **{name: max(answer[name] for answer in answers) for name in ("time/forward_backward", "time/optimizer")},
        }

    def gradients(
        self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        self._check_trained(role)
        wires = self._wires(self._deal(batch, objective.loss.needs))
        found = self._ranks.call("gradients", plain_objective(objective), role, per_rank=wires)[0]
        return ((name, torch.from_numpy(gradient)) for name, gradient in found)

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> LossSums:
        dealing = self._deal(batch, objective.loss.needs)
        answers = self._ranks.call("evaluate", plain_objective(objective), per_rank=self._wires(dealing))
        return SumsPart.join(self._counting(answers)).as_loss_sums()

    def logprobs(self, batch: TrainingBatch, role: Role = "policy", *, temperature: float = 1.0) -> Tensor:
        if role == "critic":
            self._check_trained(role)
        dealing = self._deal(batch, ())
        answers = self._ranks.call("logprobs", role, temperature, per_rank=self._wires(dealing))
        return dealing.gather(self._counting(answers))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._ranks.call("gathering_plan")[0]:
            for name, value in self._ranks.call("weights", bucket)[0]:
                yield name, torch.from_numpy(value)

    def weight_buckets(self, version: int, choice: MakerChoice) -> Iterator[WeightBucket]:
        """See `MakesBuckets`."""
        return buckets_of_ranks(self._ranks, version, choice)

    def write_weights(self, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
        name = str(dtype).removeprefix("torch.")
        answers = self._ranks.call("write_weights", str(folder.absolute()), name, max_file_bytes)
        # Ranks answer what they could not write, and do not raise it: they stay.
        _raise_first([OSError(failure) if failure is not None else None for failure in answers])

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        if self._config.expert > 1:
            # Experts stay divided, so tokens travel in every step: all ranks decode the same prompts.
            shares = [[list(prompt) for prompt in prompts]] * self._ranks.size
            return self._ranks.call("generate", max_new_tokens, per_rank=shares)[0]
        dealt = _deal_prompts(prompts, self._ranks.size)
        shares = [[list(prompts[number]) for number in numbers] for numbers in dealt]
        answers = self._ranks.call("generate", max_new_tokens, per_rank=shares)
        found = {
            number: answer
            for numbers, part in zip(dealt, answers, strict=True)
            for number, answer in zip(numbers, part, strict=True)
        }
        return [found[number] for number in range(len(prompts))]

    def facts(self) -> Mapping[str, int | str]:
        return self._ranks.call("facts")[0]

    def save(self, path: Path) -> Mapping[str, FileDigest]:
        parts: list[SavedPart] = self._ranks.call("save", str(path.absolute()))
        failures = [part.failure for part in parts if part.failure is not None]
        if failures:
            raise CheckpointWriteError(failures[0])
        return {name: digest for part in parts for name, digest in part.digests.items()}

    def load(self, path: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
        # Ranks answer what is wrong, and do not raise it: they are as they were, and stay.
        files, size = sorted((digests or {}).items()), self._ranks.size
        shares = [dict(files[rank::size]) for rank in range(size)]
        _raise_first(self._ranks.call("verify", str(path.absolute()), per_rank=shares))
        _raise_first(self._ranks.call("load", str(path.absolute())))

    def close(self) -> None:
        self._ranks.close()

    def _deal(self, batch: TrainingBatch, needs: Collection[str]) -> Dealing:
        columns = [name for name in needs if name != ENTROPY]
        check_columns(batch, columns)
        if self._length_limit is not None:
            # Before ranks see it: one that raised between exchanges would end them all.
            self._length_limit.check(int(batch.segments["length"].values.max(initial=0)))
        return deal(
            batch,
            self._config.layout().data,
            columns=columns,
            max_tokens=self._config.max_tokens_per_microbatch,
            hidden=self._hidden,
        )

    def _wires(self, dealing: Dealing) -> Sequence[Mapping[str, Any]]:
        """By rank: ranks that share sequences get the same share."""
        wires = [share.to_wire() for share in dealing.shares]
        return [wire for wire in wires for _ in range(self._config.context)]

    def _counting(self, answers: Sequence[Any]) -> Sequence[Any]:
        """Of the ranks that count: one of those that share sequences."""
        return answers[:: self._config.context]

    def _check_trained(self, role: Role) -> None:
        check_trained(role, has_critic=self._run.critic is not None)


def _raise_first(answers: Sequence[Exception | None]) -> None:
    for error in answers:
        if error is not None:
            raise error


def _deal_prompts(prompts: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Numbers of the prompts of each rank; all ranks get prompts of all lengths."""
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    return [by_length[rank::num_ranks] for rank in range(num_ranks)]
