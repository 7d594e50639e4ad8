"""What some ranks saved, any others continue, divided in any way; and nothing is taken over that is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_cases import ONE, Saved, assert_continues, save_after_a_step, train
from checkpoint_contract import CheckpointContract
from fsdp_layouts import on

from spurline.errors import CheckpointError
from spurline.protocols.backend import Backend
from spurline_fsdp_backend.trained_model import SavedModel
from spurline_models.optimizers.configs import MuonConfig
from spurline_models.testing import write_tiny_model, write_tiny_moe_model
from spurline_rl.testing.backend_cases import minibatch

pytestmark = pytest.mark.processes


class TestCheckpoints(CheckpointContract):
    backend = "fsdp"
    plugins = ("fsdp_backend",)
    on = staticmethod(on)
    write = staticmethod(write_tiny_model)
    losing_worker = "fsdp_ranks:LosingRank"
    # Muon makes directions orthogonal in bfloat16, and its roundings turn over with the last bit of a gradient.
    optimizers = (*CheckpointContract.optimizers, (MuonConfig(learning_rate=1e-3), 3e-2))

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
    def test_other_layouts_continue_with_equal_weights(self, saved: Saved, layout: dict[str, int]) -> None:
        with self.backend_of(saved.model, on(**layout), critic=True) as backend:
            assert_continues(backend, saved, tolerance=1e-7)

    @pytest.mark.slow
    @pytest.mark.parametrize("origin", [{"ranks": 1}, {"ranks": 3}, {"ranks": 4, "replicas": 2}], ids=str)
    def test_two_ranks_continue_what_other_layouts_saved(
        self, tmp_path: Path, tiny: Path, two_ranks: Backend, origin: dict[str, int]
    ) -> None:
        with self.backend_of(tiny, on(**origin), critic=True) as backend:
            saved = save_after_a_step(tmp_path, tiny, backend, critic=True)
        assert_continues(two_ranks, saved, tolerance=1e-7)

    def test_two_replicas_continue_and_one_of_them_writes(self, saved: Saved, tmp_path: Path) -> None:
        with self.backend_of(saved.model, on(4, replicas=2), critic=True) as backend:
            assert_continues(backend, saved, tolerance=1e-7)
            digests = backend.save(tmp_path)
            files = [f"rank-0000{rank}.part-000.safetensors" for rank in range(2)]
            assert sorted(digests) == [f"{role}/{file}" for role in ("critic", "policy") for file in files]
            expected = train(backend, range(3, 4))
            backend.load(tmp_path, digests)
            assert train(backend, range(3, 4)) == expected

    def test_weights_of_an_evaluation_are_not_used_after_loading(self, two_ranks: Backend, saved: Saved) -> None:
        two_ranks.load(saved.path)
        batch = minibatch("packed", ONE)
        wanted = two_ranks.evaluate(*batch)
        train(two_ranks, range(1, 2))
        assert two_ranks.evaluate(*batch) != wanted
        two_ranks.load(saved.path)
        assert two_ranks.evaluate(*batch) == wanted

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
        self, tmp_path: Path, origin: dict[str, int], other: dict[str, int]
    ) -> None:
        self.assert_others_continue(tmp_path, write_tiny_moe_model(tmp_path / "model"), on(**origin), [on(**other)])

    def test_a_run_with_adapters_saves_these_alone_and_recognises_the_rest(
        self, tmp_path: Path, tiny: Path, saved: Saved
    ) -> None:
        lora = {"rank": 4, "alpha": 8, "target_modules": "all-linear"}
        with self.backend_of(tiny, on(2, lora=lora)) as backend:
            adapters = save_after_a_step(tmp_path, tiny, backend, critic=False)
            index = SavedModel.of(adapters.path / "policy").index
            assert {key.partition(".lora_")[1] for key in index.tensors} == {".lora_"}
            assert_continues(backend, adapters, tolerance=0)
        with self.backend_of(tiny, on(1, lora=lora)) as backend:
            assert_continues(backend, adapters, tolerance=1e-7)
            with pytest.raises(CheckpointError, match=r"other weights than this run trains.*model and backend\.lora"):
                backend.load(saved.path)
        other = write_tiny_model(tmp_path / "other", seed=1)
        words = r"other frozen weights than this run.*model\.path"
        with self.backend_of(other, on(1, lora=lora)) as backend, pytest.raises(CheckpointError, match=words):
            backend.load(adapters.path)
