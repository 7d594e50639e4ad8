"""One rank of the FSDP backend, with its parts of the models."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from spurline.digests import FileDigest
from spurline.files import private_folder
from spurline.protocols.backend import Role
from spurline.protocols.loss import ENTROPY, Objective
from spurline_fsdp_backend.mesh import make_meshes
from spurline_fsdp_backend.sharded_model import (
    ShardedStreamModel,
    build_frozen,
    build_trained,
    check_sharded,
    gathered,
    give_back,
    model_tensors,
)
from spurline_fsdp_backend.trained_model import SavedModel, ShardedTrainedModel, save
from spurline_models.abilities import check_generates, check_played
from spurline_models.accumulate import SumsPart, accumulate_gradients, evaluation_sums, logprobs_of
from spurline_models.adapters.adapter_weights import AdapterWeights
from spurline_models.architecture import model_of
from spurline_models.dealing import RankShare, Rows
from spurline_models.device_profile import seed_generators
from spurline_models.experts.router_balance import balance_coefficient
from spurline_models.frozen import naming_frozen
from spurline_models.generation import generate_greedily, stop_tokens
from spurline_models.loading import check_config
from spurline_models.losses.distributions import ReadsLogits
from spurline_models.optimizers.optimization import critic_optimization, policy_optimization
from spurline_models.streams.stream_model import StreamModel
from spurline_models.streams.token_stream import TokenStream, share_streams
from spurline_models.weights import NamedWeights
from spurline_ranks.group import Place
from spurline_ranks.messages import read_objective, read_run
from spurline_ranks.publishing import Publishing
from spurline_ranks.weight_gathering import WeightGathering, as_arrays
from spurline_ranks.weight_gathering import cast as cast_to
from spurline_ranks.worker import RankWorker, Wire


class FsdpRank(RankWorker):
    """The `RankWorker` of this backend."""

    _saved_model = SavedModel

    def __init__(self, place: Place, plain_run: Mapping[str, Any], total_updates: int) -> None:
        super().__init__(place, *read_run(plain_run), total_updates)
        if self._config.compile:
            # Ranks compile the same code at the same time. With a shared folder they would load half-written files.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_compile_cache(self._run.run_dir, place.local_rank))
        self._meshes = make_meshes(self._config, place)
        self._counts = self._config.counts(place.rank)

    def build(self) -> None:
        self._place.doing("loading the model")
        model = build_trained(self._run.model, self._config, self._meshes, self._run.seed)
        check_config(model.causal, self._run.model.path, self._run.data.max_length)
        wanted = self._run.model.router_aux_loss
        self._balance = None if wanted is None else balance_coefficient(self._run.model, model.causal)
        self._place.doing("checking that packed rows are exact for this model")
        asked = {"replays": self._run.source.facts.replays_experts, "balances": self._balance is not None}
        check_sharded(model, self._config, self._profile, self._run.model.path, **asked)
        exact, optimization = self._config.is_reproducible, policy_optimization(self._run, self._registry, self._total)
        self._policy = ShardedTrainedModel(model, optimization, reproducible=exact)
        gathers, adapted = _ShardGathering(model.causal, self._memory.read), self._config.lora is not None
        self._gatherings = {"model": WeightGathering(NamedWeights(model.causal, adapted=adapted), gathers)}
        if adapted:
            self._gatherings["adapter"] = WeightGathering(AdapterWeights(model.causal), gathers)
        # Engines get weights in the dtype of the forward pass.
        published = torch.bfloat16 if self._config.computes_in == "bf16" else torch.float32
        self.publishing = Publishing(self._place, self._gatherings, published)
        self._frozen: dict[Role, ShardedStreamModel] = {}
        if self._run.trained_critic is not None:
            critic = build_trained(self._run.model, self._config, self._meshes, self._run.seed, critic=True)
            critic.read_as(self._policy.model.reading)
            optimization = critic_optimization(self._run.trained_critic, self._registry)
            self._critic = ShardedTrainedModel(critic, optimization, reproducible=exact)

    def gradients(
        self, wire: Wire, plain_objective: Mapping[str, Any], role: Role
    ) -> list[tuple[str, NDArray[Any]]] | None:
        try:
            self._accumulate(role, RankShare.from_wire(wire), read_objective(plain_objective, self._registry))
            whole = [
                (name, _whole(torch.zeros_like(value) if value.grad is None else value.grad).detach())
                for name, value in self._trained[role].parameters.items()
            ]
        finally:
            self._drop_gradients(role)
        return as_arrays(whole) if self._place.rank == 0 else None

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue this rank's prompts with a whole copy of the model. See `Generates`."""
        check_generates(self._run.model)
        model = self._policy.model
        with gathered(model.causal, self._config), self._profile.computing():
            return generate_greedily(model, prompts, max_new_tokens, self._stop_tokens) if prompts else []

    def evaluate(self, wire: Wire, plain_objective: Mapping[str, Any]) -> SumsPart | None:
        objective = read_objective(plain_objective, self._registry)
        model, share = self._policy.model, RankShare.from_wire(wire)
        streams = self._streams(model, share, objective.loss.needs)
        part = evaluation_sums(model, streams, objective, self._profile, self._playing)
        give_back(model.causal)
        self._give_back_read(objective)
        return part if self._counts else None

    def logprobs(self, wire: Wire, role: Role, temperature: float) -> NDArray[np.float32] | None:
        share = RankShare.from_wire(wire)
        with self._playing(role) as model:
            result = logprobs_of(model, self._streams(model, share, ()), share.batch, temperature, self._profile)
            give_back(model.causal)
        return result.numpy() if self._counts else None

    def adapter_settings(self) -> dict[str, Any] | None:
        if self._config.lora is None:
            return None
        from spurline_models.adapters.lora import adapter_settings

        return adapter_settings(self._policy.model.causal, self._run.model)

    def facts(self) -> dict[str, int | str]:
        return {
            "parameters": sum(value.numel() for value in self._policy.model.causal.parameters()),
            "trainable_parameters": sum(value.numel() for value in self._policy.parameters.values()),
            "device": f"{self._place.world} x {self._profile.device.type}",
            **self._policy.model.facts(torch.bfloat16 if self._config.computes_in == "bf16" else torch.float32),
        }

    def _save(self, path: Path) -> Mapping[str, FileDigest]:
        layout = {name: getattr(self._config, name) for name in ("replicas", "context", "expert")}
        return save(path, self._trained, {"ranks": self._place.world, **layout}, self._memory.read)

    def _frozen_tensors(self) -> Sequence[Tensor]:
        return [tensor for frozen in self._frozen.values() for tensor in model_tensors(frozen.causal)]

    def _drop_gradients(self, role: Role) -> None:
        for value in self._trained[role].parameters.values():
            value.grad = None

    def _accumulate(self, role: Role, share: RankShare, objective: Objective) -> SumsPart:
        trained = self._trained[role]
        # Each step seeds dropout itself, so checkpoints need not hold the state of random generators.
        seed_generators(_seed(self._run.seed, role, trained.updates, self._place.rank))
        streams = self._streams(trained.model, share, objective.loss.needs)
        balance = None
        if self._balance is not None and role == "policy":
            balance = self._balance / share.num_sequences
        sums = accumulate_gradients(trained.model, streams, objective, self._profile, self._playing, balance=balance)
        self._give_back_read(objective)
        return sums.fetch()[0]

    def _give_back_read(self, objective: Objective) -> None:
        """Free the output layers whose logits the loss has read. They are gathered until the last backward pass."""
        roles = objective.loss.reads_logits if isinstance(objective.loss, ReadsLogits) else ()
        for role in self._frozen.keys() & set(roles):
            give_back(self._frozen[role].causal)

    def _streams(
        self, model: StreamModel, share: RankShare, needs: Collection[str]
    ) -> Iterator[tuple[Rows, TokenStream]]:
        """Yield the streams of this rank. All ranks have equally many streams. Some may be idle."""
        columns = [name for name in needs if name != ENTROPY]
        number = len(share.microbatches)
        for index, (rows, stream) in enumerate(share_streams(share, columns, self._profile), start=1):
            self._place.doing(f"micro-batch {index} of {number}")
            causal, is_last = cast(FSDPModule, model.causal), index == number
            # FSDP2 must know which backward pass is the last of a step.
            causal.set_is_last_backward(is_last)
            # Copies of the model sum their gradients once per step. With `cpu_offload` the sums of the first
            # micro-batches would stay on the device.
            causal.set_requires_all_reduce(is_last or self._config.cpu_offload)
            yield rows, stream.at_tokens() if model.reads_tokens else stream

    @contextmanager
    def _playing(self, role: Role) -> Iterator[StreamModel]:
        """Yield the model of this role, for forward passes."""
        model = self._run.model
        check_played(role, model)
        if role in self._trained:
            yield self._trained[role].model
        elif role not in model.frozen and self._config.lora is not None:
            from spurline_models.adapters.lora import adapters_off

            with adapters_off(self._policy.model.causal):
                yield self._policy.model
                # Free gathered weights before adapters are switched on again, because that marks parameters as trained.
                give_back(self._policy.model.causal)
        else:
            if role not in self._frozen:
                self._place.doing(f"loading the {role} model")
                with naming_frozen(model, role):
                    pin = partial(self._policy.pinned.check, role, model=model)
                    playing = model_of(model, role)
                    frozen = build_frozen(playing, self._config, self._meshes, self._run.seed, pin)
                    frozen.replays = role not in model.frozen
                    if role in model.frozen:
                        check_sharded(frozen, self._config, self._profile, playing.path)
                    else:
                        frozen.read_as(self._policy.model.reading)
                self._frozen[role] = frozen
            yield self._frozen[role]

    @cached_property
    def _stop_tokens(self) -> list[int]:
        return stop_tokens(self._policy.model.causal, self._run.model)


class _ShardGathering:
    """A `Gathers` for a sharded model. All ranks gather every tensor. Only ranks that want a tensor keep it.

    `read` returns the values of a tensor of the model. While engines have the device, the values are on the host.
    """

    def __init__(self, causal: PreTrainedModel, read: Callable[[Tensor], Tensor]) -> None:
        self._causal, self._read = causal, read

    def gather(self, wanted: Mapping[int, Sequence[str]], dtype: torch.dtype | None) -> dict[str, Tensor]:
        # Calling `state_dict` frees weights that a forward pass has gathered.
        state = self._causal.state_dict(keep_vars=True)
        mine = set(wanted.get(dist.get_rank(), ()))
        whole: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for names in wanted.values() for name in names):
            tensor = _whole(cast_to(self._read(state[name].detach()), dtype))
            if name in mine:
                whole[name] = tensor
        return whole

    def owner_of(self, names: Sequence[str]) -> int:
        # Any rank can be the owner, since all ranks gather all tensors.
        return 0


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _compile_cache(run_dir: Path, local_rank: int) -> Path:
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # The folder must be private, since this process runs the programs in it.
    default = Path(tempfile.gettempdir(), f"spurline-inductor-{os.getuid()}")
    run = hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]
    return (Path(chosen) if chosen else private_folder(default)) / f"{run}-rank-{local_rank}"


def _seed(seed: int, role: Role, updates: int, rank: int) -> int:
    digest = hashlib.sha256(f"{seed}/{role}/{updates}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
