"""Register the asynchronous rollout sources, their engines and weight transports, and a report panel."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_async_rl.engines import configs as engines
from spurline_async_rl.source import configs as source
from spurline_async_rl.weights import configs as weights

PLUGIN = Plugin("async_rl", api=API_VERSION, requires=("rl", "ranks"))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    add, package = registry.add, "spurline_async_rl"
    add(source.AsyncRolloutsConfig, f"{package}.source.source:AsyncRolloutSource")
    add(source.RecordedRolloutsConfig, f"{package}.source.recordings:RecordedRolloutSource")
    add(engines.ChildProcessEngineConfig, f"{package}.engines.child_process:ChildProcessEngine")
    add(engines.VllmEngineConfig, f"{package}.engines.vllm.engine:VllmEngine")
    add(weights.InProcessSyncConfig, f"{package}.weights.buckets:InProcessSync")
    add(weights.SharedMemorySyncConfig, f"{package}.weights.shared_memory:SharedMemorySync")
    add(weights.DiskSyncConfig, f"{package}.weights.disk:DiskSync")
    add(weights.CollectiveSyncConfig, f"{package}.weights.collective:CollectiveSync")
    add(weights.VllmNativeSyncConfig, f"{package}.weights.vllm_native:NativeSync")
    add(weights.CudaIpcSyncConfig, f"{package}.weights.cuda_ipc:CudaIpcSync")
    panel = "spurline_insight.report_panel:ReportPanelConfig"
    registry.add_to("report_panel", panel, f"{package}.timeline.panels:TimelinePanel", name="rollout_timeline")
