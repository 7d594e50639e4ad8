"""Register the asynchronous source, its engines and the ways weights take to them."""

from __future__ import annotations

from spurline.hookspecs import hookimpl
from spurline.plugins import API_VERSION, Plugin
from spurline.registry import ComponentRegistrar
from spurline_async_rl import (
    engine_configs,
    harness_config,
    panel_configs,
    source_config,
    transport_configs,
    vllm_config,
)

PLUGIN = Plugin("async_rl", api=API_VERSION)

_PACKAGE = "spurline_async_rl"


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(
        "source",
        "async_rollouts",
        config=source_config.AsyncRolloutsConfig,
        factory=f"{_PACKAGE}.rollouts.source:AsyncRolloutSource",
    )
    registry.add(
        "source",
        "recorded_rollouts",
        config=source_config.RecordedRolloutsConfig,
        factory=f"{_PACKAGE}.rollouts.recorded_source:RecordedRolloutSource",
    )
    registry.add(
        "rollout_engine",
        "child_process",
        config=engine_configs.ChildProcessEngineConfig,
        factory=f"{_PACKAGE}.child.member:ChildProcessEngine",
    )
    registry.add(
        "rollout_engine",
        "vllm",
        config=vllm_config.VllmEngineConfig,
        factory=f"{_PACKAGE}.vllm.engine:VllmEngine",
    )
    registry.add(
        "environment",
        "harness",
        config=harness_config.HarnessConfig,
        factory=f"{_PACKAGE}.harness.environment:HarnessEnvironment",
    )
    _register_transports(registry)
    _register_panels(registry)


def _register_panels(registry: ComponentRegistrar) -> None:
    panels = f"{_PACKAGE}.panels"
    registry.add(
        "report_panel",
        "rollout_timeline",
        config=panel_configs.TimelinePanelConfig,
        factory=f"{panels}:TimelinePanel",
    )
    registry.add(
        "report_panel", "staleness", config=panel_configs.StalenessPanelConfig, factory=f"{panels}:StalenessPanel"
    )


def _register_transports(registry: ComponentRegistrar) -> None:
    transports = f"{_PACKAGE}.transports"
    registry.add(
        "weight_sync",
        "in_process",
        config=transport_configs.InProcessSyncConfig,
        factory=f"{transports}.in_process:InProcessSync",
    )
    registry.add(
        "weight_sync",
        "shared_memory",
        config=transport_configs.SharedMemorySyncConfig,
        factory=f"{transports}.shared_memory:SharedMemorySync",
    )
    registry.add(
        "weight_sync",
        "disk",
        config=transport_configs.DiskSyncConfig,
        factory=f"{transports}.disk:DiskSync",
    )
    registry.add(
        "weight_sync",
        "nccl",
        config=transport_configs.NcclSyncConfig,
        factory=f"{transports}.nccl:NcclSync",
    )
    registry.add(
        "weight_sync",
        "cuda_ipc",
        config=transport_configs.CudaIpcSyncConfig,
        factory=f"{transports}.cuda_ipc:CudaIpcSync",
    )
