"""Whatever a config says is computed or refused by name; transformers' own models tell what makes a difference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_models import FAMILIES, LLAMA3_ROPE, tiny_causal, tiny_config
from rank_plans import published
from transformers import GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from spurline.errors import ModelError
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_models.architecture import LOADING_ERRORS

TOKENS = torch.arange(37).repeat(2)[None]
"""Every token twice: more positions than any window below, and whatever the padding token is, it occurs."""

ODD_VALUES: dict[str, list[Any]] = {
    "layer_types": [["sliding_attention"] * 3, ["full_attention", "full_attention", "sliding_attention"]],
    "rope_parameters": [
        LLAMA3_ROPE | {"factor": 4.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
    "mlp_only_layers": [[0], [1, 2]],
    "hidden_act": ["gelu", "relu"],
    "pad_token_id": [0, 5, 36],
    "num_attention_heads": [4],
    "num_key_value_heads": [2, 8],
    "sliding_window": [4],
    "head_dim": [2, 4, 10],
    "num_experts_per_tok": [1, 3],
    "num_local_experts": [3, 8],
}
"""Values for fields of which simple changes would not make a model."""


def fields_of(family: str) -> list[str]:
    return sorted({field.name for field in dataclasses.fields(FAMILIES[family][0])} | {*tiny_config(family).to_dict()})


def other_values(default: Any) -> list[Any]:
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int):
        return [default + 1, 2 * default + 2]
    if isinstance(default, float):
        return [default + 0.5, default * 3]
    return [True, 3, "other", [1]]


def other_values_of(field: str, base: PretrainedConfig) -> list[Any]:
    return ODD_VALUES.get(field) or other_values(getattr(base, field, None))


def behaviour(config: PretrainedConfig) -> tuple[dict[str, torch.Size], torch.Tensor, torch.Tensor] | None:
    """Shapes of the weights, logits, and gradients of the embedding in training; None for no model."""
    try:
        causal = tiny_causal(config).train()
        causal.config._attn_implementation = "eager"
        torch.manual_seed(1)
        logits = causal(input_ids=TOKENS, use_cache=False, return_dict=True).logits
        logits.square().sum().backward()
    except LOADING_ERRORS:
        return None
    gradient = causal.get_input_embeddings().weight.grad
    assert gradient is not None
    return {name: value.shape for name, value in causal.named_parameters()}, logits.detach(), gradient


def are_equal(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))


def is_overlooked(family: str, change: dict[str, Any], expected: Any) -> bool:
    """Whether a config with this change is read as the one without, and is another model."""
    base = tiny_config(family)
    try:
        config = tiny_config(family, **change)
        read = read_architecture(config)
    except (ModelError, *LOADING_ERRORS):
        return False
    if read != read_architecture(base) or config.rope_parameters != base.rope_parameters:
        return False
    return not are_equal(behaviour(config), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_that_changes_the_model_is_overlooked(family: str) -> None:
    base = tiny_config(family)
    expected = behaviour(base)
    assert expected is not None
    changes = [{field: value} for field in fields_of(family) for value in other_values_of(field, base)]
    assert [change for change in changes if is_overlooked(family, change, expected)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_fields_that_change_the_model_together_are_overlooked(family: str) -> None:
    base = tiny_config(family)
    expected = behaviour(base)

    @settings(max_examples=8, deadline=None)
    @given(st.data(), st.lists(st.sampled_from(fields_of(family)), min_size=2, max_size=3, unique=True))
    def check(data: st.DataObject, fields: list[str]) -> None:
        change = {field: data.draw(st.sampled_from(other_values_of(field, base))) for field in fields}
        assert not is_overlooked(family, change, expected)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_no_one_knows_is_refused_by_name(family: str) -> None:
    known = fields_of(family)
    on = st.one_of(st.just(True), st.integers(1, 9), st.floats(0.1, 9), st.text("abc", min_size=1), st.just([1]))

    @settings(max_examples=30, deadline=None)
    @given(st.from_regex(r"x[a-z]{2,8}(_[a-z]{1,8})?", fullmatch=True), on)
    def check(field: str, value: Any) -> None:
        assume(field not in known and not field.endswith("_token_id"))
        with pytest.raises(ModelError, match=rf"has {field}: .*model\.config_overrides: \{{{field}: null\}}"):
            read_architecture(tiny_config(family, **{field: value}))
        for off in (None, False, 0, [], ""):
            assert read_architecture(tiny_config(family, **{field: off})) == read_architecture(tiny_config(family))

    check()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "llama",
            {"attention_bias": True},
            r"LlamaConfig has attention_bias: True.*supports only False.*fsdp or local",
        ),
        ("llama", {"mlp_bias": True}, r"has mlp_bias: True"),
        ("llama", {"attention_dropout": 0.1}, r"has attention_dropout: 0\.1.*supports only 0\.0"),
        ("llama", {"hidden_act": "gelu"}, r"has hidden_act: 'gelu'.*supports only 'silu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"has rope_parameters: .*llama3"),
        ("llama", {"rope_parameters": LLAMA3_ROPE | {"mrope_section": [1, 1, 1]}}, r"rope_parameters\.mrope_section"),
        ("llama", {"per_layer_config": {0: {"intermediate_size": 8}}}, r"has per_layer_config"),
        ("llama", {"quantization_config": {"bits": 4}}, r"has quantization_config"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, r"has layer_types: 'sliding_attention'"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, r"has layer_types: 'sliding_attention'"),
        ("qwen3", {"attention_bias": True}, r"has attention_bias"),
        ("qwen3_moe", {"use_sliding_window": True}, r"has sliding_window: 4096"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"has mlp_only_layers: \[1\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, r"has decoder_sparse_step: 2"),
        ("qwen3_moe", {"output_router_logits": True}, r"has output_router_logits: True"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            r"has norm_topk_prob: True.*num_experts_per_tok: 1.*fsdp or local",
        ),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, r"has shared_expert_intermediate_size: 64"),
    ],
)
def test_what_is_not_computed_is_refused_by_the_name_of_the_field(
    family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture(tiny_config(family, **change))


def test_one_expert_for_a_token_is_read_where_its_weight_is_learned() -> None:
    read = read_architecture(tiny_config("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False))
    assert (read.experts_per_token, read.renormalizes) == (1, False)


def test_a_window_in_layers_that_the_model_does_not_have_is_none() -> None:
    config = tiny_config("qwen3", use_sliding_window=True, max_window_layers=3)
    assert config.layer_types == ["full_attention"] * 3
    assert read_architecture(config) == read_architecture(tiny_config("qwen3"))
    # As it is cut by model.config_overrides.
    config = tiny_config("qwen3", use_sliding_window=True, max_window_layers=2)
    config.num_hidden_layers = 2
    assert read_architecture(config).num_layers == 2


@pytest.mark.parametrize("config", [MistralConfig(), GPT2Config()])
def test_another_type_of_model_is_refused_with_those_that_can_be_trained(config: PretrainedConfig) -> None:
    with pytest.raises(ModelError, match=rf"type '{config.model_type}'.*llama, qwen2, qwen3, qwen3_moe.*fsdp"):
        read_architecture(config)


def test_a_config_class_of_remote_code_is_not_taken_for_the_one_it_is_made_from() -> None:
    class OwnConfig(LlamaConfig):
        pass

    with pytest.raises(ModelError, match="OwnConfig"):
        read_architecture(OwnConfig())


PUBLISHED = {
    "llama-3-70b": Architecture("llama", 80, 8192, 28672, 64, 8, 128, 128256, False, 1e-5),
    "qwen3-235b-a22b": Architecture(
        "qwen3_moe",
        94,
        4096,
        12288,
        64,
        4,
        128,
        151936,
        False,
        1e-6,
        qk_norm=True,
        num_experts=128,
        experts_per_token=8,
        expert_ffn=1536,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    assert read_architecture(published(name)) == PUBLISHED[name]


def test_notes_that_tools_leave_in_configs_do_not_matter() -> None:
    notes = {
        "_attn_implementation_autoset": True,
        "unsloth_fixed": True,
        "qkv_bias": False,
        "use_qk_norm": True,
        "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"},
        "image_token_id": 7,
    }
    assert read_architecture(tiny_config("qwen3_moe", **notes)) == read_architecture(tiny_config("qwen3_moe"))


def test_the_padding_token_is_counted_as_torch_counts_rows() -> None:
    assert read_architecture(Qwen3Config(pad_token_id=None)).padding_token is None
    assert read_architecture(tiny_config("qwen3", pad_token_id=0)).padding_token == 0
    config = tiny_config("llama", pad_token_id=-1)
    assert read_architecture(config).padding_token == 36
    found = behaviour(config)
    assert found is not None
    assert [row for row, values in enumerate(found[2]) if not values.any()] == [36]
