"""What some ranks saved, any others continue, divided in any way; and nothing is taken over that is not whole."""

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
from checkpoint_cases import ONE, Saved, assert_continues, flip, save_after_a_step, train, truncate
from fsdp_layouts import on
from safetensors.torch import load_file

from spurline.config.loading import LoadedConfig
from spurline.digests import digest_file
from spurline.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError, RunFailedError
from spurline.protocols.backend import Backend
from spurline.protocols.optimizer import OptimizerConfig
from spurline_fsdp_backend.checkpoint import SavedModel
from spurline_models.optimizers.configs import MuonConfig, SgdConfig
from spurline_models.testing import write_tiny_model, write_tiny_moe_model
from spurline_ranks.launch import open_ranks
from spurline_ranks.messages import plain_run
from spurline_rl.testing.backend_cases import minibatch, weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes


@contextmanager
def backend_of(model: Path, critic: bool = False, **settings: Any) -> Iterator[Backend]:
    run = backend_run(model, on(**settings), ("fsdp_backend",), critic=critic)
    with opened(run) as (backend, _):
        yield backend


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def two_ranks(tiny: Path) -> Iterator[Backend]:
    """Lent to a test after the other; each loads what it needs."""
    with backend_of(tiny, critic=True, ranks=2) as backend:
        yield backend


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny: Path, two_ranks: Backend) -> Saved:
    return save_after_a_step(tmp_path_factory.mktemp("checkpoint"), tiny, two_ranks, critic=True)


def test_the_same_ranks_continue_bit_for_bit(two_ranks: Backend, saved: Saved) -> None:
    assert_continues(two_ranks, saved, tolerance=0)


@pytest.mark.parametrize(
    "layout",
    [
        {"ranks": 1},
        {"ranks": 3},
        pytest.param({"ranks": 4}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "context": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_layouts_continue_with_equal_weights(saved: Saved, layout: dict[str, int]) -> None:
    with backend_of(saved.model, critic=True, **layout) as backend:
        assert_continues(backend, saved, tolerance=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("origin", [{"ranks": 1}, {"ranks": 3}, {"ranks": 4, "replicas": 2}], ids=str)
def test_two_ranks_continue_what_other_layouts_saved(
    tmp_path: Path, tiny: Path, two_ranks: Backend, origin: dict[str, int]
) -> None:
    with backend_of(tiny, critic=True, **origin) as backend:
        saved = save_after_a_step(tmp_path, tiny, backend, critic=True)
    assert_continues(two_ranks, saved, tolerance=1e-7)


def test_two_replicas_continue_and_one_of_them_writes(saved: Saved, tmp_path: Path) -> None:
    with backend_of(saved.model, critic=True, ranks=4, replicas=2) as backend:
        assert_continues(backend, saved, tolerance=1e-7)
        digests = backend.save(tmp_path)
        names = [f"{role}/rank-0000{rank}.part-000.safetensors" for role in ("critic", "policy") for rank in range(2)]
        assert sorted(digests) == names
        expected = train(backend, range(3, 4))
        backend.load(tmp_path, digests)
        assert train(backend, range(3, 4)) == expected


def test_no_file_holds_a_pickle_and_digests_are_those_of_the_files(saved: Saved) -> None:
    for file in saved.path.rglob("*"):
        if file.suffix == ".safetensors":
            load_file(file)
        elif file.is_file():
            json.loads(file.read_text())
    assert {name: digest_file(saved.path / name) for name in saved.digests} == saved.digests
    assert len(saved.digests) == len(list(saved.path.rglob("*.safetensors")))


def test_weights_of_an_evaluation_are_not_used_after_loading(two_ranks: Backend, saved: Saved) -> None:
    two_ranks.load(saved.path)
    batch = minibatch("packed", ONE)
    wanted = two_ranks.evaluate(*batch)
    train(two_ranks, range(1, 2))
    assert two_ranks.evaluate(*batch) != wanted
    two_ranks.load(saved.path)
    assert two_ranks.evaluate(*batch) == wanted


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize(
    ("damage", "message"), [(truncate, "bytes instead of"), (flip, "content has changed"), (Path.unlink, "missing")]
)
def test_a_damaged_piece_is_named_before_anything_changes(
    two_ranks: Backend, saved: Saved, tmp_path: Path, role: str, damage: Any, message: str
) -> None:
    two_ranks.load(saved.path)
    train(two_ranks, range(1, 2))
    weights = weights_of(two_ranks)
    damaged = tmp_path / "damaged"
    shutil.copytree(saved.path, damaged)
    name = f"{role}/rank-00001.part-000.safetensors"
    damage(damaged / name)
    with pytest.raises(DamagedCheckpointError, match=f"{name}.*{message}"):
        two_ranks.load(damaged, saved.digests)
    for key, weight in weights_of(two_ranks).items():
        assert torch.equal(weight, weights[key]), key
    # The ranks are there still, with the optimizer as it was.
    assert train(two_ranks, range(2, 3)) == [saved.expected[2]]


def test_a_missing_piece_is_found_without_digests_too(two_ranks: Backend, saved: Saved, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(saved.path, damaged)
    (damaged / "policy/rank-00001.part-000.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"policy.*values are in no file.*rank-00000"):
        two_ranks.load(damaged)


def test_files_that_vanish_while_values_are_read_end_the_ranks(saved: Saved, tmp_path: Path) -> None:
    """These hold half of the checkpoint then, and must not train."""
    shutil.copytree(saved.path, tmp_path / "lost")
    run = backend_run(saved.model, on(1), ("fsdp_backend",), critic=True).config
    config: Any = run.backend
    ranks = open_ranks(config.rank_request(), "checkpoint_workers:LosingRank", (plain_run(run), 8), config.limits)
    try:
        ranks.call("build")
        with pytest.raises(DamagedCheckpointError, match=r"part-000\.safetensors.*missing"):
            ranks.call("load", str(tmp_path / "lost"))
        with pytest.raises(RunFailedError, match="No rank is left to do `facts`"):
            ranks.call("facts")
    finally:
        ranks.close()


def test_another_model_is_refused_with_the_weights_that_differ(
    saved: Saved, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wider = write_tiny_model(tmp_path_factory.mktemp("wider"), intermediate_size=80)
    with (
        backend_of(wider, critic=True, ranks=1) as backend,
        pytest.raises(
            CheckpointError, match=r"mlp\.gate_proj\.weight is \[64, 32\] float32 in the checkpoint, but \[80, 32\]"
        ),
    ):
        backend.load(saved.path)


def test_checkpoints_of_another_backend_are_refused_with_the_way_out(
    two_ranks: Backend, saved: Saved, tmp_path: Path
) -> None:
    way_out = r"checkpoint of backend '{}'.*`spurline export` with its config, then model.path"
    with opened(backend_run(saved.model, {"name": "models/local", "device": "cpu"})) as (local, _):
        with pytest.raises(CheckpointError, match=way_out.format("local")):
            local.load(saved.path)
        local.save(tmp_path)
    with pytest.raises(CheckpointError, match=way_out.format("fsdp")):
        two_ranks.load(tmp_path)


def test_a_disk_that_refuses_leaves_the_ranks_at_work(two_ranks: Backend, saved: Saved, tmp_path: Path) -> None:
    two_ranks.load(saved.path)
    with pytest.raises(CheckpointWriteError, match=r"rank 0 on .*No such file or directory"):
        two_ranks.save(tmp_path / "nowhere" / "at all")
    assert train(two_ranks, range(1, 3), saved.critic) == saved.expected


@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [
        (SgdConfig(learning_rate=0.1, momentum=0.9, weight_decay=0.1), 1e-4),
        # It makes directions orthogonal in bfloat16, and its roundings turn over with the last bit of a gradient.
        (MuonConfig(learning_rate=1e-3), 3e-2),
    ],
    ids=["sgd", "muon"],
)
def test_other_optimizers_train_as_on_one_process_and_continue(
    tmp_path: Path, tiny: Path, optimizer: OptimizerConfig, tolerance: float
) -> None:
    with opened(with_optimizer(tiny, {"name": "models/local", "device": "cpu"}, optimizer)) as (local, _):
        before = weights_of(local)
        wanted = train(local, range(4))
        weights = weights_of(local)
    with opened(with_optimizer(tiny, on(2), optimizer)) as (backend, _):
        got = train(backend, range(2))
        digests = backend.save(tmp_path)
        got += train(backend, range(2, 4))
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        for name, weight in weights_of(backend).items():
            assert (weight - weights[name]).norm() <= tolerance * (weights[name] - before[name]).norm(), name
        backend.load(tmp_path, digests)
        assert train(backend, range(2, 4)) == got[2:]


def with_optimizer(model: Path, backend: Mapping[str, Any], optimizer: OptimizerConfig) -> LoadedConfig:
    run = backend_run(model, backend, ("fsdp_backend",))
    return replace(run, config=run.config.model_copy(update={"optimizer": optimizer}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("origin", "other"),
    [
        ({"ranks": 2, "expert": 2}, {"ranks": 1}),
        ({"ranks": 4, "expert": 2}, {"ranks": 2}),
        ({"ranks": 4, "expert": 2}, {"ranks": 2, "expert": 2}),
        ({"ranks": 4, "expert": 2}, {"ranks": 3}),
        ({"ranks": 2}, {"ranks": 2, "expert": 2}),
    ],
    ids=str,
)
def test_divided_experts_continue_divided_in_another_way(
    tmp_path: Path, origin: dict[str, int], other: dict[str, int]
) -> None:
    model = write_tiny_moe_model(tmp_path / "model")
    with backend_of(model, **origin) as backend:
        saved = save_after_a_step(tmp_path, model, backend, critic=False)
        assert_continues(backend, saved, tolerance=0)
    with backend_of(model, **other) as backend:
        assert_continues(backend, saved, tolerance=1e-7)


def test_a_run_with_adapters_saves_these_alone_and_recognises_the_rest(
    tmp_path: Path, tiny: Path, saved: Saved
) -> None:
    lora = {"rank": 4, "alpha": 8, "target_modules": "all-linear"}
    with backend_of(tiny, ranks=2, lora=lora) as backend:
        adapters = save_after_a_step(tmp_path, tiny, backend, critic=False)
        index = SavedModel.of(adapters.path / "policy").index
        assert {key.partition(".lora_")[1] for key in index.tensors} == {".lora_"}
        assert_continues(backend, adapters, tolerance=0)
    with backend_of(tiny, ranks=1, lora=lora) as backend:
        assert_continues(backend, adapters, tolerance=1e-7)
        with pytest.raises(CheckpointError, match=r"other weights than this run trains.*model and backend\.lora"):
            backend.load(saved.path)
    other = write_tiny_model(tmp_path / "other", seed=1)
    words = r"other frozen weights than this run's model has.*model\.path"
    with backend_of(other, ranks=1, lora=lora) as backend, pytest.raises(CheckpointError, match=words):
        backend.load(adapters.path)
