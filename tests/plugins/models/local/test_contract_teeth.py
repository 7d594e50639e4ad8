"""The contract suites catch the mistakes they were written for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.collators.packed import PackedCollator
from spurline.data.configs import PackedCollatorConfig, SerialPrefetchConfig
from spurline.data.serial_prefetch import SerialPrefetch
from spurline.errors import NonFiniteLossError
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline.testing import CollatorContract, PrefetchContract
from spurline_models.local.backend import LocalBackend
from spurline_models.local.trained_model import TrainedModel
from spurline_models.streams.stream_model import StreamModel
from spurline_models.testing.inputs import write_tiny_model
from spurline_rl.testing import AdapterContract, BackendContract
from spurline_rl.testing.backend_cases import assert_gradients_close, minibatch
from spurline_rl.testing.backend_runs import backend_run, opened


def test_the_collator_contract_catches_a_segment_off_the_alignment() -> None:
    class Unaligned(CollatorContract):
        def make_collator(self, pad_token_id: int, layout: ParallelLayout) -> PackedCollator:
            # Rows of an aligned length, but segments packed as if nothing had asked for alignment.
            return PackedCollator(PackedCollatorConfig(max_tokens=256, pad_to_max=True), pad_token_id, ParallelLayout())

    with pytest.raises(AssertionError, match=r"segment .* starts at"):
        Unaligned().test_segments_start_at_multiples_of_the_alignment()


class CopyingAhead:
    """Builds one step ahead on a thread and hands out copies in one buffer, which it fills again at once."""

    def __init__(self, build: Any, last_step: int) -> None:
        self._inner = SerialPrefetch(SerialPrefetchConfig(), build, last_step)
        self._build, self._last_step = build, last_step
        self._buffer: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None

    def start(self, step: int) -> None:
        self._inner.start(step)

    def next(self, step: int) -> TrainingBatch:
        batch = self._inner.next(step)
        self._buffer = {name: column.clone() for name, column in batch.tokens.items()}
        self._thread = threading.Thread(target=self._overwrite, args=(step + 1,))
        self._thread.start()
        return replace(batch, tokens=self._buffer)

    def _overwrite(self, step: int) -> None:
        if step <= self._last_step:
            for name, column in self._build(step).tokens.items():
                self._buffer[name].copy_(column)

    def metrics(self) -> dict[str, float]:
        return self._inner.metrics()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()


def test_the_prefetch_contract_catches_a_buffer_filled_again_before_its_release() -> None:
    class Reusing(PrefetchContract):
        def make_prefetch(self, build: Any, last_step: int) -> CopyingAhead:
            return CopyingAhead(build, last_step)

    with pytest.raises(AssertionError, match="changed before its release"):
        Reusing().test_a_served_batch_keeps_its_content_until_it_is_released()


def test_the_prefetch_contract_catches_a_release_before_the_loop_released_the_batch() -> None:
    class Early(SerialPrefetch):
        def next(self, step: int) -> TrainingBatch:
            batch = super().next(step)
            batch.release()
            self._build(step + 1)
            return batch

    class Releasing(PrefetchContract):
        def make_prefetch(self, build: Any, last_step: int) -> Early:
            return Early(SerialPrefetchConfig(), build, last_step)

    with pytest.raises(AssertionError, match="changed before its release"):
        Releasing().test_a_served_batch_keeps_its_content_until_it_is_released()


def test_the_prefetch_contract_catches_building_after_the_last_step() -> None:
    class Eager(SerialPrefetch):
        def start(self, step: int) -> None:
            super().start(step)
            self._build(step)

    class Overshooting(PrefetchContract):
        def make_prefetch(self, build: Any, last_step: int) -> Eager:
            return Eager(SerialPrefetchConfig(), build, last_step)

    with pytest.raises(AssertionError, match="after the last"):
        Overshooting().test_starting_after_the_last_step_builds_nothing_and_closes()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Local(BackendContract):
    backend_settings = {"name": "local", "device": "cpu"}


def test_the_backend_contract_catches_a_forgotten_temperature(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_inputs = StreamModel.loss_inputs

    def untempered(self: StreamModel, stream: Any, needs: Any, temperature: float = 1.0) -> Any:
        # Right where nothing is differentiated, and forgotten in the update.
        return loss_inputs(self, stream, needs, 1.0 if torch.is_grad_enabled() else temperature)

    monkeypatch.setattr(StreamModel, "loss_inputs", untempered)
    with pytest.raises(AssertionError):
        Local().test_a_temperature_divides_the_logits_before_their_softmax(tiny_model)


def test_the_backend_contract_catches_an_evaluation_that_draws_random_numbers(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = LocalBackend.evaluate

    def drawing(self: LocalBackend, *arguments: Any) -> Any:
        torch.rand(())
        return evaluate(self, *arguments)

    monkeypatch.setattr(LocalBackend, "evaluate", drawing)
    with pytest.raises(AssertionError):
        Local().test_an_update_is_bit_identical_after_an_evaluation(tiny_model, tmp_path)


def test_the_backend_contract_catches_parameters_that_do_not_come_back_bit_for_bit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = TrainedModel.swapped

    @contextmanager
    def rounding(self: TrainedModel, values: Any) -> Iterator[None]:
        with swapped(self, values):
            yield
        with torch.no_grad():
            for name in values:
                self.parameters[name].mul_(1 + 1e-6)

    monkeypatch.setattr(TrainedModel, "swapped", rounding)
    with pytest.raises(AssertionError):
        Local().test_swapped_parameters_are_computed_with_and_the_old_ones_come_back(tiny_model, tmp_path)


def test_the_backend_contract_catches_gradients_a_thousandth_too_large_under_a_loss_that_is_right(
    tiny_model: Path,
) -> None:
    class Scaled(Local):
        @contextmanager
        def backend(self, model: Path, *, critic: bool = False) -> Iterator[Any]:
            with super().backend(model, critic=critic) as (backend, layout):
                assert isinstance(backend, LocalBackend)
                for parameter in backend._policy.parameters.values():
                    parameter.register_hook(lambda gradient: gradient * 1.001)
                yield backend, layout

    with pytest.raises(AssertionError, match="grad_norm"):
        Scaled().test_loss_and_gradient_norm_follow_the_local_backend_over_several_steps(tiny_model)
    with pytest.raises(AssertionError, match="gradient of"):
        Scaled().test_gradients_equal_the_local_backend_per_parameter(tiny_model)


def test_the_backend_contract_catches_a_refused_step_that_counts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = LocalBackend.update

    def counting(self: LocalBackend, *arguments: Any, **named: Any) -> Any:
        try:
            return update(self, *arguments, **named)
        except NonFiniteLossError:
            self._policy.updates += 1
            raise

    monkeypatch.setattr(LocalBackend, "update", counting)
    with pytest.raises(AssertionError):
        Local().test_a_step_that_is_not_finite_names_its_samples_and_changes_nothing(tiny_model)


def test_the_backend_contract_catches_one_put_back_that_is_not_as_it_was(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LocalBackend.load

    def forgetful(self: LocalBackend, path: Path) -> None:
        load(self, path)
        self._policy.updates += 1

    monkeypatch.setattr(LocalBackend, "load", forgetful)
    with pytest.raises(AssertionError):
        Local().test_two_backends_train_alike_bit_for_bit_and_so_does_one_put_back_to_its_start(tiny_model, tmp_path)


def test_gradients_that_cancel_are_judged_by_their_rounding_and_all_others_by_themselves() -> None:
    # Rounding of float32 is 1.2e-7; the largest gradient is 2.
    large, small, cancelled = torch.tensor([2.0]), torch.tensor([1e-2]), torch.tensor([0.0])
    expected = {"large": large, "small": small, "cancelled": cancelled}
    assert_gradients_close(expected | {"cancelled": cancelled + 1e-6}, expected, 3e-6)
    for wrong in ({"cancelled": cancelled + 3e-6}, {"small": small + 3e-6}, {"large": large * 1.00001}):
        with pytest.raises(AssertionError, match=next(iter(wrong))):
            assert_gradients_close(expected | wrong, expected, 3e-6)
    double = {name: gradient.double() for name, gradient in expected.items()}
    with pytest.raises(AssertionError, match="cancelled"):
        assert_gradients_close(double | {"cancelled": cancelled + 1e-13}, double, 1e-10)


def test_the_backend_contract_takes_a_model_whose_output_layer_is_its_embedding(tmp_path: Path) -> None:
    tied = write_tiny_model(tmp_path, tie_word_embeddings=True)
    Local().test_weights_have_their_hugging_face_names_and_values(tied)
    Local().test_facts_count_the_parameters(tied)


class LocalAdapters(AdapterContract):
    backend_settings = {"name": "local", "device": "cpu", "probe": False, "lora": {"rank": 4, "alpha": 32.0}}


@pytest.fixture(scope="module")
def adapted(tiny_model: Path) -> Iterator[tuple[Backend, ParallelLayout]]:
    """A trained backend, as the contract makes one for its tests."""
    with opened(backend_run(tiny_model, LocalAdapters.backend_settings)) as (backend, layout):
        for step in range(2):
            backend.update(*minibatch("packed", layout, step))
        yield backend, layout


class Mistaken:
    """A backend with a mistake in its adapter's settings or tensors; everything else is that of another one."""

    def __init__(self, backend: Backend, settings: Mapping[str, Any], change: Callable[[str, Tensor], Any]) -> None:
        self._backend, self._settings, self._change = backend, settings, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def adapter_settings(self) -> Mapping[str, Any]:
        assert isinstance(self._backend, LocalBackend)
        return {**(self._backend.adapter_settings() or {}), **self._settings}

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(self._backend, LocalBackend)
        changed = (self._change(name, tensor) for name, tensor in self._backend.named_adapter_weights())
        return (item for item in changed if item is not None)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"lora_alpha": 31.0}, lambda name, tensor: (name, tensor)),
        ({}, lambda name, tensor: (name, tensor * 0.99 if "lora_B" in name else tensor)),
        ({}, lambda name, tensor: None if "layers.1.mlp.up_proj.lora_B" in name else (name, tensor)),
        ({}, lambda name, tensor: (name.replace("base_model.model.", ""), tensor)),
    ],
    ids=["scale", "values", "lost", "names"],
)
def test_the_adapter_contract_catches_an_adapter_that_is_not_the_one_in_use(
    adapted: tuple[Backend, ParallelLayout], tiny_model: Path, tmp_path: Path, settings: Any, change: Any
) -> None:
    trained: Any = Mistaken(adapted[0], settings, change), adapted[1]

    def check(of: tuple[Backend, ParallelLayout], folder: Path) -> None:
        folder.mkdir()
        suite = LocalAdapters()
        suite.test_settings_are_plain_and_make_peft_build_the_same_tensors(of, tiny_model)
        suite.test_peft_computes_with_the_adapter_what_the_backend_computes(of, tiny_model, folder)

    check(adapted, tmp_path / "right")
    with pytest.raises(AssertionError):
        check(trained, tmp_path / "wrong")
