"""Routers of every class that transformers has: their own choice replayed changes nothing, another one reaches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import FAMILIES, Family, family_of, tiny_model

from spurline.errors import ModelError
from spurline_models.architecture import experts_per_token, num_experts
from spurline_models.device_profile import device_profile
from spurline_models.probe import check_routers, choose_reading, probe_sequences, probe_stream
from spurline_models.streams.stream_model import StreamModel, evaluation_mode

PROFILE = device_profile("cpu")
EXPERTS = family_of("qwen3_moe").settings
LATENT = family_of("deepseek_v3").settings
GEMMA4 = Family(
    "gemma4_text",
    settings=family_of("gemma4_text").settings
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
)
REPLAYED = [*(family for family in FAMILIES if "experts" in family.has and family.replays), GEMMA4]
REFUSED = {
    "phimoe": (EXPERTS, "PhimoeTopKRouter, which does not choose its experts with one call of topk"),
    "nemotron_h": (
        EXPERTS | {"layers_block_type": ["attention", "moe"]},
        "does not pass recorded experts on to the NemotronHTopkRouter of layer 1",
    ),
    "deepseek_v2": (
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
        "DeepseekV2TopkRouter, which gives no weight to experts that it would not have chosen",
    ),
    "jetmoe": (EXPERTS, "no router is known"),
}


def read(family: Family) -> StreamModel:
    model = StreamModel(tiny_model(family).train())
    choose_reading(model, PROFILE)
    assert model.reading == family.reading
    return model


@pytest.mark.parametrize("family", REPLAYED, ids=lambda family: family.model_type)
def test_a_router_of_this_family_is_replayed_exactly_and_learns(family: Family) -> None:
    model = read(family)
    check_routers(model, PROFILE, family.model_type, replays=True, balances=True)
    routing = model.routing
    stream = probe_stream(probe_sequences(128, (5, 5)), PROFILE)

    def hidden(experts: Any = None) -> torch.Tensor:
        return model.hidden(stream.input_ids, stream.position_ids, stream.plan, experts)

    with evaluation_mode(model.causal), routing.noting() as noted:
        own = hidden()
        chosen = torch.from_numpy(routing.as_array(noted))
        assert torch.equal(hidden(chosen), own)
        torch.testing.assert_close(hidden(chosen.flip(-1)), own, rtol=1e-4, atol=1e-5)
        assert torch.equal(hidden(), own), "nothing is left over for the next pass"
    others = torch.where(chosen >= 0, (chosen + 1) % routing.num_experts, chosen)
    with routing.noting() as noted:
        states = hidden(others)
        assert torch.equal(torch.from_numpy(routing.as_array(noted)), others)
    assert float((states.detach() - own).abs().max()) > 1e-4
    # Computed again in the backward pass, after another pass with the router's own choice.
    model.checkpoint_activations(PROFILE.checkpoint_options())
    again = hidden(others)
    hidden()
    parameters = [value for value in model.decoder.parameters() if value.requires_grad]
    wanted, found = (
        torch.autograd.grad(value.square().sum(), parameters, retain_graph=True, allow_unused=True)
        for value in (states, again)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    states.square().sum().backward()
    for router in routing.routers.values():
        gradients = [parameter.grad for parameter in router.parameters()]
        assert any(gradient is not None and float(gradient.norm()) > 0 for gradient in gradients)


@pytest.mark.parametrize("model_type", REFUSED)
def test_routers_that_cannot_be_replayed_are_refused_by_name(model_type: str) -> None:
    settings, reason = REFUSED[model_type]
    model = StreamModel(tiny_model(Family(model_type, settings=settings)))
    choose_reading(model, PROFILE)
    with pytest.raises(ModelError, match=reason):
        check_routers(model, PROFILE, model_type, replays=True, balances=False)


def test_a_router_that_reads_its_sizes_from_its_config_is_balanced_and_measured() -> None:
    model = read(GEMMA4)
    check_routers(model, PROFILE, GEMMA4.model_type, replays=False, balances=True)
    stream = probe_stream(probe_sequences(128, (5, 5)), PROFILE)
    with model.counting_experts() as loads:
        model.hidden(stream.input_ids, stream.position_ids, stream.plan)
    assert {layer: int(load.sum()) for layer, load in loads.fetch().items()} == {0: 20, 1: 20}
    config = model.causal.config.get_text_config()
    assert (num_experts(config), experts_per_token(config)) == (4, 2)


def test_a_pass_that_ended_before_its_routers_leaves_nothing_to_the_next() -> None:
    model = read(family_of("qwen3_moe"))
    stream = probe_stream(probe_sequences(128, (5, 5)), PROFILE)

    def hidden(experts: Any = None) -> torch.Tensor:
        return model.hidden(stream.input_ids, stream.position_ids, stream.plan, experts)

    def fail(*_: Any) -> None:
        raise RuntimeError("between attention and router")

    with evaluation_mode(model.causal), model.routing.noting() as noted:
        own = hidden()
        others = torch.from_numpy((model.routing.as_array(noted) + 1) % 4)
        handle = model.decoder.get_submodule("layers.0.mlp").register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="between attention and router"):
            hidden(others)
        handle.remove()
        assert torch.equal(hidden(), own)
