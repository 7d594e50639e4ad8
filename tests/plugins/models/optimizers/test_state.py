"""State of any optimizer by parameter name: what a checkpoint holds, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import local_backend, write_model_folder
from held_weights import train
from safetensors.torch import load_file, save_file
from torch.nn import Parameter

from spurline.errors import CheckpointError, CheckpointWriteError
from spurline_models.optimizers.configs import AdamWConfig, MuonConfig, SgdConfig
from spurline_models.optimizers.groups import parameter_groups
from spurline_models.optimizers.optimization import Optimization
from spurline_models.optimizers.state import OptimizerState


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Path:
    backend = local_backend(model)
    train(backend, range(2))
    backend.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_adamw_writes_its_moments_and_steps_by_parameter_name(saved: Path) -> None:
    tensors = load_file(saved / "optimizer.safetensors")
    assert {key.rpartition("/")[2] for key in tensors} == {"exp_avg", "exp_avg_sq", "step"}
    assert tensors["model.norm.weight/exp_avg"].shape == (32,)
    assert float(tensors["lm_head.weight/step"]) == 2.0


@pytest.mark.parametrize("config", [SgdConfig(), SgdConfig(momentum=0.9), MuonConfig()], ids=lambda config: config.name)
def test_every_optimizer_continues_bit_for_bit(model: Path, tmp_path: Path, config: Any) -> None:
    run = {"optimizer": config.model_copy(update={"learning_rate": 1e-2})}
    backend = local_backend(model, run=run)
    train(backend, range(3))
    backend.save(tmp_path / "saved")
    expected = train(backend, range(3, 6))
    resumed = local_backend(model, run=run)
    resumed.load(tmp_path / "saved")
    assert train(resumed, range(3, 6)) == expected
    weights = dict(backend.named_weights())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.named_weights())


def test_the_state_of_another_optimizer_is_refused_by_name(model: Path, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"saved: .*optimizer adamw, and this run has sgd"):
        local_backend(model, run={"optimizer": SgdConfig()}).load(saved)


MOMENT = "model.norm.weight/exp_avg"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda moment: {MOMENT: moment[:5].clone()}, r"damaged: .*exp_avg is \[5\] float32, and \[32\] float32 was"),
        (lambda moment: {MOMENT: moment.half()}, r"damaged: .*exp_avg is \[32\] float16, and \[32\] float32 was"),
        (lambda moment: {}, r"damaged: model\.norm\.weight/exp_avg is missing, and \[32\] float32 was saved"),
        (lambda moment: {"model.nrm.weight/exp_avg": moment}, r"model\.nrm\.weight/exp_avg does not fit this run's"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(
    model: Path, saved: Path, damage: Callable[[torch.Tensor], dict[str, torch.Tensor]], message: str
) -> None:
    tensors = load_file(saved / "optimizer.safetensors")
    tensors |= damage(tensors.pop(MOMENT))
    save_file(tensors, saved / "optimizer.safetensors")
    backend, other = local_backend(model), local_backend(model)
    with pytest.raises(CheckpointError, match=message):
        backend.load(saved)
    assert train(backend, range(2)) == train(other, range(2))


class Counting(torch.optim.Optimizer):
    """Keeps numbers, texts, a shared table and a count in its groups, as optimizers of several packages do."""

    def __init__(self, groups: Any) -> None:
        self._table = torch.arange(3.0)
        super().__init__(groups, {"seen": 0, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += 1
            group["scale"] *= 1 / 3
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(steps=0, mean=0.1, mode="first", nothing=None, table=self._table)
                state["steps"] += 1
                state["mean"] = state["mean"] / 3 + float(parameter.grad.mean())
                state["mode"] = "later"
                parameter -= group["lr"] * state["mean"] * group["seen"] * group["scale"] * state["table"].sum()


def parameters(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(4, 3, generator=generator)) for name in ("one", "two")}


def optimization(kind: Callable[[Any], Any], named: Mapping[str, Parameter]) -> Optimization:
    config = AdamWConfig(name="counting", learning_rate=0.1)
    return Optimization(config, kind(parameter_groups(config, named)), named, lambda step: 1.0)


def make_steps(running: Optimization, named: Mapping[str, Parameter], steps: range) -> None:
    for step in steps:
        for parameter in named.values():
            parameter.grad = parameter.detach() * (step + 1) / 7
        running.step(step)


def test_numbers_texts_and_what_changes_in_groups_are_restored_to_the_bit() -> None:
    named = parameters()
    running = optimization(Counting, named)
    make_steps(running, named, range(1, 4))
    state = running.state()
    facts = json.loads(json.dumps(state.facts()))
    again = OptimizerState.read({key: tensor.clone() for key, tensor in state.tensors.items()}, facts)
    resumed = {name: Parameter(value.detach().clone()) for name, value in named.items()}
    other = optimization(Counting, resumed)
    other.check(again)
    other.restore(again)
    assert facts["groups"] == [{"seen": 3, "scale": 1.0 * (1 / 3) * (1 / 3) * (1 / 3)}]
    make_steps(running, named, range(4, 7))
    make_steps(other, resumed, range(4, 7))
    assert all(torch.equal(resumed[name], value) for name, value in named.items())


def test_state_is_put_back_where_it_was_beside_the_parameter_or_on_the_host() -> None:
    named = {"one": Parameter(torch.empty(4, 3, device="meta"))}
    running = optimization(torch.optim.SGD, named)
    running.optimizer.state[named["one"]] = {"step": torch.tensor(2.0), "moment": torch.empty(4, 3, device="meta")}
    state = running.state()
    assert state.on_host == ("one/step",)
    other = {"one": Parameter(torch.empty(4, 3, device="meta"))}
    resumed = optimization(torch.optim.SGD, other)
    # What was read from a file lies on the host.
    resumed.restore(dataclasses.replace(state, tensors={**state.tensors, "one/moment": torch.zeros(4, 3)}))
    placed = {key: value.device.type for key, value in resumed.optimizer.state[other["one"]].items()}
    assert placed == {"step": "cpu", "moment": "meta"}


class Hoarding(Counting):
    """Keeps in `keeping` what no checkpoint can hold."""

    keeping: Callable[[Any], None]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        type(self).keeping(self)


def by_parameter(**state: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]].update(state)


class Packed(torch.Tensor):
    """A tensor whose values are not what its memory holds."""


@pytest.mark.parametrize(
    ("keeping", "message"),
    [
        (by_parameter(history=[torch.zeros(2)]), "optimizer 'counting' keeps `history` of one as list, which a check"),
        (by_parameter(packed=torch.zeros(2).as_subclass(Packed)), "keeps `packed` of one as Packed"),
        (by_parameter(**{"a/b": 1}), "state of one under the key 'a/b'"),
        (
            lambda optimizer: optimizer.state.update(all={"count": 1}),
            "keeps state that belongs to no parameter as dict",
        ),
        (lambda optimizer: optimizer.param_groups[0].update(history=(1, 2)), "`history` of a parameter group as tuple"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_with_the_optimizers_name(
    keeping: Callable[[Any], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hoarding, "keeping", keeping, raising=False)
    named = parameters()
    running = optimization(Hoarding, named)
    make_steps(running, named, range(1, 2))
    with pytest.raises(CheckpointWriteError, match=message):
        running.state()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
