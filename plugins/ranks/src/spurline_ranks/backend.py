"""Train a model in ranks: divide rows among them, call their methods, and join their answers.

A rank is a process that trains with others. This module runs in the controller, the process of the training loop, which
has no weights and no process groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.data.batch import ROUTED_EXPERTS, SUPPORT, TrainingBatch
from spurline.digests import FileDigest
from spurline.errors import ModelError, NonFiniteLossError
from spurline.plugins.registry import Registry
from spurline.protocols.backend import LossSums, Role
from spurline.protocols.loss import ENTROPY, Objective
from spurline_models.abilities import check_played, check_trained
from spurline_models.accumulate import SumsPart, describe_failure
from spurline_models.architecture import load_model_config, model_of
from spurline_models.dealing import Dealing, deal
from spurline_models.experts.router_replay import check_replayed, load_metrics, without_routing
from spurline_models.lengths import length_limit
from spurline_models.placement.offloading import refuse
from spurline_models.separation import SeparatedBatch, computed_rows
from spurline_models.streams.token_stream import check_columns, check_tokens
from spurline_models.trainable import check_losses, check_reading
from spurline_models.weight_buckets import MakerChoice, PublishedPart, WeightBucket
from spurline_ranks.cluster import cluster_request
from spurline_ranks.configs import RankBackendConfig
from spurline_ranks.group import open_ranks
from spurline_ranks.messages import plain_objective, plain_run
from spurline_ranks.publishing import buckets_of_ranks


class RankBackend:
    """A `Backend` whose model is divided among ranks."""

    def __init__(self, config: RankBackendConfig, run: RunConfig, registry: Registry, total_updates: int) -> None:
        self._config = config
        self._run = run
        # These checks come before the ranks start and read weights.
        config.check_model(run)
        check_losses(run, registry)
        check_reading(run, registry)
        if config.is_reproducible and config.on == "cpu" and config.num_threads is not None:
            # An engine in this process must compute like the engine of a run without ranks.
            torch.set_num_threads(config.num_threads)
        self._model_configs = {"policy": load_model_config(run.model)}
        self._is_device_given = False
        request = replace(config.rank_request(), peers_elsewhere=run.source.facts.engines_elsewhere)
        arguments = plain_run(run), total_updates
        self._ranks = open_ranks(request, config.worker, arguments, config.limits, cluster_request(run))
        try:
            self._ranks.call("build")
        except BaseException:
            # The caller gets no backend that it could close.
            self._ranks.close()
            raise

    def update(self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy") -> Mapping[str, float]:
        self._check_trained(role)
        self._check_device_here("trained")
        batch = computed_rows(batch, objective.loss.needs, self._config)
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
            **(load_metrics(answer["expert_loads"] for answer in answers) if role == "policy" else {}),
            **sums.balance_metrics(batch.num_trained_segments),
            **{name: max(answer[name] for answer in answers) for name in ("time/forward_backward", "time/optimizer")},
        }

    def gradients(
        self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        self._check_trained(role)
        self._check_device_here("asked for gradients")
        batch = computed_rows(batch, objective.loss.needs, self._config)
        wires = self._wires(self._deal(batch, objective.loss.needs))
        found = self._ranks.call("gradients", plain_objective(objective), role, per_rank=wires)[0]
        return ((name, torch.from_numpy(gradient)) for name, gradient in found)

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> LossSums:
        self._check_device_here("evaluated")
        dealing = self._deal(computed_rows(batch, objective.loss.needs, self._config), objective.loss.needs)
        answers = self._ranks.call("evaluate", plain_objective(objective), per_rank=self._wires(dealing))
        return SumsPart.join(self._counting(answers)).as_loss_sums()

    def logprobs(self, batch: TrainingBatch, role: Role = "policy", *, temperature: float = 1.0) -> Tensor:
        if role == "critic":
            self._check_trained(role)
        check_played(role, self._run.model)
        self._check_device_here("asked for logprobs")
        if role in self._run.model.frozen:
            batch = without_routing(batch)
        separated = SeparatedBatch.of(batch) if self._config.is_reproducible else None
        dealing = self._deal(batch if separated is None else separated.batch, (), role)
        answers = self._ranks.call("logprobs", role, temperature, per_rank=self._wires(dealing))
        found = dealing.gather(self._counting(answers))
        return found if separated is None else separated.restored(found, batch)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._named("model")

    def _named(self, part: PublishedPart) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._ranks.call("gathering_plan", part)[0]:
            for name, value in self._ranks.call("weights", part, bucket)[0]:
                yield name, torch.from_numpy(value)

    def weight_buckets(self, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
        """See `MakesBuckets`. Raises ModelError if adapters are asked for and none are trained."""
        # This is checked here because an error in a rank ends all ranks.
        if choice.part == "adapter" and self._config.adapters is None:
            raise ModelError(
                f"Backend '{self._config.name}' trains no adapters, so it cannot publish adapters alone. Set "
                "source.weight_sync.adapters: false, which publishes the whole model."
            )
        return buckets_of_ranks(self._ranks, version, choice, first)

    def write_weights(self, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
        # Ranks return file errors instead of raising them, because a raised error would end all ranks.
        _raise_first(self._ranks.call("write_weights", str(folder.absolute()), dtype, max_file_bytes))

    def facts(self) -> Mapping[str, int | str]:
        return self._ranks.call("facts")[0]

    def save(self, path: Path) -> Mapping[str, FileDigest]:
        parts = self._ranks.call("save", str(path.absolute()))
        _raise_first(parts)
        return {name: digest for part in parts for name, digest in part.items()}

    def load(self, path: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
        self._check_device_here("loaded from a checkpoint")
        files, size = sorted((digests or {}).items()), self._ranks.size
        shares = [dict(files[rank::size]) for rank in range(size)]
        _raise_first(self._ranks.call("verify", str(path.absolute()), per_rank=shares))
        _raise_first(self._ranks.call("load", str(path.absolute())))

    def yield_device(self, *, keep_weights: bool) -> None:
        # Set this first, since the call may fail after some tensors have moved.
        self._is_device_given = True
        self._ranks.call("yield_device", keep_weights)

    def take_device(self) -> None:
        self._ranks.call("take_device")
        self._is_device_given = False

    def close(self) -> None:
        self._ranks.close()

    def _deal(self, batch: TrainingBatch, needs: Collection[str], role: Role = "policy") -> Dealing:
        config = self._model_configs.get(role)
        if config is None:
            config = self._model_configs[role] = load_model_config(model_of(self._run.model, role))
        text, limit = config.get_text_config(), length_limit(config)
        columns = [name for name in needs if name != ENTROPY]
        # These are checked here because an error in a rank ends all ranks.
        check_columns(batch, columns)
        check_tokens(batch, text.vocab_size)
        check_replayed(batch, config)
        if limit is not None:
            limit.check(int(batch.segments["length"].values.max(initial=0)))
        return deal(
            batch,
            self._config.layout().data,
            columns=[*columns, *(name for name in (ROUTED_EXPERTS, SUPPORT) if name in batch.tokens)],
            # Each unit has at least one token, and so gets a micro-batch of its own.
            max_tokens=1 if self._config.is_reproducible else self._config.max_tokens_per_microbatch,
            hidden=text.hidden_size,
        )

    def _wires(self, dealing: Dealing) -> Sequence[Mapping[str, Any]]:
        """Return each rank's share of the batch, as plain data."""
        wires = [share.to_wire() for share in dealing.shares]
        return [wires[self._config.share_of(rank)] for rank in range(self._ranks.size)]

    def _counting(self, answers: Sequence[Any]) -> Sequence[Any]:
        """Return one answer for each share: the answer of the rank that `counts` chooses."""
        return [answer for rank, answer in enumerate(answers) if self._config.counts(rank)]

    def _check_device_here(self, what: str) -> None:
        """Raise RunFailedError if engines use the devices at the moment."""
        if self._is_device_given:
            refuse(what)

    def _check_trained(self, role: Role) -> None:
        check_trained(role, has_critic=self._run.trained_critic is not None)


def _raise_first(answers: Sequence[object]) -> None:
    """Raise the first answer that is an error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
