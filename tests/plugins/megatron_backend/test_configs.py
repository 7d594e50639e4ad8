"""Settings of `megatron`: sizes that do not go together are refused, with the values that would."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.config.loading import load_config
from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline_megatron_backend.configs import MegatronBackendConfig

SIZES = ("tensor", "pipeline", "context", "expert", "expert_tensor")


def loaded_run(run: dict[str, Any] | None = None, **backend: Any) -> RunConfig:
    settings = {"name": "megatron", "device": "cpu", "ranks": 8, **backend}
    plain = {
        "plugins": ["megatron_backend"],
        "run_dir": "run",
        "model": {"path": "nowhere"},
        "data": {"train": "rows.jsonl"},
        "steps": 1,
        "backend": settings,
    }
    return load_config(plain | (run or {})).config


def loaded(run: dict[str, Any] | None = None, **backend: Any) -> MegatronBackendConfig:
    config = loaded_run(run, **backend).backend
    assert isinstance(config, MegatronBackendConfig)
    return config


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"tensor": 3}, "backend.tensor is 3, and 8 ranks are not a multiple of tensor 3. Set backend.ranks: 9,"),
        ({"tensor": 2, "pipeline": 8}, "8 ranks are not a multiple of tensor 2 x pipeline 8"),
        ({"pipeline": 4, "expert": 4}, "backend.expert is 4, and 8 ranks are not a multiple of pipeline 4 x expert 4"),
        ({"virtual_stages": 2}, "backend.virtual_stages is 2, but there is only one stage"),
        ({"gpus": [0, 1], "device": "cuda"}, "backend.gpus names 2 GPUs, and each of the 8 ranks needs one"),
        ({"launch": "ray", "ranks_per_node": 3}, "backend.ranks_per_node is 3, which does not divide the 8 ranks"),
        ({"precision": "fp8"}, "backend.precision is 'fp8'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_what_would(backend: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(**backend)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("lora", "no adapters"),
        ("sequence_parallel", "always on"),
        ("activation_checkpointing", "recompute"),
        ("tensors", "'tensor'"),
    ],
)
def test_settings_of_other_backends_are_refused_with_what_to_do_instead(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"backend\.{key} is not a setting of 'megatron'.*{said}"):
        loaded(**{key: 2})


def test_a_run_without_megatron_core_is_refused_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise ModuleNotFoundError(name)

    run = loaded_run(ranks=2, tensor=2)
    monkeypatch.setattr("spurline_megatron_backend.configs.find_spec", not_found)
    with pytest.raises(ConfigError, match=r"backend.name is megatron, which needs megatron-core. Run `pip install"):
        run.backend.check_model(run)


def test_an_optimizer_of_whole_matrices_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"backend.name is megatron, .* optimizer 'muon' is not `is_elementwise`"):
        loaded({"optimizer": {"name": "muon"}})
    loaded({"optimizer": {"name": "sgd", "learning_rate": 0.1}})


@given(ranks=st.integers(1, 16), sizes=st.fixed_dictionaries({name: st.integers(1, 4) for name in SIZES}))
def test_what_is_not_refused_is_a_grid_and_proposed_ranks_are_not_refused(ranks: int, sizes: dict[str, Any]) -> None:
    """Every rank has a place of its own, each share of rows goes to as many ranks, and one of them answers."""
    config = MegatronBackendConfig(device="cpu", ranks=ranks, **sizes)
    problems = list(config.division_problems(ranks))
    for problem in problems:
        if "Set backend.ranks: " in problem.message:
            more = int(problem.message.partition("Set backend.ranks: ")[2].partition(",")[0])
            assert more > ranks
            changed = MegatronBackendConfig(device="cpu", ranks=more, **sizes)
            assert problem.key not in [other.key for other in changed.division_problems(more)]
    if problems:
        return
    grid = config.grid
    places = [grid.place(rank) for rank in range(ranks)]
    assert len(set(places)) == ranks
    shares = Counter(place.data for place in places)
    assert shares == dict.fromkeys(range(config.layout().data), grid.ranks_of_rows)
    speakers = [place.data for rank, place in enumerate(places) if grid.speaks(rank)]
    assert speakers == list(range(grid.data))


def test_ranks_that_compute_the_same_rows_get_the_same_share_and_one_of_them_counts() -> None:
    config = loaded(tensor=2, pipeline=2)
    assert [config.share_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank in range(8) if config.counts(rank)] == [4, 6]
