"""The experts that engine in_process chose, in its results and in the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import local_backend, run_config
from expert_models import replaying_source
from generated_rollouts import batch_of, generate, in_process_engine, largest_mismatch
from preparation_oracle import FakeBackend, make_groups, make_preparation
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, Glm4MoeConfig, GptOssConfig, Qwen3NextConfig

from spurline.config.run_config import ModelConfig
from spurline.data.batch import TrainingBatch
from spurline.errors import DataError
from spurline_models.local.backend import LocalBackend
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.testing import write_tiny_moe_model
from spurline_models.testing.inputs import write_model
from spurline_models.weights import NamedWeights
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.engines.in_process.engine import InProcessEngine
from spurline_rl.engines.in_process.response import ExpertRecord
from spurline_rl.protocols.rollout_engine import GenerationResult, RolloutEngineConfig
from spurline_rl.testing.rollout_engine_contract import PROMPTS, request
from spurline_rl.trajectory import Group, turns_of, with_turns

LAYERS, TOP_K = 2, 2


@pytest.fixture(scope="module")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_moe_model(tmp_path_factory.mktemp("experts"))


def make_engine(model: Path, **settings: Any) -> InProcessEngine:
    return in_process_engine(model, {"source": replaying_source()}, **settings)


def make_backend(model: Path, **settings: Any) -> LocalBackend:
    run = {"model": ModelConfig(path=str(model)), "source": replaying_source()}
    return local_backend(model, run=run, **settings)


def perturb_routers(backend: LocalBackend, size: float) -> None:
    """Move the routers as rounding would, only further."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in backend._model.causal.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.add_(size * torch.randn(parameter.shape, generator=random) * parameter.std())


REQUESTS = [request(prompt, seed=seed, max_new_tokens=20, temperature=1.0) for seed in range(3) for prompt in PROMPTS]


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"max_batch": 2, "max_cache_tokens": 60}])
def test_rollout_and_trainer_agree_and_share_their_experts(experts_model: Path, settings: dict[str, Any]) -> None:
    backend = make_backend(experts_model)
    engine = make_engine(experts_model, **settings)
    engine.share(backend)
    results = generate(engine, REQUESTS)
    batch = batch_of(REQUESTS, results)
    with backend._model.routing.noting() as noted:
        assert largest_mismatch(backend, batch) <= 1e-5
    for asked, result in zip(REQUESTS, results, strict=True):
        experts = result.routed_experts
        assert experts is not None
        assert experts.shape == (len(asked.prompt_ids) + len(result.token_ids), LAYERS, TOP_K)
        assert (experts[-1] == -1).all(), "nothing was computed from the last token"
        assert (experts[:-1] >= 0).all()
        assert experts.max() < 8
    # The stream has segments from short to long. At each one's last token the router chose itself.
    used = backend._model.routing.as_array(noted)
    order = sorted(results, key=lambda result: len(result.routed_experts if result.routed_experts is not None else ()))
    chosen = np.concatenate([result.routed_experts for result in order if result.routed_experts is not None])
    assert np.array_equal(np.where(chosen < 0, chosen, used), chosen)


DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 16,
}
GROUPS = {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "glm4_moe": (Glm4MoeConfig, GROUPS),
    "gpt_oss": (GptOssConfig, {"sliding_window": 6}),
    "ernie4_5_moe": (Ernie4_5_MoeConfig, {"moe_layer_start_index": 0, "moe_num_shared_experts": 1}),
    "qwen3_next": (Qwen3NextConfig, DELTA | {"shared_expert_intermediate_size": 16}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_trainer_agree_in_other_families(tmp_path: Path, family: str) -> None:
    config, settings = FAMILIES[family]
    layers = {"layer_types": ["linear_attention", "full_attention"]} if family == "qwen3_next" else {}
    path = write_model(tmp_path, config, EXPERTS | settings | layers)
    backend, engine = make_backend(path), make_engine(path)
    engine.share(backend)
    results = generate(engine, REQUESTS[:3])
    batch = batch_of(REQUESTS[:3], results)
    assert largest_mismatch(backend, batch) <= 1e-5
    # And not because nothing is replayed.
    others = (batch.tokens["routed_experts"] + 1) % 8
    assert largest_mismatch(backend, batch.with_tokens(routed_experts=others)) > 1e-4


def test_experts_are_those_of_the_model_reading_the_same_tokens(experts_model: Path) -> None:
    results = generate(make_engine(experts_model), REQUESTS)
    causal: Any = AutoModelForCausalLM.from_pretrained(experts_model, dtype=torch.float32)
    for asked, result in zip(REQUESTS, results, strict=True):
        tokens = torch.tensor([[*asked.prompt_ids, *result.token_ids.tolist()]])
        with torch.no_grad():
            logits = causal(tokens, output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(TOP_K, dim=-1).indices for layer in logits], dim=1).numpy()
        assert result.routed_experts is not None
        assert np.array_equal(result.routed_experts[:-1], expected[:-1])


def test_replay_undoes_what_perturbed_routers_would_choose(experts_model: Path) -> None:
    """Without replay the planted difference sends tokens elsewhere; with it only the experts' weights differ."""
    engine_side, trainer = make_backend(experts_model), make_backend(experts_model)
    engine = make_engine(experts_model)
    engine.share(engine_side)
    results = generate(engine, REQUESTS)
    perturb_routers(trainer, 0.02)
    for number, (asked, result) in enumerate(zip(REQUESTS, results, strict=True)):
        batch = batch_of([asked], [result])
        free = replace(batch, tokens={name: batch.tokens[name] for name in batch.tokens if name != "routed_experts"})
        assert result.routed_experts is not None
        expected = result.routed_experts[:-1]
        with trainer._model.routing.noting() as noted:
            trainer.logprobs(batch)
            assert np.array_equal(trainer._model.routing.as_array(noted)[:-1], expected), f"request {number}"
            trainer.logprobs(free)
            own = trainer._model.routing.as_array(noted)[:-1]
        moved = (np.sort(own, -1) != np.sort(expected, -1)).any((1, 2))
        if moved.any():
            break
    else:
        pytest.fail("the perturbation is too small to tell anything")


def test_engines_that_are_not_asked_note_nothing(experts_model: Path) -> None:
    results = generate(in_process_engine(experts_model), REQUESTS[:2])
    assert [result.routed_experts for result in results] == [None, None]


def test_experts_noted_before_an_update_stay(experts_model: Path) -> None:
    """What is read again with new weights keeps the choice that tokens were sampled after."""
    old, new = make_backend(experts_model), make_backend(experts_model)
    perturb_routers(new, 1.0)
    weights = {name: value.clone() for name, value in new.named_weights()}
    asked = request(PROMPTS[0], seed=1, max_new_tokens=12, temperature=0.0)
    engine = make_engine(experts_model)
    engine.share(old)
    update_after = 5

    async def use() -> tuple[GenerationResult, int]:
        written = 0

        def count(news: Any) -> None:
            nonlocal written
            written += len(news.token_ids)
            if written == update_after:
                update()

        def update() -> None:
            with torch.no_grad():
                for name, value in NamedWeights(old._model.causal, adapted=False):
                    value.copy_(weights[name])
            engine.set_version(1)

        result = await asyncio.wait_for(engine.generate(asked, count), 60)
        await engine.close()
        return result, written

    [untouched] = generate(make_engine(experts_model), [asked])
    result, _ = asyncio.run(use())
    known = len(asked.prompt_ids) + update_after - 1
    assert result.routed_experts is not None
    assert untouched.routed_experts is not None
    assert np.array_equal(result.routed_experts[:known], untouched.routed_experts[:known])
    assert result.versions.tolist() == [0] * update_after + [1] * (len(result.versions) - update_after)


def test_a_record_keeps_what_came_first_and_refuses_gaps() -> None:
    record = ExpertRecord()
    assert record.of_context(4) is None
    first = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    record.add(0, first)
    record.add(0, np.full((5, 2, 2), 9, np.int16))
    record.add(5, np.full((1, 2, 2), 7, np.int16))
    whole = record.of_context(8)
    assert whole is not None
    assert whole[:, 0, 0].tolist() == [0, 4, 8, 9, 9, 7, -1, -1]
    assert np.array_equal(whole[:3], first)
    since = record.since(4)
    assert since is not None
    assert since[:, 0, 0].tolist() == [9, 7]
    last = record.since(6)
    assert last is not None
    assert last.shape == (0, 2, 2)
    # A response cut at a stop text: experts of tokens behind it are dropped.
    cut = record.of_context(2)
    assert cut is not None
    assert len(cut) == 2
    with pytest.raises(AssertionError, match="tokens 6 to 7 were never computed"):
        record.add(8, first)


def prepare(groups: Sequence[Group], **source: Any) -> TrainingBatch:
    backend: Any = FakeBackend(1)
    return make_preparation(replaying_source().model_copy(update=source)).prepare(groups, backend)


def with_experts(groups: Sequence[Group], lacking: int | None = None) -> list[Group]:
    random = np.random.default_rng(0)
    turns = turns_of(groups)
    for number, turn in enumerate(turns):
        if number != lacking:
            experts = random.integers(-1, 8, (len(turn.prompt_ids) + len(turn.response_ids), 2, 3), np.int16)
            turns[number] = replace(turn, routed_experts=experts)
    return with_turns(groups, turns)


def test_a_prepared_batch_has_the_experts_of_every_token() -> None:
    groups = with_experts(make_groups(4, 3))
    batch = prepare(groups)
    for row, turn in enumerate(turns_of(groups)):
        assert turn.routed_experts is not None
        found = batch.tokens["routed_experts"][row][batch.tokens["segment_ids"][row] > 0]
        assert np.array_equal(found.numpy(), turn.routed_experts)


def test_a_turn_without_experts_is_an_error_and_not_left_to_the_routers() -> None:
    with pytest.raises(DataError, match=r"router_replay.*sample 0 of prompt"):
        prepare(with_experts(make_groups(4, 3), lacking=0))


def test_experts_that_nobody_asked_for_are_left_out() -> None:
    assert "routed_experts" not in prepare(with_experts(make_groups(4, 3)), router_replay=False).tokens


def test_the_config_says_who_cannot_note_or_replay(tmp_path: Path) -> None:
    def problems(**sections: Any) -> list[str]:
        engine = sections.pop("engine", InProcessEngineConfig())
        source = replaying_source().model_copy(update={"engine": engine})
        run = run_config(tmp_path, source=source, **sections)
        return [str(problem) for problem in source._replay_problems(run)]

    assert problems() == []
    [cannot_note] = problems(engine=RolloutEngineConfig(name="other"))
    assert "engine 'other' with these settings does not record its experts" in cannot_note
    [cannot_replay] = problems(backend=LocalBackendConfig(compile=True))
    assert "backend 'local' with these settings cannot replay experts" in cannot_replay
