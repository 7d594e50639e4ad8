"""What every backend must satisfy: it computes what core's local backend computes.

First the policy: updates, gradients, weights, checkpoints, evaluation. Then what reinforcement learning asks:
temperatures, and models in other roles than the policy's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spurline.config.loading import LoadedConfig, load_config
from spurline.config.run_config import CriticConfig
from spurline.data.batch import TrainingBatch
from spurline.data.collators.packed import PackedCollator
from spurline.data.collators.padded import PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.digests import verify_files
from spurline.errors import ModelError, SpurlineError
from spurline.losses.configs import CrossEntropyConfig, PpoConfig, ValueLossConfig
from spurline.losses.cross_entropy import CrossEntropy
from spurline.losses.ppo import Ppo
from spurline.losses.value import ValueLoss
from spurline.optimizers.configs import AdamWConfig
from spurline.protocols.backend import Backend, Generates, LendsModel, LendsParameters
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.testing.inputs import PAD, make_view
from spurline.update.configs import ByPromptConfig
from spurline.update.reduction import token_mean

GRADIENT_ROUNDINGS = 8
"""Roundings of the largest terms that a gradient whose terms cancel may keep."""

LENGTHS = (5, 17, 9, 30, 3, 12, 8, 21, 14, 6, 11, 2)
TEMPERATURE = 0.7


class BackendContract:
    """Subclass with `backend_settings`, the config's `backend:` section, and `plugins` to enable.

    gradient_tolerance, step_tolerance: largest relative difference from the local backend, of each parameter's gradient
    and of the loss and the gradient norm of a step.
    dropout: of the attention, where random numbers must be drawn; 0 for a backend that has no dropout.
    has_critic: whether it trains a critic; False for a backend that refuses one.
    """

    backend_settings: Mapping[str, Any] = {"name": "local"}
    plugins: tuple[str, ...] = ()
    gradient_tolerance = 1e-5
    step_tolerance = 1e-6
    dropout = 0.2
    has_critic = True

    @contextmanager
    def backend(self, model: Path, *, critic: bool = False) -> Iterator[tuple[Backend, ParallelLayout]]:
        """The backend under test on this model, closed afterwards. critic: whether the run has one."""
        with _opened(_run(model, self.backend_settings, self.plugins, critic)) as opened:
            yield opened

    @contextmanager
    def local(self, model: Path, *, critic: bool = False) -> Iterator[Backend]:
        """Core's local backend on the same model."""
        with _opened(_run(model, {"name": "core/local", "device": "cpu"}, self.plugins, critic)) as (backend, _):
            yield backend

    @pytest.fixture
    def tiny_model(self, spurline_tiny_model: Path) -> Path:
        """Folder of the tiny model; override for another architecture."""
        return spurline_tiny_model

    def test_loss_and_gradient_norm_follow_the_local_backend_over_several_steps(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            for step in range(4):
                got = backend.update(*minibatch("packed", layout, step))
                wanted = local.update(*minibatch("packed", layout, step))
                for name in ("loss", "grad_norm"):
                    assert got[name] == pytest.approx(wanted[name], rel=self.step_tolerance), (step, name)
                assert got["lr"] == wanted["lr"]

    def test_gradients_equal_the_local_backend_per_parameter(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = minibatch("packed", layout)
            wanted = local.gradients(batch, objective)
            assert_gradients_close(backend.gradients(batch, objective), wanted, self.gradient_tolerance)

    def test_a_wrong_gradient_scale_would_be_caught(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = minibatch("packed", layout)
            wrong = Objective(objective.loss, objective.normalizer * 1.001)
            wanted = local.gradients(batch, objective)
            with pytest.raises(AssertionError, match="gradient"):
                assert_gradients_close(backend.gradients(batch, wrong), wanted, self.gradient_tolerance)

    def test_packed_and_padded_rows_give_the_same_gradients(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            packed = dict(backend.gradients(*minibatch("packed", layout)))
            padded = backend.gradients(*minibatch("padded", layout))
            assert_gradients_close(padded, packed.items(), self.gradient_tolerance)

    @pytest.mark.parametrize("lengths", [(5, 9, 3, 12), LENGTHS], ids=["few", "many"])
    def test_rows_whose_units_alternate_give_the_gradients_of_the_uncut_batch(
        self, tiny_model: Path, lengths: tuple[int, ...]
    ) -> None:
        # The few fit into one micro-batch of 40 tokens, which then holds them in another order; the many need several.
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = minibatch("padded", layout, lengths=lengths)
            alternating = alternate_units(batch, layout)
            wanted = local.gradients(batch, objective)
            assert_gradients_close(backend.gradients(alternating, objective), wanted, self.gradient_tolerance)

    def test_gradients_leave_the_model_untouched(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            before = weights_of(backend)
            dict(backend.gradients(*minibatch("packed", layout)))
            assert_weights_equal(weights_of(backend), before)

    def test_saving_and_loading_continues_bit_for_bit(self, tiny_model: Path, tmp_path: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            backend.update(*minibatch("packed", layout, 0))
            (tmp_path / "saved").mkdir()
            digests = backend.save(tmp_path / "saved")
            verify_files(tmp_path / "saved", digests)
            expected = [without_times(backend.update(*minibatch("packed", layout, step))) for step in (1, 2)]
            weights = weights_of(backend)
        with self.backend(tiny_model) as (backend, layout):
            backend.load(tmp_path / "saved", digests)
            got = [without_times(backend.update(*minibatch("packed", layout, step))) for step in (1, 2)]
            assert got == expected
            assert_weights_equal(weights_of(backend), weights)

    def test_weights_have_their_hugging_face_names_and_values(self, tiny_model: Path) -> None:
        files = sorted(tiny_model.glob("*.safetensors"))
        expected = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
        with self.backend(tiny_model) as (backend, _):
            assert_weights_equal(weights_of(backend), expected)

    def test_logprobs_are_the_models_own_at_loss_positions(self, tiny_model: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        with self.backend(tiny_model) as (backend, layout), torch.no_grad():
            batch, _ = minibatch("padded", layout)
            logprobs = backend.logprobs(batch)
            assert logprobs.shape == batch.without_padding_rows().tokens["input_ids"].shape
            for row, (expected, weights) in zip(logprobs, _own_logprobs(model, batch), strict=True):
                got = row[1 : len(expected) + 1]
                torch.testing.assert_close(got[weights != 0], expected[weights != 0], atol=2e-5, rtol=1e-5)

    def test_facts_count_the_parameters(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, _):
            facts = backend.facts()
            assert facts["parameters"] == facts["trainable_parameters"]
            assert facts["parameters"] == sum(tensor.numel() for tensor in weights_of(backend).values())

    def test_evaluation_changes_nothing(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            before = weights_of(backend)
            batch, objective = minibatch("packed", layout)
            first, second = backend.evaluate(batch, objective), backend.evaluate(batch, objective)
            assert first == second
            assert first.tokens == batch.num_loss_tokens
            assert_weights_equal(weights_of(backend), before)

    def test_an_update_is_bit_identical_after_an_evaluation(self, tiny_model: Path, tmp_path: Path) -> None:
        model = with_dropout(tiny_model, tmp_path / "model", self.dropout)
        metrics: list[list[dict[str, float]]] = []
        for evaluated in (False, True):
            with self.backend(model) as (backend, layout):
                seen = [without_times(backend.update(*minibatch("packed", layout, 0)))]
                if evaluated:
                    backend.evaluate(*minibatch("padded", layout, 7))
                seen += [without_times(backend.update(*minibatch("packed", layout, step))) for step in (1, 2)]
            metrics.append(seen)
        assert metrics[1] == metrics[0], "evaluation drew random numbers, or left something behind"

    def test_it_generates_and_lends_its_model_where_its_config_says_so(self, tiny_model: Path) -> None:
        config = _run(tiny_model, self.backend_settings, self.plugins).config.backend
        with self.backend(tiny_model) as (backend, _):
            assert isinstance(backend, LendsModel) or not config.lends_model
            assert isinstance(backend, LendsParameters) or not config.lends_parameters
            assert isinstance(backend, Generates) or not config.generates
            if isinstance(backend, Generates) and config.generates:
                model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
                prompts = [[5, 6, 7, 8, 9], [11]]
                for prompt, answer in zip(prompts, backend.generate(prompts, max_new_tokens=4), strict=True):
                    logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
                    assert 1 <= len(answer) <= 4
                    assert answer == logits.argmax(-1).tolist(), "not the likeliest token each time"

    def test_swapped_parameters_are_computed_with_and_the_old_ones_come_back(
        self, tiny_model: Path, tmp_path: Path
    ) -> None:
        with self.backend(tiny_model) as (backend, layout):
            if not isinstance(backend, LendsParameters):
                pytest.skip("lends no parameters")
            batch, objective = minibatch("packed", layout)
            backend.update(batch, objective)
            earlier = {name: value.clone() for name, value in backend.trained_parameters().items()}
            wanted = weights_of(backend), backend.logprobs(batch)
            assert earlier.keys() == dict(backend.gradients(batch, objective)).keys()
            backend.update(*minibatch("packed", layout, 1))
            before = weights_of(backend), backend.logprobs(batch)
            assert not torch.equal(before[1], wanted[1])
            with backend.swapped("policy", earlier):
                assert backend.is_swapped
                assert_weights_equal(weights_of(backend), wanted[0])
                assert torch.equal(backend.logprobs(batch), wanted[1]), "the model computed with other values"
                for refused in (lambda: backend.update(batch, objective), lambda: backend.save(tmp_path)):
                    with pytest.raises(SpurlineError, match="swapped"):
                        refused()
            with pytest.raises(ZeroDivisionError), backend.swapped("policy", earlier):
                raise ZeroDivisionError
            for values in ({"no.such.weight": torch.zeros(1)}, {next(iter(earlier)): torch.zeros(1, 2, 3)}):
                with pytest.raises(ModelError), backend.swapped("policy", values):
                    pass
            with pytest.raises(ModelError):
                backend.trained_parameters("reference")
            assert not backend.is_swapped
            assert_weights_equal(weights_of(backend), before[0])
            assert torch.equal(backend.logprobs(batch), before[1])

    def test_a_temperature_divides_the_logits_before_their_softmax(self, tiny_model: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        with self.backend(tiny_model) as (backend, layout):
            batch, objective = minibatch("padded", layout)
            objective = Objective(objective.loss, objective.normalizer, TEMPERATURE)
            policy = backend.logprobs(batch, temperature=TEMPERATURE)
            reference = backend.logprobs(batch, "reference", temperature=TEMPERATURE)
            gradients = list(backend.gradients(batch, objective))
            updated = backend.update(batch, objective)
        total = torch.zeros(())
        for row, (expected, weights) in enumerate(_own_logprobs(model, batch, TEMPERATURE)):
            for got in (policy, reference):
                found = got[row, 1 : len(expected) + 1][weights != 0]
                torch.testing.assert_close(found, expected[weights != 0].detach(), atol=2e-5, rtol=1e-5)
            total = total - (weights * expected).sum()
        (total / objective.normalizer).backward()
        assert updated["loss"] == pytest.approx(total.item() / objective.normalizer, rel=1e-4)
        wanted = [(name, value.grad) for name, value in model.named_parameters() if value.grad is not None]
        assert_gradients_close(gradients, wanted, max(self.gradient_tolerance, 1e-5))

    def test_entropy_is_that_of_the_sampled_distribution(self, tiny_model: Path) -> None:
        loss = Ppo(PpoConfig(entropy_coefficient=0.1))
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch = _with_noisy_columns(minibatch("packed", layout)[0])
            objective = Objective(loss, 40.0, TEMPERATURE)
            wanted = local.gradients(batch, objective)
            assert_gradients_close(backend.gradients(batch, objective), wanted, self.gradient_tolerance)
            tempered, plain = backend.update(batch, objective), local.update(batch, Objective(loss, 40.0))
            assert tempered["policy/entropy"] < plain["policy/entropy"]

    def test_the_reference_is_the_model_before_training(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            batch, objective = minibatch("packed", layout)
            before = backend.logprobs(batch)
            for step in range(2):
                backend.update(*minibatch("packed", layout, step))
            trained = backend.logprobs(batch)
            torch.testing.assert_close(backend.logprobs(batch, "reference"), before, atol=1e-6, rtol=0)
            assert torch.equal(backend.logprobs(batch), trained), "asking the reference changed the policy"
            assert not torch.equal(trained, before)
            with pytest.raises(ModelError):
                backend.update(batch, objective, role="reference")

    def test_a_run_without_a_critic_has_none(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            batch, objective = minibatch("packed", layout)
            before = weights_of(backend)
            with pytest.raises(ModelError, match="critic"):
                backend.logprobs(batch, "critic")
            with pytest.raises(ModelError, match="critic"):
                backend.update(batch, objective, role="critic")
            assert_weights_equal(weights_of(backend), before)

    def test_a_critic_learns_as_that_of_the_local_backend_and_leaves_the_policy_alone(self, tiny_model: Path) -> None:
        if not self.has_critic:
            pytest.skip("trains no critic")
        with self.backend(tiny_model, critic=True) as (backend, layout), self.local(tiny_model, critic=True) as local:
            policy = weights_of(backend)
            assert bool((backend.logprobs(_values_batch(layout)[0], "critic") == 0).all()), "values start at 0"
            for step in range(4):
                batch, objective = _values_batch(layout, step)
                # The head starts at 0, so in the first step the decoder's gradients are 0 in both.
                wanted = dict(local.gradients(batch, objective, role="critic"))
                got = dict(backend.gradients(batch, objective, role="critic"))
                assert_gradients_close(got, wanted, max(self.gradient_tolerance, 1e-4 if step else 0))
                _assert_close_metrics(
                    backend.update(batch, objective, role="critic"), local.update(batch, objective, role="critic")
                )
            batch, _ = _values_batch(layout)
            values = backend.logprobs(batch, "critic")
            torch.testing.assert_close(values, local.logprobs(batch, "critic"), atol=1e-4, rtol=1e-3)
            assert bool((values[batch.without_padding_rows().tokens["loss_weights"] != 0] != 0).any())
            assert_weights_equal(weights_of(backend), policy)

    def test_saving_and_loading_continues_policy_and_critic_bit_for_bit(self, tiny_model: Path, tmp_path: Path) -> None:
        if not self.has_critic:
            pytest.skip("trains no critic")

        def train(backend: Backend, layout: ParallelLayout, step: int) -> list[dict[str, float]]:
            return [
                without_times(backend.update(*_values_batch(layout, step), role="critic")),
                without_times(backend.update(*minibatch("packed", layout, step))),
            ]

        with self.backend(tiny_model, critic=True) as (backend, layout):
            train(backend, layout, 0)
            (tmp_path / "saved").mkdir()
            digests = backend.save(tmp_path / "saved")
            expected = [train(backend, layout, step) for step in (1, 2)]
            values = backend.logprobs(_values_batch(layout)[0], "critic")
        with self.backend(tiny_model, critic=True) as (backend, layout):
            backend.load(tmp_path / "saved", digests)
            assert [train(backend, layout, step) for step in (1, 2)] == expected
            assert torch.equal(backend.logprobs(_values_batch(layout)[0], "critic"), values)


def assert_gradients_close(got: Any, wanted: Any, tolerance: float, *, cancels_below: float = 0.0) -> None:
    """Judge each parameter by the norm of the difference over the norm of the expected gradient.

    Takes (name, tensor) pairs. A gradient is a sum of terms up to the size of the model's largest gradient. Where they
    cancel (queries and keys of a token that attends to one token have no gradient), only their rounding errors are
    left, and these bound the difference instead. cancels_below: share of the largest gradient below which this is taken
    to be so, for random batches in which terms may nearly cancel.
    """
    left, right = dict(got), dict(wanted)
    assert left.keys() == right.keys()
    norms = {name: float(expected.double().norm()) for name, expected in right.items()}
    largest = max(norms.values())
    for name, expected in right.items():
        rounding = GRADIENT_ROUNDINGS * torch.finfo(expected.dtype).eps * largest
        cancels = norms[name] <= max(rounding, cancels_below * largest)
        bound = max(tolerance * norms[name], rounding if cancels else 0.0)
        difference = float((left[name].double() - expected.double()).norm())
        assert difference <= bound, f"gradient of {name}: differs by {difference:.3g}, its norm is {norms[name]:.3g}"


def assert_weights_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, same bits."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), f"weight {name} differs"


def weights_of(backend: Backend) -> dict[str, Tensor]:
    """A copy of the policy's weights."""
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.named_weights()}


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that two equal runs share."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@contextmanager
def _opened(loaded: LoadedConfig) -> Iterator[tuple[Backend, ParallelLayout]]:
    config, registry = loaded.config, loaded.host.registry
    backend: Backend = registry.create("backend", config.backend, run=config, registry=registry, total_updates=8)
    try:
        yield backend, loaded.config.backend.layout()
    finally:
        backend.close()


def _run(model: Path, backend: Mapping[str, Any], plugins: tuple[str, ...], critic: bool = False) -> LoadedConfig:
    """A run with this backend and no data."""
    loaded = load_config(
        {
            "plugins": list(plugins),
            "model": {"path": str(model)},
            "data": {"train": "unused.jsonl"},
            "steps": 8,
            "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
            "schedule": {"name": "linear", "warmup_steps": 2},
            "backend": dict(backend),
        }
    )
    if not critic:
        return loaded
    # Past the check that a source reads its values: no source is needed here.
    optimizer = AdamWConfig(learning_rate=1e-2)
    section = CriticConfig(loss=ValueLossConfig(), minibatches=ByPromptConfig(), optimizer=optimizer, warmup_steps=2)
    return replace(loaded, config=loaded.config.model_copy(update={"critic": section}))


def with_dropout(model: Path, folder: Path, dropout: float) -> Path:
    """A copy of the model that drops attention weights in training."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": dropout}), encoding="utf-8")
    return folder


def alternate_units(batch: TrainingBatch, layout: ParallelLayout) -> TrainingBatch:
    """Two units per rank, each with every other row of the rank; padding rows keep units of their own."""
    rows = torch.arange(batch.num_rows)
    units = 2 * (rows // (batch.num_rows // layout.data)) + rows % 2
    return replace(batch, unit_ids=torch.where(batch.is_padding_row, batch.num_rows * 2 + rows, units))


def minibatch(
    layout_name: str, layout: ParallelLayout, seed: int = 0, lengths: tuple[int, ...] = LENGTHS
) -> tuple[TrainingBatch, Objective]:
    """Random samples of these lengths, `packed` or `padded`, and the mean of their cross-entropy."""
    samples = make_view(lengths, seed)
    collator = (
        PackedCollator(PackedCollatorConfig(max_tokens=64), PAD, layout)
        if layout_name == "packed"
        else PaddedCollator(PaddedCollatorConfig(), PAD, layout)
    )
    batch = collator.collate(samples, training=True)
    batch, normalizer = token_mean(batch)
    return batch, Objective(CrossEntropy(CrossEntropyConfig()), normalizer)


def _own_logprobs(model: Any, batch: TrainingBatch, temperature: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Per real row of a padded batch: the model's logprobs of all tokens but the first, and their loss weights."""
    real = batch.without_padding_rows()
    for row in range(real.num_rows):
        count = int(real.segments["length"][row][0])
        tokens = real.tokens["input_ids"][row : row + 1, :count]
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1] / temperature
        # log softmax by its definition.
        logprobs = logits - logits.exp().sum(-1, keepdim=True).log()
        yield logprobs.gather(-1, tokens[0, 1:, None])[:, 0], real.tokens["loss_weights"][row, 1:count]


def _with_noisy_columns(batch: TrainingBatch) -> TrainingBatch:
    generator = torch.Generator().manual_seed(5)
    shape = (batch.num_rows, batch.length)
    return batch.with_tokens(
        advantages=torch.randn(shape, generator=generator), old_logprobs=-5 * torch.rand(shape, generator=generator)
    )


def _values_batch(layout: ParallelLayout, seed: int = 0) -> tuple[TrainingBatch, Objective]:
    """Random returns, and what a critic does with them."""
    batch, objective = minibatch("packed", layout, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (batch.num_rows, batch.length)
    columns = {"values": torch.zeros(shape), "returns": torch.randn(shape, generator=generator)}
    loss = ValueLoss(ValueLossConfig(clip=None))
    return batch.with_tokens(**columns), Objective(loss, objective.normalizer)


def _assert_close_metrics(got: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    assert got.keys() == wanted.keys()
    assert got["lr"] == wanted["lr"]
    for name in ("loss", "grad_norm", "value/predicted"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
