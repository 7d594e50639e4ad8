"""What `spurline plan` says of a run on many ranks: their layout, memory, and what saves some."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rank_plans import config_of, planned, with_model
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from spurline.config.loading import load_config
from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError
from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_models import machine
from spurline_models.architecture import build_without_memory
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_planning import fit
from spurline_planning.plan import Plan, make_plan

ROOT = Path(__file__).parents[3]
BILLIONS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
"""Qwen3-8B."""


@pytest.fixture
def config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    return config_of("fsdp", spurline_tiny_model, spurline_chat_file, tmp_path)


def memory(plan: Plan) -> dict[str, float]:
    """MiB by part."""
    lines = (line.split(": ") for line in plan.sections["memory (estimate)"] if line.endswith("MiB"))
    return {name: float(size.removesuffix(" MiB").replace(",", "")) for name, size in lines}


def test_a_plan_tells_ranks_and_groups(config: dict[str, Any]) -> None:
    plan = planned(config, ranks=4, context=2, max_tokens_per_microbatch=64)
    assert plan.problems == []
    assert plan.sections["parallel layout"] == [
        "4 ranks on this machine, cuda, bf16: 2 data x 2 context",
        "weights, gradients and optimizer are divided among 4 ranks",
        "2 neighbouring ranks share each sequence",
    ]


def test_a_plan_for_a_cluster_whose_machines_are_not_known_guesses_none(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", tuple)
    config = with_model(config, tmp_path / "8b", Qwen3Config(**BILLIONS).to_json_string()) | {"batch_size": 256}
    unknown = planned(config, ranks=16, launch="ray", cpu_offload=True, gib=1).sections
    assert unknown["parallel layout"][:2] == [
        "16 ranks on a Ray cluster, cuda, bf16: 16 data",
        "the number of machines is not known: set backend.ranks_per_node to plan for it",
    ]
    known = planned(config, ranks=16, launch="ray", cpu_offload=True, ranks_per_node=8, gib=1).sections
    of_machine, context = "in the memory of the fullest machine", "backend.context="
    for words in (of_machine, context):
        assert any(words in line for line in known["memory (estimate)"])
        assert not any(words in line for line in unknown["memory (estimate)"])


def test_parts_that_are_sharded_shrink_with_the_ranks_and_others_do_not(config: dict[str, Any], tmp_path: Path) -> None:
    config = with_model(config, tmp_path / "8b", Qwen3Config(**BILLIONS).to_json_string())
    few, many = memory(planned(config, ranks=2)), memory(planned(config, ranks=8))
    for part in ("weights", "gradients", "optimizer"):
        assert few[part] == pytest.approx(4 * many[part], rel=0.001)
    assert few["gathered weights"] == many["gathered weights"]
    # 8.19 B parameters in fp32, and Adam's two moments, on each of 8 ranks.
    assert many["weights"] == pytest.approx(8.19e9 * 4 / 8 / 2**20, rel=0.01)
    assert many["optimizer"] == pytest.approx(2 * many["weights"], rel=0.01)
    # Embedding, output layer and two layers of the decoder in bf16.
    assert many["gathered weights"] == pytest.approx((2 * 151936 * 4096 + 2 * 193e6) * 2 / 2**20, rel=0.01)


def test_divided_experts_are_gathered_by_fewer_ranks(config: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 2, "num_experts": 32, "moe_intermediate_size": 4096}
    shape = {**sizes, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 1024}
    config = with_model(config, tmp_path / "moe", Qwen3MoeConfig(**shape).to_json_string())
    whole, divided = memory(planned(config)), memory(planned(config, expert=4))
    # 32 experts on 8 ranks are 4 on each, in either way.
    assert divided["weights"] == whole["weights"]
    assert divided["gathered weights"] == pytest.approx(whole["gathered weights"] / 4, rel=0.1)


def test_a_plan_names_the_settings_that_save_memory_the_cheapest_first(config: dict[str, Any], tmp_path: Path) -> None:
    config = with_model(config, tmp_path / "8b", Qwen3Config(**BILLIONS).to_json_string()) | {"batch_size": 2048}
    assert planned(config, gib=500).sections["memory (estimate)"][-1] == "fits a device of 500.0 GiB"
    said = planned(config, gib=60).sections["memory (estimate)"]
    assert said[-2] == "does not fit a device of 60.0 GiB, of which 90% can be used"
    words = said[-1].partition("cheapest first: ")[2].partition(". ")[0].split()
    changes = [word for word in words if word != "--set"]
    assert changes[0] == "backend.activation_checkpointing=true"
    assert changes[-2:] == ["backend.cpu_offload=true", "backend.ranks=16"]
    again = make_plan(load_config(config, changes[:1]), device_bytes=60 * 2**30).sections["memory (estimate)"]
    assert again[-1] == "fits a device of 60.0 GiB"


def test_offloaded_parts_are_counted_where_they_are(config: dict[str, Any], tmp_path: Path) -> None:
    config = with_model(config, tmp_path / "8b", Qwen3Config(**BILLIONS).to_json_string())
    on_device, offloaded = memory(planned(config)), memory(planned(config, cpu_offload=True))
    assert "weights" not in offloaded
    model = build_without_memory(Qwen3Config(**BILLIONS), ModelConfig(path="8b"))
    # Of 8 ranks. Weights and gradients are in pinned memory, which is rounded up to powers of two.
    pinned = sum(
        2 ** math.ceil(math.log2(4 * math.ceil(len(value) / 8) * value[0].numel())) for value in model.parameters()
    )
    assert pinned / 2**20 > 1.2 * on_device["weights"]
    expected = 8 * (2 * pinned / 2**20 + on_device["optimizer"])
    assert offloaded["in the memory of the fullest machine"] == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("here", [2**40, 2**36])
def test_what_is_offloaded_must_fit_the_host(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: int
) -> None:
    config = with_model(config, tmp_path / "8b", Qwen3Config(**BILLIONS).to_json_string()) | {"batch_size": 256}
    monkeypatch.setattr(fit, "memory_bytes", lambda: here)
    monkeypatch.setattr(FsdpBackendConfig, "device_bytes", lambda self: 24 * 2**30)
    offloaded = planned(config, cpu_offload=True).sections["memory (estimate)"]
    assert any(line.startswith("does not fit the memory of this machine") for line in offloaded) == (here == 2**36)


def test_a_loss_with_a_state_is_found_before_anything_starts(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CrossEntropy, "state_dict", lambda self: {}, raising=False)
    monkeypatch.setattr(CrossEntropy, "load_state_dict", lambda self, state: None, raising=False)
    said = "loss is made by CrossEntropy, which keeps a state"
    assert any(said in str(problem) for problem in planned(config).problems)
    started: list[object] = []
    monkeypatch.setattr("spurline_ranks.backend.open_ranks", lambda *arguments: started.append(arguments))
    loaded = load_config(config)
    with pytest.raises(ConfigError, match=said):
        loaded.host.registry.create(
            "backend", loaded.config.backend, run=loaded.config, registry=loaded.host.registry, total_updates=1
        )
    assert started == []


@pytest.mark.parametrize("key", ["context", "expert"])
def test_a_plan_finds_a_model_that_the_ranks_cannot_divide(config: dict[str, Any], key: str) -> None:
    assert any(f"backend.{key} is 8" in str(problem) for problem in planned(config, **{key: 8}).problems)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"replicas": 3}, "backend.replicas is 3, which does not divide the 8 ranks. Choose one of 1, 2, 4, 8, or"),
        ({"gpus": [0, 1]}, "backend.gpus names 2 GPUs, and each of the 8 ranks needs one. Name 6 more"),
        ({"gpus": [0, 0], "ranks": 2}, "backend.gpus names 1 GPUs, and each of the 2 ranks needs one"),
        ({"gpus": [], "ranks": None}, "backend.ranks takes all GPUs of this machine, and there are none"),
        ({"launch": "ray", "ranks_per_node": 3}, "backend.ranks_per_node is 3, which does not divide the 8 ranks"),
        ({"replicas": 2, "expert": 2}, "backend.expert together with replicas is not supported"),
        ({"expert": 3}, "backend.expert is 3, which does not divide the 8 ranks"),
        ({"expert": 2, "compile": True}, "backend.compile together with expert"),
        ({"expert": 2, "lora": {"rank": 4}}, "backend.lora together with expert"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_what_would(
    config: dict[str, Any], backend: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match="backend") as refused:
        planned(config, **backend)
    assert said in str(refused.value)


def test_an_optimizer_that_cannot_be_sharded_is_refused_with_its_reason(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline_models.optimizers.configs import AdamWConfig

    monkeypatch.setattr(AdamWConfig, "needs_whole_parameters", "needs whole tensors")
    with pytest.raises(ConfigError, match="optimizer 'adamw' needs whole ones: needs whole tensors"):
        planned(config)


LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("example", "architecture"),
    [
        ("sft_qwen3_8b_fsdp", Qwen3Config(**BILLIONS, max_position_embeddings=40960)),
        ("sft_lora_llama_70b_fsdp", LlamaConfig(**LLAMA_70B)),
    ],
    ids=["8b", "70b"],
)
def test_examples_for_eight_gpus_fit_them(
    config: dict[str, Any], tmp_path: Path, example: str, architecture: PretrainedConfig
) -> None:
    """With a model of that size whose weights are not there, as a laptop without a network has it."""
    rows = config["data"]["train"]
    folder = with_model(config, tmp_path / "model", architecture.to_json_string())["model"]["path"]
    overrides = [f"model.path={folder}", f"data.train={rows}", f"data.eval={rows}", "trackers=[]"]
    plan = make_plan(load_config(ROOT / "examples" / f"{example}.yaml", overrides), device_bytes=80 * 2**30)
    assert "no weights can be loaded from folder" in str(plan.problems[-1])
    assert [problem for problem in plan.problems if "backend" in str(problem)] == []
    assert plan.sections["memory (estimate)"][-1] == "fits a device of 80.0 GiB"
