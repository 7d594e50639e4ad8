"""The local backend: one process trains the whole model, on CPU or one GPU.

Place on the way: mini-batch -> micro-batches -> streams -> logprobs -> loss -> gradients -> clipping -> AdamW. It is
the oracle that other backends are compared with. It knows no algorithm: the loss comes with each call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spurline.builtin.configs import LocalBackendConfig
from spurline.builtin.local.checkpoint import TrainingState, load_training_state, save_training_state
from spurline.builtin.local.config_checks import check_config
from spurline.builtin.local.device_profile import device_profile
from spurline.builtin.local.generation import generate_greedily, model_stop_tokens
from spurline.builtin.local.microbatches import Rows, TokenStream, cut_rows, token_stream
from spurline.builtin.local.model_loading import load_model
from spurline.builtin.local.optimizer import make_optimizer, set_learning_rate
from spurline.builtin.local.probe import check_exactness
from spurline.builtin.local.rng_state import seed_generators
from spurline.builtin.local.schedule import learning_rate
from spurline.builtin.local.step_sums import StepSums
from spurline.builtin.local.stream_model import ENTROPY, StreamModel, evaluation_mode
from spurline.builtin.local.weights import named_weights
from spurline.config.run_config import RunConfig
from spurline.data.batch import TrainingBatch
from spurline.data.tokenizer import load_tokenizer
from spurline.errors import DataError, ModelError, NonFiniteLossError, listing
from spurline.protocols.backend import LossSums, Role
from spurline.protocols.loss import Objective


class LocalBackend:
    """A `Backend` in this process; see the protocol for what each method promises."""

    def __init__(self, config: LocalBackendConfig, run: RunConfig, total_updates: int):
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._config = config
        self._run = run
        self._total_updates = total_updates
        self._updates = 0
        self._profile = device_profile(config)
        causal = load_model(run.model, self._profile, run.seed)
        self._length_limit = check_config(causal, run.model.path, run.data.max_length)
        if config.lora is not None:
            from spurline.builtin.local.lora import add_adapters

            add_adapters(causal, config.lora, run.seed)
        self._model = StreamModel(causal, config.logits_chunk_tokens)
        self._reference: StreamModel | None = None
        self._stop_tokens: list[int] | None = None
        if config.probe:
            check_exactness(self._model, self._profile, run.model.path)
        if config.activation_checkpointing:
            self._model.checkpoint_activations(self._profile.checkpoint_options())
        if config.compile:
            self._model.compile()
        self._parameters = {name: value for name, value in causal.named_parameters() if value.requires_grad}
        self._optimizer = make_optimizer(self._parameters, run.optimizer)
        self._state = TrainingState(causal, self._parameters, self._optimizer)
        # After loading, which draws or not depending on `init`: dropout depends on the seed alone.
        seed_generators(run.seed)

    def update(self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy") -> Mapping[str, float]:
        _check_trainable(role)
        started = time.perf_counter()
        sums = StepSums()
        try:
            self._accumulate_gradients(batch, objective, sums)
            norm = self._gradient_norm()
            # The only wait for the device in a step: loss, norm and all metrics come over together.
            (grad_norm,) = sums.fetch(norm)
            loss = sums.total("loss") / objective.normalizer
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise NonFiniteLossError(self._describe_failure(batch, sums, loss, grad_norm))
            differentiated = time.perf_counter()
            rate = self._take_step(norm, grad_norm)
            self._profile.synchronize()
        finally:
            self._drop_gradients()
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": rate,
            "tokens": float(batch.num_tokens),
            "loss_tokens": float(sums.tokens),
            **sums.metrics(),
            "time/forward_backward": differentiated - started,
            "time/optimizer": time.perf_counter() - differentiated,
        }

    def gradients(
        self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        _check_trainable(role)
        try:
            # Dropout as in the next update, without using it up.
            with self._profile.keeping_generators():
                self._accumulate_gradients(batch, objective, StepSums())
            result = [
                (name, torch.zeros_like(value, device="cpu") if value.grad is None else value.grad.cpu())
                for name, value in self._parameters.items()
            ]
        finally:
            self._drop_gradients()
        return iter(result)

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> LossSums:
        sums = StepSums()
        with evaluation_mode(self._model.causal), self._profile.computing():
            for rows, stream in self._streams(batch, objective.loss.needs):
                inputs = self._model.loss_inputs(stream, objective.loss.needs)
                sums.add(rows, stream, objective.loss.token_loss(inputs), {})
        sums.fetch()
        return LossSums(loss=sums.total("loss"), weight=sums.total("weight"), tokens=sums.tokens)

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        if role == "critic":
            raise ModelError("The local backend trains a policy and has no critic. Use an advantage without values.")
        result = torch.zeros(batch.num_rows * batch.length)
        positions: list[Tensor] = []
        values: list[Tensor] = []
        model = self._reference_model() if role == "reference" else self._model
        with self._role(role), evaluation_mode(model.causal), self._profile.computing():
            for _, stream in self._streams(batch, ()):
                positions.append(stream.batch_index)
                values.append(model.loss_inputs(stream, ()).logprobs)
        if values:
            result[torch.cat(positions)] = torch.cat(values).to("cpu", torch.float32)
        return batch.drop_padding_rows(result.view(batch.num_rows, batch.length))

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        if self._stop_tokens is None:
            self._stop_tokens = self._find_stop_tokens()
        with self._profile.computing():
            return generate_greedily(self._model.causal, prompts, max_new_tokens, self._stop_tokens)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self._model.causal, adapted=self._config.lora is not None)

    def facts(self) -> Mapping[str, int | str]:
        return {
            "parameters": sum(value.numel() for value in self._model.causal.parameters()),
            "trainable_parameters": sum(value.numel() for value in self._parameters.values()),
            "device": str(self._profile.device),
        }

    def save(self, path: Path) -> None:
        save_training_state(path, self._state, self._updates)

    def load(self, path: Path) -> None:
        self._updates = load_training_state(path, self._state)

    def close(self) -> None:
        for name in ("_model", "_reference", "_parameters", "_optimizer", "_state"):
            self.__dict__.pop(name, None)
        self._profile.release_cached_memory()

    def _accumulate_gradients(self, batch: TrainingBatch, objective: Objective, sums: StepSums) -> None:
        """Add the gradient of sum(weight * loss) / normalizer over all micro-batches to the parameters."""
        loss = objective.loss
        for rows, stream in self._streams(batch, loss.needs):
            with self._profile.computing():
                inputs = self._model.loss_inputs(stream, loss.needs)
                token_loss = loss.token_loss(inputs)
                with torch.no_grad():
                    metrics = loss.metrics(inputs)
                total = sums.add(rows, stream, token_loss, metrics)
            (total / objective.normalizer).backward()

    def _streams(self, batch: TrainingBatch, needs: frozenset[str] | tuple[()]) -> Iterator[tuple[Rows, TokenStream]]:
        columns = [name for name in needs if name != ENTROPY]
        missing = [name for name in columns if name not in batch.tokens]
        if missing:
            raise DataError(
                f"The loss needs {listing(missing)}, which this run's batches do not have. "
                "Choose another `loss`, or a `source` that provides it."
            )
        for rows in cut_rows(batch, self._config):
            stream = token_stream(batch, rows, columns, self._profile)
            if stream is not None:
                if self._length_limit is not None:
                    self._length_limit.check(stream.plan.max_length)
                yield rows, stream

    def _gradient_norm(self) -> Tensor:
        gradients = [value.grad for value in self._parameters.values() if value.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).to(self._profile.device)

    def _take_step(self, norm: Tensor, grad_norm: float) -> float:
        """Clip, and update the weights; returns the learning rate that was used."""
        limit = self._run.optimizer.max_grad_norm
        if limit is not None and grad_norm > limit:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), limit, norm)
        rate = learning_rate(
            self._updates + 1,
            peak=self._run.optimizer.learning_rate,
            total=self._total_updates,
            schedule=self._run.schedule,
        )
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._updates += 1
        return rate

    def _drop_gradients(self) -> None:
        for value in self._parameters.values():
            value.grad = None

    def _describe_failure(self, batch: TrainingBatch, sums: StepSums, loss: float, grad_norm: float) -> str:
        broken = [rows for rows, total in sums.losses_by_rows if not math.isfinite(total.item())]
        rows = np.concatenate(broken) if broken else np.arange(batch.num_rows)
        uids = list(dict.fromkeys(batch.segments["uid"].take(rows).values.tolist()))
        shown = ", ".join(str(uid) for uid in uids[:8]) + (f" and {len(uids) - 8} more" if len(uids) > 8 else "")
        return (
            f"Optimizer step {self._updates + 1}: loss is {loss}, gradient norm is {grad_norm}; the weights are "
            f"unchanged. Samples: {shown}. Lower optimizer.learning_rate or lengthen schedule.warmup_steps if the loss "
            "had been rising; otherwise look at these samples."
        )

    def _find_stop_tokens(self) -> list[int]:
        """The model's end-of-sequence ids and its tokenizer's, which chat models end their turns with."""
        found = model_stop_tokens(self._model.causal)
        try:
            eos = load_tokenizer(self._run.model).eos_token_id
        except ModelError:
            # Runs on pretokenized data need no tokenizer; the model's own ids are all there is then.
            return found
        return [*found, eos] if isinstance(eos, int) and eos not in found else found

    def _reference_model(self) -> StreamModel:
        """The model as it was before training: adapters off, or a frozen second copy of the initial weights."""
        if self._config.lora is not None:
            return self._model
        if self._reference is None:
            with self._profile.keeping_generators():
                causal = load_model(self._run.model, self._profile, self._run.seed)
            self._reference = StreamModel(causal.requires_grad_(False).eval(), self._config.logits_chunk_tokens)
        return self._reference

    @contextmanager
    def _role(self, role: Role) -> Iterator[None]:
        if role == "reference" and self._config.lora is not None:
            from spurline.builtin.local.lora import adapters_off

            with adapters_off(self._model.causal):
                yield
        else:
            yield


def _check_trainable(role: Role) -> None:
    if role != "policy":
        raise ModelError(
            f"The local backend trains the policy only, and was asked to train the {role}. Use a source and an "
            "advantage that need no other trained model, or a backend that trains one."
        )
