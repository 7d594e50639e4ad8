"""A contract of all backends with ranks: what some ranks saved is continued, and nothing is taken that is not whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from checkpoint_cases import Saved, assert_continues, flip, save_after_a_step, train, truncate
from safetensors.torch import load_file

from spurline.config.loading import LoadedConfig
from spurline.digests import digest_file
from spurline.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError, RunFailedError
from spurline.protocols.backend import Backend
from spurline.protocols.optimizer import OptimizerConfig
from spurline_models.optimizers.configs import SgdConfig
from spurline_ranks.group import open_ranks
from spurline_ranks.messages import plain_run
from spurline_rl.testing.backend_cases import weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

LOCAL = {"name": "models/local", "device": "cpu"}


class CheckpointContract:
    """backend: its name. plugins: of its runs. on: makes the section for so many ranks and other settings. write:
    writes a tiny model. losing_worker: a rank that loses a checkpoint while it reads it. optimizers: with the
    difference that they may show to one process, relative to what they changed."""

    backend: ClassVar[str]
    plugins: ClassVar[tuple[str, ...]]
    on: ClassVar[Callable[..., dict[str, Any]]]
    write: ClassVar[Callable[..., Path]]
    losing_worker: ClassVar[str]
    optimizers: ClassVar[tuple[tuple[OptimizerConfig, float], ...]] = (
        (SgdConfig(learning_rate=0.1, momentum=0.9, weight_decay=0.1), 1e-4),
    )

    @classmethod
    @contextmanager
    def backend_of(cls, model: Path, settings: Mapping[str, Any], critic: bool = False) -> Iterator[Backend]:
        with opened(backend_run(model, settings, cls.plugins, critic=critic)) as (backend, _):
            yield backend

    @pytest.fixture(scope="class")
    @classmethod
    def tiny(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return cls.write(tmp_path_factory.mktemp("tiny"))

    @pytest.fixture(scope="class")
    @classmethod
    def two_ranks(cls, tiny: Path) -> Iterator[Backend]:
        """Two ranks that all tests share. Each test loads the checkpoint it needs."""
        with cls.backend_of(tiny, cls.on(2), critic=True) as backend:
            yield backend

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, tmp_path_factory: pytest.TempPathFactory, tiny: Path, two_ranks: Backend) -> Saved:
        return save_after_a_step(tmp_path_factory.mktemp("checkpoint"), tiny, two_ranks, critic=True)

    def assert_others_continue(
        self, folder: Path, model: Path, origin: Mapping[str, Any], others: list[dict[str, Any]]
    ) -> None:
        with self.backend_of(model, origin) as backend:
            saved = save_after_a_step(folder, model, backend, critic=False)
            assert_continues(backend, saved, tolerance=0)
        for other in others:
            with self.backend_of(model, other) as backend:
                assert_continues(backend, saved, tolerance=1e-7)

    def test_the_same_ranks_continue_bit_for_bit(self, two_ranks: Backend, saved: Saved) -> None:
        assert_continues(two_ranks, saved, tolerance=0)

    def test_no_file_holds_a_pickle_and_digests_are_those_of_the_files(self, saved: Saved) -> None:
        for file in saved.path.rglob("*"):
            if file.suffix == ".safetensors":
                load_file(file)
            elif file.is_file():
                json.loads(file.read_text())
        assert {name: digest_file(saved.path / name) for name in saved.digests} == saved.digests
        assert len(saved.digests) == len(list(saved.path.rglob("*.safetensors")))

    @pytest.mark.parametrize(
        ("role", "damage", "message"),
        [
            ("policy", truncate, "bytes instead of"),
            ("critic", flip, "content has changed"),
            ("policy", Path.unlink, "missing"),
        ],
    )
    def test_a_damaged_piece_is_named_before_anything_changes(
        self, two_ranks: Backend, saved: Saved, tmp_path: Path, role: str, damage: Any, message: str
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
        # The ranks still run, with the optimizer unchanged.
        assert train(two_ranks, range(2, 3)) == [saved.expected[2]]

    def test_a_missing_piece_is_found_without_digests_too(
        self, two_ranks: Backend, saved: Saved, tmp_path: Path
    ) -> None:
        damaged = tmp_path / "damaged"
        shutil.copytree(saved.path, damaged)
        (damaged / "policy/rank-00001.part-000.safetensors").unlink()
        with pytest.raises(DamagedCheckpointError, match="policy is damaged: "):
            two_ranks.load(damaged)

    def test_a_disk_that_refuses_leaves_the_ranks_at_work(
        self, two_ranks: Backend, saved: Saved, tmp_path: Path
    ) -> None:
        two_ranks.load(saved.path)
        with pytest.raises(CheckpointWriteError, match=r"rank 0 on .*No such file or directory"):
            two_ranks.save(tmp_path / "nowhere" / "at all")
        assert train(two_ranks, range(1, 3), saved.critic) == saved.expected

    def test_a_checkpoint_of_another_optimizer_is_refused_by_all_ranks(
        self, two_ranks: Backend, saved: Saved, tmp_path: Path
    ) -> None:
        shutil.copytree(saved.path, tmp_path / "other")
        path = tmp_path / "other/policy/state.json"
        facts = json.loads(path.read_text())
        facts["optimizer"]["optimizer"] = "lion"
        path.write_text(json.dumps(facts))
        with pytest.raises(CheckpointError, match="lion, and this run has adamw"):
            two_ranks.load(tmp_path / "other")
        assert_continues(two_ranks, saved, tolerance=0)

    def test_checkpoints_of_other_backends_are_refused_with_the_way_out(
        self, two_ranks: Backend, saved: Saved, tmp_path: Path
    ) -> None:
        way_out = r"checkpoint of backend '{}'.*`spurline export`"
        with opened(backend_run(saved.model, LOCAL)) as (local, _):
            with pytest.raises(CheckpointError, match=way_out.format("local")):
                local.load(saved.path)
            (tmp_path / "local").mkdir()
            local.save(tmp_path / "local")
        shutil.copytree(saved.path, tmp_path / "of another")
        for path in (tmp_path / "of another").rglob("state.json"):
            path.write_text(path.read_text().replace(f'"{self.backend}-1"', '"another-1"'))
        for name in ("local", "of another"):
            with pytest.raises(CheckpointError, match=way_out.format(self.backend)):
                two_ranks.load(tmp_path / name)

    def test_another_model_is_refused_with_the_weights_that_differ(self, saved: Saved, tmp_path: Path) -> None:
        wider = self.write(tmp_path / "wider", intermediate_size=80)
        said = r"mlp\.gate_proj\.weight is \[64, 32\] float32 in the checkpoint, but \[80, 32\]"
        with self.backend_of(wider, self.on(1), critic=True) as backend, pytest.raises(CheckpointError, match=said):
            backend.load(saved.path)

    def test_files_that_vanish_while_values_are_read_end_the_ranks(self, saved: Saved, tmp_path: Path) -> None:
        """The ranks then hold half of the checkpoint, and must not train."""
        shutil.copytree(saved.path, tmp_path / "lost")
        run = backend_run(saved.model, self.on(2), self.plugins, critic=True).config
        config: Any = run.backend
        ranks = open_ranks(config.rank_request(), self.losing_worker, (plain_run(run), 8), config.limits)
        try:
            ranks.call("build")
            with pytest.raises(DamagedCheckpointError, match=r"part-000\.safetensors.*missing"):
                ranks.call("load", str(tmp_path / "lost"))
            with pytest.raises(RunFailedError, match="No rank is left to do `facts`"):
                ranks.call("facts")
        finally:
            ranks.close()

    def test_other_optimizers_train_as_on_one_process_and_continue(self, tmp_path: Path, tiny: Path) -> None:
        for number, (optimizer, tolerance) in enumerate(self.optimizers):
            with opened(self._with_optimizer(tiny, LOCAL, optimizer)) as (local, _):
                before = weights_of(local)
                wanted = train(local, range(4))
                weights = weights_of(local)
            (folder := tmp_path / str(number)).mkdir()
            with opened(self._with_optimizer(tiny, self.on(2), optimizer)) as (backend, _):
                got = train(backend, range(2))
                digests = backend.save(folder)
                got += train(backend, range(2, 4))
                for mine, theirs in zip(got, wanted, strict=True):
                    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
                for name, weight in weights_of(backend).items():
                    changed = (weights[name] - before[name]).norm()
                    assert (weight - weights[name]).norm() <= tolerance * changed, name
                backend.load(folder, digests)
                assert train(backend, range(2, 4)) == got[2:]

    def _with_optimizer(self, model: Path, backend: Mapping[str, Any], optimizer: OptimizerConfig) -> LoadedConfig:
        run = backend_run(model, backend, self.plugins)
        return replace(run, config=run.config.model_copy(update={"optimizer": optimizer}))
