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
from checkpoint_cases import Saved, assert_continues, flip, save_after_a_step, train, truncate
from megatron_layouts import on, write_qwen3, write_qwen3_moe, write_qwen25
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spurline.config.loading import LoadedConfig
from spurline.digests import digest_file
from spurline.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError, RunFailedError
from spurline.protocols.backend import Backend
from spurline.protocols.optimizer import OptimizerConfig
from spurline_models.optimizers.configs import SgdConfig
from spurline_models.weights import weights_digest
from spurline_ranks.launch import open_ranks
from spurline_ranks.messages import plain_run
from spurline_rl.testing.backend_cases import weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

PLUGINS = ("megatron_backend", "fsdp_backend")


@contextmanager
def backend_of(model: Path, settings: Mapping[str, Any], critic: bool = False) -> Iterator[Backend]:
    with opened(backend_run(model, settings, PLUGINS, critic=critic)) as (backend, _):
        yield backend


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def two_ranks(tiny: Path) -> Iterator[Backend]:
    """Each optimizes a half of the weights. Lent to a test after the other; each loads what it needs."""
    with backend_of(tiny, on(2), critic=True) as backend:
        yield backend


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny: Path, two_ranks: Backend) -> Saved:
    return save_after_a_step(tmp_path_factory.mktemp("checkpoint"), tiny, two_ranks, critic=True)


def test_the_same_ranks_continue_bit_for_bit(two_ranks: Backend, saved: Saved) -> None:
    assert_continues(two_ranks, saved, tolerance=0)


@pytest.mark.parametrize(
    "settings",
    [
        on(1),
        on(2, tensor=2),
        on(2, pipeline=2),
        pytest.param(on(4, tensor=2, pipeline=2), marks=pytest.mark.slow),
        pytest.param(on(2, context=2), marks=pytest.mark.slow),
    ],
    ids=["one", "tensor", "pipeline", "tensor-pipeline", "context"],
)
def test_other_layouts_continue_with_equal_weights(saved: Saved, settings: dict[str, Any]) -> None:
    with backend_of(saved.model, settings, critic=True) as backend:
        assert_continues(backend, saved, tolerance=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["tensor-data", "pipeline-tied", "interleaved", "bias"])
def test_what_four_ranks_saved_others_continue(tmp_path: Path, origin: str) -> None:
    settings, write, overrides, others = {
        "tensor-data": (on(4, tensor=2), write_qwen3, {}, [on(2, context=2), on(2, pipeline=2), on(4, tensor=4)]),
        "pipeline-tied": (
            on(4, pipeline=2, tensor=2),
            write_qwen3,
            {"tie_word_embeddings": True},
            [on(1), on(2, pipeline=2)],
        ),
        "interleaved": (
            on(4, pipeline=2, virtual_stages=2),
            write_qwen3,
            {"num_hidden_layers": 4},
            [on(1), on(2, pipeline=2), on(2, tensor=2)],
        ),
        "bias": (on(4, tensor=2), write_qwen25, {}, [on(1), on(2, tensor=2), on(3)]),
    }[origin]
    if origin == "tensor-data":
        overrides = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = write(tmp_path / "model", **overrides)
    with backend_of(model, settings) as backend:
        saved = save_after_a_step(tmp_path, model, backend, critic=False)
        assert_continues(backend, saved, tolerance=0)
    for other in others:
        with backend_of(model, other) as backend:
            assert_continues(backend, saved, tolerance=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("origin", "others"),
    [
        (on(4, expert=2), [on(1), on(2, tensor=2, expert=2)]),
        (on(4, tensor=2, expert=2, expert_tensor=2), [on(2), on(2, pipeline=2)]),
        (on(1), [on(4, expert=4)]),
    ],
    ids=["expert-data", "expert-tensor", "one"],
)
def test_divided_experts_continue_divided_in_another_way(
    tmp_path: Path, origin: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    model = write_qwen3_moe(tmp_path / "model")
    with backend_of(model, origin) as backend:
        saved = save_after_a_step(tmp_path, model, backend, critic=False)
        assert_continues(backend, saved, tolerance=0)
    for other in others:
        with backend_of(model, other) as backend:
            assert_continues(backend, saved, tolerance=1e-7)


def test_no_file_holds_a_pickle_and_digests_are_those_of_the_files(saved: Saved) -> None:
    for file in saved.path.rglob("*"):
        if file.suffix == ".safetensors":
            load_file(file)
        elif file.is_file():
            json.loads(file.read_text())
    assert {name: digest_file(saved.path / name) for name in saved.digests} == saved.digests
    assert len(saved.digests) == len(list(saved.path.rglob("*.safetensors")))


def test_the_weights_a_run_started_from_have_the_digest_that_one_process_makes(saved: Saved) -> None:
    causal = AutoModelForCausalLM.from_pretrained(saved.model, dtype=torch.float32)
    facts = json.loads((saved.path / "policy/state.json").read_text())
    assert facts["initial_weights"] == weights_digest(causal)


@pytest.mark.parametrize(
    ("damage", "message"), [(truncate, "bytes instead of"), (flip, "content has changed"), (Path.unlink, "missing")]
)
def test_a_damaged_piece_is_named_before_anything_changes(
    two_ranks: Backend, saved: Saved, tmp_path: Path, damage: Any, message: str
) -> None:
    two_ranks.load(saved.path)
    train(two_ranks, range(1, 2))
    weights = weights_of(two_ranks)
    damaged = tmp_path / "damaged"
    shutil.copytree(saved.path, damaged)
    name = "critic/rank-00001.part-000.safetensors"
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
    with pytest.raises(DamagedCheckpointError, match=r"policy is damaged: \d+ weights.* are in no file"):
        two_ranks.load(damaged)


def test_a_disk_that_refuses_leaves_the_ranks_at_work(two_ranks: Backend, saved: Saved, tmp_path: Path) -> None:
    two_ranks.load(saved.path)
    with pytest.raises(CheckpointWriteError, match=r"rank 0 on .*No such file or directory"):
        two_ranks.save(tmp_path / "nowhere" / "at all")
    assert train(two_ranks, range(1, 3), saved.critic) == saved.expected


def test_a_checkpoint_of_another_optimizer_is_refused_by_all_ranks(
    two_ranks: Backend, saved: Saved, tmp_path: Path
) -> None:
    shutil.copytree(saved.path, tmp_path / "other")
    path = tmp_path / "other/policy/state.json"
    facts = json.loads(path.read_text())
    facts["optimizer"]["optimizer"] = "lion"
    path.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="the optimizer state is that of lion, and this run has adamw"):
        two_ranks.load(tmp_path / "other")
    assert_continues(two_ranks, saved, tolerance=0)


def test_checkpoints_of_other_backends_are_refused_with_the_way_out(
    two_ranks: Backend, saved: Saved, tmp_path: Path
) -> None:
    way_out = r"checkpoint of backend '{}'.*`spurline export` with its config, then model.path"
    with backend_of(saved.model, {"name": "models/local", "device": "cpu"}) as local:
        with pytest.raises(CheckpointError, match=way_out.format("local")):
            local.load(saved.path)
        (tmp_path / "local").mkdir()
        local.save(tmp_path / "local")
    shutil.copytree(saved.path, tmp_path / "fsdp")
    for path in (tmp_path / "fsdp").rglob("state.json"):
        path.write_text(path.read_text().replace('"megatron-1"', '"fsdp-1"'))
    for name in ("local", "fsdp"):
        with pytest.raises(CheckpointError, match=way_out.format("megatron")):
            two_ranks.load(tmp_path / name)


@pytest.mark.slow
def test_a_checkpoint_of_fsdp_says_which_backend_wrote_it(tmp_path: Path, tiny: Path, two_ranks: Backend) -> None:
    with backend_of(tiny, {"name": "fsdp", "device": "cpu", "ranks": 1}, critic=True) as fsdp:
        fsdp.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint of backend 'megatron': 'fsdp' wrote it"):
        two_ranks.load(tmp_path)


@pytest.mark.slow
def test_another_model_is_refused_with_the_weights_that_differ(saved: Saved, tmp_path: Path) -> None:
    wider = write_qwen3(tmp_path / "wider", intermediate_size=80)
    with (
        backend_of(wider, on(2, tensor=2), critic=True) as backend,
        pytest.raises(
            CheckpointError, match=r"mlp\.gate_proj\.weight is \[64, 32\] float32 in the checkpoint, but \[80, 32\]"
        ),
    ):
        backend.load(saved.path)


@pytest.mark.slow
def test_files_that_vanish_while_values_are_read_end_the_ranks(saved: Saved, tmp_path: Path) -> None:
    """These hold half of the checkpoint then, and must not train."""
    shutil.copytree(saved.path, tmp_path / "lost")
    run = backend_run(saved.model, on(2), PLUGINS, critic=True).config
    config: Any = run.backend
    worker = "megatron_losing:open_losing_rank"
    ranks = open_ranks(config.rank_request(), worker, (plain_run(run), 8), config.limits)
    try:
        ranks.call("build")
        with pytest.raises(DamagedCheckpointError, match=r"part-000\.safetensors.*missing"):
            ranks.call("load", str(tmp_path / "lost"))
        with pytest.raises(RunFailedError, match="No rank is left to do `facts`"):
            ranks.call("facts")
    finally:
        ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [on(2), on(2, tensor=2)], ids=["data", "tensor"])
def test_another_optimizer_trains_as_on_one_process_and_continues(
    tmp_path: Path, tiny: Path, settings: dict[str, Any]
) -> None:
    momentum = SgdConfig(learning_rate=0.1, momentum=0.9, weight_decay=0.1)
    with opened(with_optimizer(tiny, {"name": "models/local", "device": "cpu"}, momentum)) as (local, _):
        before = weights_of(local)
        wanted = train(local, range(4))
        weights = weights_of(local)
    with opened(with_optimizer(tiny, settings, momentum)) as (backend, _):
        got = train(backend, range(2))
        digests = backend.save(tmp_path)
        got += train(backend, range(2, 4))
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        for name, weight in weights_of(backend).items():
            assert (weight - weights[name]).norm() <= 1e-4 * (weights[name] - before[name]).norm(), name
        backend.load(tmp_path, digests)
        assert train(backend, range(2, 4)) == got[2:]


def with_optimizer(model: Path, backend: Mapping[str, Any], optimizer: OptimizerConfig) -> LoadedConfig:
    run = backend_run(model, backend, PLUGINS)
    return replace(run, config=run.config.model_copy(update={"optimizer": optimizer}))
