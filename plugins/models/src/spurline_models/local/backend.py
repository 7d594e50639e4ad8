"""The local backend: one process trains the whole model, on CPU or one GPU.

It is the reference for tests of other backends. It depends on no algorithm, since each call passes a loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.data.batch import TrainingBatch
from spurline.digests import FileDigest
from spurline.errors import ConfigError, NonFiniteLossError, RunFailedError
from spurline.plugins.registry import Registry
from spurline.protocols.backend import LossSums, Role
from spurline.protocols.loss import ENTROPY, Objective
from spurline_models.abilities import GenerationModel, check_generates, check_played, check_trained
from spurline_models.accumulate import StepSums, accumulate_gradients, describe_failure, evaluation_sums, logprobs_of
from spurline_models.adapters.adapter_weights import AdapterWeights
from spurline_models.architecture import vocabulary_size
from spurline_models.configs import check_libraries
from spurline_models.dealing import Rows
from spurline_models.device_profile import device_profile, seed_generators
from spurline_models.experts.router_balance import balance_coefficient
from spurline_models.experts.router_replay import check_replayed, load_metrics, without_routing
from spurline_models.generation import generate_greedily, generation_model, stop_tokens
from spurline_models.lengths import length_limit
from spurline_models.loading import check_config
from spurline_models.local.checkpoint import HostCopies, TrainingState, read_training_state
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.local.trained_model import TrainedModel, WeightPlacement
from spurline_models.optimizers.optimization import critic_optimization, policy_optimization
from spurline_models.placement.offloading import DeviceMemory, DeviceTensors
from spurline_models.placement.quantized_weights import num_parameters
from spurline_models.probe import check_exactness, check_routers, choose_reading
from spurline_models.separation import SeparatedBatch, computed_rows
from spurline_models.streams.stream_model import StreamModel, ValueModel, put_value_head, stream_model
from spurline_models.streams.token_stream import TokenStream, check_columns, check_tokens, token_stream
from spurline_models.trainable import check_reading
from spurline_models.weight_files import WeightStream, write_weight_files
from spurline_models.weights import NamedWeights


class LocalBackend:
    """An implementation of `Backend` in this process. The protocol `Backend` describes the methods."""

    def __init__(self, config: LocalBackendConfig, run: RunConfig, registry: Registry, total_updates: int):
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._config = config
        self._run = run
        check_libraries(config.lora, config.fp8)
        check_reading(run, registry)
        # torch may see a GPU that this machine does not list, as on WSL.
        self._profile = device_profile("cuda" if config.on == "cuda" else config.device, config.computes_in)
        for problem in config.problems_on("cuda" if self._profile.device.type == "cuda" else "cpu"):
            raise ConfigError.at(f"backend.{problem.key}", problem.message)
        if config.is_reproducible:
            self._profile.use_deterministic_kernels()
        self._placement = WeightPlacement(config, run, self._profile)
        causal, masters = self._placement.load_trainable()
        self._length_limit = check_config(causal, run.model.path, run.data.max_length)
        self._model = stream_model(run.model, causal, config.chunk_tokens, config.fuses_logprobs)
        self._balance = None if run.model.router_aux_loss is None else balance_coefficient(run.model, causal)
        self._frozen: dict[Role, StreamModel] = {}
        if config.probe:
            check_exactness(self._model, self._profile, run.model.path)
        else:
            choose_reading(self._model, self._profile)
        replays, balances = run.source.facts.replays_experts, self._balance is not None
        check_routers(self._model, self._profile, run.model.path, replays=replays, balances=balances)
        recipe = policy_optimization(run, registry, total_updates)
        self._policy = self._placement.train(self._model, recipe, masters)
        self._critic: TrainedModel | None = None
        if run.trained_critic is not None:
            causal, masters = self._placement.load_trainable()
            put_value_head(causal, self._profile.weight_dtype)
            critic = ValueModel(causal)
            critic.read_as(self._model.reading)
            self._critic = self._placement.train(critic, critic_optimization(run.trained_critic, registry), masters)
        self._memory = DeviceMemory(self._profile)
        self._copies = HostCopies(self._profile)
        self._open_swaps = 0
        # Loading may have drawn random numbers. Seed again, so that dropout depends on the seed alone.
        seed_generators(run.seed)

    def update(self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy") -> Mapping[str, float]:
        self._refuse_swapped("trained")
        trained, batch = self._model_to_train(role), computed_rows(batch, objective.loss.needs, self._config)
        self._memory.check_here("trained")
        started = time.perf_counter()
        try:
            sums = self._accumulate(trained, batch, objective, role)
            norm = trained.gradient_norm()
            # With fast sums, a step waits for the device only once: loss, norm and all metrics are fetched together.
            part, (grad_norm,) = sums.fetch(norm)
            loss = part.loss / objective.normalizer
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise NonFiniteLossError(describe_failure(role, trained.updates + 1, batch, part, loss, grad_norm))
            differentiated = time.perf_counter()
            rates = trained.step(norm, grad_norm)
            self._profile.synchronize()
        finally:
            trained.drop_gradients()
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            **rates,
            "tokens": float(batch.num_tokens),
            "loss_tokens": float(part.tokens),
            **part.metrics(),
            **(load_metrics([part.expert_loads]) if role == "policy" else {}),
            **part.balance_metrics(batch.num_trained_segments),
            "time/forward_backward": differentiated - started,
            "time/optimizer": time.perf_counter() - differentiated,
        }

    def gradients(
        self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        trained, batch = self._model_to_train(role), computed_rows(batch, objective.loss.needs, self._config)
        self._memory.check_here("asked for gradients")
        try:
            # Restore the generators, so that this call does not change the dropout of the next update.
            with self._profile.keeping_generators():
                self._accumulate(trained, batch, objective, role)
            result = trained.gradients()
        finally:
            trained.drop_gradients()
        return iter(result)

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> LossSums:
        self._memory.check_here("evaluated")
        streams = self._streams(computed_rows(batch, objective.loss.needs, self._config), objective.loss.needs)
        return evaluation_sums(self._model, streams, objective, self._profile, self._playing).as_loss_sums()

    def logprobs(self, batch: TrainingBatch, role: Role = "policy", *, temperature: float = 1.0) -> Tensor:
        self._memory.check_here("asked for logprobs")
        if role in self._run.model.frozen:
            batch = without_routing(batch)
        separated = SeparatedBatch.of(batch) if self._config.is_reproducible else None
        read = batch if separated is None else separated.batch
        with self._playing(role) as model:
            result = logprobs_of(model, self._streams(read, (), model), read, temperature, self._profile)
        return batch.drop_padding_rows(result) if separated is None else separated.restored(result, batch)

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        self._memory.check_here("asked for continuations")
        check_generates(self._run.model)
        with self._profile.computing():
            return generate_greedily(self._model, prompts, max_new_tokens, self._stop_tokens)

    def generation_model(self) -> GenerationModel:
        self._memory.check_here("lent")
        check_generates(self._run.model)
        insists = self._run.model.allow_extrapolation
        return generation_model(self._model, self._profile, self._length_limit, allow_extrapolation=insists)

    @property
    def is_swapped(self) -> bool:
        return self._open_swaps > 0

    def trained_parameters(self, role: Role = "policy") -> Mapping[str, Tensor]:
        self._memory.check_here("asked for its parameters")
        return self._model_to_train(role).values

    @contextmanager
    def swapped(self, role: Role, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Give parameters other values in the context. Copies of the former values are restored at its end."""
        self._memory.check_here("given other parameters")
        with self._model_to_train(role).swapped(values):
            self._open_swaps += 1
            try:
                yield
            finally:
                self._open_swaps -= 1

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._named_weights())

    def adapter_settings(self) -> Mapping[str, Any] | None:
        if self._config.lora is None:
            return None
        from spurline_models.adapters.lora import adapter_settings

        return adapter_settings(self._model.causal, self._run.model)

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._config.lora is not None:
            for name, tensor in AdapterWeights(self._model.causal):
                yield name, self._memory.read(tensor)

    def write_weights(self, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
        named = self._named_weights()
        write_weight_files(folder, WeightStream(named.layout, iter(named)), dtype, max_file_bytes)

    def facts(self) -> Mapping[str, int | str]:
        return {
            "parameters": num_parameters(self._model.causal),
            "trainable_parameters": sum(value.numel() for value in self._policy.parameters.values()),
            "device": str(self._profile.device),
            **self._model.facts(self._profile.computes_in),
        }

    def save(self, path: Path) -> Mapping[str, FileDigest]:
        self._refuse_swapped("saved")
        return _write(path, self._states())

    def snapshot(self) -> Callable[[Path], Mapping[str, FileDigest]]:
        self._refuse_swapped("saved")
        copies = {folder: state.copied(self._copies, folder) for folder, state in self._states().items()}
        return lambda path: _write(path, copies)

    def load(self, path: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
        self._refuse_swapped("loaded")
        self._memory.check_here("loaded from a checkpoint")
        puts = [read_training_state(path / folder, trained) for folder, trained in self._trained().items()]
        # Nothing is changed unless the states of all models fit.
        for put in puts:
            put()

    def yield_device(self, *, keep_weights: bool) -> None:
        self._refuse_swapped("moved off its device")
        for trained in self._trained().values():
            # A checkpoint may need this digest later. Compute it while the weights are on the device.
            _ = trained.frozen_weights
        self._memory.give(self._device_tensors(), keep_weights=keep_weights)

    def take_device(self) -> None:
        self._memory.take()

    def close(self) -> None:
        for name in ("_model", "_frozen", "_policy", "_critic", "_memory", "_copies"):
            self.__dict__.pop(name, None)
        self._profile.release_cached_memory()

    def _accumulate(self, trained: TrainedModel, batch: TrainingBatch, objective: Objective, role: Role) -> StepSums:
        streams = self._streams(batch, objective.loss.needs)
        balance = None
        if self._balance is not None and role == "policy":
            balance = self._balance / batch.num_trained_segments
        return accumulate_gradients(trained.model, streams, objective, self._profile, self._playing, balance=balance)

    def _streams(
        self, batch: TrainingBatch, needs: Collection[str], model: StreamModel | None = None
    ) -> Iterator[tuple[Rows, TokenStream]]:
        """Yield the streams of a batch for this model, which is the policy by default."""
        model = model or self._model
        causal = model.causal
        columns = [name for name in needs if name != ENTROPY]
        check_columns(batch, columns)
        check_tokens(batch, vocabulary_size(causal))
        check_replayed(batch, causal.config)
        limit = length_limit(causal.config)
        for rows in cut_rows(batch, self._config):
            stream = token_stream(batch, rows, columns, self._profile)
            if stream is not None:
                if limit is not None:
                    limit.check(stream.plan.max_length)
                yield rows, stream.at_tokens() if model.reads_tokens else stream

    @cached_property
    def _stop_tokens(self) -> list[int]:
        return stop_tokens(self._model.causal, self._run.model)

    def _trained(self) -> dict[str, TrainedModel]:
        """Return the trained models, keyed by their folder in a checkpoint."""
        return {"": self._policy} | ({} if self._critic is None else {"critic": self._critic})

    def _states(self) -> dict[str, TrainingState]:
        return {folder: TrainingState.of(trained, self._memory.read) for folder, trained in self._trained().items()}

    def _device_tensors(self) -> DeviceTensors:
        models = [trained.tensors() for trained in self._trained().values()]
        weights = [tensor for tensors in models for tensor in tensors.weights]
        for frozen in self._frozen.values():
            weights += [*frozen.causal.parameters(), *frozen.causal.buffers()]
        return DeviceTensors(weights, [tensor for tensors in models for tensor in tensors.state])

    def _named_weights(self) -> NamedWeights:
        adapted = self._config.lora is not None
        return NamedWeights(self._model.causal, adapted=adapted, read=self._memory.read)

    def _refuse_swapped(self, what: str) -> None:
        if self.is_swapped:
            raise RunFailedError(
                f"The model cannot be {what} while its parameters are swapped for others. Leave the `with "
                "backend.swapped(...)` first."
            )

    def _model_to_train(self, role: Role) -> TrainedModel:
        check_trained(role, has_critic=self._critic is not None)
        return self._policy if self._critic is None or role == "policy" else self._critic

    @contextmanager
    def _playing(self, role: Role) -> Iterator[StreamModel]:
        check_played(role, self._run.model)
        if role in ("policy", "critic"):
            yield self._model_to_train(role).model
        elif role not in self._run.model.frozen and self._config.lora is not None:
            from spurline_models.adapters.lora import adapters_off

            with adapters_off(self._model.causal):
                yield self._model
        else:
            if role not in self._frozen:
                self._frozen[role] = self._placement.load_frozen(role, self._policy)
            yield self._frozen[role]


def _write(path: Path, states: Mapping[str, TrainingState]) -> dict[str, FileDigest]:
    """Write each state into its folder, and return the files' digests, keyed by path."""
    return {
        f"{folder}/{name}".lstrip("/"): digest
        for folder, state in states.items()
        for name, digest in state.write(path / folder).items()
    }


def cut_rows(batch: TrainingBatch, config: LocalBackendConfig) -> list[Rows]:
    """Return the row numbers of each micro-batch, in increasing order. Rows of one unit (`unit_ids`) stay together."""
    tokens = (batch.tokens["segment_ids"] > 0).sum(1).numpy()
    rows = np.flatnonzero(tokens)
    if config.is_reproducible:
        # Each unit is a micro-batch.
        cost, limit = np.ones_like(tokens), 1
    elif config.rows_per_microbatch is not None:
        cost, limit = np.ones_like(tokens), config.rows_per_microbatch
    elif config.max_tokens_per_microbatch is not None:
        cost, limit = tokens, config.max_tokens_per_microbatch
    else:
        return [rows] if len(rows) else []
    units: dict[int, list[int]] = {}
    for row, unit in zip(rows.tolist(), batch.unit_ids.numpy()[rows].tolist(), strict=True):
        units.setdefault(unit, []).append(row)
    groups: list[list[int]] = []
    used = limit
    for members in units.values():
        size = int(cost[members].sum())
        if used + size > limit or not groups:
            groups.append([])
            used = 0
        groups[-1].extend(members)
        used += size
    # The rows of a unit may lie apart in the batch. Sort, so that each micro-batch keeps the order of the batch.
    return [np.sort(np.asarray(group, dtype=np.int64)) for group in groups]
