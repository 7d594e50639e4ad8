"""Settings of `megatron`: sizes that do not go together are refused, with the values that would."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.config.loading import load_config
from spurline.errors import ConfigError
from spurline_megatron_backend.backend import MegatronBackend
from spurline_megatron_backend.configs import MegatronBackendConfig

SIZES = ("tensor", "pipeline", "context", "expert", "expert_tensor")


def loaded(run: dict[str, Any] | None = None, **backend: Any) -> MegatronBackendConfig:
    settings = {"name": "megatron", "device": "cpu", "ranks": 8, **backend}
    plain = {
        "plugins": ["megatron_backend"],
        "run_dir": "run",
        "model": {"path": "nowhere"},
        "data": {"train": "rows.jsonl"},
        "steps": 1,
        "backend": settings,
    }
    config = load_config(plain | (run or {})).config.backend
    assert isinstance(config, MegatronBackendConfig)
    return config


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"tensor": 3}, "backend.tensor is 3, which does not divide the 8 ranks. Choose one of 1, 2, 4, 8, or change"),
        (
            {"tensor": 2, "pipeline": 8},
            "backend.pipeline is 8, and tensor 2 x pipeline 8 do not divide the 8 ranks. Choose one of 1, 2, 4, or",
        ),
        (
            {"tensor": 3, "pipeline": 5},
            "backend.pipeline is 5, and tensor 3 x pipeline 5 need 15 ranks or a multiple: there are 8. Set "
            "backend.ranks: 15, or smaller sizes.",
        ),
        (
            {"pipeline": 4, "expert": 4},
            "backend.expert is 4, and pipeline 4 x expert 4 do not divide the 8 ranks. Choose one of 1, 2, or change",
        ),
        (
            {"tensor": 2, "context": 2, "ranks": 2},
            "backend.context is 2, and tensor 2 x context 2 need 4 ranks or a multiple: there are 2. Set "
            "backend.ranks: 4, or context to 1.",
        ),
        (
            {"tensor": 2, "ranks": 1},
            "backend.tensor is 2, which needs 2 ranks or a multiple: there is 1. Set backend.ranks: 2, or tensor to 1.",
        ),
        ({"virtual_stages": 2}, "backend.virtual_stages is 2, and there is one stage. Set pipeline to more than 1"),
        ({"sequence_parallel": True}, "backend.sequence_parallel divides tokens among the ranks that divide layers"),
        (
            {"tensor": 2, "expert": 2, "sequence_parallel": False},
            "backend.sequence_parallel is false, and Megatron-core trains experts with tensor more than 1 only where",
        ),
        ({"gpus": [0, 1], "device": "cuda"}, "backend.gpus names 2 GPUs, and there are 8 ranks"),
        ({"launch": "ray", "ranks_per_node": 3}, "backend.ranks_per_node is 3, which does not divide the 8 ranks"),
        ({"precision": "fp8"}, "backend.precision is 'fp8'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_what_would(backend: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(**backend)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("lora", {}, "backend.lora is not a setting of 'megatron'. Megatron-core has no adapters"),
        ("lora", {}, "Set backend.name: fsdp"),
        ("activation_checkpointing", True, "Its name here is recompute: none, selective or full."),
        ("cpu_offload", True, "Divide the model further"),
        ("tensor_model_parallel_size", 2, "Its name here is tensor."),
        ("vpp", 2, "Its name here is virtual_stages."),
        ("use_distributed_optimizer", True, "The optimizer is always divided"),
        ("tensors", 2, "Did you mean 'tensor'?"),
    ],
)
def test_settings_of_other_backends_are_refused_with_what_to_do_instead(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(**{key: value})
    assert said in str(refused.value)


def test_a_run_without_megatron_core_is_refused_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise ModuleNotFoundError(name)

    plain = {
        "plugins": ["megatron_backend"],
        "run_dir": "run",
        "model": {"path": "nowhere"},
        "data": {"train": "rows.jsonl"},
        "steps": 1,
        "backend": {"name": "megatron", "device": "cpu", "ranks": 2, "tensor": 2},
    }
    run = load_config(plain).config
    monkeypatch.setattr("spurline_megatron_backend.configs.find_spec", not_found)
    with pytest.raises(ConfigError, match=r"backend.name is megatron, which needs megatron-core. Run `pip install"):
        run.backend.check_model(run)


def test_an_optimizer_of_whole_matrices_is_refused_with_its_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"backend.name is megatron, .* optimizer 'muon' does not change each value by"
    ):
        loaded({"optimizer": {"name": "muon"}})
    loaded({"optimizer": {"name": "sgd", "learning_rate": 0.1}})


def test_answers_to_held_out_prompts_are_refused_as_it_generates_none() -> None:
    with pytest.raises(ConfigError, match="backend 'megatron' does not generate"):
        loaded(
            {
                "data": {"train": "rows.jsonl", "eval": "rows.jsonl"},
                "evaluation": {"generate": {"rewards": {"right": "exact_match"}}},
            }
        )


def test_tokens_are_divided_where_layers_are_unless_it_is_said() -> None:
    assert not loaded().divides_tokens
    assert loaded(tensor=2).divides_tokens
    assert not loaded(tensor=2, sequence_parallel=False).divides_tokens


@given(ranks=st.integers(1, 16), sizes=st.fixed_dictionaries({name: st.integers(1, 4) for name in SIZES}))
def test_what_is_not_refused_is_a_grid_and_a_proposed_value_is_not_refused(ranks: int, sizes: dict[str, Any]) -> None:
    """Every rank has a place of its own, each share of rows goes to as many ranks, and one of them answers."""
    config = MegatronBackendConfig(device="cpu", ranks=ranks, **sizes)
    problems = list(config.division_problems(ranks))
    for problem in problems:
        if "Choose one of " in problem.message:
            proposed = problem.message.partition("Choose one of ")[2].partition(", or ")[0]
            for value in proposed.split(", "):
                changed = MegatronBackendConfig(device="cpu", ranks=ranks, **{**sizes, problem.key: int(value)})
                assert problem not in list(changed.division_problems(ranks))
                assert not any(other.key == problem.key for other in changed.division_problems(ranks))
        if "Set backend.ranks: " in problem.message:
            more = int(problem.message.partition("Set backend.ranks: ")[2].partition(",")[0])
            assert more > ranks
            changed = MegatronBackendConfig(device="cpu", ranks=more, **sizes)
            assert problem.key not in [other.key for other in changed.division_problems(more)]
        if problem.message.endswith(f"or {problem.key} to 1."):
            changed = MegatronBackendConfig(device="cpu", ranks=ranks, **{**sizes, problem.key: 1})
            assert not any(other.key == problem.key for other in changed.division_problems(ranks))
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
    backend = MegatronBackend.__new__(MegatronBackend)
    backend._config = loaded(tensor=2, pipeline=2)
    assert [backend._share_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank in range(8) if backend._counts(rank)] == [4, 6]
