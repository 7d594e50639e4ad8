"""Section `cluster`: one line of a config places ranks and engines on Ray; and what settings say to the processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spurline.config.loading import config_model, load_config
from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline.plugins.host import PluginHost
from spurline_ranks.cluster import cluster_needs, cluster_request
from spurline_ranks.configs import RankBackendConfig
from spurline_ranks.group import ClusterNeed

RANKS = {"name": "fsdp", "device": "cuda", "ranks": 8}


def loaded(engine: Any = None, backend: Any = None, **sections: Any) -> RunConfig:
    return load_config(
        {
            "plugins": ["async_rl", "fsdp_backend"],
            "model": {"path": "unused"},
            "data": {"train": "unused.jsonl"},
            "steps": 2,
            "source": {
                "name": "async_rollouts",
                "environment": {"name": "single_turn", "rewards": {"right": {"name": "exact_match"}}},
                "engine": engine or {"name": "vllm", "engines": 4, "tensor_parallel_size": 2},
                "max_staleness": 0,
            },
            "backend": backend or RANKS,
            **sections,
        }
    ).config


@pytest.mark.parametrize("cluster", ["auto", {"address": "auto"}, "node1:6379", "[fe80::1]:6379"])
def test_one_line_places_ranks_and_engines_on_a_cluster(cluster: Any) -> None:
    run: Any = loaded(cluster=cluster)
    assert (run.backend.launch, run.source.engine.placement) == ("ray", "ray")
    assert cluster_needs(run) == [
        ClusterNeed("ranks", 8, 1, 1, together=True),
        ClusterNeed("engines", 4, 2, 1, gpus_if_any=True, modules=("vllm",)),
    ], "whoever needs whole machines comes first"
    assert cluster_request(run).address == (cluster if isinstance(cluster, str) else "auto")


def test_what_a_run_writes_down_says_where_it_was_placed() -> None:
    run: Any = loaded(cluster="auto")
    written = json.loads(json.dumps(run.model_dump(mode="json")))
    assert load_config(written, recorded=True).config.model_dump() == run.model_dump()
    assert written["backend"]["launch"] == written["source"]["engine"]["placement"] == "ray"


def test_without_a_cluster_everything_is_on_this_machine() -> None:
    run: Any = loaded()
    assert (run.backend.launch, run.source.engine.placement) == ("local", "local")
    assert cluster_needs(run) == []


def test_a_part_that_says_where_it_is_stays_there() -> None:
    on_cpu = {**RANKS, "device": "cpu"}
    run = loaded({"name": "vllm", "placement": "local"}, on_cpu, cluster="auto")
    assert [need.kind for need in cluster_needs(run)] == ["ranks"]
    run = loaded({"name": "vllm"}, {**on_cpu, "launch": "local"}, cluster="auto")
    assert [need.kind for need in cluster_needs(run)] == ["engines"]
    run = loaded({"name": "vllm", "placement": "ray"}, {**on_cpu, "launch": "ray"})
    assert [need.kind for need in cluster_needs(run)] == ["ranks", "engines"]
    assert cluster_request(run).address == "auto"


def test_servers_that_run_already_are_placed_nowhere() -> None:
    run = loaded({"name": "vllm", "mode": "server", "urls": ["http://node1:8000"]}, cluster="auto")
    assert [need.kind for need in cluster_needs(run)] == ["ranks"]


def test_the_environment_of_the_cluster_is_that_of_all_that_is_placed_there() -> None:
    run = loaded(cluster={"address": "auto", "runtime_env": {"env_vars": {"NCCL_SOCKET_IFNAME": "eth0"}}})
    assert cluster_request(run).env_vars == {"NCCL_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"cluster": "ray://node1:10001"}, r"cluster.address is 'ray://node1:10001', which is not .* HOST:PORT"),
        ({"cluster": "node1"}, "cluster.address is 'node1', which is not an address of a cluster"),
        ({"cluster": {"adress": "auto"}}, "cluster.adress is not a setting. Did you mean 'address'"),
        ({"backend": {**RANKS, "runtime_env": {}}}, r"backend.runtime_env is not .* Write it in the section `cluster`"),
        (
            {"cluster": "auto", "backend": {"name": "local"}, "engine": {"name": "in_process"}},
            "cluster.address is auto, but nothing of this run is placed on a cluster",
        ),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused_with_what_to_write(sections: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        loaded(**sections)


def test_the_schema_takes_a_bare_address() -> None:
    schema = config_model(PluginHost.load([])).model_json_schema()
    assert {"type": "string"} in schema["properties"]["cluster"]["anyOf"]


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def variables(**settings: Any) -> dict[str, str]:
    request = RankBackendConfig(name="any", ranks=2, device="cpu", **settings).rank_request()
    assert request is not None
    return dict(request.variables)


def test_deterministic_ranks_have_a_workspace_for_products_unless_one_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    assert variables() == {}
    assert variables(deterministic=True) == {WORKSPACE: ":4096:8"}
    monkeypatch.setenv(WORKSPACE, ":16:8")
    assert variables(deterministic=True) == {WORKSPACE: ":16:8"}
