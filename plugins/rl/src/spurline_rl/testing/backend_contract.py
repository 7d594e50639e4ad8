"""Check that a backend computes the same as the local backend.

The first tests check the policy: updates, gradients, weights, checkpoints and evaluation. Then come tests with uneven
batches. The last tests are for reinforcement learning: temperatures, and the reference model and the critic.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spurline.data.batch import MAY_BE_WIDE
from spurline.digests import verify_files
from spurline.errors import ModelError, NonFiniteLossError, RunFailedError, SpurlineError
from spurline.protocols.backend import Backend, LendsParameters, LossSums, TakesSnapshots
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline_models.abilities import Generates, LendsModel, YieldsDevice
from spurline_rl.losses.algorithms import Ppo
from spurline_rl.losses.configs import PpoConfig
from spurline_rl.testing.backend_cases import (
    TEMPERATURE,
    UNEVEN,
    assert_critics_close,
    assert_gradients_close,
    assert_weights_equal,
    minibatch,
    own_logprobs,
    tensors_of,
    uneven_batch,
    values_batch,
    weights_of,
    with_dropout,
    with_noisy_columns,
    with_support,
    without_times,
)
from spurline_rl.testing.backend_runs import KeptBackends, backend_run, opened

Opened = AbstractContextManager[tuple[Backend, ParallelLayout]]


class BackendContract:
    """A test suite: a subclass sets `backend_settings` (the config section `backend`) and the `plugins` to enable.

    Attributes:
        gradient_tolerance: Largest relative difference between a parameter's gradient and the local backend's gradient.
        step_tolerance: Largest relative difference of the loss and of the gradient norm of a step.
        metric_tolerance: Largest relative difference of the other metrics of a loss.
        dropout: Attention dropout in the tests. Set it to 0 for a backend that does not support dropout.
        has_critic: Whether the backend trains a critic.
        keeps_open: Whether the tests of the class share backends, one for each config. Their initial state is restored
            before each test. Set it for a backend that takes seconds to start.
    """

    backend_settings: Mapping[str, Any] = {"name": "local"}
    plugins: tuple[str, ...] = ()
    gradient_tolerance = 1e-5
    step_tolerance = 1e-6
    metric_tolerance = 1e-5
    dropout = 0.2
    has_critic = True
    keeps_open = False
    _kept: ClassVar[KeptBackends | None] = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _keeping_open(cls) -> Iterator[None]:
        cls._kept = KeptBackends() if cls.keeps_open else None
        yield
        if cls._kept is not None:
            cls._kept.close()
            cls._kept = None

    def backend(self, model: Path, *, critic: bool = False) -> Opened:
        """Open the backend under test with this model, or restore the initial state of the one that is shared."""
        run = backend_run(model, self.backend_settings, self.plugins, critic=critic)
        return opened(run) if self._kept is None else self._kept.lend(run)

    def new_backend(self, model: Path, *, critic: bool = False) -> Opened:
        """Open a backend for this test alone."""
        return opened(backend_run(model, self.backend_settings, self.plugins, critic=critic))

    @contextmanager
    def local(self, model: Path, *, critic: bool = False) -> Iterator[Backend]:
        """Open the local backend with the same model."""
        run = backend_run(model, {"name": "models/local", "device": "cpu"}, self.plugins, critic=critic)
        with opened(run) as (backend, _):
            yield backend

    @pytest.fixture
    def tiny_model(self, spurline_tiny_model: Path) -> Path:
        """Return the folder of the tiny model. Override this for another architecture."""
        return spurline_tiny_model

    @pytest.fixture
    def dropout_model(self, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the folder of the same model with dropout."""
        return with_dropout(tiny_model, tmp_path_factory.getbasetemp(), self.dropout)

    def test_loss_and_gradient_norm_follow_the_local_backend_over_several_steps(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            for step in range(4):
                got = backend.update(*minibatch("packed", layout, step))
                wanted = local.update(*minibatch("packed", layout, step))
                self.assert_same_step(got, wanted)

    def test_metrics_and_gradients_with_entropy_at_a_temperature_are_those_of_the_local_backend(
        self, tiny_model: Path
    ) -> None:
        loss = Ppo(PpoConfig(entropy_coefficient=0.1))
        objective = Objective(loss, 40.0, TEMPERATURE)
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch = with_noisy_columns(minibatch("packed", layout)[0])
            sums, plain = (local.evaluate(batch, each) for each in (objective, Objective(loss, 40.0)))
            assert sums.metrics["policy/entropy"] < plain.metrics["policy/entropy"]
            self.assert_same_sums(backend.evaluate(batch, objective), sums)
            for each in (batch, with_support(batch)):
                wanted = local.gradients(each, objective)
                assert_gradients_close(backend.gradients(each, objective), wanted, self.gradient_tolerance)
            got, wanted = backend.update(batch, objective), local.update(batch, objective)
            assert got.keys() == wanted.keys()
            assert len([name for name in got if name.startswith("policy/")]) > 3
            for name, value in without_times(wanted).items():
                assert got[name] == pytest.approx(value, rel=self.metric_tolerance, abs=self.metric_tolerance), name

    def test_gradients_equal_the_local_backend_per_parameter_and_change_nothing(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            before = weights_of(backend)
            for batch, objective in (minibatch("packed", layout), minibatch("padded", layout)):
                wanted = local.gradients(batch, objective)
                assert_gradients_close(backend.gradients(batch, objective), wanted, self.gradient_tolerance)
            assert_weights_equal(weights_of(backend), before)

    def test_a_wrong_gradient_scale_would_be_caught(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = minibatch("packed", layout)
            wrong = Objective(objective.loss, objective.normalizer * 1.001)
            wanted = local.gradients(batch, objective)
            with pytest.raises(AssertionError, match="gradient"):
                assert_gradients_close(backend.gradients(batch, wrong), wanted, self.gradient_tolerance)

    def test_ids_and_positions_that_are_narrow_or_wide_on_the_host_give_the_same_bits(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            batch, objective = minibatch("packed", layout)
            narrow, wide = (
                batch.with_tokens(**{name: batch.tokens[name].to(dtype) for name in MAY_BE_WIDE})
                for dtype in (torch.int32, torch.int64)
            )
            assert torch.equal(backend.logprobs(narrow), backend.logprobs(wide))
            expected = {name: value.clone() for name, value in backend.gradients(narrow, objective)}
            assert_weights_equal(dict(backend.gradients(wide, objective)), expected)

    @pytest.mark.parametrize("critic", [False, True], ids=["policy", "and_critic"])
    def test_backends_train_alike_and_continue_from_a_checkpoint_bit_for_bit(
        self, dropout_model: Path, tmp_path: Path, critic: bool
    ) -> None:
        if critic and not self.has_critic:
            pytest.skip("trains no critic")

        def train(backend: Backend, layout: ParallelLayout, step: int) -> list[object]:
            seen: list[object] = [without_times(backend.update(*minibatch("packed", layout, step)))]
            if critic:
                seen.append(without_times(backend.update(*values_batch(layout, step), role="critic")))
                seen.append(backend.logprobs(values_batch(layout)[0], "critic").tolist())
            return seen

        start, saved = tmp_path / "0", tmp_path / "1"
        start.mkdir()
        saved.mkdir()
        with self.backend(dropout_model, critic=critic) as (backend, layout):
            backend.save(start)
            first = train(backend, layout, 0)
            digests = backend.save(saved)
            verify_files(saved, digests)
            expected = [train(backend, layout, step) for step in (1, 2)]
            weights = weights_of(backend)
            backend.load(start)
            assert train(backend, layout, 0) == first
        with self.new_backend(dropout_model, critic=critic) as (backend, layout):
            assert train(backend, layout, 0) == first
            backend.load(saved, digests)
            assert [train(backend, layout, step) for step in (1, 2)] == expected
            assert_weights_equal(weights_of(backend), weights)

    def test_a_snapshot_that_is_written_later_is_what_was_saved_at_its_moment(
        self, tiny_model: Path, tmp_path: Path
    ) -> None:
        with self.backend(tiny_model) as (backend, layout):
            if not isinstance(backend, TakesSnapshots):
                pytest.skip("takes no snapshots")
            for step in (0, 2):
                saved, written = tmp_path / f"saved-{step}", tmp_path / f"written-{step}"
                for folder in (saved, written):
                    folder.mkdir()
                backend.update(*minibatch("packed", layout, step))
                digests = backend.save(saved)
                write = backend.snapshot()
                backend.update(*minibatch("packed", layout, step + 1))
                assert write(written) == digests
                verify_files(written, digests)

    def test_a_step_that_is_not_finite_names_its_samples_and_changes_nothing(self, tiny_model: Path) -> None:
        lengths = (5, 9, 3, 12)
        objective = Objective(Ppo(PpoConfig()), 40.0)
        after: list[tuple[list[dict[str, float]], dict[str, Tensor]]] = []
        for broken in (False, True):
            with self.backend(tiny_model) as (backend, layout):
                backend.update(*minibatch("packed", layout, 0))
                if broken:
                    batch = with_noisy_columns(minibatch("padded", layout, 1, lengths)[0])
                    row = int(torch.nonzero(batch.tokens["loss_weights"].sum(-1))[-1])
                    batch.tokens["advantages"][row] = torch.nan
                    with pytest.raises(NonFiniteLossError, match=str(batch.segments["uid"][row][0])):
                        backend.update(batch, objective)
                metrics = [without_times(backend.update(*minibatch("packed", layout, step))) for step in (1, 2)]
                after.append((metrics, weights_of(backend)))
        assert after[1][0] == after[0][0]
        assert_weights_equal(after[1][1], after[0][1])

    def test_weights_have_their_hugging_face_names_and_values(self, tiny_model: Path) -> None:
        files = sorted(tiny_model.glob("*.safetensors"))
        expected = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
        with self.backend(tiny_model) as (backend, _):
            names = Counter(name for name, _ in backend.named_weights())
            assert names.most_common(1)[0][1] == 1, "two weights have the same name"
            assert_weights_equal(weights_of(backend), expected)

    def test_facts_count_the_parameters(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, _):
            facts = backend.facts()
            assert facts["parameters"] == facts["trainable_parameters"]
            assert facts["parameters"] == sum(tensor.numel() for tensor in weights_of(backend).values())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_written_weights_are_the_named_ones_in_files_of_limited_size(
        self, tiny_model: Path, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        limit = 20_000
        with self.backend(tiny_model) as (backend, layout):
            backend.update(*minibatch("packed", layout))
            backend.write_weights(tmp_path, dtype, limit)
            expected = {name: tensor.to(dtype) for name, tensor in weights_of(backend).items()}
        files = {file: load_file(file) for file in tmp_path.glob("*.safetensors")}
        assert len(files) > 1
        for file, tensors in files.items():
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit, file.name
        assert_weights_equal({name: tensor for tensors in files.values() for name, tensor in tensors.items()}, expected)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
        assert index == {name: file.name for file, tensors in files.items() for name in tensors}

    @pytest.mark.parametrize("name", UNEVEN)
    def test_uneven_work_gives_what_the_local_backend_gives(self, tiny_model: Path, name: str) -> None:
        # If ranks called different collectives, they would wait for each other until the test's time limit.
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = uneven_batch(name, layout)
            wanted = local.gradients(batch, objective)
            assert_gradients_close(backend.gradients(batch, objective), wanted, self.gradient_tolerance)
            self.assert_same_sums(backend.evaluate(batch, objective), local.evaluate(batch, objective))
            got, expected = backend.logprobs(batch), local.logprobs(batch)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
            self.assert_same_step(backend.update(batch, objective), local.update(batch, objective))

    def test_an_evaluation_changes_nothing_and_the_next_update_is_bit_identical(self, dropout_model: Path) -> None:
        metrics: list[list[dict[str, float]]] = []
        for evaluated in (False, True):
            with self.backend(dropout_model) as (backend, layout):
                seen = [without_times(backend.update(*minibatch("packed", layout, 0)))]
                if evaluated:
                    before, (batch, objective) = weights_of(backend), minibatch("padded", layout, 7)
                    sums = backend.evaluate(batch, objective)
                    assert backend.evaluate(batch, objective) == sums
                    assert sums.tokens == batch.num_loss_tokens
                    assert_weights_equal(weights_of(backend), before)
                seen += [without_times(backend.update(*minibatch("packed", layout, step))) for step in (1, 2)]
            metrics.append(seen)
        assert metrics[1] == metrics[0], "evaluation changed the random state or another state"

    def test_it_generates_and_lends_its_model_where_its_config_says_so(self, tiny_model: Path) -> None:
        facts = backend_run(tiny_model, self.backend_settings, self.plugins).config.backend.facts
        with self.backend(tiny_model) as (backend, _):
            assert isinstance(backend, LendsModel) or not facts.lends_model
            assert isinstance(backend, LendsParameters) or not facts.lends_parameters
            assert isinstance(backend, Generates) or not facts.generates
            if isinstance(backend, Generates) and facts.generates:
                model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
                prompts = [[5, 6, 7, 8, 9], [11]]
                for prompt, answer in zip(prompts, backend.generate(prompts, max_new_tokens=4), strict=True):
                    logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
                    assert 1 <= len(answer) <= 4
                    assert answer == logits.argmax(-1).tolist(), "a token is not the most likely one"

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
            assert policy.shape == batch.without_padding_rows().tokens["input_ids"].shape
            gradients = list(backend.gradients(batch, objective))
            updated = backend.update(batch, objective)
        total = torch.zeros(())
        for row, (expected, weights) in enumerate(own_logprobs(model, batch, TEMPERATURE)):
            for got in (policy, reference):
                found = got[row, 1 : len(expected) + 1][weights != 0]
                torch.testing.assert_close(found, expected[weights != 0].detach(), atol=2e-5, rtol=1e-5)
            total = total - (weights * expected).sum()
        (total / objective.normalizer).backward()
        assert updated["loss"] == pytest.approx(total.item() / objective.normalizer, rel=1e-4)
        wanted = [(name, value.grad) for name, value in model.named_parameters() if value.grad is not None]
        assert_gradients_close(gradients, wanted, max(self.gradient_tolerance, 1e-5))

    def test_the_reference_is_the_model_before_training_and_without_a_critic_there_is_none(
        self, tiny_model: Path
    ) -> None:
        with self.new_backend(tiny_model) as (backend, layout):
            batch, objective = minibatch("packed", layout)
            before = backend.logprobs(batch)
            for step in range(2):
                backend.update(*minibatch("packed", layout, step))
            trained = backend.logprobs(batch)
            torch.testing.assert_close(backend.logprobs(batch, "reference"), before, atol=1e-6, rtol=0)
            assert torch.equal(backend.logprobs(batch), trained), "computing with the reference changed the policy"
            assert not torch.equal(trained, before)
            with pytest.raises(ModelError):
                backend.update(batch, objective, role="reference")
            with pytest.raises(ModelError, match="critic"):
                backend.logprobs(batch, "critic")
            with pytest.raises(ModelError, match="critic"):
                backend.update(batch, objective, role="critic")
            assert torch.equal(backend.logprobs(batch), trained)

    def test_a_critic_learns_as_that_of_the_local_backend_and_leaves_the_policy_alone(self, tiny_model: Path) -> None:
        if not self.has_critic:
            pytest.skip("trains no critic")
        with self.backend(tiny_model, critic=True) as (backend, layout), self.local(tiny_model, critic=True) as local:
            policy = weights_of(backend)
            assert bool((backend.logprobs(values_batch(layout)[0], "critic") == 0).all()), "values start at 0"
            for step in range(4):
                batch, objective = values_batch(layout, step)
                # The critic's head starts at 0, so the other gradients are 0 in the first step.
                wanted = dict(local.gradients(batch, objective, role="critic"))
                got = dict(backend.gradients(batch, objective, role="critic"))
                assert_gradients_close(got, wanted, max(self.gradient_tolerance, 1e-4 if step else 0))
                assert_critics_close(
                    backend.update(batch, objective, role="critic"), local.update(batch, objective, role="critic")
                )
            batch, _ = values_batch(layout)
            values = backend.logprobs(batch, "critic")
            torch.testing.assert_close(values, local.logprobs(batch, "critic"), atol=1e-4, rtol=1e-3)
            assert bool((values[batch.without_padding_rows().tokens["loss_weights"] != 0] != 0).any())
            assert_weights_equal(weights_of(backend), policy)

    def test_an_update_is_bit_identical_after_the_device_was_given_away_and_taken_back(
        self, dropout_model: Path
    ) -> None:
        seen: list[list[object]] = []
        for gives in (False, True):
            with self.backend(dropout_model, critic=self.has_critic) as (backend, layout):
                if not isinstance(backend, YieldsDevice):
                    pytest.skip("cannot give its device away")
                batch, _ = minibatch("padded", layout, 7)
                # When the device is given away for the first time, there is no optimizer state and no reference yet.
                steps: list[object] = []
                for step, keep_weights in enumerate((False, True, False, True)):
                    if gives:
                        backend.yield_device(keep_weights=keep_weights)
                        if keep_weights:
                            # In a run, an engine would now have the weights, and would need the memory of this copy.
                            backend.yield_device(keep_weights=False)
                        backend.take_device()
                    steps.append(without_times(backend.update(*minibatch("packed", layout, step))))
                    if self.has_critic:
                        steps.append(without_times(backend.update(*values_batch(layout, step), role="critic")))
                        steps.append(backend.logprobs(batch, "critic").tolist())
                    steps.append(backend.logprobs(batch, "reference").tolist())
                steps.append({name: value.tolist() for name, value in weights_of(backend).items()})
            seen.append(steps)
        assert seen[1] == seen[0]

    @pytest.mark.parametrize("keep_weights", [False, True], ids=["all", "but_weights"])
    def test_weights_and_checkpoints_are_the_same_while_others_have_the_device(
        self, tiny_model: Path, tmp_path: Path, keep_weights: bool
    ) -> None:
        with self.backend(tiny_model) as (backend, layout):
            if not isinstance(backend, YieldsDevice):
                pytest.skip("cannot give its device away")
            batch, objective = minibatch("packed", layout)
            backend.update(batch, objective)
            backend.logprobs(batch, "reference")

            def write(folder: Path) -> tuple[dict[str, Tensor], Any]:
                (folder / "saved").mkdir(parents=True)
                digests = backend.save(folder / "saved")
                backend.write_weights(folder, torch.float32, 1 << 30)
                return weights_of(backend) | tensors_of(folder), (backend.facts(), digests)

            here, facts = write(tmp_path / "here")
            backend.yield_device(keep_weights=keep_weights)
            away, (facts_away, digests) = write(tmp_path / "away")
            assert facts_away == facts[0]
            assert_weights_equal(away, here)
            for what, call in {
                "trained": lambda: backend.update(batch, objective),
                "gradients": lambda: backend.gradients(batch, objective),
                "evaluated": lambda: backend.evaluate(batch, objective),
                "logprobs": lambda: backend.logprobs(batch),
                "loaded": lambda: backend.load(tmp_path / "here" / "saved"),
            }.items():
                with pytest.raises(RunFailedError, match=f"{what}.* engines have the memory of its device"):
                    call()
            backend.take_device()
            weights = weights_of(backend)
            assert_weights_equal(weights, {name: here[name] for name in weights})
            expected = without_times(backend.update(*minibatch("packed", layout, 1)))
            backend.load(tmp_path / "away" / "saved", digests)
            assert without_times(backend.update(*minibatch("packed", layout, 1))) == expected

    def assert_same_step(self, got: Mapping[str, float], wanted: Mapping[str, float]) -> None:
        """Compare loss, gradient norm and learning rate of one update."""
        for name in ("loss", "grad_norm"):
            assert got[name] == pytest.approx(wanted[name], rel=self.step_tolerance), name
        assert got["lr"] == wanted["lr"]

    def assert_same_sums(self, got: LossSums, wanted: LossSums) -> None:
        """Compare two evaluations of one batch."""
        assert (got.tokens, got.metrics.keys()) == (wanted.tokens, wanted.metrics.keys())
        assert got.weight == pytest.approx(wanted.weight, rel=1e-6)
        assert got.loss == pytest.approx(wanted.loss, rel=self.step_tolerance)
        for name, value in wanted.metrics.items():
            assert got.metrics[name] == pytest.approx(value, rel=self.metric_tolerance, abs=self.metric_tolerance), name
