"""With `backend.sums: reproducible`, runs on any ranks, with any packing and micro-batches, train the same bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from every_run import SOAK
from megatron_layouts import write_llama3
from run_helpers import Config, KillableProcess, Trained, on_ranks, ppo_config, train, write_pairs
from safetensors.torch import load_file
from torch import Tensor

from spurline_models.local import trained_model
from spurline_ranks.pieces import Box, PieceIndex

pytestmark = pytest.mark.processes

PACKINGS: dict[str, Config] = {
    "packed": {"name": "packed", "max_tokens": 256},
    "padded": {"name": "padded"},
    "rollouts": {"name": "rollouts"},
    "rollouts on the right": {"name": "rollouts", "pad_side": "left", "pad_to_multiple_of": 16},
}
MICROBATCHES: tuple[Config, ...] = ({}, {"max_tokens_per_microbatch": 256}, {"max_tokens_per_microbatch": 90})
EVERY_RUN = {("sft", "qwen3"), ("dpo", "llama"), ("ppo", "qwen3")}
CASES = [
    pytest.param(case, marks=() if case in EVERY_RUN else pytest.mark.slow)
    for case in product(("sft", "dpo", "ppo"), ("qwen3", "llama"))
    if SOAK or case in EVERY_RUN
]


@pytest.fixture
def method_config(base_config: Config, tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    method, model = getattr(request, "param", ("sft", "qwen3"))
    packings = ("rollouts", "rollouts on the right") if method == "ppo" else ("packed", "padded")
    config = base_config | {"steps": 20 if SOAK else 5, "checkpoint": {}, "evaluation": {"every_steps": 5}}
    if model == "llama":
        config["model"] = {"path": str(write_llama3(tmp_path / "llama"))}
    if method == "sft":
        config["data"]["eval"] = config["data"]["train"]
        config["reduction"] = "sequence_mean"
    if method == "dpo":
        pairs, held_out = (write_pairs(tmp_path / f"{seed}.jsonl", 30, seed) for seed in (0, 1))
        config |= {"source": "preference", "data": {"train": str(pairs), "eval": str(held_out), "max_length": 64}}
    if method == "ppo":
        del config["evaluation"]
        config = ppo_config(config)
    return config | {"packings": packings}


def laid_out(config: Config, ranks: int | None, packing: str, microbatches: Config = MICROBATCHES[0]) -> Config:
    """Return the config for this number of ranks, or for the backend `local` if it is None."""
    settings = {"sums": "reproducible", **microbatches}
    config = config | {"collator": PACKINGS[packing]}
    if ranks is None:
        return config | {"backend": {**config["backend"], **settings}}
    return on_ranks(config, ranks, **settings)


def learned(run: Trained) -> tuple[list[Config], str]:
    """Return the metrics that do not describe the layout, and a hash of the weights of policy and critic."""
    lines = [
        {name: value for name, value in line.items() if not name.startswith(("packing/", "sync/"))}
        for line in run.without_times
    ]
    backend = sorted((run.run_dir / "checkpoints").glob("step-*"))[-1] / "backend"
    hashed = hashlib.sha256()
    for role in ("policy", "critic"):
        for name, value in sorted(weights_of(backend, role).items()):
            hashed.update(f"{role}/{name}".encode() + value.numpy().tobytes())
    return lines, hashed.hexdigest()


def weights_of(backend: Path, role: str) -> dict[str, Tensor]:
    """Read the weights of a role from a checkpoint of one process or of ranks."""
    if ((backend / role).exists() and role == "policy") or list((backend / role).glob("rank-*")):
        index = PieceIndex.of(backend / role)
        names = json.loads((backend / role / "state.json").read_text())["weights"]
        return {name: index.read(name, Box.whole(index.tensors[name].shape)) for name in names}
    file = backend / ("" if role == "policy" else role) / "model.safetensors"
    return load_file(file) if file.exists() else {}


@pytest.mark.parametrize("method_config", CASES, indirect=True)
def test_any_ranks_packing_and_microbatches_train_the_same_bits(method_config: Config) -> None:
    packings = method_config.pop("packings")
    layouts = list(product((None, 1, 2, 3, 4), packings)) if SOAK else [(None, packings[0]), (3, packings[1])]
    wanted: tuple[list[Config], str] | None = None
    for number, (ranks, packing) in enumerate(layouts):
        config = laid_out(method_config, ranks, packing, MICROBATCHES[number % 3])
        found = learned(train(config, name=str(number)))
        wanted = wanted or found
        for line, expected in zip(found[0], wanted[0], strict=True):
            assert line == expected, (ranks, packing)
        assert found[1] == wanted[1], (ranks, packing)


def test_a_killed_run_goes_on_with_fewer_ranks_as_if_nothing_had_happened(
    method_config: Config, killable_process: Callable[..., KillableProcess]
) -> None:
    del method_config["packings"]
    config = method_config | {"steps": 12 if SOAK else 6, "checkpoint": {"every_steps": 2}}
    whole = learned(train(laid_out(config, None, "padded"), name="whole"))
    for ranks in (4, 3) if SOAK else (2,):
        process = killable_process(laid_out(config, ranks, "packed"))
        process.wait_for_steps(3)
        process.kill()
    assert learned(train(laid_out(config, 1, "packed"))) == whole


class PlainSum:
    """A sum in fp32, which depends on the order."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, values: Tensor) -> None:
        self._sum = values.clone() if self._sum is None else self._sum + values

    def total(self) -> Tensor:
        assert self._sum is not None
        return self._sum


def test_sums_that_depend_on_the_order_do_not_pass(method_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    del method_config["packings"]
    monkeypatch.setattr(trained_model, "ExactSum", PlainSum)
    runs = (train(laid_out(method_config, None, packing), name=packing) for packing in ("packed", "padded"))
    one, other = map(learned, runs)
    assert one[1] != other[1]
    assert one[0][0]["loss"] == other[0][0]["loss"]
