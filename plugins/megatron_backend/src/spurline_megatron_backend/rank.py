"""One rank of the Megatron backend, with its parts of the models."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.digests import FileDigest
from spurline.plugins.registry import Registry
from spurline.protocols.backend import Role
from spurline.protocols.loss import ENTROPY, Objective, TokenLossInputs
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.checkpoint import SavedModel, save, weights_digest
from spurline_megatron_backend.core_attention import Rotary
from spurline_megatron_backend.gpt import Groups
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.loading import load_weights
from spurline_megatron_backend.model_building import COMPUTED, build_parts
from spurline_megatron_backend.parts import held_parameters, whole_shapes
from spurline_megatron_backend.probe import check_exactness
from spurline_megatron_backend.router_replay import router_choices
from spurline_megatron_backend.stages import StagedModel, Visit
from spurline_megatron_backend.trained_model import TrainedModel
from spurline_megatron_backend.weight_gathering import WeightsOfRanks
from spurline_models.abilities import check_played
from spurline_models.accumulate import StepSums, SumsPart, logprob_table
from spurline_models.architecture import build_without_memory, load_model_config, model_of
from spurline_models.dealing import RankShare, Rows
from spurline_models.experts.router_replay import ExpertLoads, no_routers
from spurline_models.frozen import naming_frozen
from spurline_models.losses.distributions import ReadsLogits
from spurline_models.optimizers.optimization import OptimizationRecipe, critic_optimization, policy_optimization
from spurline_models.streams.token_logprobs import LogitReading
from spurline_models.streams.token_stream import TokenStream, share_streams
from spurline_models.weights import NamedWeights, PinnedWeights
from spurline_ranks.group import Place
from spurline_ranks.messages import read_objective
from spurline_ranks.publishing import Publishing
from spurline_ranks.sequence_sharing import SequenceSharing
from spurline_ranks.weight_gathering import WeightGathering, as_arrays
from spurline_ranks.worker import RankWorker, Wire


class MegatronRank(RankWorker):
    """The `RankWorker` of this backend."""

    _saved_model = SavedModel

    def __init__(self, place: Place, run: RunConfig, registry: Registry, total_updates: int) -> None:
        super().__init__(place, run, registry, total_updates)
        # If `ranks` is not set, the config counts the visible GPUs. But a rank sees only its own GPU.
        grid = replace(self._config.grid, ranks=place.world)
        self._groups = _open_groups(grid, place.rank, run.seed)
        self._counts = grid.speaks(place.rank)

    def build(self) -> None:
        self._place.doing("loading the model")
        config = load_model_config(self._run.model)
        self._architecture = read_architecture(config, self._run.model.head)
        if self._run.source.facts.replays_experts and not self._architecture.num_experts:
            raise no_routers(self._run.model.path)
        self._rotary = self._rotary_of(config)
        self._sharing = SequenceSharing(self._groups.context, self._profile)
        self._policy = self._train(policy_optimization(self._run, self._registry, self._total))
        self._check(self._policy.model, self._architecture, self._run.model.path)
        self._frozen: dict[Role, StagedModel] = {}
        if self._run.trained_critic is not None:
            self._critic = self._train(critic_optimization(self._run.trained_critic, self._registry), critic=True)
        # Tensors get the names, shapes and dtypes that they have in the backend `local`.
        causal = build_without_memory(config, self._run.model)
        nn.Module.to(causal, torch.float32)
        named = NamedWeights(causal, adapted=False)
        grid, policy, read = self._groups.grid, self._policy, self._memory.read
        exact = WeightsOfRanks(self._architecture, grid, policy.exact(), read=read, prepare=policy.show_exact)
        self._gatherings = {"model": WeightGathering(named, exact)}
        # Engines get weights in the dtype of the forward pass.
        used = WeightsOfRanks(self._architecture, grid, policy.model.parameters(), read=read)
        published = {"model": WeightGathering(named, used)}
        self.publishing = Publishing(self._place, published, COMPUTED[self._config.computes_in])

    def gradients(
        self, wire: Wire, plain_objective: Mapping[str, Any], role: Role
    ) -> list[tuple[str, NDArray[Any]]] | None:
        trained, objective = self._trained[role], read_objective(plain_objective, self._registry)
        self._accumulate(role, RankShare.from_wire(wire), objective, whole_gradients=True)
        pairs = [(held, cast(Any, value).main_grad) for held, value in trained.model.parameters()]
        gathers = WeightsOfRanks(self._architecture, self._groups.grid, pairs, critic=role == "critic")
        whole = gathers.gather({0: gathers.names}, torch.float32)
        return as_arrays(whole.items()) if self._place.rank == 0 else None

    def evaluate(self, wire: Wire, plain_objective: Mapping[str, Any]) -> SumsPart | None:
        objective = read_objective(plain_objective, self._registry)
        sums, share = StepSums(), RankShare.from_wire(wire)
        self._train_or_evaluate(self._policy.model, share, partial(sums.add, objective=objective), objective)
        return sums.fetch()[0] if self._counts else None

    def logprobs(self, wire: Wire, role: Role, temperature: float) -> NDArray[np.float32] | None:
        share = RankShare.from_wire(wire)
        found: list[tuple[Tensor, Tensor]] = []

        def visit(rows: Rows, stream: TokenStream, inputs: TokenLossInputs) -> Tensor:
            if not stream.is_idle:
                found.append((stream.batch_index, inputs.logprobs))
            return inputs.logprobs.sum()

        with self._playing(role) as model:
            model.run(self._streams(share, ()), visit, (), temperature, doing=self._place.doing, backward=False)
        return logprob_table(found, share.batch).numpy() if self._counts else None

    def facts(self) -> dict[str, int | str]:
        count = sum(math.prod(shape) for shape in whole_shapes(self._architecture).values())
        return {
            "parameters": count,
            "trainable_parameters": count,
            "device": f"{self._place.world} x {self._profile.device.type}",
        }

    def _save(self, path: Path) -> Mapping[str, FileDigest]:
        return save(path, self._trained, self._groups.grid)

    def _frozen_tensors(self) -> Sequence[Tensor]:
        return [tensor for frozen in self._frozen.values() for tensor in frozen.tensors()]

    def _accumulate(
        self, role: Role, share: RankShare, objective: Objective, *, whole_gradients: bool = False
    ) -> SumsPart:
        trained = self._trained[role]
        loads = ExpertLoads()
        sums = StepSums(loads)

        def visit(rows: Rows, stream: TokenStream, inputs: TokenLossInputs) -> Tensor:
            return sums.add(rows, stream, inputs, objective) / objective.normalizer

        trained.begin()
        with trained.model.counting_experts(loads):
            self._train_or_evaluate(
                trained.model, share, visit, objective, backward=True, whole_gradients=whole_gradients
            )
        return sums.fetch()[0]

    def _train_or_evaluate(
        self,
        model: StagedModel,
        share: RankShare,
        visit: Visit,
        objective: Objective,
        *,
        backward: bool = False,
        whole_gradients: bool = False,
    ) -> None:
        loss, temperature = objective.loss, objective.temperature
        streams, doing = self._streams(share, loss.needs), self._place.doing
        with ExitStack() as used:
            readings: list[LogitReading] = []
            if isinstance(loss, ReadsLogits):
                # A pipeline runs one model at a time. The output layers of the others are used until the end.
                others = {
                    role: used.enter_context(self._playing(role)).states(streams, doing) for role in loss.reads_logits
                }
                readings = [
                    LogitReading(loss, {role: states[number] for role, states in others.items() if states})
                    for number in range(len(streams))
                ]
            model.run(
                streams,
                visit,
                loss.needs,
                temperature,
                doing=doing,
                backward=backward,
                whole_gradients=whole_gradients,
                readings=readings,
            )

    def _streams(self, share: RankShare, needs: Collection[str]) -> list[tuple[Rows, TokenStream]]:
        """Return the streams of this rank. All ranks have equally many streams. Some may be idle."""
        columns = [name for name in needs if name != ENTROPY]
        streams = list(share_streams(share, columns, self._profile))
        missing = self._groups.grid.rounded_up(len(streams)) - len(streams)
        nobody = np.zeros(0, np.int64)
        return [*streams, *[(nobody, TokenStream.idle(columns, self._profile))] * missing]

    def _train(self, recipe: OptimizationRecipe, *, critic: bool = False) -> TrainedModel:
        model, exact, digest = self._model(self._run.model, self._architecture, self._rotary, critic=critic)
        shapes = whole_shapes(self._architecture, critic=critic)
        return TrainedModel(
            model, recipe, shapes, self._groups.place.tensor, exact, PinnedWeights(digest), self._memory
        )

    def _model(
        self,
        model_config: ModelConfig,
        architecture: Architecture,
        rotary: Rotary,
        *,
        critic: bool = False,
        replays: bool = True,
    ) -> tuple[StagedModel, list[Tensor], str]:
        """Return a model with the weights from the files, these weights in fp32, and the digest of the fp32 weights."""
        groups = self._groups
        parts = build_parts(architecture, self._config, groups, critic=critic)
        choices = router_choices(parts, groups.tensor, replay=replays and not critic)
        held = held_parameters(architecture, groups.grid, groups.place, critic=critic)
        model = StagedModel(parts, held, groups.grid, self._sharing, rotary, choices, reads_tokens=architecture.scores)
        pairs = model.parameters()
        exact = [
            value.detach() if value.dtype == torch.float32 else torch.empty(value.shape, dtype=torch.float32)
            for _, value in pairs
        ]
        held_exact = [(entry, values) for (entry, _), values in zip(pairs, exact, strict=True)]
        load_weights(held_exact, model_config, architecture, self._run.seed, self._config.on, critic=critic)
        with torch.no_grad():
            for (_, parameter), values in zip(pairs, exact, strict=True):
                parameter.copy_(values)
        return model, exact, weights_digest(architecture, held_exact, self._profile.device, critic=critic)

    @contextmanager
    def _playing(self, role: Role) -> Iterator[StagedModel]:
        """Yield the model of this role, which is on the device, for forward passes."""
        check_played(role, self._run.model)
        if role in self._trained:
            yield self._trained[role].model
            return
        if role not in self._frozen:
            self._frozen[role] = self._load_frozen(role)
        model = self._frozen[role]
        try:
            model.to(self._profile.device)
            yield model
        finally:
            if self._config.frozen == "host":
                model.to(torch.device("cpu"))
                self._profile.release_cached_memory()

    def _load_frozen(self, role: Role) -> StagedModel:
        self._place.doing(f"loading the {role} model")
        settings, architecture, rotary = model_of(self._run.model, role), self._architecture, self._rotary
        with naming_frozen(self._run.model, role):
            if role in self._run.model.frozen:
                config = load_model_config(settings)
                architecture, rotary = read_architecture(config, settings.head), self._rotary_of(config)
            # A model of its own has other experts than the engine chose from.
            replays = role not in self._run.model.frozen
            model, _, found = self._model(settings, architecture, rotary, replays=replays)
            for _, parameter in model.parameters():
                parameter.requires_grad_(False)
            self._policy.pinned.check(role, found, self._run.model)
            if role in self._run.model.frozen:
                self._check(model, architecture, settings.path)
        return model

    def _rotary_of(self, config: PretrainedConfig) -> Rotary:
        return Rotary(config.get_text_config(), self._profile.device, COMPUTED[self._config.computes_in])

    def _check(self, model: StagedModel, architecture: Architecture, path: str) -> None:
        """Run the probe on a model, unless it is switched off. This is a collective."""
        if self._config.probe:
            check_exactness(
                model,
                architecture,
                self._groups.grid,
                self._profile,
                path,
                half_precision=self._config.computes_in == "bf16",
                doing=lambda what: self._place.doing(f"checking that packed rows are exact for {path}: {what}"),
            )


def _open_groups(grid: Grid, rank: int, seed: int) -> Groups:
    """Open the groups, and seed Megatron. This is a collective."""
    parallel_state.initialize_model_parallel(**grid.parallel_sizes, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(seed % 2**31)
    # Megatron's functions have no types.
    state: Any = parallel_state
    context = state.get_context_parallel_group() if grid.context > 1 else None
    return Groups(grid, grid.place(rank), state.get_tensor_model_parallel_group(), context)
